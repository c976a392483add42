"""Staging writers: runs of many logs in one ledger, their order, and the end of the ledgers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.background import end_tasks
from dlcore.base.errors import (
    AlreadyClosedError,
    AppendMismatchError,
    ConfigurationError,
    LogNotFoundError,
    TransactionIdOutOfOrderError,
    WriteError,
)
from dlcore.log.metadata.commits import SharedStaging
from dlcore.log.upkeep.staged import create_staged_ledger, drop
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all
from tests.fixtures.staged_records import batch, ledgers, payloads_of, staged_nodes

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ledger.writing.writer import LedgerWriter
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.nodes import StagedNode
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.log.staging.writer import DirectStagingWriter


def test_own_transaction_ids() -> None:
    """They are kept, and must follow those of the log."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        append = await namespace.begin_append("job", 1)
        writer = append
        await writer.write_batch("clicks", batch("a", "b", txids=[3, 7]))
        with pytest.raises(TransactionIdOutOfOrderError, match="6 is lower than 7"):
            await writer.write_batch("clicks", batch("c", txids=[6]))
        with pytest.raises(ConfigurationError, match="mixes"):
            await writer.write_batch("clicks", batch("c"))
        await writer.write_batch("clicks", batch("c", txids=[7]))
        await append.commit()
        assert [r.txid for r in await read_all(log)] == [3, 7, 7]
        append = await namespace.begin_append("job", 2)
        await append.write_batch("clicks", batch("d", txids=[6]))
        with pytest.raises(TransactionIdOutOfOrderError, match="6, lower than 7"):
            await append.commit()
        await append.aclose()

    on_log(body)


def test_a_strict_append_is_never_taken_for_another() -> None:
    """A version of an old state, or one that went elsewhere, fails; nothing of it is appended."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        others = [f"other-{number}" for number in range(7)]
        for name in others:
            await namespace.create_log(name)

        async def append(version: int, *names: str) -> bool:
            async with await namespace.begin_append("job", version, strict=True) as staged:
                for name in names:
                    await staged.write_batch(name, batch(f"{version}"))
                return (await staged.commit()).committed

        assert await append(4, "clicks")
        assert await append(5, "clicks", others[0])
        assert not await append(5, others[0], others[1])
        assert not await append(5)
        with pytest.raises(AppendMismatchError, match="version 4: version 5 was committed before"):
            await append(4, "clicks")
        with pytest.raises(AppendMismatchError, match=r"nothing of it to 'other-1', 'other-2'$"):
            await append(5, *others[1:3])
        with pytest.raises(AppendMismatchError, match="'other-5' and 1 more logs"):
            await append(5, *others[1:])
        assert await append(6)
        with pytest.raises(AppendMismatchError, match="nothing of it to 'clicks'"):
            await append(6, "clicks")
        assert await payloads_of(log) == ["4", "5"]

    on_log(body)


@pytest.mark.parametrize("stages", [False, True])
def test_calls_at_once_follow_each_other(*, stages: bool) -> None:
    """Each batch needs several entries: a call waits for ledgers between the first and the last."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("views")
        views = await namespace.open_log("views")
        big = "x" * CONFIG.entry_bytes
        writer: DirectStagingWriter = await namespace.open_staging_writer(identity="job")
        staged: list[StagedExtent] = []

        async def stage() -> None:
            staged.extend(await writer.stage())

        async with asyncio.TaskGroup() as calls:
            for number in range(3):
                for name in ("clicks", "views"):
                    rows = batch(*(f"{number}{row}{big}" for row in range(3)))
                    calls.create_task(writer.write_batch(name, rows))
                if stages:
                    calls.create_task(stage())
        await stage()
        append = await namespace.begin_append("job", 1)
        await append.commit(staged)
        expected = [f"{number}{row}" for number in range(3) for row in range(3)]
        for each in (log, views):
            assert [payload[:2] for payload in await payloads_of(each)] == expected
        await writer.aclose()

    on_log(body)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_writer_that_is_closed_while_it_begins_a_ledger_leaves_none(
    monkeypatch: pytest.MonkeyPatch, *, is_cancelled: bool
) -> None:
    """The call is refused, and its ledger goes with the others; a close may be tried again."""
    is_made, may_go = asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any, **named: Any) -> LedgerWriter:
        ledger = await create_staged_ledger(*arguments, **named)
        is_made.set()
        await may_go.wait()
        return ledger

    monkeypatch.setattr("dlcore.log.staging.writer.create_staged_ledger", slow)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await cluster.namespaces[0].open_staging_writer(identity="job")
        big = batch("x" * 2 * CONFIG.entry_bytes, "y")
        writing = asyncio.ensure_future(writer.write_batch(log.name, big))
        await is_made.wait()
        closing = asyncio.ensure_future(writer.aclose())
        await until(lambda: writer._closed)
        if is_cancelled:
            await end_tasks(closing)
            closing = asyncio.ensure_future(writer.aclose())
        may_go.set()
        with pytest.raises(AlreadyClosedError):
            await writing
        await closing
        assert not staged_nodes(cluster)

    on_log(body)


