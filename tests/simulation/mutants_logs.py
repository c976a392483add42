"""Bugs of staged appends, merging, truncation and upkeep, put back on purpose."""

from __future__ import annotations

import contextlib
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.log.entries.body import move_entry
from dlcore.log.metadata import changes
from dlcore.log.metadata.commits import Decision, Verdict, decide
from dlcore.log.metadata.values import (
    StagedLedger,
)
from dlcore.log.staging import commit as commits
from dlcore.log.upkeep import removal, staged
from dlcore.log.upkeep.retention import Front
from dlcore.metadata.port import ANY_VERSION, Delete, Put
from dlcore.metadata.stored import encode
from dlcore.ops.upkeep import merger, merging, swap, worker as upkeep
from dlcore.ops.upkeep.merger import LogMerger
from dlcore.ops.upkeep.swap import Swap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.log.metadata.changes import Change
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import CommitRecord
    from dlcore.metadata.port import Op


def _unguarded(change: Change) -> Change:
    """Return the change with a head that is written over whatever is there."""
    ops = tuple(
        Put(op.path, op.value, ANY_VERSION)
        if isinstance(op, Put) and op.path.count("/") == 4
        else op
        for op in change.ops
    )
    return with_fields(change, ops=ops)


@contextlib.contextmanager
def swaps_are_not_guarded() -> Iterator[None]:
    """A swap writes the head as it was read: what was appended meanwhile is lost."""
    plan_swap = merging.plan_swap

    def blind(*about: Any) -> Change:
        return _unguarded(plan_swap(*about))

    with patch.object(swap, "plan_swap", blind):
        yield


@contextlib.contextmanager
def appends_are_not_guarded() -> Iterator[None]:
    """The later of two commits that meet in a log writes over the other."""
    plan_append = changes.plan_append

    def blind(*about: Any, **more: Any) -> Any:
        change, first, end = plan_append(*about, **more)
        return _unguarded(change), first, end

    with patch.object(commits, "plan_append", blind):
        yield


@contextlib.contextmanager
def merged_ledgers_go_at_once() -> Iterator[None]:
    """A reader with an older view of the log finds the ledgers gone while it reads."""
    drop_merged = staged.drop_merged

    async def early(context: Any, *, grace_ms: int) -> int:
        return await drop_merged(context, grace_ms=0)

    with patch.object(upkeep, "drop_merged", early):
        yield


@contextlib.contextmanager
def settling_forgets_merges() -> Iterator[None]:
    """A ledger that merging has emptied goes with its process, without a grace."""

    def release(paths: Any, node: Any, now: StagedLedger) -> list[Op]:
        if now.extents or not now.settled:
            return [node.put(now)]
        return [Delete(node.path, node.version), Delete(paths.ledger(now.ledger_id))]

    with patch.object(staged, "release", release):
        yield


@contextlib.contextmanager
def merges_count_nothing_off() -> Iterator[None]:
    """The old ledgers keep the extents that a merge has replaced: they stay for ever."""

    def release(_self: Swap, nodes: Sequence[Any], **_: Any) -> list[Op]:
        return [node.put(node.staged) for node in nodes]

    with patch.object(Swap, "_release", release):
        yield


@contextlib.contextmanager
def commits_count_nothing() -> Iterator[None]:
    """A commit leaves the count of extents as it was: ledgers are removed too early."""
    with_committed = StagedLedger.with_committed

    def uncounted(self: StagedLedger, extents: Any) -> StagedLedger | None:
        after = with_committed(self, extents)
        return None if after is None else replace(after, extents=self.extents)

    with patch.object(StagedLedger, "with_committed", uncounted):
        yield


@contextlib.contextmanager
def entries_are_copied_in_another_order() -> Iterator[None]:
    """The merged ledger holds the extents, but not one after the other as they were."""
    copy = LogMerger._copy

    async def shuffled(self: LogMerger, ledger: Any, parts: Sequence[Extent]) -> None:
        await copy(self, ledger, parts[::-1])

    with patch.object(LogMerger, "_copy", shuffled):
        yield


@contextlib.contextmanager
def assigned_transaction_ids_are_lost() -> Iterator[None]:
    """Copied entries say nothing of the transaction id that their commit gave them."""

    def forgetful(body: Any, **more: Any) -> Any:
        return move_entry(body, **{**more, "assigned_txid": None})

    with patch.object(merger, "move_entry", forgetful):
        yield


@contextlib.contextmanager
def a_second_merge_is_not_noticed() -> Iterator[None]:
    """A swap does not look whether another one has merged the segment meanwhile."""
    is_there = swap.is_there

    def careless(at: Any, stored: Any, *, merges: int) -> bool:
        return is_there(at, stored, merges=at.head.merges)

    with patch.object(swap, "is_there", careless):
        yield


