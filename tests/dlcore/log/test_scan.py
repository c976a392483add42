"""Snapshots and scan ranges: pure, picklable, and nothing lost or doubled by any split."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import convert, structs

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN, BookieId
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.log.entries.body import batch_of
from dlcore.log.metadata.segment import StagedExtent
from dlcore.log.reading.scan import ExtentView, LogSnapshot, ScanBatch, ScanRange, SegmentView
from tests.fixtures.lengths import for_each
from tests.fixtures.log_states import staged

BOOKIES = tuple(BookieId(f"bookie-{i}", f"{i:032x}") for i in range(4))


def ledger(ledger_id: int) -> LedgerMetadata:
    """Return a closed ledger on the first three bookies."""
    return LedgerMetadata(
        ledger_id=ledger_id,
        quorum=QuorumConfig(),
        state=LedgerState.CLOSED,
        ensembles=(Ensemble(0, BOOKIES[:3]),),
        token="t",
        created_ms=1,
        last_entry_id=1000,
        custom={},
    )


def snapshot_of(*segments: list[int], first: DLSN = DLSN.INITIAL) -> LogSnapshot:
    """Return a log whose segments have extents of the given numbers of entries, 10 records each."""
    views = []
    sequence_id = 0
    ledger_id = 0
    for lssn, counts in enumerate(segments, 1):
        extents = []
        ledgers = {}
        base = 0
        start = sequence_id
        for count in counts:
            ledger_id += 1
            ledgers[ledger_id] = ledger(ledger_id)
            extents.append(
                ExtentView(
                    ledger_id=ledger_id,
                    first_entry_id=5,
                    last_entry_id=4 + count,
                    base_entry_id=base,
                    start_sequence_id=sequence_id,
                    record_count=10 * count,
                    size_bytes=100 * count,
                    first_txid=0,
                    last_txid=0,
                )
            )
            base += count
            sequence_id += 10 * count
        views.append(
            SegmentView(lssn=lssn, start_sequence_id=start, extents=tuple(extents), ledgers=ledgers)
        )
    ends = [DLSN(v.lssn, v.entry_count, 0) for v in views if v.entry_count]
    return LogSnapshot(
        log="clicks",
        log_id="id",
        first=first,
        end=max([first, *ends]),
        segments=tuple(views),
        cluster_id="cluster",
        addresses={bookie: f"host:{i}" for i, bookie in enumerate(BOOKIES)},
    )


SNAPSHOT = snapshot_of([3, 2], [4], [], [1])


def entries_of(ranges: list[ScanRange]) -> list[tuple[int, int, int, int]]:
    """Return (segment, entry, ledger, entry of the ledger) of all that would be read."""
    return [
        (r.lssn, extent.base_entry_id + i, extent.ledger_id, extent.first_entry_id + i)
        for r in ranges
        for extent in r.extents
        for i in range(extent.entry_count)
    ]


def test_everything_is_one_range_per_segment() -> None:
    """Segments without entries have none."""
    ranges = SNAPSHOT.scans(SNAPSHOT.first, SNAPSHOT.end)
    assert [(r.lssn, r.entry_count, r.record_count_estimate) for r in ranges] == [
        (1, 5, 50),
        (2, 4, 40),
        (4, 1, 10),
    ]
    assert SNAPSHOT.end == DLSN(4, 1, 0)
    assert ranges[0].size_bytes_estimate == 500
    assert set(ranges[0].addresses) == set(BOOKIES[:3])
    assert ranges[0].cluster_id == "cluster"
    assert SNAPSHOT.count_records(SNAPSHOT.first, SNAPSHOT.end) == 100


def test_all_values_are_picklable() -> None:
    """They travel to other processes."""
    assert pickle.loads(pickle.dumps(SNAPSHOT)) == SNAPSHOT
    ranges = SNAPSHOT.scans(SNAPSHOT.first, SNAPSHOT.end)
    assert pickle.loads(pickle.dumps(ranges)) == ranges
    packed = ScanRange.pack(ranges * 100)
    assert ScanRange.unpack(packed) == tuple(ranges * 100)


def test_edges_within_entries() -> None:
    """An entry that is wanted in part is read; one that ends at slot 0 is not."""
    assert entries_of(SNAPSHOT.scans(DLSN(1, 2, 7), DLSN(1, 3, 0))) == [(1, 2, 1, 7)]
    assert entries_of(SNAPSHOT.scans(DLSN(1, 2, 7), DLSN(1, 3, 1))) == [(1, 2, 1, 7), (1, 3, 2, 5)]
    assert SNAPSHOT.scans(DLSN(2, 1, 3), DLSN(2, 1, 3)) == []
    assert SNAPSHOT.scans(DLSN(2, 4, 0), DLSN(3, 9, 9)) == []


@for_each(range(100))
def test_any_split_reads_the_same(seed: int) -> None:
    """Ranges join at the cuts, and their parts are the entries of the whole, in order."""
    rng = random.Random(seed)
    snapshot = snapshot_of(
        *[
            [rng.randrange(1, 6) for _ in range(rng.randrange(4))]
            for _ in range(rng.randrange(1, 5))
        ]
    )

    def position() -> DLSN:
        return DLSN(rng.randrange(1, 6), rng.randrange(12), rng.choice([0, 0, 3]))

    start, end = sorted([position(), position()])
    ranges = snapshot.scans(start, end)
    for each in ranges:
        parts = each.split(rng.randrange(1, 6))
        assert entries_of(parts) == entries_of([each])
        assert parts[0].start == each.start
        assert parts[-1].end == each.end
        assert all(a.end == b.start for a, b in pairwise(parts))
    whole = snapshot.scans(DLSN.INITIAL, snapshot.end)
    wanted = [
        entry
        for entry in entries_of(whole)
        if DLSN(entry[0], entry[1] + 1, 0) > start and DLSN(entry[0], entry[1], 0) < end
    ]
    assert entries_of(ranges) == wanted


def test_sequence_ids_of_clipped_extents_count_from_the_whole() -> None:
    """Entry headers count from the extent's first record, clipped or not."""
    (part,) = SNAPSHOT.scans(DLSN(1, 4, 0), DLSN(1, 5, 0))
    assert part.extents[0].start_sequence_id == 30
    assert part.record_count_estimate == 10


