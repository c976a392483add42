"""Facts about a log: its first and last record, its status, its segments as they change."""

from __future__ import annotations

import asyncio
import inspect
import io
from dataclasses import is_dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

import dlcore
import dlcore.sync
from dlcore.base.errors import AlreadyClosedError, LogEmptyError, LogNotFoundError
from dlcore.base.html_tables import fields_html, rows_html
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.metadata.segment import SegmentState
from dlcore.log.metadata.values import LogHead
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import encode
from dlcore.ops.inspection import find_nameless
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog


def test_first_and_last_record() -> None:
    """An empty log, a truncated one, a sealed one, and one that is written."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for get in (log.get_first_record, log.get_last_record, log.get_first_txid):
            with pytest.raises(LogEmptyError):
                await get()
        writer = await log.open_writer()
        await writer.write_batch(pa.record_batch({"txid": [3, 4, 5], "value": [b"x"] * 3}))
        await writer.commit()
        assert (await log.get_last_record()).txid == 5
        await writer.aclose()
        await log.truncate(DLSN(1, 0, 1))
        assert await log.get_first_txid() == 4
        assert (await log.get_first_record()).dlsn == DLSN(1, 0, 1)
        async with await log.open_writer() as writer:
            await writer.write(record(9))
            await writer.mark_end_of_stream()
        assert [await log.get_first_record(), await log.get_last_record()] == [
            (await read_all(log))[0],
            (await read_all(log))[-1],
        ]
        await log.truncate((await log.get_snapshot()).end)
        with pytest.raises(LogEmptyError):
            await log.get_first_record()

    on_log(body)


def test_the_status_of_a_log() -> None:
    """Everything in one call; of a log that was never written too."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        empty = await log.status()
        assert (empty.first, empty.last, empty.last_txid, empty.idle_s) == (None, None, None, None)
        assert (empty.record_count, empty.writer, empty.sealed) == (0, None, False)
        cluster.clocks["a"].current_ms += 5_000
        async with await log.open_writer() as writer:
            await writer.write_batch(pa.record_batch({"txid": [1, 2, 3], "value": [b"x"] * 3}))
            await writer.commit()
            status = await log.status()
            assert status.writer == "a"
            assert (status.first, status.last, status.last_txid) == (
                DLSN.INITIAL, DLSN(1, 0, 2), 3,
            )  # fmt: skip
            assert (status.record_count, status.segment_count, status.ledger_count) == (3, 1, 1)
            assert status.size_bytes > 3
        await log.truncate(DLSN(1, 0, 2))
        ledger_id = (await log.get_log_segments())[0].extents[0].ledger_id
        path = cluster.paths.under_replicated_ledger(ledger_id)
        await cluster.stores["a"].create(path, make_parents=True)
        cluster.clocks["a"].current_ms += 2_000
        status = await log.status()
        assert (status.record_count, status.under_replicated_ledgers) == (1, 1)
        assert (status.writer, status.age_s, status.idle_s) == (None, 7.0, 2.0)
        assert status.created == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
        assert "<td>1:0:2 … 1:0:2</td>" in status._repr_html_()
        assert "<td>3/3/2</td>" in status._repr_html_()
        assert "never written" in empty._repr_html_()
        assert "sealed" in replace(status, sealed=True)._repr_html_()

    on_log(body)


