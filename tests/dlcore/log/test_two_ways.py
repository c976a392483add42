"""Rows in batches or one by one: a writer comes to the same in both ways.

Method: Hypothesis chooses rows, and how they are cut; two logs get the same rows in two ways.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from hypothesis import given, settings, strategies as st

from dlcore.base.records import LogRecord
from tests.fixtures.aio import run
from tests.fixtures.lengths import amount
from tests.fixtures.memory_namespace import CONFIG, TIME_LIMIT_S, memory_cluster, read_all

if TYPE_CHECKING:
    from dlcore.base.ids import DLSN

ROWS = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 5]), st.sampled_from([0, 1, 30, 400])),
    min_size=1,
    max_size=30,
)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(max_examples=amount(40, sampled=12))
@given(ROWS, CUTS, st.sampled_from([1, 200, 5000]), st.sampled_from([600, 10**6]), st.booleans())
def test_batches_are_their_records_one_by_one(
    rows: list[tuple[int, int]], cuts: list[int], entry_bytes: int, segment_bytes: int, waits: bool
) -> None:
    """The same records in the same order, and each at the position that its writer got."""
    config = replace(CONFIG, entry_bytes=entry_bytes, segment_bytes_max=segment_bytes)
    txids: list[int] = []
    payloads: list[bytes] = []
    for number, (step, size) in enumerate(rows):
        txids.append(step + (txids[-1] if txids else 0))
        payloads.append(b"%d:" % number + bytes(size))

    async def main() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a", config=config)
            found: list[list[Any]] = []
            for name, sizes in (("batches", cuts), ("records", [1])):
                await namespace.create_log(name)
                log = await namespace.open_log(name)
                waiting: dict[int, asyncio.Future[DLSN]] = {}
                async with await log.open_writer() as writer:
                    first = 0
                    while first < len(rows):
                        size = sizes[len(waiting) % len(sizes)]
                        part = slice(first, first + size)
                        first = min(first + size, len(rows))
                        if name == "records":
                            future = writer.write(LogRecord(txids[first - 1], payloads[first - 1]))
                        else:
                            columns = {"txid": txids[part], "value": payloads[part]}
                            future = writer.write_batch(pa.record_batch(columns))
                        waiting[first - 1] = future
                        if waits and len(waiting) % 3 == 0:
                            await future
                read = await read_all(log)
                found.append([(each.txid, each.payload, each.sequence_id) for each in read])
                for last, future in waiting.items():
                    assert await future == read[last].dlsn
            assert found[0] == found[1]
            assert [(txid, payload) for txid, payload, _ in found[0]] == [
                *zip(txids, payloads, strict=True)
            ]

    run(asyncio.wait_for(main(), TIME_LIMIT_S))
