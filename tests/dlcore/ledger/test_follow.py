"""Goal: every transition of the machine that follows a ledger.

Method: exact effects for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    ConfigurationError,
    LedgerNotFoundError,
    LedgerReadError,
    MetadataConnectionError,
)
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.reading.follow import (
    TRANSITIONS,
    AskMembers,
    Broke,
    Call,
    CallFailed,
    Checked,
    CheckLac,
    Control,
    Effect,
    EndFound,
    EndRead,
    Event,
    Fail,
    Follow,
    FollowState,
    FollowStep,
    LedgerFollow,
    MembersAnswered,
    MetadataRead,
    Offer,
    Pause,
    Pushed,
    RangeRead,
    ReadRange,
    Refused,
    Signal,
    TellDamage,
    Tick,
    TickAt,
)
from dlcore.wire.frames import encode_frame
from dlcore.wire.port import HeldEntries
from tests.fixtures.ledgers import bookie, bookies, entry_of, frame_of, metadata_of

if TYPE_CHECKING:
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.wire.frames import EntryFrame

WANTED = Signal.STEP_WANTED
OPEN = metadata_of((0, "ABC"))
LOST = LedgerReadError("no replica")
GONE = LedgerNotFoundError("deleted")
AWAY = MetadataConnectionError("no connection")
END = Control.READ_ON
READ = ReadRange(0, 0)  # which range failed says nothing: only one is read at a time


def closed_at(last_entry_id: int, *, names: str = "ABC") -> LedgerMetadata:
    """Return a ledger that ends there."""
    return metadata_of((0, names), state=LedgerState.CLOSED, last_entry_id=last_entry_id)


def entries(*ids: int) -> list[EntryFrame]:
    """Return entries as read."""
    return [entry_of(entry_id) for entry_id in ids]


def frames(*ids: int) -> list[bytes | memoryview]:
    """Return the same entries as a bookie sends them."""
    return [frame_of(entry_id) for entry_id in ids]


class Bench:
    """A machine that is validated after each event; of ledger 7 it follows B first."""

    def __init__(self, metadata: LedgerMetadata = OPEN, *, first: int = 0) -> None:
        self.machine = LedgerFollow(metadata, first=first, now=0.0)
        self.now = 0.0

    def handle(self, event: Event) -> list[Effect]:
        """Feed an event."""
        effects = self.machine.handle(event)
        self.machine.validate()
        return effects

    def push(self, *ids: int, lac: int, fenced: bool = False) -> list[Effect]:
        """Let the followed bookie push."""
        return self.handle(Pushed(frames(*ids), lac, fenced, self.now))

    def tick(self, now: float) -> list[Effect]:
        """Let it be so late."""
        self.now = now
        return self.handle(Tick(now))

    @property
    def state(self) -> FollowState:
        """The machine's state."""
        return self.machine.state


def waiting(*, first: int = 0, lac: int = -1) -> Bench:
    """Return a bench whose caller got the first step, and waits for the next."""
    bench = Bench(first=first)
    assert bench.handle(WANTED) == [Follow(bookie("B"), first)]
    assert bench.push(lac=lac) == [step(lac=lac)]
    assert bench.handle(WANTED) == [Control.LISTEN]
    return bench


def step(*ids: int, lac: int, closed: bool = False) -> FollowStep:
    """Return a step with these entries."""
    return FollowStep(entries(*ids) or (), lac, closed=closed)


def asked(bench: Bench) -> Bench:
    """Let silence last until the members are asked."""
    assert bench.tick(5.0)[1:] == [AskMembers(bookies("ABC"))]
    return bench


def answers(**held: HeldEntries) -> MembersAnswered:
    """Return what members answered."""
    return MembersAnswered([(bookie(name), each) for name, each in held.items()])


def knows(lac: int, *ranges: tuple[int, int]) -> HeldEntries:
    """Return the answer of a bookie with this LAC, and entries above it."""
    return HeldEntries(lac, 1000, ranges)


def test_the_first_step_reports_the_lac_and_carries_what_came_with_it() -> None:
    """It is never offered: the caller first learns where it is."""
    bench = Bench()
    assert bench.handle(WANTED) == [Follow(bookie("B"), 0)]
    assert bench.push(0, 1, 2, lac=1) == [step(0, 1, lac=1)]
    assert bench.state is FollowState.IDLE
    assert waiting(first=9, lac=4).state is FollowState.WAITING


