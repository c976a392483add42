"""The upkeep of logs: asked for by commits, done by any worker, once at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.metadata.changes import lssn_to_merge
from dlcore.log.metadata.commit_records import sweep_commits
from dlcore.log.metadata.values import LogHead, LogKey, OpenSegment
from dlcore.log.upkeep.requests import ask_for_upkeep
from dlcore.log.writing.changing import truncate_log
from dlcore.metadata.port import ANY_VERSION
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.dlcore.ops.upkeep.test_merger import (
    POLICY,
    Scene,
    check_ledgers,
    on_scene,
    stored_ledgers,
)
from tests.fixtures.memory_namespace import read_all

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace

UPKEEP = UpkeepConfig(
    upkeep_interval_s=0.01,
    sweep_interval_s=0.01,
    merged_grace_s=10,
    leftovers_age_s=100,
    commits_age_s=1_000,
    merge_bytes_per_s=1e9,
    merge=POLICY,
)


def worker(namespace: DirectNamespace) -> LogUpkeep:
    """Return a worker of a process."""
    return LogUpkeep.of(namespace, UPKEEP)


def requests(scene: Scene) -> list[str]:
    """Return the logs that ask for upkeep."""
    below = scene.merging.log_context.paths.upkeep_requests + "/"
    dump = scene.cluster.tree.dump()
    return [path for path in dump if path.startswith(below) and path.count("/") == 5]


def open_log(chunks: int, *, lssn: int = 3) -> LogHead:
    """Return a head whose last segment is in progress."""
    segment = OpenSegment(created_ms=1, start_sequence_id=0, chunk_count=chunks)
    return LogHead(max_lssn=lssn, segment=segment)


@pytest.mark.parametrize(
    ("before", "after", "lssn"),
    [
        (LogHead(max_lssn=2), open_log(9), None),  # the first extents of a segment
        (open_log(6), open_log(7), None),
        (open_log(7), open_log(8), 3),
        (open_log(8), open_log(9), None),
        (open_log(7), open_log(20), 3),
        (open_log(2), open_log(0, lssn=4), 3),  # completed, and the next one begun
    ],
)
def test_when_a_commit_asks(before: LogHead, after: LogHead, lssn: int | None) -> None:
    """Once in eight chunks, and for a segment that is completed."""
    assert lssn_to_merge(before, after) == lssn


def test_commits_ask_and_a_worker_serves() -> None:
    """After many extents the log asks; when all is merged it asks no more."""

    async def body(scene: Scene) -> None:
        assert len(requests(scene)) == 1
        before = await read_all(scene.log)
        assert await worker(scene.merging).serve() > 0
        assert requests(scene) == []
        assert sum(await scene.extent_counts()) < 20
        assert await read_all(scene.log) == before
        assert await worker(scene.merging).serve() == 0

    on_scene(body, appends=60)


def test_a_log_that_was_renamed_since_it_asked_is_served() -> None:
    """The request names it as it was called then: its id finds it, not the name."""

    async def body(scene: Scene) -> None:
        before = await read_all(scene.log)
        name = scene.log.name
        await scene.log.rename("visits")
        await scene.cluster.namespaces[0].create_log(name)
        assert await worker(scene.merging).serve() > 0
        assert requests(scene) == []
        assert sum(await scene.extent_counts()) < 20
        assert await read_all(scene.log) == before

    on_scene(body, appends=60)


def test_one_worker_takes_a_log() -> None:
    """While another holds its lock it is left alone, and taken once that one has died."""

    async def body(scene: Scene) -> None:
        other = await scene.cluster.open("other worker")
        context = other.log_context
        path = context.paths.upkeep_lock(scene.log.log_id)
        await context.store.create(path, b"other", ephemeral=True)
        assert await worker(scene.merging).serve() == 0
        assert len(requests(scene)) == 1
        await other.aclose()
        assert await worker(scene.merging).serve() > 0

    on_scene(body, appends=60)


@pytest.mark.parametrize("applied", [True, False])
def test_a_lock_whose_answer_was_lost_is_ones_own(*, applied: bool) -> None:
    """Its creation failed or not: the next look takes it."""

    async def body(scene: Scene) -> None:
        upkeep = worker(scene.merging)
        scene.cluster.stores[scene.merging_name].lose_next_reply(applied=applied)
        assert await upkeep.serve() == 0
        while requests(scene):
            await upkeep.serve()
            await asyncio.sleep(0.01)
        assert sum(await scene.extent_counts()) < 20
        assert requests(scene) == []

    on_scene(body, appends=60)


def test_a_log_that_fails_is_tried_less_and_less_often() -> None:
    """Up to every ten minutes, and as if nothing had been once it succeeds."""

    async def body(scene: Scene) -> None:
        upkeep = worker(scene.merging)

        def pause_s() -> float:
            upkeep._requests._back_off("broken")
            retry = upkeep._requests._retries["broken"]
            retry.due_s = 0.0  # its time has come
            return retry.pause_s

        pauses = [pause_s() for _ in range(20)]
        assert pauses[:3] == [0.01, 0.02, 0.04]
        assert pauses[-1] == 600
        await upkeep.serve()  # it is not asked for any more
        assert pause_s() == 0.01

    on_scene(body, appends=3)


def test_a_log_that_fails_hides_no_other() -> None:
    """Its request stays, with the reason in the log; that of a log that is gone goes."""

    async def body(scene: Scene) -> None:
        context = scene.namespace.log_context
        await ask_for_upkeep(context, {LogKey(name="gone", log_id="gone"): 1})
        path = context.paths.upkeep_request("broken")
        await context.store.create(path, b"?")
        assert len(requests(scene)) == 3
        assert await worker(scene.merging).serve() > 0
        assert requests(scene) == [path]

    on_scene(body, appends=60)


def test_the_rest_of_a_truncation_goes_too() -> None:
    """Its process died after the head said so: the log's next upkeep removes the data."""

    async def body(scene: Scene) -> None:
        await scene.close_staging()
        context, log = scene.namespace.log_context, scene.log._log
        async with await scene.log.open_writer() as writer:  # completes the segment in progress
            await writer.write(LogRecord(writer.last_txid, b"last"))
        at = await context.logs.read(log)
        await truncate_log(context, at, DLSN(at.head.max_lssn, 0, 0))
        assert len(stored_ledgers(scene.cluster)) == 5
        await worker(scene.merging).serve()
        assert len(stored_ledgers(scene.cluster)) == 1
        assert [record.payload for record in await read_all(scene.log)] == [b"last"]

    on_scene(body, appends=60)


