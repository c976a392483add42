"""Figures of reading through a proxy by Kafka's protocol, beside Flight, of the same log."""

from __future__ import annotations

import socket
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, TopicPartition

from benchmarks.figures import Figure, Target, measure
from benchmarks.limits import MIB
from benchmarks.logs import (
    KEEPS_NOTHING,
    CpuCost,
    drop_log,
    record_batches,
    restarted,
    write_log,
)
from benchmarks.proxy_reads import get_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

_AT_ONCE = 10_000
_BYTES = 64 * MIB
_ROUNDS = 3
_WAIT_S = 5.0


def read(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """All records of a log by librdkafka, in Python, beside DoGet: of 100 bytes, and of 1 KB.

    They come from bookies each time.  The client of Flight takes batches, that of librdkafka an
    object for each record: this is most of the difference at 100 bytes.  CPU is that of the proxy
    and its bookies.  Records of one size, as here, are encoded in a half of the time that others
    take, or less.
    """
    with served(sandbox, **KEEPS_NOTHING) as address:
        return [
            _read(sandbox, address, name, record_bytes=size, ratio=ratio)
            for name, size, ratio in (("kafka_read", 100, 0.1), ("kafka_read_1k", 1000, 0.2))
        ]


@contextmanager
def served(sandbox: Sandbox, **settings: object) -> Iterator[str]:
    """Let the proxy serve Kafka's clients meanwhile, with these settings; yield where."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with restarted(sandbox, kafka_address=address, **settings):
        yield address


def _read(sandbox: Sandbox, address: str, name: str, *, record_bytes: int, ratio: float) -> Figure:
    batches = record_batches(total_bytes=_BYTES, record_bytes=record_bytes)
    records = sum(int(each.num_rows) for each in batches)
    log, _ = write_log(sandbox.uri, batches)
    pids = [*(each.pid for each in sandbox.bookies), sandbox.proxies[0].pid]
    by_kafka, by_flight = CpuCost(pids), CpuCost(pids)

    def value() -> float:
        started = time.perf_counter()
        with by_kafka.counted():
            assert consumed(address, log.replace("/", "."), records) == records
        return records * record_bytes / 1e6 / (time.perf_counter() - started)

    def limit() -> float:
        started = time.perf_counter()
        with by_flight.counted():
            assert get_all(sandbox.proxies[0].location, log, ["value"]) == records
        return records * record_bytes / 1e6 / (time.perf_counter() - started)

    try:
        figure = measure(
            name=name,
            unit="MB/s",
            target=Target(ratio=ratio, is_rate=True),
            value=value,
            limit=limit,
            rounds=_ROUNDS,
        )
    finally:
        drop_log(sandbox.uri, log)
    costs = {}
    for whom, cost in (("Kafka", by_kafka), ("Flight", by_flight)):
        costs[f"client of {whom}"], costs[f"proxy and bookies for {whom}"] = cost.per_gb(_BYTES)
    return replace(figure, cpu_s_per_gb=costs)


def consumed(servers: str, name: str, records: int) -> int:
    """Read a log from its beginning by librdkafka; return how many records came."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            # By default it pauses for a second whenever it holds 100,000 records.
            "fetch.queue.backoff.ms": 10,
        }
    )
    consumer.assign([TopicPartition(name, 0, 0)])
    try:
        count = 0
        while count < records:
            found = consumer.consume(min(_AT_ONCE, records - count), _WAIT_S)
            errors = [each.error() for each in found if each.error() is not None]
            assert found, f"{count} of {records} records came"
            assert not errors, errors[0]
            count += len(found)
        return count
    finally:
        consumer.close()
