"""Goal: every transition of the machine that swaps a merged extent in.

Method: exact effects over a tree of nodes; then seeded chance with lost answers and other changes.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from dlcore.base.errors import (
    AlreadyClosedError,
    CorruptMetadataError,
    LedgerNotFoundError,
    MetadataConnectionError,
    MetadataVersionError,
)
from dlcore.base.steps import CallFailed, Ended, Pause
from dlcore.log.metadata.values import LogHead, LogKey, SegmentEnd, StagedLedger, Totals, pack
from dlcore.metadata.attempts import ATTEMPTS_MAX, Store
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import decode, encode
from dlcore.ops.upkeep.merging import MergeRun, StoredSegment, merged_extent
from dlcore.ops.upkeep.swap import (
    MERGING_IDENTITY,
    TRANSITIONS,
    Effect,
    Event,
    Look,
    Looked,
    Signal,
    Swap,
    SwapState,
    Verified,
    Verify,
)
from tests.fixtures.log_states import final
from tests.fixtures.nodes import Nodes, refused

PATHS = NamespacePaths("/dlog")
LOG = LogKey(name="clicks", log_id="log-1")
LOG_PATHS = PATHS.log_of(LOG.log_id)
STAGED, WRITTEN, MERGED = 4, 5, 9
AWAY = MetadataConnectionError("no answer")
CHANGED = MetadataVersionError("changed")


class Bench(Nodes):
    """A machine, validated after each event; a segment of three extents, one of a plain writer."""

    def __init__(self) -> None:
        super().__init__()
        first = replace(final(STAGED), timestamp_floor_ms=0)
        parts = (first, replace(first, first_entry_id=3, last_entry_id=5), final(WRITTEN))
        end = SegmentEnd(
            created_ms=1,
            completed_ms=2,
            start_sequence_id=0,
            chunk_count=0,
            chunked=Totals(),
            packed=pack(parts),
        )
        self.put(LOG_PATHS.head, encode(LogHead(max_lssn=1, end=(1, 9))))
        self.put(LOG_PATHS.segment(1), encode(end))
        self.put(PATHS.staged_ledger(STAGED), encode(self.registration(STAGED, extents=2)))
        self.put(PATHS.staged_ledger(MERGED), encode(self.registration(MERGED, owner="me")))
        self.put(PATHS.staging_entry(MERGING_IDENTITY, MERGED), b"")
        self.put(PATHS.ledger(WRITTEN), b"")
        self.put(PATHS.merged_ledger(1), b"")
        merged = merged_extent(parts, ledger_id=MERGED)
        segment = StoredSegment(lssn=1, chunks=(), end=end)
        run = MergeRun(first=0, end=3)
        self.machine = Swap(PATHS, LOG, segment, run, merged, merges=0)

    @staticmethod
    def registration(ledger_id: int, **changes: Any) -> StagedLedger:
        """Return a registration."""
        made = StagedLedger(
            ledger_id=ledger_id, identity="job", owner="", created_ms=0, settled=ledger_id == STAGED
        )
        return replace(made, **changes)

    def registered(self, ledger_id: int) -> StagedLedger:
        """Return a stored registration."""
        return decode(StagedLedger, self.value(PATHS.staged_ledger(ledger_id)), source="")

    def extents(self) -> list[int]:
        """Return the ledgers of the segment's extents."""
        end = decode(SegmentEnd, self.value(LOG_PATHS.segment(1)), source="")
        return [each.ledger_id for each in end.tail]

    def handle(self, event: Event) -> Effect:
        """Feed an event."""
        effect = self.machine.handle(event)
        self.machine.validate()
        return effect

    def look(self, effect: Effect) -> Effect:
        """Answer a look."""
        assert isinstance(effect, Look), effect
        return self.handle(Looked([self.read(path) for path in effect.paths], 1000))

    def planned(self) -> Store:
        """Plan the transaction, and return it."""
        verify = self.look(self.handle(Signal.BEGIN))
        assert verify == Verify((WRITTEN,))
        store = self.handle(Verified(()))
        assert isinstance(store, Store)
        return store


def test_a_swap_is_one_look_and_one_transaction() -> None:
    """The extent, the count of each ledger and the head change together."""
    bench = Bench()
    look = bench.handle(Signal.BEGIN)
    ids = (MERGED, STAGED, WRITTEN)
    assert look == Look((LOG_PATHS.head, *map(PATHS.staged_ledger, ids)))
    bench = Bench()
    assert bench.store(bench.planned())
    assert bench.handle(Signal.STORED) == Ended(True)
    assert bench.extents() == [MERGED]
    merged, old, written = map(bench.registered, (MERGED, STAGED, WRITTEN))
    assert (merged.extents, merged.settled, merged.owner) == (1, True, "")
    assert merged.committed == ((0, 8),)
    assert (old.extents, old.released_ms, written.released_ms) == (0, 1000, 1000)
    assert bench.read(PATHS.staging_entry(MERGING_IDENTITY, MERGED)) is None
    assert bench.read(PATHS.merged_ledger(STAGED)) is not None


