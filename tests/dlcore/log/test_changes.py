"""Planned changes of a log's metadata: exact operations, and the state that follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.errors import EndOfStreamError, TransactionIdOutOfOrderError, UnexpectedError
from dlcore.ids import DLSN, TXID_MAX
from dlcore.log import codec
from dlcore.log.changes import (
    SegmentLimits,
    plan_append,
    plan_complete,
    plan_remove,
    plan_start,
    plan_truncate,
    removable_segments,
)
from dlcore.log.metadata import LogState, MaxLssn
from dlcore.log.segment import (
    EXTENTS_PER_SEGMENT_MAX,
    LogSegment,
    SegmentState,
    Truncation,
)
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Put
from tests.fixtures.log_states import EMPTY, PATHS, final, staged, written

if TYPE_CHECKING:
    from dlcore.log.changes import Change

LIMITS = SegmentLimits(size_bytes_max=10_000, age_max_ms=1000)


def guard_of(change: Change) -> Put:
    """Return the operation on the guard: there is exactly one, with the version that was read."""
    (guard,) = [op for op in change.ops if op.path == PATHS.max_lssn]
    assert isinstance(guard, Put)
    return guard


def test_the_first_segment() -> None:
    """Its number is 1, its sequence ids begin with 0."""
    change = plan_start(PATHS, EMPTY, ledger_id=7, now_ms=2)
    assert [type(op) for op in change.ops] == [Create, Put]
    segment = change.state.segments[0]
    assert change.ops[0] == Create(PATHS.segment(1), codec.encode_segment(segment))
    assert guard_of(change).version == 0
    assert change.state.version == 1
    assert change.state.max_lssn == MaxLssn(max_lssn=1)
    assert segment.start_sequence_id == 0
    assert segment.has_open_extent


def test_rolling_is_one_change() -> None:
    """The old segment ends, the next begins, and the transaction id moves, together."""
    started = plan_start(PATHS, EMPTY, ledger_id=7, now_ms=2).state
    change = plan_start(PATHS, started, ledger_id=8, now_ms=9, closing=final(7))
    first, second = change.state.segments
    assert (first.state, first.completed_ms) == (SegmentState.COMPLETED, 9)
    assert (second.lssn, second.start_sequence_id) == (2, 10)
    assert [(type(op), op.path) for op in change.ops] == [
        (Put, PATHS.segment(1)),
        (Create, PATHS.segment(2)),
        (Put, PATHS.max_lssn),
        (Put, PATHS.max_txid),
    ]
    assert change.state.max_txid == 5


def test_an_empty_segment_vanishes_and_its_number_is_used_again() -> None:
    """So numbers stay consecutive."""
    state = plan_start(PATHS, written(7), ledger_id=8, now_ms=2).state
    change = plan_complete(PATHS, state, now_ms=3, closing=None, empty_ledger_id=8)
    assert change.ops[0] == Delete(PATHS.segment(2))
    assert change.state.max_lssn.max_lssn == 1
    again = plan_start(PATHS, change.state, ledger_id=9, now_ms=4)
    assert again.state.segments[-1].lssn == 2
    assert again.state.segments[-1].start_sequence_id == 10


@pytest.mark.parametrize("empty_ledger_id", [None, 9])
@pytest.mark.parametrize("seal", [True, False])
def test_an_open_extent_is_dropped_only_by_name(*, empty_ledger_id: int | None, seal: bool) -> None:
    """Whoever does not know that it is empty must not lose what it holds."""
    state = plan_start(PATHS, written(7), ledger_id=8, now_ms=2).state
    with pytest.raises(UnexpectedError, match="ledger 8"):
        plan_complete(
            PATHS, state, now_ms=3, closing=None, empty_ledger_id=empty_ledger_id, seal=seal
        )


def test_the_only_segment_that_knows_the_next_sequence_id_stays() -> None:
    """All before it was truncated away: the count must not begin anew."""
    state = plan_start(PATHS, written(7), ledger_id=8, now_ms=2).state
    truncated = plan_truncate(PATHS, state, DLSN(2, 0, 0))
    assert truncated is not None
    assert [s.lssn for s in removable_segments(truncated.state)] == [1]
    alone = plan_remove(PATHS, truncated.state, [1]).state
    completed = plan_complete(PATHS, alone, now_ms=3, closing=None, empty_ledger_id=8).state
    assert completed.next_sequence_id == 10
    assert plan_start(PATHS, completed, ledger_id=9, now_ms=4).state.next_sequence_id == 10


def test_a_sealed_log_takes_nothing_more() -> None:
    """The seal is in the change that completes the last segment."""
    started = plan_start(PATHS, EMPTY, ledger_id=7, now_ms=2).state
    change = plan_complete(PATHS, started, now_ms=3, closing=final(7), seal=True)
    assert codec.decode_max_lssn(guard_of(change).value, path="") == MaxLssn(
        max_lssn=1, sealed=True
    )
    with pytest.raises(EndOfStreamError):
        plan_start(PATHS, change.state, ledger_id=8, now_ms=4)
    with pytest.raises(EndOfStreamError):
        plan_append(PATHS, change.state, [staged(9)], now_ms=4, limits=LIMITS)


def test_staged_extents_share_a_segment_until_it_is_full() -> None:
    """By size here; each extent follows the one before it."""
    change, first, end = plan_append(
        PATHS, written(7), [staged(8), staged(9, size=10_000), staged(8)], now_ms=100, limits=LIMITS
    )
    assert (first, end) == (DLSN(2, 0, 0), DLSN(3, 2, 0))
    second, third = change.state.segments[1:]
    assert second.state is SegmentState.COMPLETED
    assert [extent.ledger_id for extent in second.extents] == [8, 9]
    assert second.start_sequence_id == 10
    assert (third.state, third.start_sequence_id) == (SegmentState.IN_PROGRESS, 18)
    again, first, end = plan_append(PATHS, change.state, [staged(8)], now_ms=200, limits=LIMITS)
    assert (first, end) == (DLSN(3, 2, 0), DLSN(3, 4, 0))
    assert len(again.state.segments) == 3
    aged, first, _ = plan_append(PATHS, again.state, [staged(8)], now_ms=1100, limits=LIMITS)
    assert first == DLSN(4, 0, 0)
    assert aged.state.segments[2].state is SegmentState.COMPLETED


def test_a_segment_takes_a_bounded_number_of_extents() -> None:
    """More of them in one append fill several segments."""
    extents = [staged(8)] * (2 * EXTENTS_PER_SEGMENT_MAX + 1)
    limits = SegmentLimits(size_bytes_max=10**12, age_max_ms=10**12)
    change, _, end = plan_append(PATHS, EMPTY, extents, now_ms=1, limits=limits)
    assert [len(s.extents) for s in change.state.segments] == [
        EXTENTS_PER_SEGMENT_MAX,
        EXTENTS_PER_SEGMENT_MAX,
        1,
    ]
    assert end == DLSN(3, 2, 0)


def test_transaction_ids_of_staged_extents() -> None:
    """Own ones must follow the log's; missing ones are the time, but never lower than the log's."""
    state = written(7)  # its highest is 5
    change, _, _ = plan_append(
        PATHS, state, [staged(8, txids=(5, 9)), staged(9)], now_ms=3, limits=LIMITS
    )
    own, assigned = change.state.segments[-1].extents
    assert (own.first_txid, own.last_txid, own.txid_assigned) == (5, 9, False)
    assert (assigned.first_txid, assigned.last_txid, assigned.txid_assigned) == (9, 9, True)
    assert change.state.max_txid == 9
    later, _, _ = plan_append(PATHS, state, [staged(9)], now_ms=1000, limits=LIMITS)
    assert later.state.max_txid == 1000
    with pytest.raises(TransactionIdOutOfOrderError, match="id 4, lower than 5"):
        plan_append(PATHS, state, [staged(8, txids=(4, 9))], now_ms=3, limits=LIMITS)
    with pytest.raises(TransactionIdOutOfOrderError, match="id 8, lower than 9"):
        plan_append(
            PATHS,
            state,
            [staged(8, txids=(6, 9)), staged(9, txids=(8, 8))],
            now_ms=3,
            limits=LIMITS,
        )


def test_the_highest_transaction_id_can_be_assigned_after() -> None:
    """Nothing overflows."""
    state = plan_append(PATHS, EMPTY, [staged(8, txids=(1, TXID_MAX))], now_ms=3, limits=LIMITS)[
        0
    ].state
    change, _, _ = plan_append(PATHS, state, [staged(9)], now_ms=5, limits=LIMITS)
    assert change.state.max_txid == TXID_MAX


def test_timestamps_of_staged_extents_have_a_floor() -> None:
    """They were staged at 50, but the log has 77 already."""
    change, _, _ = plan_append(PATHS, written(7), [staged(8)], now_ms=3, limits=LIMITS)
    extent = change.state.segments[-1].extents[0]
    assert (extent.timestamp_floor_ms, extent.last_timestamp_ms) == (77, 77)


@pytest.mark.parametrize(
    ("dlsn", "truncations", "first"),
    [
        (DLSN(1, 0, 1), "P--", DLSN(1, 0, 1)),
        (DLSN(2, 0, 0), "T--", DLSN(2, 0, 0)),
        (DLSN(2, 1, 5), "TP-", DLSN(2, 1, 5)),
        (DLSN(2, 3, 0), "TT-", DLSN(3, 0, 0)),
        (DLSN(3, 0, 0), "TT-", DLSN(3, 0, 0)),
        (DLSN(3, 3, 0), "TTT", DLSN(4, 0, 0)),
    ],
)
def test_truncation(dlsn: DLSN, truncations: str, first: DLSN) -> None:
    """Lower segments wholly, the one that holds the position in part."""
    change = plan_truncate(PATHS, written(7, 8, 9), dlsn)
    assert change is not None
    letters = {
        Truncation.ACTIVE: "-",
        Truncation.PARTIALLY_TRUNCATED: "P",
        Truncation.TRUNCATED: "T",
    }
    assert "".join(letters[s.truncation] for s in change.state.segments) == truncations
    assert change.state.first_active == first
    assert plan_truncate(PATHS, change.state, dlsn) is None


def test_truncation_never_goes_back() -> None:
    """A lower position changes nothing, and leaves the guard alone."""
    change = plan_truncate(PATHS, written(7, 8), DLSN(2, 1, 0))
    assert change is not None
    for lower in (DLSN.INITIAL, DLSN(1, 2, 0), DLSN(2, 0, 9), DLSN(2, 1, 0)):
        assert plan_truncate(PATHS, change.state, lower) is None


def test_the_segment_in_progress_is_truncated_inside() -> None:
    """Its open extent stays open."""
    state = plan_start(PATHS, written(7), ledger_id=8, now_ms=2).state
    change = plan_truncate(PATHS, state, DLSN(2, 4, 2))
    assert change is not None
    assert change.state.first_active == DLSN(2, 4, 2)
    assert change.state.open_segment is not None
    rolled = plan_start(PATHS, change.state, ledger_id=9, now_ms=5, closing=final(8, entries=9))
    assert rolled.state.first_active == DLSN(2, 4, 2)


def test_the_last_segment_is_never_removed() -> None:
    """It knows the next sequence id."""
    change = plan_truncate(PATHS, written(7, 8), DLSN(2, 3, 0))
    assert change is not None
    assert [s.lssn for s in removable_segments(change.state)] == [1]
    removed = plan_remove(PATHS, change.state, [1])
    assert removed.ops[0] == Delete(PATHS.segment(1), ANY_VERSION)
    assert plan_start(PATHS, removed.state, ledger_id=9, now_ms=5).state.next_sequence_id == 20


def test_a_state_that_contradicts_itself_is_refused() -> None:
    """Missing numbers, and two segments in progress."""
    state = written(7, 8, 9)
    for segments in (state.segments[::2], state.segments[:2], ()):
        with pytest.raises(UnexpectedError, match=r"segments are|is missing"):
            LogState(
                metadata=state.metadata,
                max_lssn=state.max_lssn,
                version=1,
                max_txid=5,
                segments=segments,
            )
    in_progress = LogSegment(
        lssn=1, state=SegmentState.IN_PROGRESS, created_ms=1, start_sequence_id=0, extents=()
    )
    with pytest.raises(UnexpectedError, match="in progress"):
        LogState(
            metadata=state.metadata,
            max_lssn=MaxLssn(max_lssn=2),
            version=1,
            max_txid=5,
            segments=(in_progress, state.segments[1]),
        )
