"""Values of logs: extents are packed small and come back, counts and states are checked."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlcore.base.errors import CorruptMetadataError, UnexpectedError
from dlcore.log.metadata.segment import Extent, LogSegment, SegmentState
from dlcore.log.metadata.values import (
    COMMITTED_RUNS_MAX,
    Chunk,
    CommitRecord,
    LogHead,
    LogState,
    OpenSegment,
    SegmentEnd,
    StagedLedger,
    Totals,
    pack,
    unpack,
)
from dlcore.metadata.stored import decode, encode
from tests.fixtures.log_states import LOG

EXTENT = Extent(
    ledger_id=7,
    first_entry_id=3,
    last_entry_id=9,
    record_count=100,
    size_bytes=5_000,
    first_txid=1_700_000_000_000,
    last_txid=1_700_000_000_000,
    txid_assigned=True,
    timestamp_floor_ms=1_700_000_000_000,
    last_timestamp_ms=1_700_000_000_005,
)
STAGED = StagedLedger(ledger_id=7, identity="job", owner="o", created_ms=1)
COMMIT = CommitRecord(version=3, token="t", committed=1, run="", seen=1, last_ns=0)
HEAD = LogHead(
    max_lssn=2,
    segment=OpenSegment(created_ms=5, start_sequence_id=8, packed=pack([EXTENT])),
)
END = SegmentEnd(
    created_ms=1,
    completed_ms=2,
    start_sequence_id=0,
    chunk_count=0,
    chunked=Totals(),
    packed=pack([EXTENT]),
)
CHUNK = Chunk(first_entry_id=0, first_sequence_id=0, packed=pack([EXTENT]))


def state_of(lssns: tuple[int, ...], open_at: tuple[int, ...]) -> LogState:
    """Return a view of a log whose last segment is 3, with these segments."""
    segments = tuple(
        LogSegment(
            lssn=lssn,
            state=SegmentState.IN_PROGRESS if lssn in open_at else SegmentState.COMPLETED,
            created_ms=1,
            start_sequence_id=0,
            extents=(),
        )
        for lssn in lssns
    )
    return LogState(log=LOG, head=LogHead(max_lssn=3), version=1, segments=segments)


def numbers(top: int = 2**63 - 1) -> st.SearchStrategy[int]:
    """Return small and large numbers."""
    return st.one_of(st.integers(0, 300), st.integers(0, top))


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    """Return any extent."""
    first = draw(numbers(2**61))
    last = first + draw(numbers(2**61))
    floor_ms = draw(numbers(2**61))
    return Extent(
        ledger_id=draw(numbers(2**61)),
        first_entry_id=first,
        last_entry_id=last,
        record_count=draw(numbers()),
        size_bytes=draw(numbers()),
        first_txid=draw(numbers(2**62)),
        last_txid=draw(numbers(2**62)),
        txid_assigned=draw(st.booleans()),
        timestamp_floor_ms=floor_ms,
        last_timestamp_ms=floor_ms + draw(numbers(2**61)),
    )


@given(st.lists(extents(), max_size=20), st.booleans())
def test_any_extents_come_back(some: list[Extent], is_open: bool) -> None:
    """Also where ledgers alternate, and where the last one is open."""
    if is_open:
        some.append(Extent(ledger_id=5, first_entry_id=0, last_entry_id=None))
    value = encode(Chunk(first_entry_id=0, first_sequence_id=0, packed=pack(some)))
    assert decode(Chunk, value, source="p").extents == tuple(some)


def test_extents_of_a_micro_batch_are_small() -> None:
    """A segment that follows the one before in ledger, time and transaction id takes 20 bytes."""
    some = []
    for number in range(8):
        time_ms = 1_700_000_000_000 + 1_000 * number
        some.append(
            msgspec.structs.replace(
                EXTENT,
                first_entry_id=1_000 + 8 * number,
                last_entry_id=1_000 + 8 * number,
                first_txid=time_ms,
                last_txid=time_ms,
                timestamp_floor_ms=time_ms,
                last_timestamp_ms=time_ms + 5,
            )
        )
    value = encode(Chunk(first_entry_id=0, first_sequence_id=0, packed=pack(some)))
    assert len(value) <= 8 * 20 + 40


@pytest.mark.parametrize("flat", [(1, 2), (0, -1, 0, 0, 0, 0, 0, 0, 0, 0)])
def test_values_that_are_no_extents(flat: tuple[int, ...]) -> None:
    """Half of one, or one of a ledger that cannot be."""
    with pytest.raises(CorruptMetadataError):
        unpack(flat)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4)), max_size=40))
def test_no_entry_is_committed_twice(offers: list[tuple[int, int]]) -> None:
    """Whatever is offered, in any order: compared with a set of all entries."""
    staged, taken, count = STAGED, set[int](), 0
    for first, more in offers:
        entries = set(range(first, first + more + 1))
        after = staged.with_committed([(first, first + more)])
        covered = {e for low, high in staged.committed for e in range(low, high + 1)}
        assert taken <= covered
        assert (after is None) is bool(entries & covered)
        if after is not None:
            staged, count = after, count + 1
            taken |= entries
        assert len(staged.committed) <= COMMITTED_RUNS_MAX
        assert staged.extents == count
    assert staged.released(count).extents == 0
    with pytest.raises(UnexpectedError, match="are counted"):
        staged.released(count + 1)


@pytest.mark.parametrize(
    ("lssns", "open_at", "message"),
    [
        ((1, 3), (), r"log 'clicks': its segments are \[1, 3\], expected consecutive.*up to 3"),
        ((1, 2), (), r"its segments are \[1, 2\].*up to 3"),
        ((2, 3), (2, 3), r"log 'clicks': segments \[2\] are in progress, not the last"),
    ],
)
def test_a_view_of_a_log_that_contradicts_itself_is_refused(
    lssns: tuple[int, ...], open_at: tuple[int, ...], message: str
) -> None:
    """Nothing is read by it: its maker missed a segment."""
    with pytest.raises(UnexpectedError, match=message):
        state_of(lssns, open_at)


def test_a_view_may_leave_out_segments_at_its_front() -> None:
    """They are not asked for then."""
    state = state_of((2, 3), (3,))
    assert state.name == "clicks"
    assert [state.segment(lssn) for lssn in (1, 2, 3, 4)] == [None, *state.segments, None]
    assert state_of((), ()).segment(1) is None


def test_the_lowest_gaps_of_many_committed_ranges_close() -> None:
    """A version in a closed gap counts as committed: refused rather than doubled."""
    staged = STAGED
    for number in range(COMMITTED_RUNS_MAX + 1):
        after = staged.with_committed([(10 * number, 10 * number)])
        assert after is not None
        staged = after
    assert len(staged.committed) == COMMITTED_RUNS_MAX
    assert staged.committed[:2] == ((0, 10), (20, 20))
    assert staged.with_committed([(5, 6)]) is None
    assert staged.with_committed([(15, 16)]) is not None
    assert staged.extents == COMMITTED_RUNS_MAX + 1
