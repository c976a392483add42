"""Staged appends: all or nothing, once, whichever process crashes in between."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    AppendAbortedError,
    AppendSupersededError,
    ConfigurationError,
    DuplicateAppendError,
    EndOfStreamError,
    LogNotFoundError,
    OwnershipAcquireFailedError,
    TransactionIdOutOfOrderError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.log.metadata.commits import AppendRun
from dlcore.metadata.port import Delete
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all, record
from tests.fixtures.staged_records import batch, ledgers, payloads_of, stage, staged_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.metadata.port import Op


RUN = AppendRun(token="run-1", begun_ns=0)


def test_extents_of_many_writers_enter_in_the_given_order() -> None:
    """They travel as pickles; transaction ids are assigned; nothing was visible before."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        tasks = [await cluster.open(f"task-{i}") for i in range(3)]
        extents = [await stage(task, f"{i}a", f"{i}b") for i, task in enumerate(tasks)]
        assert await payloads_of(log) == []
        driver = await cluster.open("driver")
        append = await driver.begin_append("job", 1)
        sent = pickle.loads(pickle.dumps([extents[2], extents[0], extents[1]]))
        result = await append.commit(sent)
        assert result.committed
        assert dict(result.logs) == {"clicks": (DLSN(1, 0, 0), DLSN(1, 3, 0))}
        records = await read_all(log)
        assert [r.payload.decode() for r in records] == ["2a", "2b", "0a", "0b", "1a", "1b"]
        assert [r.sequence_id for r in records] == list(range(6))
        assert {r.txid for r in records} == {1_700_000_000_000}
        assert await log.get_last_txid() == 1_700_000_000_000

    on_log(body)


def test_one_commit_for_many_logs() -> None:
    """All of them, or none: the second log is sealed."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("orders")
        orders = await namespace.open_log("orders")
        append = await namespace.begin_append("job", 1)
        for name in ("orders", "clicks"):
            await append.write_batch(name, batch(name))
        result = await append.commit()
        assert sorted(result.logs) == ["clicks", "orders"]
        assert (await payloads_of(log), await payloads_of(orders)) == (["clicks"], ["orders"])
        async with await orders.open_writer() as writer:
            await writer.mark_end_of_stream()
        append = await namespace.begin_append("job", 2)
        for name in ("orders", "clicks"):
            await append.write_batch(name, batch("more"))
        with pytest.raises(EndOfStreamError, match="orders"):
            await append.commit()
        await append.abort()
        assert await payloads_of(log) == ["clicks"]
        assert staged_nodes(cluster) == []

    on_log(body)


def test_a_version_is_committed_once() -> None:
    """Without a run that counts appends, also if others repeat it; older versions are skipped."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        first = await namespace.begin_append("job", 5)
        await first.write_batch("clicks", batch("once"))
        assert (await first.commit()).committed
        for version, run in ((5, RUN), (5, None), (4, RUN)):
            again = await namespace.begin_append("job", version, run=run)
            await again.write_batch("clicks", batch("twice"))
            result = await again.commit()
            assert (result.committed, result.already_committed) == (False, True)
            await again.aclose()
        empty = await namespace.begin_append("job", 6)
        assert (await empty.commit([])).committed
        assert await payloads_of(log) == ["once"]

    on_log(body)


@pytest.mark.parametrize("survived", [0, 1, 2])
def test_appends_of_one_version(survived: int) -> None:
    """A later run skips those that are committed, and appends the rest."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for token, names in (("run-1", "ab"[:survived]), ("run-2", "ab")):
            for name in names:
                run = AppendRun(token=token, begun_ns=int(asyncio.get_running_loop().time() * 1e9))
                append = await cluster.namespaces[0].begin_append("job", 5, run=run)
                async with append:
                    await append.write_batch("clicks", batch(name))
                    assert (await append.commit()).committed is (
                        token == "run-1" or "ab".index(name) >= survived
                    )
        assert await payloads_of(log) == ["a", "b"]

    on_log(body)


def test_appends_of_one_version_that_overlap() -> None:
    """The second is refused, and so is every repetition; the first is there."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        extents = [await stage(namespace, name) for name in "ab"]
        append = await namespace.begin_append("job", 5, run=RUN)
        assert (await append.commit(extents[:1])).committed
        for run in (RUN, replace(RUN, token="run-2")):
            other = await namespace.begin_append("job", 5, run=run)
            with pytest.raises(DuplicateAppendError, match=r"'job' version 5.*no order"):
                await other.commit(extents[1:])
        assert await payloads_of(log) == ["a"]

    on_log(body)


