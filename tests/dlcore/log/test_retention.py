"""Retention: what is too old goes, with a writer, without one, and beside truncation.

Goal: the table in `upkeep/retention.py` holds for every log that has settings for it, and for no
other.  Method: clocks that the test moves, a sweep of a worker, and what is stored then.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from msgspec.structs import replace as replace_of

from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    ConfigurationError,
    LedgerNotFoundError,
    LogEmptyError,
    LogNotFoundError,
    MetadataConnectionError,
)
from dlcore.base.ids import DLSN
from dlcore.log.metadata.segment import Extent
from dlcore.log.metadata.values import LogHead, LogKey, OpenSegment, SegmentEnd, Totals, pack
from dlcore.log.upkeep.retention import (
    first_kept,
    kept_by_size,
    kept_from_ms,
    last_write_ms,
    must_complete,
    readable_for_s,
    truncated_for_s,
)
from dlcore.metadata.stored import encode
from dlcore.ops.upkeep import expiry
from dlcore.ops.upkeep.expiry import expire_log, expire_logs
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.aio import until
from tests.fixtures.interrupted_store import InterruptedStore
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all, record
from tests.fixtures.recording_store import RecordingStore

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.context import LogContext

HOUR_MS = 3_600_000
HOURLY = LogSettings(retention_s=3600.0)


def extent(last_timestamp_ms: int, *, is_open: bool = False) -> Extent:
    """Return an extent of one record."""
    return Extent(
        ledger_id=1,
        first_entry_id=0,
        last_entry_id=None if is_open else 0,
        record_count=0 if is_open else 1,
        last_timestamp_ms=last_timestamp_ms,
    )


def segment_end(last_timestamp_ms: int | None, *, completed_ms: int = 0) -> SegmentEnd:
    """Return a completed segment; None: all of its extents are in chunks."""
    return SegmentEnd(
        created_ms=0,
        completed_ms=completed_ms,
        start_sequence_id=0,
        chunk_count=0,
        chunked=Totals(),
        packed=() if last_timestamp_ms is None else pack([extent(last_timestamp_ms)]),
    )


def test_records_are_kept_from_a_time_on() -> None:
    """Or at any age."""
    assert kept_from_ms(HOURLY, now_ms=4_000_000) == 400_000
    assert kept_from_ms(LogSettings(), now_ms=4_000_000) is None


@pytest.mark.parametrize(
    ("retention_s", "explicit", "readable_s", "truncated_s"),
    [
        (None, False, math.inf, 0),
        (None, True, math.inf, 0),
        (60, False, 60, 0),
        (60, True, math.inf, 60),
    ],
)
def test_for_how_long_records_stay(
    retention_s: float | None, explicit: bool, readable_s: float, truncated_s: float
) -> None:
    """As the table says."""
    settings = LogSettings(retention_s=retention_s, explicit_truncation=explicit)
    assert (readable_for_s(settings), truncated_for_s(settings)) == (readable_s, truncated_s)


def test_a_segment_is_as_old_as_its_last_record() -> None:
    """Or as its completion, where the record's time lies further away."""
    assert last_write_ms(segment_end(7, completed_ms=90)) == 7
    assert last_write_ms(segment_end(None, completed_ms=90)) == 90


def test_the_first_segment_that_is_young_enough_and_all_after_it_stay() -> None:
    """Also where a later one is older, as clocks of writers may have it."""
    head = LogHead(max_lssn=7, end=(7, 5), first_active=(5, 3, 0))
    ends = [segment_end(10), segment_end(20), segment_end(15)]
    assert first_kept(head, ends, kept_from_ms=10) is None
    assert first_kept(head, ends, kept_from_ms=11) == DLSN(6, 0, 0)
    assert first_kept(head, ends, kept_from_ms=20) == DLSN(6, 0, 0)
    assert first_kept(head, ends, kept_from_ms=21) == DLSN(7, 5, 0)  # the end: nothing is left
    assert first_kept(head, [], kept_from_ms=21) is None