def test_ledgers_that_are_all_registered_are_not_looked_up() -> None:
    """The transaction follows the look."""
    bench = Bench()
    written = bench.registration(WRITTEN, extents=1, settled=True)
    bench.put(PATHS.staged_ledger(WRITTEN), encode(written))
    assert isinstance(bench.look(bench.handle(Signal.BEGIN)), Store)


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_lost_answer(is_applied: bool) -> None:
    """The registration of the new ledger shows the outcome."""
    bench = Bench()
    store = bench.planned()
    if is_applied:
        assert bench.store(store)
    pause = bench.handle(CallFailed(AWAY))
    assert isinstance(pause, Pause)
    assert pause.error is AWAY
    effect = bench.look(bench.handle(Signal.PAUSE_OVER))
    assert effect == (Ended(True) if is_applied else Verify((WRITTEN,)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (LOG_PATHS.head, encode(LogHead(deleted=True))),
        (LOG_PATHS.head, encode(LogHead(max_lssn=1, merges=1, merged_lssns=(1,)))),
        (LOG_PATHS.head, encode(LogHead(max_lssn=1, merges=2, merged_lssns=(1,)))),
        (LOG_PATHS.head, encode(LogHead(max_lssn=2, first_lssn=2))),
        (LOG_PATHS.head, encode(LogHead(max_lssn=2, first_active=(2, 0, 0)))),
    ],
    ids=["deleted", "merged", "merged too often", "removed", "truncated"],
)
def test_a_run_that_is_not_there_any_more(path: str, value: bytes) -> None:
    """The copy is not needed."""
    bench = Bench()
    bench.put(path, value)
    assert bench.look(bench.handle(Signal.BEGIN)) == Ended(False)
    assert bench.machine.state is SwapState.OVERTAKEN


def test_changes_of_other_segments_are_no_hindrance() -> None:
    """A log may be truncated again and again while much of it is copied."""
    bench = Bench()
    head = LogHead(max_lssn=2, end=(2, 9), merges=3, merged_lssns=(2, 2, 2))
    bench.put(LOG_PATHS.head, encode(head))
    assert bench.store(bench.planned())
    assert bench.handle(Signal.STORED) == Ended(True)
    after = decode(LogHead, bench.value(LOG_PATHS.head), source="")
    assert (after.merges, after.merged_lssns) == (4, (2, 2, 2, 1))


def test_a_new_ledger_that_is_gone() -> None:
    """Its process was taken for dead, and another one removed it."""
    bench = Bench()
    look = bench.handle(Signal.BEGIN)
    assert isinstance(look, Look)
    nodes = [bench.read(path) for path in look.paths]
    nodes[1] = None
    assert bench.handle(Looked(nodes, 0)) == Ended(False)


def test_a_staged_ledger_without_a_registration_is_damage() -> None:
    """Nothing is changed."""
    bench = Bench()
    bench.look(bench.handle(Signal.BEGIN))
    error = refused(bench.handle(Verified([WRITTEN])))
    assert isinstance(error, CorruptMetadataError)
    assert str(error) == f"ledger {WRITTEN} of an extent is not registered"


def test_a_refusal_of_the_store_ends_it() -> None:
    """And so do too many attempts."""
    gone = LedgerNotFoundError("gone")
    bench = Bench()
    bench.handle(Signal.BEGIN)
    assert refused(bench.handle(CallFailed(AWAY))) is AWAY
    bench = Bench()
    bench.look(bench.handle(Signal.BEGIN))
    assert refused(bench.handle(CallFailed(gone))) is gone
    bench = Bench()
    bench.planned()
    closed = AlreadyClosedError("closed")
    assert refused(bench.handle(CallFailed(closed))) is closed
    bench = Bench()
    bench.planned()
    for _ in range(ATTEMPTS_MAX - 1):
        assert isinstance(bench.handle(CallFailed(CHANGED)), Pause)
        bench.look(bench.handle(Signal.PAUSE_OVER))
        assert isinstance(bench.handle(Verified(())), Store)
    error = refused(bench.handle(CallFailed(CHANGED)))
    assert isinstance(error, MetadataConnectionError)
    assert "100 attempts to swap" in str(error)


def test_chance_makes_every_transition_and_the_outcome_is_true() -> None:
    """Answers are lost, and the head changes meanwhile."""
    made: set[tuple[SwapState, SwapState]] = set()
    for seed in range(200):
        made |= play(random.Random(seed))
    expected = {
        (before, after) for before, afters in TRANSITIONS.causes.items() for after in afters
    }
    assert made == expected


def play(rng: random.Random) -> set[tuple[SwapState, SwapState]]:
    """Run one swap; return the transitions."""
    bench, made = Bench(), set[tuple[SwapState, SwapState]]()
    if rng.random() < 0.3:
        written = bench.registration(WRITTEN, extents=1, settled=True)
        bench.put(PATHS.staged_ledger(WRITTEN), encode(written))
    effect: Effect | None = None
    while not isinstance(effect, Ended):
        before = bench.machine.state
        if rng.random() < 0.1:
            node = bench.read(LOG_PATHS.head)
            assert node is not None
            bench.put(LOG_PATHS.head, node.value)
        effect = bench.handle(Signal.BEGIN) if effect is None else answer(bench, effect, rng)
        made.add((before, bench.machine.state))
    assert effect.outcome is not True or bench.extents() == [MERGED]
    # A log that was deleted after the swap has no use for it.
    head = bench.read(LOG_PATHS.head)
    is_deleted = head is not None and decode(LogHead, head.value, source="").deleted
    assert effect.outcome is not False or is_deleted or bench.extents() != [MERGED]
    return made


def answer(bench: Bench, effect: Effect, rng: random.Random) -> Effect:
    """Answer an effect, well or badly."""
    fails = rng.random() < 0.15
    match effect:
        case Look():
            if rng.random() < 0.05:
                bench.put(LOG_PATHS.head, encode(LogHead(deleted=True)))
            return bench.handle(CallFailed(AWAY)) if fails else bench.look(effect)
        case Verify():
            return bench.handle(Verified([WRITTEN] if fails else []))
        case Store():
            is_applied = rng.random() < 0.6 and bench.store(effect)
            if is_applied and not fails:
                return bench.handle(Signal.STORED)
            is_closed = rng.random() < 0.1
            return bench.handle(CallFailed(AlreadyClosedError("closed") if is_closed else AWAY))
        case _:
            return bench.handle(Signal.PAUSE_OVER)