def test_a_sweep_removes_what_no_log_needs() -> None:
    """Ledgers merged away after the grace, a deleted log, leftovers and records by their age."""

    async def body(scene: Scene) -> None:
        context, clock = scene.merging.log_context, scene.cluster.clocks[scene.merging_name]
        upkeep = worker(scene.merging)
        await upkeep.serve()
        merged_away = len(stored_ledgers(scene.cluster))
        await upkeep.sweep()
        assert len(stored_ledgers(scene.cluster)) == merged_away
        clock.current_ms = scene.cluster.clocks["driver"].current_ms + 11_000
        await upkeep.sweep()
        assert len(stored_ledgers(scene.cluster)) < merged_away
        check_ledgers(scene.cluster)
        await scene.namespace.create_log("doomed")
        doomed = await scene.namespace.open_log("doomed")
        await doomed.delete()
        record = context.paths.commit("job")
        assert await context.store.get(record) is not None
        clock.current_ms += 500_000
        await upkeep.sweep()
        assert await context.store.get(record) is not None
        assert await context.store.get_children(context.paths.deleted_logs) == []
        clock.current_ms += 600_000
        await upkeep.sweep()
        assert await context.store.get(record) is None
        assert await sweep_commits(context.store, context.paths, before_ms=clock.current_ms) == 0
        assert len(await read_all(scene.log)) > 0

    on_scene(body, appends=60)


def test_damage_stops_no_other_work_of_a_sweep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The damage is logged, and records of commits are still removed by their age."""

    async def body(scene: Scene) -> None:
        context, clock = scene.merging.log_context, scene.cluster.clocks[scene.merging_name]
        upkeep = worker(scene.merging)
        await upkeep.serve()
        merged = await context.store.get_children(context.paths.merged)
        assert merged
        damaged = context.paths.staged_ledger(int(merged[0]))
        await context.store.put(damaged, b"{", version=ANY_VERSION)
        clock.current_ms = scene.cluster.clocks["driver"].current_ms + 2_000_000
        await upkeep.sweep()
        assert await context.store.get(context.paths.commit("job")) is None
        assert f"StagedLedger at {damaged} does not parse" in caplog.text

    on_scene(body, appends=60)


def test_it_works_until_cancelled() -> None:
    """Beside commits; the records are those that were appended."""

    async def body(scene: Scene) -> None:
        running = asyncio.create_task(worker(scene.merging).run())
        for _ in range(80):
            await scene.append()
        while requests(scene):
            assert not running.done()
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        records = await read_all(scene.log)
        assert [record.sequence_id for record in records] == list(range(len(records)))
        assert records[0].dlsn == DLSN(1, 0, 0)
        assert sum(await scene.extent_counts()) < 60

    on_scene(body, appends=4)


@pytest.mark.parametrize(
    ("key", "value"), [("upkeep_interval_s", 0), ("logs_at_once", 0), ("merged_grace_s", -1)]
)
def test_a_configuration_that_cannot_be_meant(key: str, value: int) -> None:
    """It is refused by name."""
    with pytest.raises(ConfigurationError, match=f"{key}={value}"):
        UpkeepConfig(**{key: value})  # type: ignore[arg-type]