@pytest.mark.parametrize(
    ("segment", "last_timestamp_ms", "expected"),
    [
        (None, 0, False),
        (OpenSegment(created_ms=50, start_sequence_id=0), 0, False),
        (OpenSegment(created_ms=49, start_sequence_id=0), 49, True),
        (OpenSegment(created_ms=49, start_sequence_id=0), 50, False),  # staged appends go on
        (
            OpenSegment(created_ms=49, start_sequence_id=0, packed=pack([extent(0, is_open=True)])),
            99,
            True,
        ),
    ],
)
def test_when_a_segment_in_progress_must_be_completed(
    segment: OpenSegment | None, last_timestamp_ms: int, *, expected: bool
) -> None:
    """It is old, and no writer adds to it."""
    head = LogHead(segment=segment, last_timestamp_ms=last_timestamp_ms, max_lssn=1)
    assert must_complete(head, kept_from_ms=50) is expected


@pytest.mark.parametrize(
    ("bytes_max", "known", "lssn"),
    [
        (1, 3, 4),
        (10, 3, 4),
        (11, 3, 3),
        (110, 3, 3),
        (111, 3, 2),
        (210, 3, 2),
        (211, 3, None),
        (110, 1, None),
        (110, 2, 3),
        (10, 0, None),
    ],
)
def test_the_newest_segments_that_have_enough_stay(
    bytes_max: int, known: int, lssn: int | None
) -> None:
    """The one in progress counts; as long as it is not known what is older, nothing goes."""
    part = replace_of(extent(1), size_bytes=100)
    ends = [replace_of(segment_end(1), packed=pack([part]))] * known
    tail = pack([replace_of(part, size_bytes=10)])
    head = LogHead(max_lssn=4, segment=OpenSegment(created_ms=0, start_sequence_id=0, packed=tail))
    found = kept_by_size(head, ends, bytes_max=bytes_max)
    assert found == (None if lssn is None else DLSN(lssn, 0, 0))
    if known == 3 and bytes_max == 110:
        without = replace_of(head, max_lssn=3, segment=None)
        assert kept_by_size(without, ends, bytes_max=100) == DLSN(3, 0, 0)


def test_a_log_keeps_so_many_bytes() -> None:
    """The oldest segments go in a sweep, however young they are."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for txid in range(1, 6):
            await write(cluster, log, txid)
        segments = await log.get_log_segments()
        assert len(segments) == 5
        size = sum(each.size_bytes for each in segments[-1].extents)
        await log.update_settings(retention_bytes=5 * size)
        await sweep(cluster)
        assert await txids(log) == [1, 2, 3, 4, 5]
        await log.update_settings(retention_bytes=2 * size)
        await sweep(cluster)
        assert await txids(log) == [4, 5]
        assert ledgers(cluster) == 2
        await sweep(cluster)
        assert await txids(log) == [4, 5]
        await log.update_settings(retention_bytes=None)
        await write(cluster, log, 6)
        await sweep(cluster)
        assert await txids(log) == [4, 5, 6]

    on_log(body)


def test_a_retention_is_a_time() -> None:
    """Zero would drop everything at once."""
    with pytest.raises(ConfigurationError, match=r"retention_s=0\.0: expected seconds > 0"):
        LogSettings(retention_s=0.0)
    with pytest.raises(ConfigurationError, match="retention_bytes=0: expected bytes > 0"):
        LogSettings(retention_bytes=0)
    with pytest.raises(ConfigurationError, match="retention_bytes=1: expected nothing with"):
        LogSettings(retention_bytes=1, explicit_truncation=True)


async def write(cluster: MemoryCluster, log: DirectLog, *txids: int) -> None:
    """Write one segment for each transaction id, an hour apart."""
    for txid in txids:
        async with await log.open_writer() as writer:
            await writer.write(record(txid))
        pass_hours(cluster, 1)


def pass_hours(cluster: MemoryCluster, hours: float) -> None:
    """Let all clocks go on."""
    for clock in cluster.clocks.values():
        clock.current_ms += int(hours * HOUR_MS)


async def sweep(cluster: MemoryCluster) -> None:
    """Let a worker look once."""
    await LogUpkeep.of(cluster.namespaces[0]).sweep()


async def txids(log: DirectLog) -> list[int]:
    """Return what can be read."""
    return [each.txid for each in await read_all(log)]


def ledgers(cluster: MemoryCluster) -> int:
    """Return how many ledgers there are."""
    below = f"{cluster.paths.ledgers}/"
    dump = cluster.tree.dump()
    return sum(path.startswith(below) and path.count("/") == 5 for path in dump)


def test_an_idle_log_loses_what_is_too_old_without_a_writer() -> None:
    """Whole segments, and their space; a log without a retention loses nothing."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("kept")
        kept = await namespace.open_log("kept")
        await write(cluster, kept, 1)
        await write(cluster, log, 1, 2, 3)
        await log.update_settings(retention_s=2.5 * 3600)
        await sweep(cluster)
        assert await txids(log) == [2, 3]
        assert ledgers(cluster) == 3
        pass_hours(cluster, 10)
        await sweep(cluster)
        assert await txids(log) == []
        assert await txids(kept) == [1]
        with pytest.raises(LogEmptyError):
            await log.get_first_dlsn()
        await write(cluster, log, 4)  # positions and transaction ids go on
        assert [each.dlsn for each in await read_all(log)] == [DLSN(4, 0, 0)]

    on_log(body)