def test_a_run_that_another_one_followed() -> None:
    """Its late append is refused."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        for token in ("run-1", "run-2"):
            append = await namespace.begin_append("job", 5, run=replace(RUN, token=token))
            await append.commit([])
        late = await namespace.begin_append("job", 5, run=RUN)
        with pytest.raises(AppendSupersededError, match="later run"):
            await late.commit([await stage(namespace, "late")])
        assert await payloads_of(log) == []

    on_log(body)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("kind", ["append", "skip", "conflict"])
def test_a_lost_reply_of_a_counted_append(kind: str, *, applied: bool) -> None:
    """Whatever was tried is what the caller learns."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        first = await namespace.begin_append("job", 1, run=RUN)
        assert (await first.commit([await stage(namespace, "first")])).committed
        run = {
            "append": replace(RUN, begun_ns=int(asyncio.get_running_loop().time() * 1e9)),
            "skip": replace(RUN, token="run-2"),
            "conflict": RUN,
        }[kind]
        extent = await stage(namespace, "second")
        append = await namespace.begin_append("job", 1, run=run)
        cluster.stores["a"].lose_next_reply(applied=applied)
        if kind == "conflict":
            with pytest.raises(DuplicateAppendError, match="no order"):
                await append.commit([extent])
        else:
            assert (await append.commit([extent])).committed is (kind == "append")
        expected = ["first", "second"] if kind == "append" else ["first"]
        assert await payloads_of(log) == expected

    on_log(body)


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_reply_of_the_commit(*, applied: bool) -> None:
    """The commit record tells; either way the records are there once, and the caller knows."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        extent = await stage(cluster.namespaces[0], "once")
        driver = await cluster.open("driver")
        append = await driver.begin_append("job", 1, run=RUN)
        cluster.stores["driver"].lose_next_reply(applied=applied)
        result = await append.commit([extent])
        assert result.committed
        assert result.logs["clicks"][0] == DLSN(1, 0, 0)
        assert (await append.commit([extent])).committed
        assert await payloads_of(log) == ["once"]

    on_log(body)


def test_competing_committers() -> None:
    """Each plans again when it was overtaken; all get in, in some order."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async def one(index: int) -> None:
            namespace = await cluster.open(f"client-{index}")
            append = await namespace.begin_append(f"job-{index}", 1)
            await append.write_batch("clicks", batch(f"{index}a", f"{index}b"))
            assert (await append.commit()).committed

        async with asyncio.TaskGroup() as group:
            for index in range(8):
                group.create_task(one(index))
        found = await payloads_of(log)
        assert sorted(found) == sorted(f"{i}{x}" for i in range(8) for x in "ab")
        assert all(found[i][0] == found[i + 1][0] for i in range(0, 16, 2))

    on_log(body)


def test_a_live_writer_keeps_appends_out() -> None:
    """A dead one does not: what it left is recovered first."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        await writer.write(record(1, b"first"))
        extent = await stage(cluster.namespaces[0], "second")
        driver = await cluster.open("driver")
        append = await driver.begin_append("job", 1)
        with pytest.raises(OwnershipAcquireFailedError, match="owned by the writer a"):
            await append.commit([extent])
        await writer.abort()
        assert (await append.commit([extent])).committed
        assert await payloads_of(log) == ["first", "second"]

    on_log(body)


@pytest.mark.parametrize("dies", [True, False])
def test_an_append_waits_for_a_writer(*, dies: bool) -> None:
    """Until it closes, or its session has ended; then what it wrote comes first."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        rival = await cluster.open("rival")
        writer = await (await rival.open_log("clicks")).open_writer()
        await writer.write(record(1, b"first"))
        extent = await stage(cluster.namespaces[0], "second")
        append = await cluster.namespaces[0].begin_append("job", 1, lock_timeout_s=30)
        commit = asyncio.create_task(append.commit([extent]))
        assert not (await asyncio.wait({commit}, timeout=0.1))[0]
        if dies:
            cluster.stores["rival"].disconnect()
            cluster.stores["rival"].expire()
        else:
            await writer.aclose()
        assert (await commit).committed
        assert await payloads_of(log) == ["first", "second"]
        if dies:
            cluster.stores["rival"].reconnect()
            await writer.abort()

    on_log(body)


