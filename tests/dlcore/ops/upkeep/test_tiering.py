"""The machine that tiers a run, and the choice of runs: no I/O."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlcore.base.errors import CorruptMetadataError, DLError, LedgerReadError, ObjectStoreError
from dlcore.base.machines import CallFailed, Ended
from dlcore.ledger.metadata.values import StoredObject
from dlcore.log.cold.facts import ObjectFacts
from dlcore.log.metadata.segment import ColdExtent, Extent
from dlcore.log.metadata.values import pack, unpack
from dlcore.ops.upkeep.config import MergePolicy
from dlcore.ops.upkeep.merging import MergeRun, weight_of
from dlcore.ops.upkeep.tiering import (
    ATTEMPTS_MAX,
    Check,
    Close,
    Create,
    Created,
    Effect,
    Event,
    PutInPlace,
    ReadBack,
    RunPlace,
    Signal,
    Swapped,
    TierRun,
    TierState,
    Write,
    Written,
    plan_tier,
)
from tests.fixtures.nodes import refused

LOST = ObjectStoreError("503")


def extent(ledger_id: int, *, entries: int = 3, records: int = 6, cold: bool = False) -> Extent:
    """Return a final extent."""
    return (ColdExtent if cold else Extent)(
        ledger_id=ledger_id,
        first_entry_id=0,
        last_entry_id=entries - 1,
        record_count=records,
        size_bytes=100,
        first_txid=1,
        last_txid=2,
        timestamp_floor_ms=5,
        last_timestamp_ms=6,
    )


def facts(first_entry: int, entries: int, first_sequence_id: int, records: int) -> ObjectFacts:
    """Return those of an object."""
    return ObjectFacts(
        cluster_id="c",
        log_id="l",
        lssn=4,
        schema_id=0,
        first_entry=first_entry,
        entries=entries,
        first_sequence_id=first_sequence_id,
        records=records,
        first_txid=1,
        last_txid=2,
        crc32c=first_entry,
    )


FIRST, SECOND = facts(10, 4, 50, 9), facts(14, 2, 59, 3)


class Run:
    """A machine over two extents of six entries, which begin with entry 10 of the segment."""

    def __init__(self) -> None:
        parts = [extent(1), extent(2)]
        self.machine = TierRun(RunPlace(4, 10, 50), parts)

    def handle(self, event: Event) -> Effect:
        """Feed an event."""
        effect = self.machine.handle(event)
        self.machine.validate()
        return effect

    def writing(self) -> Effect:
        """Register the ledger; return the effect that writes the first object."""
        assert self.handle(Signal.BEGIN) == Create()
        return self.handle(Created(7, "token"))

    def failed(self, event: Event) -> DLError:
        """Feed an event that ends it with an error."""
        error = refused(self.handle(event))
        assert self.machine.state is TierState.FAILED
        return error


@pytest.mark.parametrize(
    ("is_there", "state"), [(True, TierState.TIERED), (False, TierState.OVERTAKEN)]
)
def test_objects_one_after_the_other_then_the_swap(is_there: bool, state: TierState) -> None:
    """Each is read back before the next; the ledger names them before it takes the place."""
    run = Run()
    assert run.writing() == Write("7-token-0-1.parquet", 10, again=False)
    assert run.handle(Written(FIRST, 1000)) == Check("7-token-0-1.parquet", 1000)
    assert run.handle(ReadBack(FIRST)) == Write("7-token-1-1.parquet", 14, again=False)
    assert run.handle(Written(SECOND, 500)) == Check("7-token-1-1.parquet", 500)
    close = run.handle(ReadBack(SECOND))
    cold = ColdExtent(
        ledger_id=7,
        first_entry_id=0,
        last_entry_id=5,
        record_count=12,
        size_bytes=200,
        first_txid=1,
        last_txid=2,
        timestamp_floor_ms=5,
        last_timestamp_ms=6,
    )
    objects = (
        StoredObject(0, 0, "7-token-0-1.parquet", 1000, 10),
        StoredObject(4, 9, "7-token-1-1.parquet", 500, 14),
    )
    assert close == Close(objects, cold)
    assert run.handle(Signal.CLOSED) == PutInPlace(cold)
    assert run.handle(Swapped(is_there)) == Ended(is_there)
    assert run.machine.state is state


@pytest.mark.parametrize("event", [CallFailed(LOST), ReadBack(replace(FIRST, crc32c=1))])
def test_another_name_after_a_failure_and_then_no_more(event: Event) -> None:
    """Whether it was stored is not known; after some attempts the log waits for the next round."""
    run = Run()
    run.writing()
    assert ATTEMPTS_MAX < 10
    for attempt in range(2, ATTEMPTS_MAX + 1):
        if isinstance(event, ReadBack):
            run.handle(Written(FIRST, 1000))
        name = f"7-token-0-{attempt}.parquet"
        assert run.handle(event) == Write(name, 10, again=True)
    if isinstance(event, ReadBack):
        run.handle(Written(FIRST, 1000))
    assert isinstance(run.failed(event), ObjectStoreError)


def test_a_failed_check_writes_again_and_counts_anew_for_the_next_object() -> None:
    """The attempts are those of one object."""
    run = Run()
    run.writing()
    run.handle(Written(FIRST, 1000))
    assert run.handle(CallFailed(LOST)) == Write("7-token-0-2.parquet", 10, again=True)
    run.handle(Written(FIRST, 1000))
    assert run.handle(ReadBack(FIRST)) == Write("7-token-1-1.parquet", 14, again=False)


@pytest.mark.parametrize(
    "changed",
    [
        {"lssn": 5},
        {"first_entry": 11},
        {"first_sequence_id": 51},
        {"entries": 0},
        {"entries": 7},
        {"entries": 6},  # all entries, and too few records
    ],
)
def test_other_entries_than_the_metadata_says(changed: dict[str, Any]) -> None:
    """Nothing of the log changes."""
    run = Run()
    run.writing()
    error = run.failed(Written(replace(FIRST, **changed), 1000))
    assert isinstance(error, CorruptMetadataError)


def test_any_other_error_ends_it() -> None:
    """Losses of bookies while an object is made, and of the metadata at each step."""
    run = Run()
    run.writing()
    error = LedgerReadError("away")
    assert run.failed(CallFailed(error)) is error
    for steps in range(4):
        run = Run()
        run.handle(Signal.BEGIN)
        if steps:
            run.handle(Created(7, "token"))
            run.handle(Written(facts(10, 6, 50, 12), 1000))
            run.handle(ReadBack(facts(10, 6, 50, 12)))
        if steps > 1:
            run.handle(Signal.CLOSED)
        assert run.failed(CallFailed(LOST)) is LOST


POLICY = MergePolicy(run_extents_max=16, run_ledgers_max=16)


@pytest.mark.parametrize(
    ("extents", "run"),
    [
        ([], None),
        ([extent(1, cold=True)], None),
        ([extent(1)], MergeRun(first=0, end=1)),
        ([extent(1, cold=True), extent(2), extent(3), extent(4, cold=True), extent(5)], (1, 3)),
        ([extent(1)] * 40, (0, 16)),
        ([extent(n) for n in range(40)], (0, 16)),
    ],
)
def test_the_next_run(extents: list[Extent], run: MergeRun | tuple[int, int] | None) -> None:
    """The first that is not cold, bounded in extents and ledgers."""
    expected = MergeRun(first=run[0], end=run[1]) if isinstance(run, tuple) else run
    assert plan_tier(extents, POLICY) == expected


def test_a_cold_extent_is_stored_as_one_and_not_merged() -> None:
    """Its kind is a flag; to a merge it is never small."""
    cold = extent(1, cold=True)
    assert unpack(pack([extent(2), cold])) == (extent(2), cold)
    assert cold != extent(1)
    assert weight_of(cold) > 2**40 > weight_of(extent(1))