def test_entries_that_come_while_the_caller_waits_are_offered() -> None:
    """Taken entries are in no step; a step brings the others."""
    bench = waiting()
    assert bench.push(0, 1, lac=1) == [Offer(entries(0, 1))]
    assert bench.push(2, 3, 4, lac=4) == [Offer(entries(2, 3, 4))]
    assert bench.handle(Refused(entries(3, 4))) == [step(3, 4, lac=4)]
    assert bench.handle(WANTED) == [Control.LISTEN]


def test_nothing_is_handed_out_while_the_caller_works() -> None:
    """The next update is not asked for before the caller is done with this one."""
    bench = waiting()
    assert bench.push(0, lac=0) == [Offer(entries(0))]
    assert bench.handle(Refused(entries(0))) == [step(0, lac=0)]
    assert bench.push(1, lac=1) == []
    assert bench.handle(WANTED) == [Offer(entries(1))]


def test_an_entry_above_the_lac_is_handed_out_once_it_is_confirmed() -> None:
    """It is read then, and a repeated or unordered push does no harm."""
    bench = waiting()
    assert bench.push(2, 1, 0, 1, lac=1) == [Offer(entries(0, 1))]
    assert bench.handle(EndFound(2)) == [ReadRange(2, 2)]
    assert bench.handle(RangeRead(entries(2))) == [END, step(2, lac=2)]


def test_gaps_are_read_from_any_replica() -> None:
    """Before, between and behind what was pushed; chunks as the caller asks for them."""
    bench = waiting()
    assert bench.push(2, 5, lac=7) == [ReadRange(0, 1)]
    assert bench.handle(RangeRead(entries(0))) == [step(0, lac=7)]
    assert bench.handle(WANTED) == [Control.READ_ON]
    assert bench.handle(RangeRead(entries(1))) == [END, step(1, lac=7)]
    assert bench.handle(WANTED) == [step(2, lac=7)]
    assert bench.handle(WANTED) == [ReadRange(3, 4)]
    assert bench.handle(RangeRead(entries(3, 4))) == [END, step(3, 4, lac=7)]
    assert bench.handle(WANTED) == [step(5, lac=7)]
    assert bench.handle(WANTED) == [ReadRange(6, 7)]
    assert bench.handle(RangeRead(entries(6, 7))) == [END, step(6, 7, lac=7)]
    assert bench.handle(WANTED) == [Control.LISTEN]


def test_an_end_that_the_caller_found_is_read_up_to() -> None:
    """Not below what is known, and at once only if the caller waits."""
    bench = waiting()
    assert bench.handle(EndFound(1)) == [ReadRange(0, 1)]
    assert bench.handle(EndFound(1)) == []
    assert bench.handle(EndFound(2)) == []
    assert bench.handle(RangeRead(entries(0, 1))) == [END, step(0, 1, lac=2)]
    assert bench.handle(WANTED) == [ReadRange(2, 2)]


def test_a_closed_ledger_is_read_to_its_end() -> None:
    """Without following anybody; an empty one ends at once."""
    bench = Bench(closed_at(2))
    assert bench.handle(WANTED) == [ReadRange(0, 2)]
    assert bench.handle(EndFound(9)) == []
    assert bench.handle(RangeRead(entries(0, 1))) == [step(0, 1, lac=2)]
    assert bench.handle(WANTED) == [Control.READ_ON]
    assert bench.handle(RangeRead(entries(2))) == [END, step(2, lac=2, closed=True)]
    assert bench.state is FollowState.ENDED
    assert bench.handle(WANTED) == []
    assert Bench(closed_at(-1)).handle(WANTED) == [step(lac=-1, closed=True)]


def test_a_ledger_that_is_closed_meanwhile_ends() -> None:
    """While the caller waits, works, or has just taken the last entry."""
    bench = waiting()
    assert bench.handle(Signal.METADATA_CHANGED) == [Call.READ_METADATA]
    assert bench.handle(MetadataRead(closed_at(-1))) == [
        Control.UNFOLLOW,
        step(lac=-1, closed=True),
    ]
    bench = waiting()
    bench.push(0, lac=0)
    bench.handle(Refused(entries(0)))
    assert bench.push(1, lac=1) == []
    assert bench.handle(MetadataRead(closed_at(1))) == [Control.UNFOLLOW]
    assert bench.handle(WANTED) == [step(1, lac=1, closed=True)]