def test_an_append_does_not_wait_for_ever() -> None:
    """It names the owner and the time; nothing is written, and a later try goes through."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await log.open_writer()
        extent = await stage(cluster.namespaces[0], "late")
        append = await cluster.namespaces[0].begin_append("job", 1, lock_timeout_s=0.2)
        before = asyncio.get_running_loop().time()
        with pytest.raises(OwnershipAcquireFailedError, match=r"writer a.*waited 0\.2 s") as caught:
            await append.commit([extent])
        assert caught.value.owner.startswith("a")
        assert asyncio.get_running_loop().time() - before >= 0.2
        await writer.abort()
        assert (await append.commit([extent])).committed

    on_log(body)


def test_an_append_fences_a_writer_without_a_lock() -> None:
    """Fencing keeps the two apart."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        unlocked = await cluster.open("b", config=replace(CONFIG, lock_enabled=False))
        writer = await (await unlocked.open_log("clicks")).open_writer()
        await writer.write(record(1, b"first"))
        extent = await stage(cluster.namespaces[0], "second")
        assert (await (await unlocked.begin_append("job", 1)).commit([extent])).committed
        late = writer.write(record(2_000_000_000_000, b"late"))
        with pytest.raises(Exception, match=r"fenced|recovered"):
            await late
        with pytest.raises(WriteError):
            await writer.aclose()
        assert await payloads_of(log) == ["first", "second"]

    on_log(body)


def test_a_writer_opened_after_an_append_goes_on_behind_it() -> None:
    """And one opened before, that has not written yet, too."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        unlocked = await cluster.open("b", config=replace(CONFIG, lock_enabled=False))
        early = await (await unlocked.open_log("clicks")).open_writer()
        extent = await stage(cluster.namespaces[0], "appended")
        assert (await (await unlocked.begin_append("job", 1)).commit([extent])).committed
        refused = early.write(record(5, b"too low"))
        with pytest.raises(TransactionIdOutOfOrderError, match="5 is lower than 1700000000000"):
            await refused
        await early.abort()
        async with await log.open_writer() as writer:
            position = await writer.write(record(writer.last_txid, b"written"))
        assert position == DLSN(2, 0, 0)
        assert await payloads_of(log) == ["appended", "written"]

    on_log(body)


def test_one_ledger_serves_many_appends() -> None:
    """Its extents lie in segments that come and go; what is discarded is in none."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        writer = await namespace.open_staging_writer(identity="job")
        for version in range(1, 6):
            await writer.write_batch("clicks", batch("dropped"))
            await writer.discard()
            await writer.write_batch("clicks", batch(f"{version}a"))
            await writer.write_batch("clicks", batch(f"{version}b"))
            (extent,) = await writer.stage()
            assert await writer.stage() == []
            append = await namespace.begin_append("job", version)
            assert (await append.commit([extent])).committed
        assert len(ledgers(cluster)) == 1
        assert await payloads_of(log) == [f"{v}{x}" for v in range(1, 6) for x in "ab"]
        assert len(await log.get_log_segments()) == 1
        await log.truncate(DLSN(1, 3, 0))
        assert (await log.get_first_dlsn()) == DLSN(1, 3, 0)
        await writer.aclose()

    on_log(body)


