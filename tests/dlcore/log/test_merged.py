"""A reader over many logs: one sequence by transaction id, nothing left out or read twice."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.base.errors import LogNotFoundError, SchemaMismatchError
from dlcore.log.reading import merged
from tests.fixtures.aio import cancel_after, until
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace

NAMES = ("x", "y", "z")


async def fill(namespace: DirectNamespace, rng: random.Random) -> list[tuple[int, str, bytes]]:
    """Make the logs; return what is in them in the order of a merge."""
    found = []
    for name in NAMES:
        await namespace.create_log(name)
        log, txid = await namespace.open_log(name), 0
        for _ in range(rng.randrange(3)):
            async with await log.open_writer() as writer:
                for number in range(rng.randrange(1, 30)):
                    txid += rng.randrange(3)
                    payload = b"%d" % number
                    await writer.write(record(txid, payload))
                    found.append((txid, name, payload))
    return sorted(found, key=lambda each: each[:2])  # which keeps the order of the rest


@pytest.mark.parametrize("seed", range(8))
def test_many_logs_are_one_sequence(seed: int) -> None:
    """In bulks and by iterating, from the start, from a transaction id, from positions."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        rng = random.Random(seed)
        namespace = cluster.namespaces[0]
        wanted = await fill(namespace, rng)
        found = []
        async with await namespace.open_merged_reader(NAMES) as reader:
            for count in (1, 7):
                found += await reader.read_bulk(count)
            async for each in reader:
                found.append(each)
                if rng.random() < 0.2:
                    break
            middle, positions = len(found), reader.positions
            found += await reader.read_bulk(3)
            found += [each async for each in reader]
            assert await reader.read_bulk(1) == []
        rows = [(each.record.txid, each.log, each.record.payload) for each in found]
        assert rows == wanted
        async with await namespace.open_merged_reader(NAMES, positions=positions) as reader:
            assert [each async for each in reader] == found[middle:]
        async with await namespace.open_merged_reader(NAMES, txid=9) as reader:
            assert [each async for each in reader] == [e for e in found if e.record.txid >= 9]

    on_log(body)


def test_following_keeps_the_order_over_all_time() -> None:
    """A log without records holds the others back, unless it is sealed, or for a while only."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        logs = []
        for name in ("x", "y"):
            await namespace.create_log(name)
            logs.append(await namespace.open_log(name))
        async with (
            await logs[0].open_writer() as x,
            await logs[1].open_writer() as y,
            await namespace.open_merged_reader(["x", "y"]) as reader,
        ):
            await x.write(record(5))
            waiting = asyncio.create_task(reader.read_bulk(9, follow=True))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await y.write(record(3))
            assert [(e.log, e.record.txid) for e in await waiting] == [("y", 3)]
            (early,) = await reader.read_bulk(9, follow=True, patience_s=0.05)
            assert (early.log, early.record.txid) == ("x", 5)
            await x.write(record(6))
            await y.mark_end_of_stream()
            assert [e.record.txid for e in await reader.read_bulk(9, follow=True)] == [6]
            await x.mark_end_of_stream()
            assert await reader.read_bulk(9, follow=True) == []
            assert "2 logs" in repr(reader)

    on_log(body)


def test_read_batches_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the records are: of each log its share of all that may be here."""
    monkeypatch.setattr(merged, "_HERE_BYTES", 300_000)

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace, rng = cluster.namespaces[0], random.Random(1)
        for name in NAMES:
            await namespace.create_log(name)
            async with await (await namespace.open_log(name)).open_writer() as writer:
                for txid in range(30):
                    await writer.write(record(txid, rng.randbytes(40_000)))
        most = count = 0
        async with await namespace.open_merged_reader(NAMES) as reader:
            fetchers = [each.reader._fetcher for each in reader._sources]
            await until(
                lambda: all(each._machine.buffer.size_bytes > 30 * 40_000 for each in fetchers)
            )
            async for _each in reader:
                count += 1
                here = sum(rows.size_bytes for each in reader._sources for rows in each.rows)
                here += sum(len(each.record.payload) for each in reader.gathered)
                most = max(most, here)
        assert count == 90
        assert 0 < most < 300_000 + len(NAMES) * 100_000

    on_log(body)


def test_a_typed_log_is_refused_where_the_reader_is_opened() -> None:
    """Its rows are no records; what had been opened by then is closed."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("typed", schema=pa.schema({"x": pa.int64()}))
        with pytest.raises(SchemaMismatchError, match="'typed' is typed"):
            await namespace.open_merged_reader(["clicks", "typed"])
        assert "AsyncLogReader" not in namespace.get_statistics().open_objects

    on_log(body)


def test_an_error_of_one_log_waits_for_no_other() -> None:
    """While the other has no records, the error names the deleted one."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("quiet")
        async with await namespace.open_merged_reader(["quiet", "clicks"]) as reader:
            await (await namespace.open_log("clicks")).delete()
            with pytest.raises(LogNotFoundError):
                await reader.read_bulk(1, follow=True)

    on_log(body)


def test_a_cancelled_close_closes_each_of_the_readers() -> None:
    """And not only those whose turn had come."""

    async def body(cluster: MemoryCluster, _: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        for name in NAMES:
            await namespace.create_log(name)
        for turns in range(4):
            reader = await namespace.open_merged_reader(NAMES)
            await cancel_after(asyncio.create_task(reader.aclose()), turns)
            left = namespace.get_statistics().open_objects.get("AsyncLogReader", 0)
            assert left == (0 if turns else len(NAMES))  # one that had not begun closed nothing
            await reader.aclose()

    on_log(body)