def test_a_retention_that_is_unset_drops_nothing_more() -> None:
    """The log is not listed any more; nor is one that is deleted."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        listed = cluster.paths.retained_log(log.log_id)
        await log.update_settings(retention_s=1)
        assert listed in cluster.tree.dump()
        await write(cluster, log, 1)
        await log.update_settings(retention_s=None)
        assert listed not in cluster.tree.dump()
        await sweep(cluster)
        assert await txids(log) == [1]
        await log.update_settings(retention_s=1)
        await log.delete()
        assert listed not in cluster.tree.dump()
        await sweep(cluster)

    on_log(body)


def test_the_segment_of_a_dead_writer_gets_old_too() -> None:
    """It is recovered, and goes; that of a writer that lives stays in progress."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(retention_s=3600)
        writer = await log.open_writer()
        await writer.write(record(1))
        pass_hours(cluster, 1.5)
        await sweep(cluster)
        assert await txids(log) == [1]  # its owner lives, and completes it by its age
        await writer.abort()
        await sweep(cluster)
        assert await txids(log) == []
        assert ledgers(cluster) == 0

    on_log(body)


def test_an_idle_writer_completes_its_segment_by_age() -> None:
    """It can then go; the writer goes on in another one."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = await cluster.open("b", config=replace(CONFIG, segment_age_max_s=0.05))
        log = await namespace.open_log("clicks")
        await log.update_settings(retention_s=3600)
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            cluster.clocks["b"].current_ms += 50
            await until(lambda: "OPENING" in repr(writer))
            assert (await log.get_log_segments())[0].completed_ms
            pass_hours(cluster, 2)
            await sweep(cluster)
            assert await txids(log) == []
            assert await writer.write(record(2)) == DLSN(2, 0, 0)

    on_log(body)


def test_staged_appends_that_ended_get_old_too() -> None:
    """Their segment is completed once nothing was added for so long."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(retention_s=3600)
        batch = pa.record_batch({"value": [b"x"]})
        for version in range(2):
            async with await cluster.namespaces[0].begin_append("me", version) as append:
                await append.write_batch("clicks", batch)
                await append.commit()
            pass_hours(cluster, 0.9)
            await sweep(cluster)
        assert len(await txids(log)) == 2
        pass_hours(cluster, 0.9)
        await sweep(cluster)
        assert await txids(log) == []
        assert ledgers(cluster) == 0

    on_log(body)