def test_a_recovery_may_close_a_ledger_below_what_was_claimed() -> None:
    """Nothing above its end is handed out, whether bookies have it or not."""
    for answer in (RangeRead(entries(1, 2)), CallFailed(READ, LOST)):
        bench = waiting()
        assert bench.push(0, lac=9) == [step(0, lac=9)]
        assert bench.handle(WANTED) == [ReadRange(1, 9)]
        assert bench.handle(MetadataRead(closed_at(0))) == [Control.UNFOLLOW]
        assert bench.handle(answer) == [step(lac=0, closed=True)]
    bench = waiting()
    assert bench.push(lac=9) == [ReadRange(0, 9)]
    bench.handle(MetadataRead(closed_at(1)))
    assert bench.handle(RangeRead(entries(0, 1, 2))) == [step(0, 1, lac=1, closed=True)]
    bench = waiting()
    assert bench.push(lac=9) == [ReadRange(0, 9)]
    assert bench.handle(RangeRead(entries(0))) == [step(0, lac=9)]
    bench.handle(MetadataRead(closed_at(0)))
    assert bench.handle(WANTED) == [step(lac=0, closed=True)]


def test_a_bookie_that_leaves_the_ensemble_is_not_followed_any_more() -> None:
    """Nor is the new one from another entry than the next."""
    bench = waiting()
    changed = metadata_of((0, "ADC"))
    assert bench.handle(Signal.METADATA_CHANGED) == [Call.READ_METADATA]
    assert bench.handle(Signal.METADATA_CHANGED) == []
    assert bench.handle(MetadataRead(OPEN)) == [Call.READ_METADATA, Control.LISTEN]
    assert bench.handle(MetadataRead(changed)) == [Control.UNFOLLOW, Follow(bookie("D"), 0)]
    assert bench.push(0, lac=0) == [Offer(entries(0))]
    assert bench.handle(Refused(entries(0))) == [step(0, lac=0)]
    assert bench.handle(MetadataRead(OPEN)) == [Control.UNFOLLOW]
    assert bench.handle(WANTED) == [Follow(bookie("B"), 1)]


def test_metadata_that_cannot_be_read_is_read_at_the_next_change() -> None:
    """The bookies go on meanwhile."""
    bench = waiting()
    assert bench.handle(Signal.METADATA_CHANGED) == [Call.READ_METADATA]
    assert bench.handle(CallFailed(Call.READ_METADATA, AWAY)) == []
    assert bench.handle(Signal.METADATA_CHANGED) == [Call.READ_METADATA]


def test_bookies_that_fail_are_followed_in_turn_with_pauses_that_grow() -> None:
    """After each round the metadata is read; an answer ends the count."""
    bench = Bench()
    assert bench.handle(WANTED) == [Follow(bookie("B"), 0)]
    for pause_s in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert bench.handle(Signal.STREAM_ENDED) == [Follow(bookie("C"), 0)]
        assert bench.handle(Signal.STREAM_ENDED) == [Follow(bookie("A"), 0)]
        assert bench.handle(Signal.STREAM_ENDED) == [Pause(pause_s)]
        assert bench.handle(MetadataRead(OPEN)) == []
        effects = bench.handle(Signal.PAUSE_OVER)
        assert effects == [Call.READ_METADATA, Follow(bookie("B"), 0)]
        assert bench.handle(CallFailed(Call.READ_METADATA, AWAY)) == []
    assert bench.push(lac=-1) == [step(lac=-1)]
    assert bench.handle(Signal.STREAM_ENDED) == []  # the caller works
    assert bench.handle(WANTED) == [Follow(bookie("C"), 0)]
    assert bench.handle(Signal.STREAM_ENDED) == [Follow(bookie("A"), 0)]
    assert bench.handle(Signal.STREAM_ENDED) == [Pause(0.1)]


def test_a_bookie_without_an_answer_is_not_followed_any_more() -> None:
    """Whatever its error, also where the same error would end a call."""
    bench = waiting()
    for name in "CA":
        failed = CallFailed(Follow(bookie("B"), 0), GONE)
        assert bench.handle(failed) == [Follow(bookie(name), 0)]


def test_damaged_pushes_are_logged_and_read_from_others() -> None:
    """Also a frame of another ledger; good entries beside them are handed out."""
    bench = waiting()
    damaged = bytearray(frame_of(1))
    damaged[-20] ^= 1
    sent = [frame_of(0), bytes(damaged), frame_of(2)]
    damage, handed_out = bench.handle(Pushed(sent, 2, False, 0.0))
    assert isinstance(damage, TellDamage)
    assert damage.bookie == bookie("B")
    assert handed_out == step(0, lac=2)
    assert bench.handle(WANTED) == [ReadRange(1, 1)]
    assert bench.handle(RangeRead(entries(1))) == [END, step(1, lac=2)]
    assert bench.handle(WANTED) == [Offer(entries(2))]
    foreign = encode_frame(
        ledger_id=8, entry_id=3, last_add_confirmed=2, ledger_bytes=16, body=[b"body"]
    )
    effects = bench.handle(Pushed([foreign], 3, True, 0.0))
    assert isinstance(effects[0], TellDamage)
    assert effects[1:] == [Call.READ_METADATA, ReadRange(3, 3)]


