"""Goal: every transition of the machine that reads a log along its tail.

Method: exact effects for each; `test_tail_by_chance.py` plays whole histories.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from dlcore.base.errors import (
    AlreadyTruncatedError,
    BookieUnavailableError,
    InvalidEntryError,
    LogNotFoundError,
    MetadataConnectionError,
    ReaderIdleError,
    UnexpectedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace
from dlcore.log.metadata.changes import plan_complete
from dlcore.log.reading.cursor import FollowExtent, ReadCursor, ReadExtent, Step, TruncationRule
from dlcore.log.reading.tail import (
    TRANSITIONS,
    Alarm,
    AlarmAt,
    Broke,
    Control,
    Fetched,
    Follow,
    FollowBegan,
    Open,
    Read,
    ReadState,
    Rejected,
    SessionChanged,
    Signal,
    Skipped,
    StateRead,
    StreamFailed,
    TailState,
    WaitOver,
    Waits,
    WarnIdle,
)
from tests.fixtures.log_states import PATHS, Tree, final, written
from tests.fixtures.tail_bench import (
    AWAY,
    BROKEN,
    CHANGED,
    CONFIG,
    DAMAGED,
    ENDED,
    GONE,
    LOST,
    START,
    Bench,
    completed,
    entries,
    entry,
    sealed,
    started,
    truncated,
)

if TYPE_CHECKING:
    from dlcore.base.config import LogConfig


def following(config: LogConfig = CONFIG, *, skips_broken: bool = False) -> Bench:
    """Return a bench that follows the only segment, which is open."""
    bench = Bench(started(Tree()), config=config, skips_broken=skips_broken)
    assert bench.handle(START) == [bench.follows(1)]
    return bench


def caught_up() -> Bench:
    """Return a bench that waits for the first segment."""
    bench = Bench(Tree())
    assert bench.handle(START) == []
    assert bench.state is TailState.CAUGHT_UP
    return bench


def test_final_extents_are_read_each_opened_before_its_turn() -> None:
    """Up to the end of a sealed log; the last one is followed by nothing."""
    bench = Bench(sealed(written(7, 8)))
    assert bench.handle(START) == bench.reads(1)
    second = bench.step(2)
    assert isinstance(second, ReadExtent)
    assert bench.handle(Fetched(entries(0, 1))) == [Open(second), Control.GO_ON]
    assert bench.handle(Fetched(entries(2))) == [Control.GO_ON]
    assert bench.handle(ENDED) == [Read(second)]
    assert bench.handle(Fetched(entries(0, 1, 2))) == [Control.GO_ON]
    assert bench.buffered == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    last = bench.machine.buffer.entries[-1]
    assert (last.place.sequence_id, last.place.timestamp_ms, last.last_txid) == (18, 7, 5)
    assert bench.handle(ENDED) == []
    assert bench.state is TailState.ENDED
    assert bench.learn() == []


def test_the_next_extent_is_not_opened_long_before_its_turn() -> None:
    """Its first entries would only take memory."""
    tree = started(Tree(), 7)
    large = structs.replace(final(7), size_bytes=90_000_000)
    tree.apply(plan_complete(PATHS, tree.at, now_ms=5, closing=large))
    bench = Bench(completed(started(tree)))
    bench.handle(START)
    assert bench.handle(Fetched(entries(0))) == [Control.GO_ON]
    assert bench.handle(Fetched(entries(1))) == [Control.GO_ON]
    assert bench.handle(Fetched(entries(2))) == [*bench.reads(2)[:1], Control.GO_ON]


def test_an_error_of_the_next_extent_waits_for_its_turn() -> None:
    """The present one is read first."""

    class Contradicted(ReadCursor):
        def plan_after(self, *_: object) -> Step:
            raise UnexpectedError("planted")

    bench = Bench(written(7, 8))
    bench.machine.cursor = Contradicted("", DLSN.INITIAL, truncated=TruncationRule.SKIP)
    bench.handle(START)
    assert bench.handle(Fetched(entries(0))) == [Control.GO_ON]


def test_entries_wait_for_room_in_the_buffer() -> None:
    """Above the bound by one; the stream goes on when all of them found room."""
    bench = Bench(written(7), config=replace(CONFIG, read_ahead_bytes=150))
    bench.handle(START)
    assert bench.handle(Fetched(entries(0, 1, 2))) == [Control.AWAIT_ROOM]
    assert bench.buffered == [(1, 0), (1, 1)]
    assert bench.take() == [Control.GO_ON]
    assert bench.take() == []
    assert bench.take() == []
    assert bench.handle(ENDED) == []
    assert bench.state is TailState.CAUGHT_UP


def test_a_wait_ends_with_an_entry() -> None:
    """One that comes after it began, or that is there already."""
    bench = following()
    assert bench.handle(Waits(0.0, 0.0))[0] == AlarmAt(CONFIG.reader_idle_warn_s)
    assert bench.push(entry(0)) == [WaitOver(None)]
    assert bench.handle(Waits(1.0, 0.0)) == [WaitOver(None)]
    assert bench.handle(Fetched(entries(1))) == [Control.GO_ON]


def test_pushed_entries_need_room_and_their_turn() -> None:
    """Their stream gives them else."""
    refused = [Control.REFUSE]
    bench = following(replace(CONFIG, read_ahead_bytes=50))
    other = bench.step(1)
    assert isinstance(other, FollowExtent)
    assert bench.push(entry(0), other) == refused
    assert bench.handle(Fetched(entries(0, 1))) == [Control.AWAIT_ROOM]
    bench.machine.buffer.clear()
    assert bench.push(entry(2)) == refused  # another one waits
    assert bench.handle(Signal.ROOM) == [Control.GO_ON]
    assert bench.push(entry(2)) == refused  # the buffer is full
    assert bench.take() == []
    assert bench.push(entry(2)) == []
    assert bench.take() == []
    assert bench.handle(ENDED) == []
    assert bench.push(entry(3)) == refused


def test_an_open_extent_is_left_when_the_segment_list_shows_its_end() -> None:
    """Not before, though its ledger is closed; a change that says nothing of it is passed over."""
    bench = following()
    bench.handle(Fetched(entries(0, 1, 2)))
    assert bench.handle(ENDED) == []
    assert bench.handle(CHANGED) == [ReadState(1)]
    assert bench.handle(CHANGED) == []
    assert bench.learn() == [ReadState(1)]
    assert bench.learn() == []
    completed(bench.tree)
    assert bench.handle(CHANGED) == [ReadState(1)]
    assert bench.learn() == []
    started(bench.tree, 10)
    assert bench.handle(CHANGED) == [ReadState(1)]
    assert bench.learn() == [bench.follows(2)]


def test_a_change_before_an_extent_is_followed_is_learned_then() -> None:
    """Its ledger may be closed by then, and no other change may come."""
    bench = Bench(started(written(7), 8))
    assert bench.handle(START) == bench.reads(1)
    assert bench.handle(CHANGED) == []
    bench.handle(Fetched(entries(0, 1, 2)))
    follows = bench.follows(2)
    started(completed(bench.tree, 8), 10)
    assert bench.handle(ENDED) == [follows, ReadState(2)]
    bench.handle(Fetched(entries(0, 1, 2)))
    assert bench.handle(ENDED) == []
    assert bench.learn() == [bench.follows(3)]


def test_a_change_while_the_list_is_read_is_learned_when_an_extent_is_followed() -> None:
    """A snapshot may be older: of a log that grows, or whose ledger was recovered as empty."""
    bench = caught_up()
    assert bench.handle(CHANGED) == [ReadState(1)]
    assert bench.handle(CHANGED) == []
    started(bench.tree)
    assert bench.learn() == [bench.follows(1), ReadState(1)]
    assert bench.learn() == []
    assert bench.handle(StreamFailed(GONE)) == [ReadState(1)]
    assert bench.handle(CHANGED) == []
    empty = plan_complete(PATHS, bench.tree.at, now_ms=5, closing=None, empty_ledger_id=9)
    started(bench.tree.apply(empty), 10)
    assert bench.learn() == [bench.follows(1), ReadState(1)]


def test_a_followed_extent_that_is_final_is_read_to_its_end() -> None:
    """Its stream ends: what it did not bring, and what found no room, is read."""
    bench = following(replace(CONFIG, read_ahead_bytes=50))
    assert bench.handle(Fetched(entries(0, 1))) == [Control.AWAIT_ROOM]
    completed(bench.tree)
    assert bench.handle(CHANGED) == [ReadState(1)]
    effects = bench.learn()
    assert effects[0] is Control.STOP
    assert isinstance(effects[1], Open)
    assert effects[1].step.first_entry_id == 1
    bench.take()
    assert bench.handle(Fetched(entries(1))) == [Control.GO_ON]


def test_truncation_moves_what_is_followed() -> None:
    """From where the log begins now; a reader that may not skip gets an error."""
    for rule in (TruncationRule.SKIP, TruncationRule.REFUSE):
        bench = Bench(started(Tree()), rule=rule)
        assert bench.handle(START) == [bench.follows(1)]
        bench.handle(Fetched(entries(0)))
        truncated(bench.tree, 1, 2)
        assert bench.handle(CHANGED) == [ReadState(1)]
        effects = bench.learn()
        assert effects[0] is Control.STOP
        if rule is TruncationRule.SKIP:
            assert isinstance(effects[1], Follow)
            assert effects[1].step.first_entry_id == 2
        else:
            assert effects == [Control.STOP]
            assert isinstance(bench.machine.error, AlreadyTruncatedError)


def test_everything_known_ends_a_wait_each_time_it_was_read() -> None:
    """A change while it is read is read, too."""
    bench = Bench(written(7))
    bench.handle(START)
    bench.handle(Fetched(entries(0, 1, 2)))
    for _ in range(3):
        bench.take()
    assert bench.handle(CHANGED) == []
    bench.handle(Waits(0.0, 0.0))
    assert bench.handle(ENDED) == [WaitOver(None), ReadState(1)]
    bench.handle(Waits(1.0, 0.0))
    assert bench.learn() == [WaitOver(None)]
    assert not any(isinstance(each, WaitOver) for each in bench.handle(Waits(2.0, 0.0)))


def test_segments_that_are_not_known_are_learned() -> None:
    """A reader far from the end knows a few at a time."""
    tree = written(7, 8)
    state = tree.state
    known = type(state)(
        log=state.log,
        head=state.head,
        version=state.version,
        segments=state.segments[:1],
        known_lssn=1,
    )
    bench = Bench(tree, state=known)
    bench.handle(START)
    bench.handle(Fetched(entries(0, 1, 2)))
    assert bench.handle(ENDED) == [ReadState(2)]
    assert bench.learn() == bench.reads(2)
    bench = Bench(tree, state=known)
    bench.handle(START)
    bench.handle(Fetched(entries(0, 1, 2)))
    bench.handle(ENDED)
    assert bench.handle(StateRead(known)) == [ReadState(2)]


def test_a_ledger_that_cannot_be_read_is_an_error_unless_the_list_changed() -> None:
    """The list is read after the failure, also if it is being read just then."""
    for error in (LOST, GONE):
        bench = Bench(written(7, 8))
        bench.handle(START)
        assert bench.handle(StreamFailed(error)) == [ReadState(1)]
        assert bench.state is TailState.CHECKING
        assert bench.handle(CHANGED) == []
        truncated(bench.tree, 2)
        assert bench.learn() == bench.reads(2)
        assert bench.handle(StreamFailed(error)) == [ReadState(2)]
        assert bench.learn() == []
        assert bench.machine.error is error
    bench = following()
    assert bench.handle(CHANGED) == [ReadState(1)]
    assert bench.handle(StreamFailed(LOST)) == []
    assert bench.learn() == [ReadState(1)]
    assert bench.learn() == []
    assert bench.machine.error is LOST


def test_another_failure_of_a_stream_is_an_error() -> None:
    """After the buffered entries; what was opened before its turn is dropped."""
    bench = Bench(written(7, 8))
    bench.handle(START)
    bench.handle(Fetched(entries(0)))
    assert bench.handle(StreamFailed(AWAY)) == [Control.DROP]
    assert bench.machine.error is AWAY
    assert bench.buffered == [(1, 0)]
    assert bench.handle(Waits(0.0, 0.0)) == [WaitOver(None)]
    assert bench.learn() == []


def test_an_extent_that_was_opened_in_vain_is_dropped() -> None:
    """The log was truncated behind it before its turn."""
    bench = Bench(written(7, 8, 9))
    bench.handle(START)
    bench.handle(Fetched(entries(0, 1)))
    truncated(bench.tree, 3)
    assert bench.handle(StreamFailed(GONE)) == [ReadState(1)]
    assert bench.learn() == [Control.DROP, *bench.reads(3)]


@pytest.mark.parametrize("skips_broken", [True, False])
def test_broken_entries_are_errors_or_skipped(*, skips_broken: bool) -> None:
    """An entry whose header cannot be decoded, or that has no undamaged replica."""
    bench = following(skips_broken=skips_broken)
    effects = bench.push(BROKEN)
    if not skips_broken:
        assert effects == [Control.STOP]
        assert isinstance(bench.machine.error, InvalidEntryError)
        damaged = following()
        assert damaged.handle(StreamFailed(DAMAGED)) == []
        assert damaged.machine.error is DAMAGED
        return
    (skipped,) = effects
    assert isinstance(skipped, Skipped)
    assert (skipped.lssn, skipped.entry_id) == (1, 0)
    again = bench.handle(StreamFailed(DAMAGED))
    assert again[0] == Skipped(1, 1, DAMAGED)
    assert isinstance(again[1], Follow)
    assert again[1].step.first_entry_id == 2


def test_nothing_is_buffered_behind_a_broken_entry() -> None:
    """The rest of its chunk is dropped, and its stream ended."""
    bench = Bench(written(7))
    bench.handle(START)
    assert bench.handle(Fetched([entry(0), BROKEN, entry(2)])) == [Control.STOP]
    assert bench.buffered == [(1, 0)]


def test_an_entry_that_is_not_the_next_one_is_an_error() -> None:
    """A reader rather fails than skips one."""
    bench = following()
    assert bench.push(entry(1)) == [Control.STOP]
    assert isinstance(bench.machine.error, UnexpectedError)


def test_a_caller_that_rejects_an_entry_gets_none_after_it() -> None:
    """Its error replaces any other, as it is about an earlier entry; or the entry is skipped."""
    place = EntryPlace(3, 4, 0, 1, 0)
    bench = following()
    bench.push(entry(0))
    bench.push(entry(1))
    bench.take()
    error = InvalidEntryError("rejected")
    assert bench.handle(Rejected(place, error)) == [Control.STOP]
    assert (bench.machine.error, bench.buffered) == (error, [])
    assert bench.handle(Rejected(place, AWAY)) == []
    assert bench.machine.error is AWAY
    bench = following()
    bench.handle(StreamFailed(GONE))
    assert bench.handle(Rejected(place, error)) == []
    bench = following(skips_broken=True)
    bench.push(entry(0))
    assert bench.handle(Rejected(place, error)) == [Skipped(3, 4, error)]
    assert (bench.machine.error, bench.buffered) == (None, [(1, 0)])


def test_a_failure_of_all_ends_a_wait() -> None:
    """The log may be deleted, or its list not to be read."""
    bench = caught_up()
    bench.handle(Waits(0.0, 0.0))
    bench.handle(CHANGED)
    error = LogNotFoundError("deleted")
    assert bench.handle(Broke(error)) == [WaitOver(None)]
    assert bench.machine.error is error
    bench.handle(Broke(KeyError("a defect")))
    assert isinstance(bench.machine.error, UnexpectedError)
    assert "reader of log 'clicks' broke: KeyError('a defect')" in str(bench.machine.error)


def test_closing_ends_everything() -> None:
    """The stream, the one ahead, the wait; then nothing has an effect but an answer."""
    bench = Bench(written(7, 8))
    bench.handle(START)
    bench.handle(Fetched(entries(0)))
    assert bench.handle(Signal.CLOSE) == [Control.STOP, Control.DROP]
    assert bench.buffered == []
    assert bench.handle(Broke(AWAY)) == []
    bench = following()
    step = bench.step(1)
    assert isinstance(step, FollowExtent)
    bench.handle(Waits(0.0, 0.0))
    assert bench.handle(Signal.CLOSE) == [Control.STOP, WaitOver(None)]
    assert bench.handle(Waits(1.0, 0.0)) == [WaitOver(None)]
    assert bench.push(entry(0), step) == [Control.REFUSE]
    bench = following()
    bench.handle(ENDED)
    assert bench.handle(Signal.CLOSE) == []
    bench = following()
    bench.handle(Broke(AWAY))
    assert bench.handle(Signal.CLOSE) == []


def test_a_waiting_caller_learns_that_the_metadata_store_is_away() -> None:
    """After the time-out of its silence, or of the wait, whichever began later; each time."""
    config = replace(CONFIG, read_unavailable_timeout_s=5.0)
    bench = Bench(Tree(), config=config)
    bench.handle(START)
    assert bench.handle(Waits(1.0, 0.0)) == [AlarmAt(1.0 + config.reader_idle_warn_s)]
    assert bench.handle(SessionChanged(False, 2.0)) == [AlarmAt(7.0)]
    assert bench.handle(SessionChanged(False, 3.0)) == []
    (over,) = bench.handle(Alarm(7.0, 0.0))
    assert isinstance(over, WaitOver)
    assert isinstance(over.error, MetadataConnectionError)
    assert "ZooKeeper for 5 s" in str(over.error)
    assert bench.handle(Waits(8.0, 0.0)) == [AlarmAt(13.0)]
    assert bench.handle(SessionChanged(True, 9.0)) == []
    assert bench.handle(Alarm(13.0, 0.0)) == [AlarmAt(1.0 + config.reader_idle_warn_s)]


def test_a_waiting_caller_learns_that_no_followed_bookie_answers() -> None:
    """Not while one does, and not of those that are followed no more."""
    config = replace(CONFIG, read_unavailable_timeout_s=5.0, reader_idle_warn_s=100.0)
    bench = following(config)
    assert bench.handle(Waits(0.0, 0.0)) == [AlarmAt(100.0)]
    assert bench.handle(FollowBegan(1.0)) == [AlarmAt(6.0)]
    assert bench.handle(Alarm(6.0, 4.0)) == [AlarmAt(9.0)]
    (over,) = bench.handle(Alarm(9.0, 4.0))
    assert isinstance(over, WaitOver)
    assert isinstance(over.error, BookieUnavailableError)
    assert "the bookies that it follows for 5 s" in str(over.error)
    assert bench.handle(Alarm(99.0, 4.0)) == []
    bench.handle(Waits(100.0, 99.0))
    bench.handle(SessionChanged(False, 101.0))
    (over,) = bench.handle(Alarm(105.0, 99.0))
    assert isinstance(over, WaitOver)
    assert "ZooKeeper and the bookies" in str(over.error)
    assert bench.handle(StreamFailed(GONE)) == []
    assert bench.handle(FollowBegan(106.0)) == []


def test_an_idle_reader_looks_again_and_fails_in_the_end() -> None:
    """The list is read again if something may depend on it."""
    config = replace(CONFIG, reader_idle_warn_s=10.0, reader_idle_error_s=25.0)
    bench = Bench(Tree(), config=config)
    bench.handle(START)
    assert bench.handle(Waits(0.0, 0.0)) == [AlarmAt(10.0)]
    looks = bench.handle(Alarm(10.0, 0.0))
    assert looks == [WarnIdle(DLSN.INITIAL, 10.0), ReadState(1), AlarmAt(20.0)]
    assert bench.learn() == [WaitOver(None)]
    assert bench.handle(Waits(11.0, 0.0)) == []
    assert bench.handle(Signal.WAIT_LEFT) == []
    assert bench.handle(Alarm(20.0, 0.0)) == []
    (over,) = bench.handle(Waits(25.0, 0.0))
    assert isinstance(over, WaitOver)
    assert isinstance(over.error, ReaderIdleError)
    assert "no record came for 25 s" in str(over.error)


@pytest.mark.parametrize("state", TailState)
def test_every_state_says_when_it_is_left(state: TailState) -> None:
    """CLOSED never is."""
    assert bool(TRANSITIONS.causes[state]) == (state is not TailState.CLOSED)