def test_with_explicit_truncation_records_go_when_they_are_truncated_and_old() -> None:
    """The last row of the table: space stays for the retention, and what is not truncated stays."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(retention_s=2.5 * 3600, explicit_truncation=True)
        await write(cluster, log, 1, 2, 3)
        pass_hours(cluster, -3)
        assert await log.truncate(DLSN(3, 0, 0))
        assert await txids(log) == [3]
        assert ledgers(cluster) == 3
        pass_hours(cluster, 3)
        await sweep(cluster)
        assert ledgers(cluster) == 2
        pass_hours(cluster, 30)
        await sweep(cluster)
        assert ledgers(cluster) == 1
        assert await txids(log) == [3]

    on_log(body)


def test_truncation_frees_space_at_once_without_or_beside_a_retention() -> None:
    """The first two rows of the table."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(cluster, log, 1, 2, 3)
        await log.truncate(DLSN(2, 0, 0))
        assert ledgers(cluster) == 2
        await log.update_settings(retention_s=1e6)
        await log.truncate(DLSN(3, 0, 0))
        assert ledgers(cluster) == 1

    on_log(body)


def test_many_segments_go_in_steps() -> None:
    """More than are looked at at once."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(retention_s=3600)
        for txid in range(130):
            async with await log.open_writer() as writer:
                await writer.write(record(txid))
        pass_hours(cluster, 2)
        await write(cluster, log, 500)
        pass_hours(cluster, -0.5)
        await sweep(cluster)
        assert await txids(log) == [500]

    on_log(body)


def test_a_log_whose_retention_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It is named; those after it have their turn."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        broken = []
        for number in range(5):
            await namespace.create_log(f"broken-{number}", settings=HOURLY)
            broken.append(await namespace.open_log(f"broken-{number}"))
            path = cluster.paths.log_of(broken[-1].log_id).settings
            node = await cluster.stores["a"].get(path)
            assert node is not None
            await cluster.stores["a"].put(path, b"{}", version=node.version)
        await log.update_settings(retention_s=3600)
        await write(cluster, log, 1)
        pass_hours(cluster, 1)
        await sweep(cluster)
        assert await txids(log) == []
        assert all(f"retention of log {each.name}: " in caplog.text for each in broken)

    on_log(body)


def test_a_listed_log_that_was_deleted_is_passed_over() -> None:
    """Between the list and its turn."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(retention_s=3600)
        path = cluster.paths.log_of(log.log_id).head
        node = await cluster.stores["a"].get(path)
        assert node is not None
        gone = encode(LogHead(deleted=True))
        await cluster.stores["a"].put(path, gone, version=node.version)
        await sweep(cluster)
        assert cluster.paths.retained_log(log.log_id) in cluster.tree.dump()

    on_log(body)


def test_truncation_by_transaction_id_and_by_time() -> None:
    """The first record kept has the id or time, or a higher one; also through the writer."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        clock = cluster.clocks["a"]
        start_ms = clock.current_ms
        async with await log.open_writer() as writer:
            for txid in range(6):
                await writer.write(record(txid * 10))
                clock.current_ms += 1000
            assert await writer.truncate(txid=15)
            assert await txids(log) == [20, 30, 40, 50]
            assert await log.truncate(timestamp_ms=start_ms + 2500)
            assert await txids(log) == [30, 40, 50]
            assert not await log.truncate(txid=0)
            assert await writer.truncate(timestamp_ms=start_ms + 60_000)
            assert await txids(log) == []
        for wrong in ({}, {"txid": 1, "dlsn": DLSN(1, 0, 0)}):
            with pytest.raises(
                ConfigurationError, match="expected one of dlsn, txid and timestamp_m"
            ):
                await log.truncate(**wrong)  # type: ignore[arg-type]

    on_log(body)


def test_a_purge_drops_whole_segments_and_keeps_the_last() -> None:
    """Those whose records all lie below a transaction id."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(cluster, log, 10, 20)
        async with await log.open_writer() as writer:
            await writer.write(record(30))
            await writer.write(record(31))
        assert not await log.purge_logs_older_than(10)
        assert await log.purge_logs_older_than(31)
        assert await txids(log) == [30, 31]
        assert not await log.purge_logs_older_than(1000)
        assert await txids(log) == [30, 31]

    on_log(body)


