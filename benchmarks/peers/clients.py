"""Figures of a proxy that speaks Kafka's protocol beside a Kafka, by one client: librdkafka.

A log is a topic of one partition, so Kafka's topic has one as well.  Everything has three copies,
all of which are acknowledged: Kafka's are on their way to the disk, ours have reached it.  Both are
read while their pages are in memory.  All records have one size: a proxy takes longer to encode
others, which Kafka sends as they are stored.  A proxy keeps messages that it has sent, as Kafka's
brokers have them in the page cache; "first" is a proxy that keeps none, so that its bookies read.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.figures import Figure, Target, measure
from benchmarks.kafka_reads import consumed, served
from benchmarks.kafka_writes import produce
from benchmarks.limits import MIB
from benchmarks.logs import CONFIG, KEEPS_NOTHING, drop_log, record_batches
from benchmarks.peers.kafka import BROKERS, running_kafka
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

_BYTES = 64 * MIB
_ROUNDS = 5
_ANSWER_S = 10.0
_SIZES = {"": 100, "_1k": 1000}


def read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """All records of a topic read by librdkafka: of 100 bytes, and of 1 KB, beside Kafka."""
    figures = []
    for which, settings in (("", {}), ("_first", KEEPS_NOTHING)):
        with _both(sandbox, folder, **settings) as sides:
            figures += [
                _read(sides, f"peers_client_read{which}{suffix}", record_bytes)
                for suffix, record_bytes in _SIZES.items()
            ]
    return figures


def write(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """All records once by librdkafka's idempotent producer: of 100 bytes, and of 1 KB."""
    with _both(sandbox, folder) as sides:
        return [
            _write(sides, f"peers_client_write{suffix}", record_bytes)
            for suffix, record_bytes in _SIZES.items()
        ]


def _read(sides: tuple[_Topics, _Topics], name: str, record_bytes: int) -> Figure:
    values = _values(record_bytes)
    topics = [(side, side.create()) for side in sides]
    for side, topic in topics:
        produce(side.servers, topic, values)

    def rate(which: int) -> float:
        side, topic = topics[which]
        return _rate(record_bytes, values, lambda: consumed(side.servers, topic, len(values)))

    figure = _measured(name, rate, ratio=1)
    for side, topic in topics:
        side.drop(topic)
    return figure


def _write(sides: tuple[_Topics, _Topics], name: str, record_bytes: int) -> Figure:
    values = _values(record_bytes)

    def rate(which: int) -> float:
        side = sides[which]
        topic = side.create()
        found = _rate(record_bytes, values, lambda: produce(side.servers, topic, values))
        assert side.records(topic) == len(values)
        side.drop(topic)
        return found

    return _measured(name, rate, ratio=0.7)


def _measured(name: str, rate: Callable[[int], float], *, ratio: float) -> Figure:
    return measure(
        name=name,
        unit="MB/s",
        target=Target(ratio=ratio, is_rate=True),
        value=lambda: rate(0),
        limit=lambda: rate(1),
        rounds=_ROUNDS,
    )


def _rate(record_bytes: int, values: Sequence[bytes], work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return len(values) * record_bytes / 1e6 / (time.perf_counter() - started)


def _values(record_bytes: int) -> list[bytes]:
    batches = record_batches(total_bytes=_BYTES, record_bytes=record_bytes)
    return [value for each in batches for value in each.column("value").to_pylist()]


@contextmanager
def _both(sandbox: Sandbox, folder: Path, **settings: object) -> Iterator[tuple[_Topics, _Topics]]:
    """Serve Kafka's clients by the proxy, and by a Kafka; yield both, ours first."""
    with (
        served(sandbox, **settings) as address,
        running_kafka(folder / f"kafka-{uuid4().hex}", is_synced=False) as servers,
    ):
        yield _Logs(sandbox, address), _Topics(servers)


class _Topics:
    """Topics of one partition of a Kafka."""

    def __init__(self, servers: str) -> None:
        self.servers = servers
        self._admin = AdminClient({"bootstrap.servers": servers})

    def create(self) -> str:
        """Create a topic and return its name."""
        name = f"bench-{uuid4().hex}"
        self._admin.create_topics([NewTopic(name, 1, BROKERS)])[name].result()
        return name

    def drop(self, topic: str) -> None:
        """Delete a topic, so that rounds do not fill the disk."""
        self._admin.delete_topics([topic])[topic].result()

    def records(self, topic: str) -> int:
        """Return the offset after the last record."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": "bench"})
        try:
            _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), _ANSWER_S)
        finally:
            consumer.close()
        return int(end)


class _Logs(_Topics):
    """Logs of the sandbox, by the names that its proxy gives them as topics."""

    def __init__(self, sandbox: Sandbox, servers: str) -> None:
        super().__init__(servers)
        self._sandbox = sandbox

    def create(self) -> str:
        """Create a log with the configuration of the other figures; return its topic's name."""
        log = f"bench/{uuid4().hex}"
        with open_namespace(self._sandbox.uri) as namespace:
            namespace.create_log(log, config=CONFIG)
        return log.replace("/", ".")

    def drop(self, topic: str) -> None:
        """Delete the log through its owner, the proxy."""
        drop_log(self._sandbox.proxies[0].location, topic.replace(".", "/"))