def test_going_on_after_an_entry() -> None:
    """The rest after a failure begins with the next entry."""
    (part,) = SNAPSHOT.scans(DLSN(1, 1, 4), DLSN(1, 4, 2))
    rest = part.after_entry(2)
    assert rest is not None
    assert entries_of([rest]) == [(1, 3, 2, 5), (1, 4, 2, 6)]
    assert part.after_entry(4) is None


def test_canonical_positions() -> None:
    """Positions with the same records before them become equal."""
    assert SNAPSHOT.canonical(DLSN(1, 5, 0)) == DLSN(2, 0, 0)
    assert SNAPSHOT.canonical(DLSN(2, 9, 9)) == DLSN(4, 0, 0)
    assert SNAPSHOT.canonical(DLSN(1, 2, 3)) == DLSN(1, 2, 3)
    assert SNAPSHOT.canonical(DLSN(0, 0, 0)) == SNAPSHOT.first
    assert SNAPSHOT.canonical(DLSN(9, 0, 0)) == SNAPSHOT.end


def test_records_inside_and_truncated_ones() -> None:
    """Half-open: the end is not inside."""
    snapshot = snapshot_of([3], [2], first=DLSN(1, 1, 2))
    assert not snapshot.contains(DLSN(1, 1, 1))
    assert snapshot.contains(DLSN(1, 1, 2))
    assert not snapshot.contains(snapshot.end)
    assert snapshot.is_truncated_before(DLSN.INITIAL)
    assert not snapshot.is_truncated_before(DLSN(1, 1, 2))
    assert snapshot.scans(DLSN.INITIAL, snapshot.end)[0].start == DLSN(1, 1, 2)


def test_an_empty_log() -> None:
    """Its first and its end position are one."""
    snapshot = snapshot_of()
    assert snapshot.is_empty
    assert snapshot.end == snapshot.first == DLSN.INITIAL
    assert snapshot.scans(snapshot.first, snapshot.end) == []


def test_a_split_needs_a_number() -> None:
    """Zero entries per part would never end."""
    (part, *_) = SNAPSHOT.scans(SNAPSHOT.first, SNAPSHOT.end)
    with pytest.raises(ConfigurationError, match="entries_per_part=0"):
        part.split(0)


def test_a_range_without_extents_has_nothing_to_divide() -> None:
    """It reads no entry, and is its own only part."""
    (whole, *_) = SNAPSHOT.scans(SNAPSHOT.first, SNAPSHOT.end)
    empty = replace(whole, end=whole.start, extents=())
    assert empty.entry_count == 0
    assert empty.split(1) == [empty]


def test_extents_outside_of_a_range_have_no_part_of_it() -> None:
    """And sums are those of the extents."""
    segment = snapshot_of([3, 4]).segments[0]
    first, second = segment.extents
    assert (segment.entry_count, segment.record_count, segment.size_bytes) == (7, 70, 700)
    assert first.clipped(first=3, end=7) is None
    assert second.clipped(first=0, end=3) is None
    assert second.clipped(first=5, end=5) is None
    assert second.clipped(first=0, end=7) is second
    part = second.clipped(first=4, end=6)
    assert part is not None
    assert (part.first_entry_id, part.last_entry_id, part.base_entry_id) == (6, 7, 4)
    assert (part.record_count, part.size_bytes) == (20, 200)
    assert (first.ledger_id, second.ledger_id) == (1, 2)


@pytest.mark.parametrize(
    "wrong", [{"record_count": 0}, {"first_entry_id": -1}, {"first_entry_id": 8}]
)
def test_a_staged_extent_that_holds_nothing_is_refused(wrong: dict[str, int]) -> None:
    """It comes from another process, and would be appended to a log."""
    with pytest.raises(ConfigurationError, match="not a staged extent"):
        convert(list((structs.asdict(staged(7)) | wrong).values()), StagedExtent)
    assert not staged(7).has_txids
    assert staged(7, txids=(0, 0)).has_txids


def test_a_batch_knows_where_it_begins() -> None:
    """Within its entry too."""
    batch = ScanBatch(
        batch=batch_of([5, 6], [b"a", b"b"]),
        lssn=3,
        entry_id=8,
        first_slot=2,
        sequence_id=40,
        timestamp_ms=1,
    )
    assert batch.first == DLSN(3, 8, 2)