def test_segments_are_watched() -> None:
    """The state at once, and after each change; deletion is reported; closing ends the waiting."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        watch = log.watch_segments()
        assert await anext(watch) == []
        writer = await log.open_writer()
        waiting = asyncio.create_task(anext(watch))
        await writer.write(record(1))
        (segment,) = await waiting
        assert (segment.lssn, segment.state) == (1, SegmentState.IN_PROGRESS)
        assert repr(segment).endswith("1 extents, the last one open>")
        await writer.aclose()
        (segment,) = await anext(watch)
        assert segment.state is SegmentState.COMPLETED
        assert "1 records" in repr(segment)
        await log.delete()
        for _ in range(2):
            with pytest.raises(LogNotFoundError):
                await anext(watch)
        assert "OPEN" in repr(watch)
        await watch.aclose()
        await cluster.namespaces[0].create_log("other")
        other = await cluster.namespaces[0].open_log("other")
        async with other.watch_segments() as watch:
            async for segments in watch:
                assert segments == []
                break
            waiting = asyncio.create_task(anext(watch))
            await asyncio.sleep(0)
            await cluster.namespaces[0].aclose()
            with pytest.raises(AlreadyClosedError):
                await waiting

    on_log(body)


def test_every_value_of_the_public_faces_is_shown_as_a_table() -> None:
    """But for positions and identities, which are one short text."""
    plain = {
        name
        for face in (dlcore, dlcore.sync)
        for name in face.__all__
        if isinstance(kind := getattr(face, name), type)
        and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))
        and not hasattr(kind, "_repr_html_")
    }
    assert plain == {"DLSN", "BookieId"}


def test_everything_of_the_public_faces_says_what_it_is() -> None:
    """And not only where it lies in memory, whatever it is that a notebook prints."""
    inherited: tuple[Any, ...] = (object.__repr__, io.RawIOBase.__repr__)
    silent = {
        kind.__name__
        for face in (dlcore, dlcore.sync)
        for name in face.__all__
        for kind in concrete(getattr(face, name))
        if kind.__repr__ in inherited
    }
    assert silent == set()


def concrete(found: object) -> list[type[Any]]:
    """Return the classes of objects that users get for a name: it, or the classes of back ends."""
    if not isinstance(found, type):
        return []
    if not inspect.isabstract(found):
        return [found]
    derived: list[type[Any]] = found.__subclasses__()
    return [each for kind in derived for each in concrete(kind)]


def test_the_output_in_a_notebook() -> None:
    """Short texts, and tables; nothing that a name could break."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(record(1))
        snapshot = await log.get_snapshot()
        assert repr(snapshot) == "<LogSnapshot 'clicks' from 1:0:0 to 1:1:0, 1 segments>"
        assert "<td>1</td>" in snapshot._repr_html_()
        assert "1:0:0 … 1:1:0" in (await log.read())._repr_html_()
        (segment,) = await log.get_log_segments()
        assert "<caption>LogSegment</caption>" in segment._repr_html_()
        assert "<th>created_ms</th>" in segment._repr_html_()
        assert "_entry_ends" not in segment._repr_html_()
        settings = await log.update_settings(compression="lz4", explicit_truncation=True)
        assert "<tr><th>compression</th><td>lz4</td></tr>" in settings._repr_html_()
        assert "<tr><th>explicit_truncation</th><td>True</td></tr>" in settings._repr_html_()
        statistics = cluster.namespaces[0].get_statistics()
        assert "<tr><th>entries_written</th><td>1</td></tr>" in statistics._repr_html_()
        assert len(LogRecord(txid=1, payload=bytes(1_000_000))._repr_html_()) < 1_000

    on_log(body)
    assert "&lt;b&gt;" in fields_html("<b>", {"a": 1_000})
    assert "<td>1,000</td>" in rows_html("t", ["a"], [[1_000]])


def test_the_version() -> None:
    """That of the distribution."""
    assert dlcore.__version__ == version("distributed-dlog")


def test_heads_to_which_no_name_leads() -> None:
    """They are found, damaged ones too; those of deleted logs have none, and nothing is wrong."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        context = log._context
        store, path = context.store, context.paths.log_of(log.log_id).head
        writer = await log.open_writer()
        await writer.write(record(1))
        await writer.aclose()
        assert await find_nameless(context) == []
        await store.delete(context.paths.log(log.name))
        (found,) = await find_nameless(context)
        assert (found.log, found.kind) == (f"of id {log.log_id}", "nameless")
        assert found.detail == "no name leads to it, whose last segment is 1"
        await store.put(path, b"no head", version=ANY_VERSION)
        (found,) = await find_nameless(context)
        assert f"no name leads to it: LogHead at {path}" in found.detail
        await store.put(path, encode(LogHead(deleted=True)), version=ANY_VERSION)
        assert await find_nameless(context) == []

    on_log(body)