def test_a_call_without_a_ledger_ends_it() -> None:
    """An answer that only failed to come does not."""
    for call in Call:
        assert waiting().handle(CallFailed(call, AWAY)) == []
        bench = waiting()
        assert bench.handle(CallFailed(call, GONE)) == [Fail(GONE)]
        assert bench.state is FollowState.ENDED
    assert waiting().handle(CallFailed(Pause(0.1), AWAY)) == [Fail(AWAY)]  # it cannot fail


def test_silence_makes_it_ask_all_members() -> None:
    """Soon at first, then after a second; not while the caller works, or no bookie is followed."""
    bench = waiting()
    assert bench.tick(0.0) == [TickAt(0.02)]
    assert bench.tick(0.02) == [TickAt(1.02), AskMembers(bookies("ABC"))]
    assert bench.tick(1.02) == [TickAt(2.02)]  # they have not answered yet
    assert bench.handle(answers()) == []
    bench.now = 1.5
    assert bench.push(lac=-1) == [Control.LISTEN]
    assert bench.tick(2.02) == [TickAt(2.5)]
    assert bench.tick(2.5) == [TickAt(3.5), AskMembers(bookies("ABC"))]
    assert bench.handle(answers()) == []
    for _ in range(2):
        bench.handle(Signal.STREAM_ENDED)
    assert bench.handle(Signal.STREAM_ENDED) == [Pause(0.1)]
    assert bench.tick(9.0) == [TickAt(10.0)]
    idle = waiting()
    idle.push(0, lac=0)
    idle.handle(Refused(entries(0)))
    assert idle.tick(7.0) == [TickAt(8.0)]


def test_a_member_that_knows_a_higher_lac_is_followed() -> None:
    """From the next entry on, once the caller has those up to that LAC."""
    bench = asked(waiting())
    assert bench.handle(answers(A=knows(-1), C=knows(1))) == [Control.UNFOLLOW, ReadRange(0, 1)]
    assert bench.handle(RangeRead(entries(0, 1))) == [END, step(0, 1, lac=1)]
    assert bench.handle(WANTED) == [Follow(bookie("C"), 2)]


def test_the_followed_bookie_is_believed_beside_what_it_pushed() -> None:
    """A push may be lost: its stream is opened again, even if it alone knows the LAC."""
    bench = asked(waiting())
    held = {"A": knows(-1), "B": knows(0), "C": knows(-1)}
    assert bench.handle(answers(**held)) == [Control.UNFOLLOW, ReadRange(0, 0)]
    assert bench.handle(RangeRead(entries(0))) == [END, step(0, lac=0)]
    assert bench.handle(WANTED) == [Follow(bookie("B"), 1)]


def test_a_member_that_left_is_believed_but_not_followed() -> None:
    """Its LAC was true when it was a member."""
    bench = asked(waiting())
    assert bench.handle(MetadataRead(metadata_of((0, "ABD")))) == [Control.LISTEN]
    assert bench.handle(answers(C=knows(0))) == [ReadRange(0, 0)]


def test_entries_above_every_known_lac_may_be_readable() -> None:
    """Their writer may be dead: then the entries decide, not a LAC."""
    bench = asked(waiting())
    assert bench.handle(answers(A=knows(-1, (0, 2)), B=knows(-1))) == [Call.READ_END]
    assert bench.tick(7.0) == [TickAt(8.0)]
    assert bench.handle(EndRead(2, OPEN)) == [Control.LISTEN, ReadRange(0, 2)]
    assert bench.handle(RangeRead(entries(0, 1, 2))) == [END, step(0, 1, 2, lac=2)]
    bench.handle(WANTED)
    assert bench.tick(9.0) == [TickAt(10.0), AskMembers(bookies("ABC"))]
    bench.handle(answers())
    assert bench.tick(9.5) == [TickAt(10.0)]
    bench = asked(waiting())
    bench.handle(answers(A=knows(-1, (0, 2))))
    assert bench.handle(CallFailed(Call.READ_END, LOST)) == []
    assert bench.tick(7.0) == [TickAt(8.0), AskMembers(bookies("ABC"))]
    bench.handle(answers(A=knows(-1, (0, 2))))
    end = bench.handle(EndRead(0, closed_at(0)))
    assert end == [Control.UNFOLLOW, ReadRange(0, 0)]
    assert bench.handle(RangeRead(entries(0))) == [END, step(0, lac=0, closed=True)]


