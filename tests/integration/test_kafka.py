"""Kafka's own clients read logs of real bookies through proxies of their own processes.

Goal: each reads every record once and in its order, byte for byte, through rolls of segments, a
truncation, a move of the log to another proxy, and the death of the proxy that it reads from.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.kafka import consumed, consumer
from tests.fixtures.kafka_proxies import (
    filled,
    go_on_through_faults,
    kafka_address,
    kafka_addresses,
)
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import log_name_for, payloads_in, produce
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

RECORDS = amount(1_000_000, sampled=40_000)
FILLED = RECORDS * 3 // 4
"""Number of records before a client reads; the others come while the log moves."""


def test_a_log_of_many_segments(sandbox: Sandbox, kafka_proxies: list[ProxyProcess]) -> None:
    """Truncated records are out of range, and the others come as they were written.

    It also does when the log moves, and when the proxy is killed that serves it.
    """
    uri, addresses = sandbox.uri, kafka_addresses(kafka_proxies, sandbox.uri)
    name = filled(uri, FILLED, log_name_for(kafka_proxies[0], uri))
    first = FILLED - len(payloads_in(uri, name))
    assert first > 1
    reader = consumer(addresses, name.replace("/", "."), 1, **{"auto.offset.reset": "earliest"})
    found: list[Any] = []
    ignored: list[Any] = []

    def wait_for(number: int) -> None:
        found.extend(consumed(reader, number - first - len(found), on_error=ignored.append))

    try:
        go_on_through_faults(uri, kafka_proxies, name, range(FILLED, RECORDS), wait_for)
    finally:
        reader.close()
    assert [each.offset() for each in found] == list(range(first, RECORDS))
    assert [each.value() for each in found] == payloads_in(uri, name)


def test_a_follower_goes_on_at_another_proxy(
    sandbox: Sandbox, kafka_proxies: list[ProxyProcess]
) -> None:
    """When the log moves, and when the proxy is killed from which it reads."""
    killed, other = kafka_proxies
    addresses = kafka_addresses(kafka_proxies, sandbox.uri)
    name = log_name_for(killed, sandbox.uri)
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name)
    reader = consumer(addresses, name.replace("/", "."))
    sent: list[bytes] = []
    found: list[Any] = []
    ignored: list[Any] = []

    def follow(writing: ProxyProcess, *, more: int, kills: bool = False) -> None:
        stop, now = threading.Event(), list[bytes]()
        thread = threading.Thread(target=produce, args=(writing.location, name, "p", stop, now))
        thread.start()
        try:
            found.extend(consumed(reader, more, on_error=ignored.append))
        finally:
            stop.set()
            thread.join()
            sent.extend(now)
        if kills:
            killed.kill()

    try:
        follow(killed, more=300)
        killed.act("drain")  # the log moves to the other one
        follow(other, more=300)
        killed.act("undrain")
        follow(other, more=100, kills=True)
        follow(other, more=300)
        found.extend(consumed(reader, len(sent) - len(found), on_error=ignored.append))
    finally:
        reader.close()
    assert [each.value() for each in found] == sent == payloads_in(sandbox.uri, name)
    assert [each.offset() for each in found] == list(range(len(sent)))


def test_kafka_addresses_are_listed(sandbox: Sandbox, kafka_proxies: list[ProxyProcess]) -> None:
    """Each proxy tells those of all."""
    wanted = sorted(kafka_address(each, sandbox.uri) for each in kafka_proxies)
    reader = consumer(wanted[0], "none")
    try:
        wait_until(
            lambda: (
                sorted(f"{each.host}:{each.port}" for each in reader.list_topics().brokers.values())
                == wanted
            ),
            timeout_s=60,
        )
    finally:
        reader.close()
