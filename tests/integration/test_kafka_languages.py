"""Kafka's own client in Java, and franz-go, read and write logs through proxies.

Goal: as with librdkafka, each reads every record once and in its order, byte for byte, through a
move of the log and the death of the proxy that it reads from, also as a member of a group; and what
each writes is there once, whatever happened to answers, owner and proxy.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.kafka_proxies import filled, kafka_addresses
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import log_name_for, payloads_in, produce
from tests.fixtures.waiting import wait_until
from tests.kafka_clients.programs import LANGUAGES, Reader, Writer, command_of

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.kafka_proxies import Served
    from tests.fixtures.proxies import ProxyProcess

pytestmark = [pytest.mark.integration, pytest.mark.prove, pytest.mark.timeout(1800)]

LOST = amount(60, sampled=12)
"""Number of answers that are lost in each part of a test."""
RECORD_BYTES = 100


@pytest.fixture(scope="module", params=LANGUAGES)
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The program in a language."""
    return command_of(request.param, tmp_path_factory.mktemp("client"))


def test_a_follower_goes_on_at_another_proxy(
    sandbox: Sandbox, kafka_proxies: list[ProxyProcess], command: list[str], tmp_path: Path
) -> None:
    """When the log moves, and when the proxy is killed from which it reads."""
    killed, other = kafka_proxies
    addresses = kafka_addresses(kafka_proxies, sandbox.uri)
    name = log_name_for(killed, sandbox.uri)
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name)
    sent: list[bytes] = []

    def follow(writing: ProxyProcess, *, more: int, kills: bool = False) -> None:
        stop, now = threading.Event(), list[bytes]()
        thread = threading.Thread(target=produce, args=(writing.location, name, "p", stop, now))
        thread.start()
        try:
            reader.wait_for(reader.count + more)
        finally:
            stop.set()
            thread.join()
            sent.extend(now)
        if kills:
            killed.kill()

    topic = name.replace("/", ".")
    with Reader(command, "read", addresses, topic, 0, folder=tmp_path) as reader:
        follow(killed, more=300)
        killed.act("drain")  # the log moves to the other one
        follow(other, more=300)
        killed.act("undrain")
        follow(other, more=100, kills=True)
        follow(other, more=300)
        reader.wait_for(len(sent))
    assert [each.value for each in reader.records] == sent == payloads_in(sandbox.uri, name)
    assert [each.offset for each in reader.records] == list(range(len(sent)))


def test_a_member_goes_on_where_another_left(
    sandbox: Sandbox, kafka_proxies: list[ProxyProcess], command: list[str], tmp_path: Path
) -> None:
    """Behind what was committed, also when the proxy is killed that coordinated the group."""
    name = filled(sandbox.uri, 40_000)
    expected = payloads_in(sandbox.uri, name)
    addresses = kafka_addresses(kafka_proxies, sandbox.uri)
    found: list[bytes] = []
    for step in range(3):
        arguments = (addresses, name.replace("/", "."), "reports", 700)
        with Reader(command, "subscribe", *arguments, folder=tmp_path) as reader:
            reader.succeed()
        found += [each.value for each in reader.records]
        if step:
            kafka_proxies[0].kill()
    assert found == expected[: 3 * 700]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_lost_answers_double_nothing(
    sandbox: Sandbox, served: Served, command: list[str], tmp_path: Path, codec: str
) -> None:
    """Also when the log moves to another proxy, back, and its owner is killed."""
    killed, other = served.proxies
    name = log_name_for(killed, sandbox.uri)
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name)
    arguments = (served.addresses, name.replace("/", "."), codec)
    with Writer(command, "write", *arguments, folder=tmp_path) as writer:

        def go_on(more: int) -> None:
            writer.wait_for(writer.count + more)

        def lose_some() -> None:
            until = served.lost + LOST
            served.lose(is_on=True)
            wait_until(lambda: served.lost >= until or bool(writer.failed), timeout_s=240)
            served.lose(is_on=False)
            go_on(1000)

        go_on(100)
        lose_some()
        killed.act("drain")  # the log moves to the other one
        lose_some()
        killed.act("undrain")
        other.act("drain")
        go_on(1000)
        other.act("undrain")
        served.lose(is_on=True)
        go_on(1000)
        killed.kill()
        go_on(1000)
        served.lose(is_on=False)
    assert not writer.failed, writer.failed[:3]
    assert writer.sent == writer.count
    found = payloads_in(sandbox.uri, name)
    assert found == [b"%d:" % n + b"x" * (RECORD_BYTES - len(f"{n}:")) for n in range(writer.count)]
    known = {number: offset for number, offset in writer.offsets.items() if offset >= 0}
    assert all(number == offset for number, offset in known.items())
    assert len(known) > len(found) // 2
