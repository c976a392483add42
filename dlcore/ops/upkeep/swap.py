"""The swap of a merge: a run of extents becomes one, in one transaction with its ledgers' counts.

Theory of operation.  The entries of the run were copied to a ledger that is registered like a
staged one.  One look reads the log's head and the registrations of all ledgers, and one transaction
puts the merged extent in the place of the run, settles the new ledger, and counts the run's extents
off the old ones.  docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Promises:

* The state of the new ledger changes in the same transaction as the head.  If the answer is lost it
  says whether the swap was made.
* The swap is given up if its extents were truncated, deleted, or merged by another worker.
* An old ledger that was never registered gets a registration, so that it is removed later, as one
  that was.  But one that was staged and is not registered is damage, and nothing is changed.

The driver is `merger.py`.  Each event has one effect.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from msgspec.structs import replace

from dlcore.base.errors import (
    CorruptMetadataError,
    DLError,
    LogNotFoundError,
)
from dlcore.base.machines import CallFailed, Ended, Pause, State, StepMachine, Transitions
from dlcore.log.metadata.nodes import decode_node, head_of, register_merged, release
from dlcore.metadata.attempts import Attempts, Store, pause_after
from dlcore.metadata.port import Delete, Op, Versioned
from dlcore.ops.upkeep.merging import MergeRun, StoredSegment, plan_swap

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dlcore.log.metadata.nodes import StagedNode
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import LogKey, VersionedHead
    from dlcore.metadata.paths import NamespacePaths

MERGING_IDENTITY = ":merging"
"""The identity under which the ledgers are listed that merges fill."""


class SwapState(State):
    """The state of the machine; SWAPPED, OVERTAKEN and FAILED are final."""

    READY = "nothing has begun"
    LOOKING = "the head and the registrations are read"
    VERIFYING = "ledgers without a registration are looked up: writers must have filled them"
    STORING = "the transaction is being stored"
    PAUSING = "the transaction had a conflict, or no answer; all is read again"
    SWAPPED = "the merged extent is in the log"
    OVERTAKEN = "the run is not in the log any more"
    FAILED = "the metadata cannot be read, is damaged, or changes all the time"


_S = SwapState
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.LOOKING: "begin"},
        _S.LOOKING: {
            _S.VERIFYING: "some are not registered",
            _S.STORING: "planned",
            _S.SWAPPED: "by the last attempt, whose answer was lost",
            _S.OVERTAKEN: "truncated, deleted or merged",
            _S.FAILED: "refused",
        },
        _S.VERIFYING: {_S.STORING: "writers filled them", _S.FAILED: "staged, or refused"},
        _S.STORING: {
            _S.SWAPPED: "stored",
            _S.PAUSING: "conflict, or no answer",
            _S.FAILED: "refused, or too many attempts",
        },
        _S.PAUSING: {_S.LOOKING: "later"},
        _S.SWAPPED: {},
        _S.OVERTAKEN: {},
        _S.FAILED: {},
    },
)


class Signal(enum.Enum):
    """Events that carry nothing."""

    BEGIN = "the copies of the run are durable, and their ledger is closed"
    STORED = "the transaction was applied"
    PAUSE_OVER = "the pause is over"


@dataclass(frozen=True, slots=True)
class Looked:
    """Event: the nodes of `Look`; `now_ms` is the wall clock's time."""

    nodes: Sequence[Versioned | None]
    now_ms: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Event: those of the ledgers that were staged."""

    staged: Collection[int]


Event: TypeAlias = Signal | Looked | Verified | CallFailed


@dataclass(frozen=True, slots=True)
class Look:
    """Effect: read these nodes in one round trip; answer with `Looked`."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """Effect: find out which of these ledgers were staged; answer with `Verified`."""

    ledger_ids: tuple[int, ...]


Work: TypeAlias = Look | Verify | Store | Pause
Effect: TypeAlias = Work | Ended[bool]
"""`PAUSE_OVER` answers `Pause`.  The outcome is whether another extent is in the run's place."""