def test_a_fence_makes_it_read_the_metadata() -> None:
    """At once, and with each silence: the watch may come late."""
    bench = waiting()
    assert bench.push(0, lac=0, fenced=True) == [Call.READ_METADATA, Offer(entries(0))]
    assert bench.push(lac=0, fenced=True) == [Control.LISTEN]
    assert bench.handle(MetadataRead(OPEN)) == [Control.LISTEN]
    assert bench.tick(5.0)[1:] == [AskMembers(bookies("ABC")), Call.READ_METADATA]


def test_a_lac_is_checked_if_an_entry_below_it_is_nowhere() -> None:
    """If it is false the bookie that sent it is not followed, nor believed, any more."""
    bench = waiting()
    assert bench.push(0, lac=9) == [step(0, lac=9)]
    assert bench.handle(WANTED) == [ReadRange(1, 9)]
    assert bench.handle(CallFailed(READ, LOST)) == [CheckLac(OPEN.last_ensemble, 0, 9)]
    assert bench.state is FollowState.CHECKING
    assert bench.handle(Checked(9, 0)) == [Control.UNFOLLOW, Follow(bookie("C"), 1)]
    asked(bench)
    assert bench.handle(answers(B=knows(9), C=knows(0))) == []
    for _ in range(2):
        bench.handle(Signal.STREAM_ENDED)
    assert bench.tick(6.0) == [TickAt(7.0), AskMembers(bookies("ABC"))]


def test_if_all_sent_false_ones_all_are_followed_again() -> None:
    """Some bookie must be followed: each LAC is checked again."""
    bench = Bench()
    assert bench.handle(WANTED) == [Follow(bookie("B"), 0)]
    for name in "CAA":
        bench.push(lac=9)
        if bench.state is FollowState.IDLE:
            bench.handle(WANTED)
        assert bench.handle(CallFailed(READ, LOST)) == [CheckLac(OPEN.last_ensemble, -1, 9)]
        assert bench.handle(Checked(9, -1)) == [Control.UNFOLLOW, Follow(bookie(name), 0)]


def test_a_false_lac_without_a_source_is_no_bookies_fault() -> None:
    """A read of the caller found it: no bookie is left out."""
    bench = waiting()
    assert bench.handle(EndFound(3)) == [ReadRange(0, 3)]
    bench.handle(CallFailed(READ, LOST))
    assert bench.handle(Checked(3, -1)) == [Control.UNFOLLOW, Follow(bookie("B"), 0)]


def test_an_entry_below_a_true_lac_is_lost() -> None:
    """One of a closed ledger ends it as well; another error says nothing about the LAC."""
    bench = waiting()
    bench.push(lac=0)
    assert bench.handle(CallFailed(READ, LOST)) == [CheckLac(OPEN.last_ensemble, -1, 0)]
    assert bench.handle(Checked(0, 0)) == [Fail(LOST)]
    assert bench.state is FollowState.ENDED
    bench = Bench(closed_at(0))
    bench.handle(WANTED)
    assert bench.handle(CallFailed(READ, LOST)) == [Fail(LOST)]
    bench = waiting()
    bench.push(lac=0)
    refused = ConfigurationError("no such entry")
    assert bench.handle(CallFailed(READ, refused)) == [Fail(refused)]


def test_a_ledger_that_is_closed_while_its_lac_is_checked_is_read_again() -> None:
    """Its end says which entries there are."""
    for confirmed in (-1, 9):
        bench = waiting()
        bench.push(lac=9)
        bench.handle(CallFailed(READ, LOST))
        assert bench.handle(MetadataRead(closed_at(0))) == [Control.UNFOLLOW]
        assert bench.handle(Checked(9, confirmed)) == [ReadRange(0, 0)]


def test_an_error_waits_for_a_caller_that_works() -> None:
    """It ends everything else at once."""
    assert waiting().handle(Broke(GONE)) == [Fail(GONE)]
    bench = waiting()
    bench.push(0, lac=0)
    bench.handle(Refused(entries(0)))
    assert bench.handle(Broke(GONE)) == []
    assert bench.handle(WANTED) == [Fail(GONE)]
    bench = waiting()
    bench.push(lac=0)
    bench.handle(CallFailed(READ, LOST))
    assert bench.handle(Broke(GONE)) == [Fail(GONE)]


@pytest.mark.parametrize("state", FollowState)
def test_every_state_says_when_it_is_left(state: FollowState) -> None:
    """ENDED never is."""
    assert bool(TRANSITIONS.causes[state]) == (state is not FollowState.ENDED)