def test_truncation_spares_a_ledger_that_is_still_filled() -> None:
    """It goes when its process has gone and no segment refers to it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        small = await cluster.open("small", config=replace(CONFIG, segment_bytes_max=1))
        task = await cluster.open("task")
        writer = await task.open_staging_writer(identity="job")

        async def append(version: int, text: str) -> None:
            await writer.write_batch("clicks", batch(text))
            (extent,) = await writer.stage()
            await (await small.begin_append("job", version)).commit([extent])

        await append(1, "one")
        async with await (await small.open_log("clicks")).open_writer() as ordinary:
            await ordinary.write(record(ordinary.last_txid, b"two"))
        await log.truncate(DLSN(2, 0, 0))
        assert [s.lssn for s in await log.get_log_segments()] == [2]
        assert len(ledgers(cluster)) == 2
        await append(2, "three")
        assert await payloads_of(log) == ["two", "three"]
        async with await (await small.open_log("clicks")).open_writer() as ordinary:
            await ordinary.write(record(ordinary.last_txid, b"four"))
        await log.truncate(DLSN(4, 0, 0))
        assert len(ledgers(cluster)) == 2
        cluster.stores["task"].expire()
        await task.staging_owner.aclose()
        await cluster.stores["task"].aclose()
        await (await small.begin_append("job", 3)).commit([])
        await small.log_context.tidier.settled()
        assert len(ledgers(cluster)) == 1
        assert staged_nodes(cluster) == []

    on_log(body)


def test_truncation_spares_a_ledger_of_which_more_is_committed_meanwhile() -> None:
    """Both change its registration: the removal that was overtaken is planned again."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        small = await cluster.open("small", config=replace(CONFIG, segment_bytes_max=1))
        writer = await (await cluster.open("task")).open_staging_writer(identity="job")
        extents = []
        for text in ("one", "three"):
            await writer.write_batch("clicks", batch(text))
            extents += await writer.stage()
        other = await cluster.open("truncating")
        await (await small.begin_append("job", 1)).commit(extents[:1])
        async with await (await small.open_log("clicks")).open_writer() as ordinary:
            await ordinary.write(record(ordinary.last_txid, b"two"))
        store = other.log_context.store
        multi, late = store.multi, iter(extents[1:])

        async def commit_before(ops: Sequence[Op]) -> None:
            if any(isinstance(op, Delete) for op in ops):
                for extent in late:
                    await (await small.begin_append("job", 2)).commit([extent])
            await multi(ops)

        store.multi = commit_before  # type: ignore[method-assign]
        await (await other.open_log("clicks")).truncate(DLSN(2, 0, 0))
        assert next(late, None) is None
        assert [s.lssn for s in await log.get_log_segments()] == [2, 3]
        assert await payloads_of(log) == ["two", "three"]
        await writer.aclose()
        await (await small.begin_append("job", 3)).commit([])
        await small.log_context.tidier.settled()
        assert staged_nodes(cluster) == []
        assert len(ledgers(cluster)) == 2  # settled, and needed
        await log.truncate(DLSN(3, 1, 0))
        async with await log.open_writer() as ordinary:
            await ordinary.write(record(ordinary.last_txid, b"four"))
        await log.truncate(DLSN(4, 0, 0))
        assert len(ledgers(cluster)) == 1

    on_log(body)


def test_leftovers_of_a_process_that_is_gone() -> None:
    """The next commit of the same identity removes what was never committed."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        gone, alive = await cluster.open("gone"), await cluster.open("alive")
        await stage(gone, "lost")
        kept = await stage(alive, "kept")
        await gone.aclose()
        assert len(staged_nodes(cluster)) == 2
        driver = await cluster.open("driver")
        await (await driver.begin_append("job", 1)).commit([])
        await driver.log_context.tidier.settled()
        assert staged_nodes(cluster) == [cluster.paths.staging_entry("job", kept.ledger_id)]
        assert len(ledgers(cluster)) == 1
        assert (await (await driver.begin_append("job", 2)).commit([kept])).committed
        assert await payloads_of(log) == ["kept"]

    on_log(body)


def test_records_about_to_be_committed_outlive_their_process() -> None:
    """A task may be long gone when the driver commits, if another task opens a writer meanwhile."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        gone = await cluster.open("gone")
        extent = await stage(gone, "early")
        await gone.aclose()
        late = await stage(await cluster.open("late"), "late")
        driver = await cluster.open("driver")
        result = await (await driver.begin_append("job", 1)).commit([extent, late])
        assert result.committed
        assert await payloads_of(log) == ["early", "late"]
        await driver.log_context.tidier.settled()
        assert len(staged_nodes(cluster)) == 1
        metadata = await driver.get_ledger(extent.ledger_id)
        assert metadata.last_entry_id == 0

    on_log(body)