class Swap(StepMachine[SwapState, Event, Work, bool]):
    """One swap.

    Args:
        paths: the namespace's nodes.
        log: the log.
        stored: the segment, as it was read.
        run: the extents of it that are replaced.
        merged: the extent that replaces them.
        merges: the number of the log's merges when the segment was read.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        paths: NamespacePaths,
        log: LogKey,
        stored: StoredSegment,
        run: MergeRun,
        merged: Extent,
        *,
        merges: int,
    ) -> None:
        self.state = SwapState.READY
        self._paths = paths
        self._log = log
        self._stored = stored
        self._run = run
        self._merged = merged
        self._merges = merges
        self._attempts = Attempts(f"merging log {log.name!r}", "to swap")
        self._planned: tuple[Op, ...] = ()
        self.also: tuple[Op, ...] = ()
        """Further operations of the same transaction."""

    def handle(self, event: Event) -> Effect:
        """Take one event."""
        try:
            match event:
                case Signal.STORED:
                    return self._end(SwapState.SWAPPED)
                case Signal.BEGIN | Signal.PAUSE_OVER:
                    return self._look()
                case Looked():
                    return self._looked(event)
                case Verified(staged):
                    return self._verified(staged)
                case CallFailed(error):
                    return self._call_failed(error)
                case _:
                    assert_never(event)
        except DLError as error:
            self._become(SwapState.FAILED)
            return Ended(error)

    def _end(self, state: SwapState) -> Effect:
        self._become(state)
        return Ended(state is SwapState.SWAPPED)

    def _look(self) -> Effect:
        self._become(SwapState.LOOKING)
        head = self._paths.log_of(self._log.log_id).head
        return Look((head, *map(self._paths.staged_ledger, self._ledger_ids())))

    @property
    def _counts(self) -> Counter[int]:
        """How many extents of the run lie in each ledger."""
        run = self._run
        return Counter(part.ledger_id for part in self._stored.extents[run.first : run.end])

    def _ledger_ids(self) -> list[int]:
        return [self._merged.ledger_id, *self._counts]

    def _looked(self, seen: Looked) -> Effect:
        paths = self._paths
        try:
            at = head_of(paths, self._log, seen.nodes[0])
        except LogNotFoundError:
            return self._end(SwapState.OVERTAKEN)
        own, *others = (
            decode_node(paths, each, node)
            for each, node in zip(self._ledger_ids(), seen.nodes[1:], strict=True)
        )
        # First: after a swap whose answer was lost, the run is not in the log either.
        if own is not None and own.staged.settled:
            return self._end(SwapState.SWAPPED)
        # Without its registration the new ledger was taken for a leftover, and is being deleted.
        if own is None or not is_there(at, self._stored, merges=self._merges):
            return self._end(SwapState.OVERTAKEN)
        self._planned = self._plan(at, own, others, now_ms=seen.now_ms)
        nodes = zip(self._counts, others, strict=True)
        unregistered = tuple(ledger_id for ledger_id, node in nodes if node is None)
        if not unregistered:
            return self._store()
        self._become(SwapState.VERIFYING)
        return Verify(unregistered)

    def _plan(
        self,
        at: VersionedHead,
        own: StagedNode,
        others: Sequence[StagedNode | None],
        *,
        now_ms: int,
    ) -> tuple[Op, ...]:
        paths, merged = self._paths, self._merged
        log_paths = paths.log_of(self._log.log_id)
        change = plan_swap(log_paths, at, self._stored, self._run, merged)
        filled = replace(
            own.staged,
            owner="",
            extents=1,
            committed=((0, merged.entry_count - 1),),
            settled=True,
        )
        entry = paths.staging_entry(MERGING_IDENTITY, merged.ledger_id)
        releases = self._release(others, now_ms=now_ms)
        return (*change.ops, own.put(filled), Delete(entry), *releases, *self.also)

    def _release(self, nodes: Sequence[StagedNode | None], *, now_ms: int) -> Iterator[Op]:
        """Yield the operations that release the run's extents of each ledger."""
        for (ledger_id, count), node in zip(self._counts.items(), nodes, strict=True):
            if node is None:
                # A writer filled it, with this extent only: it is removed like a staged ledger.
                yield from register_merged(self._paths, ledger_id, now_ms=now_ms)
                continue
            staged = replace(node.staged.released(count), released_ms=now_ms)
            yield from release(self._paths, node, staged)

    def _verified(self, staged: Collection[int]) -> Effect:
        if staged:
            raise CorruptMetadataError(f"ledger {min(staged)} of an extent is not registered")
        return self._store()

    def _store(self) -> Effect:
        self._become(SwapState.STORING)
        return Store(self._planned)

    def _call_failed(self, error: DLError) -> Effect:
        # Reads were repeated before they failed; only a transaction may have been applied in spite
        # of an error.
        if self.state is not SwapState.STORING:
            raise error
        self._attempts = self._attempts.failed(error)
        self._become(SwapState.PAUSING)
        return pause_after(error)

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self.state is not SwapState.PAUSING or self._attempts.count
        assert self.state not in (SwapState.VERIFYING, SwapState.STORING) or self._planned


def is_there(at: VersionedHead, stored: StoredSegment, *, merges: int) -> bool:
    """Return whether the segment's extents are those that were read, and stay for now.

    `merges` is the number of merges that the log's head had then.
    """
    head = at.head
    rewritten = head.rewritten_since(merges)
    return (
        rewritten is not None
        and stored.lssn not in rewritten
        and (head.first_lssn, head.first_chunk) <= (stored.lssn, stored.first_chunk)
        and head.first_active[0] <= stored.lssn <= head.max_lssn
    )
