"""Figures of writing through a proxy by Kafka's protocol, beside a producer of Flight."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from confluent_kafka import Producer

from benchmarks.figures import Figure, Target, measure
from benchmarks.kafka_reads import served
from benchmarks.limits import MIB
from benchmarks.logs import CONFIG, CpuCost, drop_log, record_batches
from benchmarks.put_clients import Put
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pyarrow as pa

    from dlcore.ops.sandbox.cluster import Sandbox

_BYTES = 64 * MIB
_ROUNDS = 3
_WINDOW = 8
_FLUSH_S = 300


def write(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """All records once by librdkafka, in Python, beside a producer of DoPut: of 100 B, and of 1 KB.

    Both number their records, and wait for the last acknowledgement.  The client of Flight sends
    batches, that of librdkafka takes an object for each record: this is most of the difference at
    100 bytes.
    """
    with served(sandbox) as address:
        return [
            _write(sandbox, address, name, record_bytes=size, ratio=ratio)
            for name, size, ratio in (("kafka_write", 100, 0.1), ("kafka_write_1k", 1000, 0.1))
        ]


def _write(sandbox: Sandbox, address: str, name: str, *, record_bytes: int, ratio: float) -> Figure:
    batches = record_batches(total_bytes=_BYTES, record_bytes=record_bytes)
    values = [value for each in batches for value in each.column("value").to_pylist()]

    def by_kafka(log: str) -> None:
        produce(address, log.replace("/", "."), values)

    def by_flight(log: str) -> None:
        _put(sandbox.proxies[0].location, log, batches)

    pids = [*(each.pid for each in sandbox.bookies), sandbox.proxies[0].pid]
    ways = {"Kafka": (by_kafka, CpuCost(pids)), "Flight": (by_flight, CpuCost(pids))}

    def rate(way: str) -> float:
        fill, cost = ways[way]
        return _rate(sandbox, len(values), record_bytes, fill, cost)

    figure = measure(
        name=name,
        unit="MB/s",
        target=Target(ratio=ratio, is_rate=True),
        value=lambda: rate("Kafka"),
        limit=lambda: rate("Flight"),
        rounds=_ROUNDS,
    )
    costs = {}
    for way, (_, cost) in ways.items():
        costs[f"client of {way}"], costs[f"proxy and bookies for {way}"] = cost.per_gb(_BYTES)
    return replace(figure, cpu_s_per_gb=costs)


def produce(servers: str, name: str, values: Sequence[bytes]) -> None:
    """Write each value once, in order, by librdkafka; return when all are acknowledged."""
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 50})

    def on_delivery(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error)

    for value in values:
        while True:
            try:
                producer.produce(name, value, on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(_FLUSH_S) == 0
    assert not failed, failed[0]


def _put(location: str, log: str, batches: Sequence[pa.RecordBatch]) -> None:
    put = Put(location, log, batches[0].schema, producer="bench")
    for batch in batches:
        put.write(batch, in_flight_max=(_WINDOW - 1) * batch.num_rows)
    put.close()


def _rate(
    sandbox: Sandbox, records: int, record_bytes: int, fill: Callable[[str], None], cost: CpuCost
) -> float:
    """Fill a new log; return the MB a second, once all of it is there."""
    log = f"bench/{uuid4().hex}"
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(log, config=CONFIG)
    started = time.perf_counter()
    with cost.counted():
        fill(log)
    seconds = time.perf_counter() - started
    with open_namespace(sandbox.proxies[0].location) as namespace:
        assert namespace.open_log(log).get_log_record_count() == records
    drop_log(sandbox.proxies[0].location, log)
    return records * record_bytes / 1e6 / seconds
