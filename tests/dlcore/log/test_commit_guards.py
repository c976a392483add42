"""The guards that keep a late commit from doing harm, each alone: nothing else changes beside it.

An append is planned from what it reads, and another writer is quicker: as when its process stood
still meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import AppendAbortedError
from dlcore.log.metadata.commits import SharedStaging
from dlcore.log.upkeep.staged import read_staged
from tests.fixtures.memory_namespace import MemoryCluster, on_log
from tests.fixtures.staged_records import batch, payloads_of, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.metadata.port import Op

SHARED = SharedStaging(identity="stream", round="1")


def overtake(
    late: DirectNamespace,
    monkeypatch: pytest.MonkeyPatch,
    by: Callable[[], Coroutine[None, None, None]],
) -> None:
    """Let something happen right before the next transaction of a namespace."""
    store = late.log_context.store
    multi = store.multi

    async def after_it(ops: Sequence[Op]) -> None:
        monkeypatch.setattr(store, "multi", multi)
        await by()
        await multi(ops)

    monkeypatch.setattr(store, "multi", after_it)


async def stage_two(task: DirectNamespace, identity: str, *logs: str) -> list[StagedExtent]:
    """Stage two records, one for each log, in the same ledger."""
    writer = await task.open_staging_writer(identity=identity)
    extents = []
    for log in logs:
        await writer.write_batch(log, batch(log))
        extents += await writer.stage()
    assert len({extent.ledger_id for extent in extents}) == 1
    return extents


@pytest.mark.parametrize("before", [0, 1])
def test_the_record_alone_keeps_a_version_from_being_committed_twice(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one wrote to another log, from another ledger; the record is made or changed."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        late, quick = cluster.namespaces[0], await cluster.open("quick")
        await quick.create_log("views")
        for version in range(before):
            await (await quick.begin_append("job", version)).commit([])
        extents = [await stage(late, "late"), await stage(quick, "quick", log="views")]

        async def commit() -> None:
            assert (await (await quick.begin_append("job", 1)).commit(extents[1:])).committed

        overtake(late, monkeypatch, commit)
        assert (await (await late.begin_append("job", 1)).commit(extents[:1])).already_committed
        assert await payloads_of(log) == []
        assert await payloads_of(await quick.open_log("views")) == ["quick"]

    on_log(body)


def test_the_registration_alone_counts_what_two_commit_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Extents of one ledger go to two logs, by appends of two identities: both are counted."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        late, quick = cluster.namespaces[0], await cluster.open("quick")
        await quick.create_log("views")
        extents = await stage_two(await cluster.open("task"), "stream", "clicks", "views")

        async def commit() -> None:
            await (await quick.begin_append(">views", 1, shared=SHARED)).commit(extents[1:])

        overtake(late, monkeypatch, commit)
        await (await late.begin_append(">clicks", 1, shared=SHARED)).commit(extents[:1])
        assert await payloads_of(log) == ["clicks"]
        (node,) = (await read_staged(late.log_context, [extents[0].ledger_id])).values()
        assert node.staged.extents == 2

    on_log(body)


def test_a_settled_ledger_alone_keeps_what_was_given_up_out() -> None:
    """It stays, for a log has another extent of it, and the append has left no other trace."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        driver, task = cluster.namespaces[0], await cluster.open("task")
        first, second = await stage_two(task, "job", "clicks", "clicks")
        await (await driver.begin_append("job", 1)).commit([first])
        await task.aclose()
        await (await driver.begin_append("job", 2)).abort([second])
        late = await driver.begin_append("job", 2)
        with pytest.raises(AppendAbortedError, match="is gone; it was aborted"):
            await late.commit([second])
        assert await payloads_of(log) == ["clicks"]

    on_log(body)
