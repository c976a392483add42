"""A group of Kafka's own clients over a log of real bookies, through proxies of their own.

Goal: of two consumers one reads; when its process is killed the other goes on from the position
that was stored, and when the proxy is killed that coordinates them, at another one.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaException

from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace
from tests.fixtures.kafka_proxies import PORT, kafka_addresses
from tests.fixtures.proxies import ProxyProcess, log_name_for, proxy_process, wait_for_no_proxy
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MEMBER = """
import sys
from confluent_kafka import Consumer
address, topic = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": address, "group.id": "g", "client.id": "a",
    "session.timeout.ms": 6000,
    "auto.offset.reset": "earliest", "enable.auto.commit": False, "heartbeat.interval.ms": 500})
consumer.subscribe([topic])
while True:
    record = consumer.poll(1.0)
    if record is not None and record.error() is None:
        if record.offset() == 99:
            consumer.commit(record, asynchronous=False)
        print(record.offset(), flush=True)
"""


@pytest.fixture
def proxies(sandbox: Sandbox) -> Iterator[list[ProxyProcess]]:
    """Two proxies that serve Kafka's clients; both may be killed."""
    wait_for_no_proxy(sandbox.uri)
    with (
        proxy_process(sandbox.uri, PORT, is_killed=True) as first,
        proxy_process(sandbox.uri, PORT, is_killed=True) as second,
    ):
        yield [first, second]
        for each in (first, second):
            each.kill()


def write(uri: str, name: str, first: int, count: int) -> None:
    """Write records whose values are their numbers."""
    with open_namespace(uri) as namespace:
        log = namespace.open_log(name, create_if_missing=True)
        with log.open_writer() as writer:
            for number in range(first, first + count):
                writer.write(LogRecord(number, b"%d" % number))


def test_a_member_takes_over(sandbox: Sandbox, proxies: list[ProxyProcess]) -> None:
    """From a process that is killed, and again when the coordinator is killed."""
    name = log_name_for(proxies[0], sandbox.uri)
    write(sandbox.uri, name, 0, 150)
    addresses = kafka_addresses(proxies, sandbox.uri)
    topic = name.replace("/", ".")
    command = [sys.executable, "-c", MEMBER, addresses, topic]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as member:
        assert member.stdout is not None
        assert [int(member.stdout.readline()) for _ in range(150)] == list(range(150))
        consumer = Consumer(
            {
                "bootstrap.servers": addresses,
                "group.id": "g",
                "client.id": "b",  # a member's id begins with it, and the first id reads
                "session.timeout.ms": 6000,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "reconnect.backoff.max.ms": 200,
            }
        )
        consumer.subscribe([topic])
        try:
            _take_over(sandbox, proxies, name, member, consumer)
        finally:
            member.kill()
            consumer.close()


def _take_over(
    sandbox: Sandbox,
    proxies: list[ProxyProcess],
    name: str,
    member: subprocess.Popen[str],
    consumer: Consumer,
) -> None:
    found: list[int] = []

    def take() -> int:
        for each in consumer.consume(100, 0.2):
            offset = each.offset()
            if each.error() is None and offset is not None:
                assert each.value() == b"%d" % offset
                found.append(offset)
        return len(found)

    wait_until(lambda: bool(consumer.memberid()) and not take(), timeout_s=60)
    member.kill()
    wait_until(lambda: take() >= 50, timeout_s=60)
    assert found == list(range(100, 150))  # behind the stored position
    _commit(consumer, take)
    proxies[0].kill()
    write(sandbox.uri, name, 150, 50)
    wait_until(lambda: take() >= 100, timeout_s=120)
    assert list(dict.fromkeys(found)) == list(range(100, 200))
    _commit(consumer, take)
    with open_namespace(sandbox.uri) as namespace:
        assert list(namespace.open_log(name).get_subscriptions()) == ["g"]


def _commit(consumer: Consumer, take: object) -> None:
    """Store the position, as soon as the group is whole."""

    def is_stored() -> bool:
        try:
            consumer.commit(asynchronous=False)
        except KafkaException:
            take()  # type: ignore[operator]
            return False
        return True

    wait_until(is_stored, timeout_s=60)