def test_a_fenced_staging_writer_says_so() -> None:
    """Its ledger was reaped as a zombie's: what it writes next is refused as a whole."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        writer: DirectStagingWriter = await namespace.open_staging_writer(identity="job")
        await writer.write_batch("clicks", batch("a"))
        (extent,) = await writer.stage()
        await namespace.ports.ledgers.recover_ledger(extent.ledger_id)
        await writer.write_batch("clicks", batch("b"))
        with pytest.raises(WriteError, match="fenced"):
            await writer.stage()
        with pytest.raises(WriteError):
            await writer.write_batch("clicks", batch("c"))
        assert (await (await namespace.begin_append("job", 1)).commit([extent])).committed
        await writer.aclose()
        assert await payloads_of(log) == ["a"]

    on_log(body)


def test_many_logs_of_one_task() -> None:
    """They share a ledger; each has one run of entries."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        names = [f"log{number:02}" for number in range(30)]
        for name in names:
            await namespace.create_log(name)
        async with await namespace.open_staging_writer(identity="job") as writer:
            for version in range(1, 4):
                for round_number in range(5):
                    text = f"{version}-{round_number}"
                    await writer.write_batches([(name, batch(text)) for name in reversed(names)])
                extents = await writer.stage()
                assert [extent.log for extent in extents] == names
                append = await namespace.begin_append("job", version)
                assert (await append.commit(extents)).committed
        assert len(ledgers(cluster)) == 1
        expected = [f"{version}-{number}" for version in range(1, 4) for number in range(5)]
        for name in names:
            assert await payloads_of(await namespace.open_log(name)) == expected
        with pytest.raises(LogNotFoundError, match="'nowhere'"):
            await writer_of(namespace, [("log01", batch("a")), ("nowhere", batch("a"))])

    on_log(body)


@pytest.mark.parametrize("first_is_committed", [True, False])
def test_ledgers_that_are_filled_between_two_stages(*, first_is_committed: bool) -> None:
    """Parts that were not handed out yet are not settled, whatever became of the others."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        small = await cluster.open(
            "small", config=replace(CONFIG, entry_bytes=300, segment_bytes_max=1500)
        )
        async with await small.open_staging_writer(identity="job") as writer:
            await writer.write_batch("clicks", batch(*(f"{n:0100}" for n in range(50, 100))))
            await writer.discard()
            await writer.write_batch("clicks", batch("first"))
            first = await writer.stage()
            if first_is_committed:
                await (await small.begin_append("job", 1)).commit(first)
            await writer.write_batch("clicks", batch(*(f"{n:0100}" for n in range(50))))
            extents = await writer.stage()
            assert len({extent.ledger_id for extent in extents}) > 2
            if not first_is_committed:
                await (await small.begin_append("job", 1)).commit(first)
            assert (await (await small.begin_append("job", 2)).commit(extents)).committed
        assert await payloads_of(log) == ["first", *(f"{n:0100}" for n in range(50))]

    on_log(body)


def shared(round_number: int, identity: str = "stream") -> SharedStaging:
    """Return where the appends of a round find what was staged."""
    return SharedStaging(identity=identity, round=str(round_number))


def test_appends_of_many_identities_share_a_ledger() -> None:
    """Each commits once; of what was staged elsewhere they commit nothing."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        driver, task = cluster.namespaces[0], await cluster.open("task")
        names = [f"log{number:02}" for number in range(30)]
        for name in names:
            await driver.create_log(name)
        writer = await task.open_staging_writer(identity="stream")
        for version in range(1, 4):
            for name in names:
                await writer.write_batch(name, batch(f"{version}"))
                extents = await writer.stage()
                append = await driver.begin_append(f">{name}", version, shared=shared(version))
                assert (await append.commit(extents)).committed
                repeated = await driver.begin_append(f">{name}", version, shared=shared(version))
                assert (await repeated.commit(extents)).already_committed
        assert len(ledgers(cluster)) == 1
        for name in names:
            assert await payloads_of(await driver.open_log(name)) == ["1", "2", "3"]
        for elsewhere in (None, shared(1, "other")):
            append = await driver.begin_append(">clicks", 1, shared=elsewhere)
            with pytest.raises(ConfigurationError, match="staged as 'stream' cannot"):
                await append.commit(extents)
        with pytest.raises(ConfigurationError, match="round=''"):
            SharedStaging(identity="stream", round="")
        await writer.aclose()

    on_log(body)


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "dies"])
def test_staged_records_of_a_process_are_kept_for_its_round(*, closes: bool) -> None:
    """Appends beside one do not take it away; a later round does, if it was not committed."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        driver, task = cluster.namespaces[0], await cluster.open("task")
        writer = await task.open_staging_writer(identity="stream")
        await writer.write_batch("clicks", batch("late"))
        (late,) = await writer.stage()
        await writer.write_batch("clicks", batch("never"))
        await writer.stage()
        if closes:
            await writer.aclose()
        else:
            cluster.stores["task"].expire()
            await task.staging_owner.aclose()
            await cluster.stores["task"].aclose()
        beside = await driver.begin_append(">other", 1, shared=shared(1))
        await beside.commit([])
        await (await driver.begin_append(">failed", 1, shared=shared(1))).abort([late])
        await driver.log_context.tidier.settled()
        append = await driver.begin_append(">clicks", 1, shared=shared(1))
        assert (await append.commit([late])).committed
        await driver.log_context.tidier.settled()
        assert len(staged_nodes(cluster)) == 1
        await (await driver.begin_append(">other", 2, shared=shared(2))).commit([])
        await driver.log_context.tidier.settled()
        assert staged_nodes(cluster) == []
        assert await payloads_of(log) == ["late"]

    on_log(body)


async def writer_of(namespace: DirectNamespace, parts: list[tuple[str, pa.RecordBatch]]) -> None:
    """Write parts with a writer of their own."""
    async with await namespace.open_staging_writer(identity="job") as writer:
        await writer.write_batches(parts)


def test_more_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log with the most gets its turn early: several runs, and the order is kept."""
    monkeypatch.setattr("dlcore.log.staging.writer.QUEUED_BYTES_MAX", 1000)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = await cluster.open("b", config=replace(CONFIG, entry_bytes=300))
        for name in ("a", "b", "c"):
            await namespace.create_log(name)
        async with await namespace.open_staging_writer(identity="job") as writer:
            for number in range(40):
                for name in ("a", "b", "c"):
                    await writer.write_batch(name, batch(f"{number:0100}"))
            extents = await writer.stage()
            assert len(extents) > 6
            append = await namespace.begin_append("job", 1)
            assert (await append.commit(extents)).committed
        for name in ("a", "b", "c"):
            texts = await payloads_of(await namespace.open_log(name))
            assert texts == [f"{number:0100}" for number in range(40)]

    on_log(body)