def test_reaped_data_cannot_be_committed() -> None:
    """The commit finds the registration gone, and says so."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        gone = await cluster.open("gone")
        extent = await stage(gone, "lost")
        await gone.aclose()
        driver = await cluster.open("driver")
        await (await driver.begin_append("job", 1)).commit([])
        await driver.log_context.tidier.settled()
        with pytest.raises(AppendAbortedError, match="is gone"):
            await (await driver.begin_append("job", 2)).commit([extent])
        assert await payloads_of(log) == []

    on_log(body)


def test_a_session_that_is_lost_and_renewed_keeps_its_ledgers() -> None:
    """The owner's node is made again; others then see a living process."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        task = await cluster.open("task")
        writer = await task.open_staging_writer(identity="job")
        await writer.write_batch("clicks", batch("before"))
        (first,) = await writer.stage()
        cluster.stores["task"].expire()
        for _ in range(100):
            await asyncio.sleep(0)
        driver = await cluster.open("driver")
        await (await driver.begin_append("job", 1)).commit([])
        await writer.write_batch("clicks", batch("after"))
        (second,) = await writer.stage()
        await (await driver.begin_append("job", 2)).commit([first, second])
        assert await payloads_of(log) == ["before", "after"]
        assert first.ledger_id == second.ledger_id

    on_log(body)


def test_abort() -> None:
    """Nothing stays, and nothing can be committed afterwards."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        task = await cluster.open("task")
        writer = await task.open_staging_writer(identity="job")
        await writer.write_batch("clicks", batch("closed"))
        (extent,) = await writer.stage()
        await writer.aclose()
        append = await namespace.begin_append("job", 1)
        await append.write_batch("clicks", batch("own"))
        await append.abort([extent])
        with pytest.raises(AppendAbortedError, match="aborted"):
            await append.commit()
        with pytest.raises(AppendAbortedError):
            await append.write_batch("clicks", batch("late"))
        assert staged_nodes(cluster) == []
        assert ledgers(cluster) == []
        assert await payloads_of(log) == []

    on_log(body)


def test_a_log_that_was_made_anew_does_not_get_old_records() -> None:
    """It is another log of the same name."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        extent = await stage(namespace, "old")
        await namespace.delete_log("clicks")
        append = await namespace.begin_append("job", 1)
        for _ in range(2):
            with pytest.raises(AppendAbortedError, match="was deleted"):
                await append.commit([extent])
            if not await namespace.log_exists("clicks"):
                await namespace.create_log("clicks")

    on_log(body)


def test_wrong_extents_are_refused() -> None:
    """Twice the same, of another identity, or in a log already."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        extent = await stage(namespace, "a")
        with pytest.raises(ConfigurationError, match="given twice"):
            await (await namespace.begin_append("job", 1)).commit([extent, extent])
        with pytest.raises(ConfigurationError, match="staged as 'job'"):
            await (await namespace.begin_append("other", 1)).commit([extent])
        await (await namespace.begin_append("job", 1)).commit([extent])
        with pytest.raises(AppendAbortedError, match="already"):
            await (await namespace.begin_append("job", 2)).commit([extent])
        for identity in ("", "x" * 201):
            with pytest.raises(ConfigurationError, match="identity"):
                await namespace.begin_append(identity, 1)
        with pytest.raises(ConfigurationError, match="version=-1"):
            await namespace.begin_append("job", -1)
        with pytest.raises(LogNotFoundError):
            await (await namespace.begin_append("job", 1)).write_batch("nowhere", batch("a"))
        assert await payloads_of(log) == ["a"]

    on_log(body)