@contextlib.contextmanager
def segments_are_removed_as_soon_as_they_are_truncated_into() -> Iterator[None]:
    """Truncation takes the whole segment that holds the first position to keep."""
    with patch.object(removal, "_is_passed", lambda first, lssn, _end: lssn <= first[0]):
        yield


@contextlib.contextmanager
def removal_gives_nothing_up() -> Iterator[None]:
    """The nodes of a truncated segment go, and its ledgers stay for ever."""

    async def none(*_: Any) -> list[Op]:
        return []

    with patch.object(removal, "plan_releases", none):
        yield


@contextlib.contextmanager
def truncated_extents_stay_as_long_as_their_segment() -> Iterator[None]:
    """Nothing is removed of a segment that stays."""

    async def none(*_: Any, **__: Any) -> list[Any]:
        return []

    with patch.object(removal, "_front_pieces", none):
        yield


@contextlib.contextmanager
def the_extent_with_the_first_position_goes() -> Iterator[None]:
    """A segment that stays loses one extent more."""
    begin = Front.__init__

    def greedy(self: Front, head: Any, end: Any, **more: Any) -> None:
        begin(self, head, end, **more)
        self.limit += self.limit > 0

    with patch.object(Front, "__init__", greedy):
        yield


@contextlib.contextmanager
def a_removed_front_is_no_change_of_its_segment() -> Iterator[None]:
    """A swap that was planned before puts the removed extents back."""
    plan_remove = changes.plan_remove

    def quiet(paths: Any, at: Any, *about: Any) -> Change:
        change = plan_remove(paths, at, *about)
        head = replace(change.after.head, merges=at.head.merges, merged_lssns=at.head.merged_lssns)
        ops = (*change.ops[:-1], Put(paths.head, encode(head), at.version))
        return with_fields(change, ops=ops, after=at.with_head(head))

    with patch.object(removal, "plan_remove", quiet):
        yield


@contextlib.contextmanager
def removals_are_not_guarded() -> Iterator[None]:
    """A removal writes the head as it was read: what was appended meanwhile is lost."""
    plan_remove = changes.plan_remove

    def blind(*about: Any) -> Change:
        return _unguarded(plan_remove(*about))

    with patch.object(removal, "plan_remove", blind):
        yield


@contextlib.contextmanager
def repeated_appends_are_not_recognised() -> Iterator[None]:
    """A client that repeats a version, because a reply was lost, appends it once more."""

    def again(record: CommitRecord | None, **more: Any) -> Decision:
        decision = decide(record, **more)
        if decision.verdict is Verdict.SKIP and record is not None:
            return Decision(Verdict.APPEND, replace(record, token=more["token"]))
        return decision

    with patch.object(commits, "decide", again):
        yield


@contextlib.contextmanager
def registrations_are_kept_for_ever() -> Iterator[None]:
    """A ledger that merging has emptied goes, and its name stays in the list of those to go."""

    async def keep(context: Any, *, grace_ms: int) -> int:
        return 0

    with patch.object(upkeep, "drop_merged", keep):
        yield


@contextlib.contextmanager
def staged_ledgers_go_with_their_process() -> Iterator[None]:
    """The staged records of a dead process are dropped, whether or not it was committed."""
    drop = staged.drop

    async def reckless(context: Any, node: Any) -> bool:
        ops = [
            Delete(context.paths.staging_entry(node.staged.identity, node.staged.ledger_id)),
            Delete(node.path, node.version),
            Delete(context.paths.ledger(node.staged.ledger_id)),
        ]
        await context.store.multi(ops)
        return True

    async def settle_drop(context: Any, node: Any) -> bool:
        with contextlib.suppress(Exception):
            return await reckless(context, node)
        return await drop(context, node)

    with patch.object(staged, "drop", settle_drop):
        yield


MUTANTS = (
    a_removed_front_is_no_change_of_its_segment,
    a_second_merge_is_not_noticed,
    appends_are_not_guarded,
    assigned_transaction_ids_are_lost,
    commits_count_nothing,
    entries_are_copied_in_another_order,
    merged_ledgers_go_at_once,
    merges_count_nothing_off,
    registrations_are_kept_for_ever,
    removal_gives_nothing_up,
    removals_are_not_guarded,
    repeated_appends_are_not_recognised,
    segments_are_removed_as_soon_as_they_are_truncated_into,
    settling_forgets_merges,
    staged_ledgers_go_with_their_process,
    swaps_are_not_guarded,
    the_extent_with_the_first_position_goes,
    truncated_extents_stay_as_long_as_their_segment,
)