def test_ledgers_of_a_writer_are_settled_when_it_has_begun_others() -> None:
    """Once all that was staged in them is committed; what is not committed stays."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        small = await cluster.open("small", config=replace(CONFIG, segment_bytes_max=1))
        async with await small.open_staging_writer(identity="job") as writer:
            kept = []
            for version in range(1, 5):
                await writer.write_batch("clicks", batch(f"{version}"))
                extents = await writer.stage()
                if version == 2:
                    kept = extents
                else:
                    append = await small.begin_append("job", version)
                    assert (await append.commit(extents)).committed
                await small.log_context.tidier.settled()
            open_ledgers = {int(path.rpartition("/")[2]) for path in staged_nodes(cluster)}
            assert open_ledgers == {kept[0].ledger_id, extents[0].ledger_id}
        append = await small.begin_append("job", 5)
        assert (await append.commit(kept)).committed
        assert await payloads_of(log) == ["1", "3", "4", "2"]

    on_log(body)


def test_records_that_lower_rounds_staged_in_vain_are_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing of this one, nor if a task of a lower one comes late; a failure is made good."""
    refusals = [True]

    async def refuse_once(context: LogContext, node: StagedNode) -> bool:
        return False if refusals and refusals.pop() else await drop(context, node)

    monkeypatch.setattr("dlcore.log.staging.writer.drop", refuse_once)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        small = await cluster.open("small", config=replace(CONFIG, segment_bytes_max=1))

        async def attempt(number: int, late: int | None = None) -> list[StagedExtent]:
            await writer.begin_round(number if late is None else late)
            await writer.write_batch("clicks", batch(f"{number}"))
            return await writer.stage()

        async with await small.open_staging_writer(identity="stream") as writer:
            for number in range(1, 7):
                counts, _, _ = [await attempt(number, late) for late in (None, 1, None)]
                append = await small.begin_append(">clicks", number, shared=shared(number))
                assert (await append.commit(counts)).committed
                await small.log_context.tidier.settled()
            # Those of this round, and the one that was being filled when it began.
            assert len(staged_nodes(cluster)) == 3 + 1
            assert len(ledgers(cluster)) == 6 + 2 + 1
        assert refusals == []
        assert await payloads_of(log) == [f"{number}" for number in range(1, 7)]

    on_log(body)


def test_tasks_whose_clocks_differ() -> None:
    """Times never fall: what comes behind a clock that is ahead has its last time, until then."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        driver = cluster.namespaces[0]
        now_ms = cluster.clocks["a"].current_ms
        hour_ms = 3_600_000
        tasks = {}
        for name, ahead_ms in (("early", hour_ms), ("late", -hour_ms), ("right", 0)):
            tasks[name] = await (await cluster.open(name)).open_staging_writer(identity="job")
            cluster.clocks[name].current_ms = now_ms + ahead_ms
        for version, order in enumerate((("late", "early", "right"), ("right", "late"))):
            extents = []
            for name in order:
                await tasks[name].write_batch("clicks", batch(name))
                extents += await tasks[name].stage()
            await (await driver.begin_append("job", version)).commit(extents)
        records = await read_all(log)
        names = ["late", "early", "right", "right", "late"]
        assert [each.payload.decode() for each in records] == names
        first, *others = [each.timestamp_ms for each in records]
        assert first == now_ms - hour_ms
        assert others == [now_ms + hour_ms] * 4
        assert [each.txid for each in records] == [now_ms] * 5, "that is the driver's clock"

    on_log(body)
