"""Kafka's own client writes a log of real bookies through proxies, whose answers are lost.

Goal: each record is in the log once and in the order in which it was sent, whatever happened to
answers, to the owner of the log and to the proxy; an acknowledged offset is where it is read.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from dlcore.sync import open_namespace
from tests.fixtures.lengths import amount, sample
from tests.fixtures.proxies import log_name_for, payloads_in
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.kafka_proxies import Served

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

BATCH, REST_S = 40, 0.01
LOST = amount(200, sampled=12)
"""Number of answers that are lost in each part of the test."""


class Writer:
    """A client of librdkafka that writes numbered records, until it gets the signal to stop."""

    def __init__(self, addresses: str, topic: str, **settings: Any) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": addresses,
                "enable.idempotence": True,
                "linger.ms": 2,
                "batch.num.messages": BATCH,
                "reconnect.backoff.max.ms": 200,
                "retry.backoff.max.ms": 200,
                "message.timeout.ms": 240_000,
                **settings,
            }
        )
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent: list[bytes] = []
        self.offsets: list[int | None] = []
        self.errors: list[Any] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if len(self.sent) - len(self.offsets) < 2000:
                self.sent.append(_record(len(self.sent)))
                self._producer.produce(self._topic, self.sent[-1], on_delivery=self._delivered)
                # A rest for each batch: all that it could write would be most of what this costs.
                self._producer.poll(0 if len(self.sent) % BATCH else REST_S)
            else:
                self._producer.poll(0.05)
        self._producer.flush()

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.errors.append(error)
        self.offsets.append(message.offset())

    def wait_for(self, more: int) -> None:
        """Wait until so many more are acknowledged."""
        until = len(self.offsets) + more
        wait_until(lambda: len(self.offsets) >= until or bool(self.errors), timeout_s=120)
        assert not self.errors, self.errors[:3]

    def end(self) -> None:
        """Stop, and wait for all acknowledgements."""
        self._stop.set()
        self._thread.join()


def _record(number: int) -> bytes:
    """Return a record that a codec hardly shortens: the relay counts bytes before it loses any."""
    return f"{number}:{hashlib.sha256(b'%d' % number).hexdigest()}".encode()


def lose_answers(served: Served, writer: Writer) -> None:
    """Let so many answers be lost; the time for it depends on how quickly a client comes back."""
    until = served.lost + LOST
    served.lose(is_on=True)
    while served.lost < until and not writer.errors:
        _wait_for_loss(served, writer)
    served.lose(is_on=False)


def _wait_for_loss(served: Served, writer: Writer) -> None:
    lost = served.lost
    wait_until(lambda: served.lost > lost or bool(writer.errors), timeout_s=60)


@pytest.mark.parametrize("codec", sample(["zstd", "none"], 1))
def test_lost_answers_double_nothing(sandbox: Sandbox, served: Served, codec: str) -> None:
    """Also when the log moves to another proxy, back, and its owner is killed."""
    killed, other = served.proxies
    name = log_name_for(killed, sandbox.uri)
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name)
    topic = name.replace("/", ".")
    writer = Writer(served.addresses, topic, **{"compression.type": codec})

    def lose_some() -> None:
        lose_answers(served, writer)
        writer.wait_for(1000)

    try:
        writer.wait_for(100)
        lose_some()
        killed.act("drain")  # the log moves to the other one
        lose_some()
        killed.act("undrain")
        other.act("drain")
        writer.wait_for(1000)
        other.act("undrain")
        served.lose(is_on=True)
        writer.wait_for(1000)
        killed.kill()
        writer.wait_for(1000)
        served.lose(is_on=False)
    finally:
        writer.end()
    assert not writer.errors, writer.errors[:3]
    found = payloads_in(sandbox.uri, name)
    assert found == writer.sent
    known = [(number, offset) for number, offset in enumerate(writer.offsets) if offset_is(offset)]
    assert all(number == offset for number, offset in known)
    assert len(known) > len(found) // 2


def offset_is(offset: int | None) -> bool:
    """Whether an offset is one: of a record that came again it may be forgotten."""
    return offset is not None and offset >= 0


def test_without_numbers_all_is_written_at_least_once(sandbox: Sandbox, served: Served) -> None:
    """Records sent again are there twice: the numbers exist to prevent that."""
    name = log_name_for(served.proxies[0], sandbox.uri)
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name)
    settings = {"enable.idempotence": False, "acks": -1, "max.in.flight": 1}
    writer = Writer(served.addresses, name.replace("/", "."), **settings)
    try:
        writer.wait_for(100)
        lose_answers(served, writer)
        writer.wait_for(500)
    finally:
        writer.end()
    assert not writer.errors
    found = payloads_in(sandbox.uri, name)
    assert len(found) > len(writer.sent)
    assert list(dict.fromkeys(found)) == writer.sent