async def interrupted(cluster: MemoryCluster) -> tuple[DirectNamespace, InterruptedStore]:
    """Open a namespace before whose requests something else can be made to happen."""
    stores: list[InterruptedStore] = []

    def wrap(store: Any) -> Any:
        stores.append(InterruptedStore(store))
        return stores[0]

    namespace = await cluster.open("b", wrap=wrap)
    cluster.clocks["b"].current_ms = cluster.clocks["a"].current_ms
    return namespace, stores[0]


def test_a_recovery_for_retention_leaves_the_next_writer_alone() -> None:
    """It has no lock: if another was quicker, what is open by then is not a dead writer's."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(retention_s=3600)
        dead = await log.open_writer()
        await dead.write(record(1))
        await dead.abort()
        pass_hours(cluster, 2)
        namespace, store = await interrupted(cluster)
        opened = []

        async def reopen() -> None:
            store.disarm()
            opened.append(await log.open_writer())
            await opened[0].write(record(2))

        store.before_each("multi", reopen)
        assert await expire_log(namespace.log_context, LogKey(name=log.name, log_id=log.log_id))
        async with opened[0] as writer:
            await writer.write(record(3))
        assert await txids(log) == [2, 3]

    on_log(body)


@pytest.mark.parametrize("change", ["append", "truncate", "deletion", "keep"])
@pytest.mark.parametrize("at", range(1, 9))
def test_changes_while_a_log_expires(change: str, at: int) -> None:
    """Whatever happens to the log before whichever request, what is young stays."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(cluster, log, 1, 2)
        batch = pa.record_batch({"value": [b"x"]})
        async with await cluster.namespaces[0].begin_append("me", 1) as append:
            await append.write_batch("clicks", batch)
            await append.commit()
        pass_hours(cluster, 2)
        await log.update_settings(retention_s=3600)
        namespace, store = await interrupted(cluster)

        async def interrupt() -> None:
            if change == "append":
                async with await cluster.namespaces[0].begin_append("me", 2) as append:
                    await append.write_batch("clicks", batch)
                    await append.commit()
            elif change == "truncate":
                await log.truncate(DLSN(2, 0, 0))
            elif change == "deletion":
                await log.delete()
            else:
                await log.update_settings(retention_s=None)

        store.arm(at, interrupt)
        key = LogKey(name=log.name, log_id=log.log_id)
        with contextlib.suppress(LogNotFoundError, LedgerNotFoundError):
            await expire_log(namespace.log_context, key)
        if change != "deletion":
            store.disarm()
            await expire_log(namespace.log_context, key)
            left = len(await txids(log))
            if change == "append" and store.made >= at:
                assert left >= 1
            if change == "keep":
                assert left in {0, 3}

    on_log(body)


def test_a_sweep_ends_when_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no fault of one log: the next ones would have to wait as long."""

    async def no_answer(_: LogContext, __: LogKey) -> bool:
        raise MetadataConnectionError("no answer")

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(retention_s=3600)
        await write(cluster, log, 1)
        pass_hours(cluster, 2)
        monkeypatch.setattr(expiry, "expire_log", no_answer)
        with pytest.raises(MetadataConnectionError):
            await expire_logs(cluster.namespaces[0].log_context)

    on_log(body)


def test_a_sweep_of_many_logs_asks_only_of_those_that_are_due() -> None:
    """A few requests for every 32 buckets, however many logs have nothing that is too old."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = await cluster.open("b", wrap=RecordingStore)
        store = namespace.log_context.store
        assert isinstance(store, RecordingStore)
        for number in range(300):
            await namespace.create_log(f"log-{number}", settings=LogSettings(retention_s=60))
        for name in ("log-1", "log-2"):
            async with await (await namespace.open_log(name)).open_writer() as writer:
                await writer.write(record(1))
        with store.record() as requests:
            assert await expire_logs(namespace.log_context) == 0
        assert requests.count <= 4 * 8
        cluster.clocks["b"].current_ms += 100_000
        async with await (await namespace.open_log("log-2")).open_writer() as writer:
            await writer.write(record(2))
        assert await expire_logs(namespace.log_context) == 2
        assert await read_all(await namespace.open_log("log-1")) == []
        assert [r.txid for r in await read_all(await namespace.open_log("log-2"))] == [2]

    on_log(body)
