"""Goal: a follower of a ledger gets each entry once and in order, whatever happens.

Method: seeded chance, with bookies that lose, forge and fail.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from dlcore.base.errors import LedgerReadError, MetadataConnectionError
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.reading.follow import (
    AskMembers,
    Call,
    CallFailed,
    Checked,
    CheckLac,
    Control,
    Effect,
    EndFound,
    EndRead,
    Event,
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
    Tick,
    TickAt,
)
from dlcore.wire.port import HeldEntries
from tests.fixtures.ledgers import bookie, entry_of, frame_of, metadata_of, quorum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.wire.frames import EntryFrame

LOST = LedgerReadError("no replica")
AWAY = MetadataConnectionError("no connection")


class World:
    """Bookies and a caller by chance: updates, reads, failures and lies, up to a closed ledger."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.machine = LedgerFollow(
            metadata_of((0, "ABCD"), quorum=quorum_of(4, 2, 2)), first=self.rng.randrange(4), now=0
        )
        self.now = 0.0
        self.lac = self.proven = -1
        self.is_open = True
        self.liar = bookie(self.rng.choice("ABCD"))
        self.followed: Follow | None = None
        self.listens = False
        self.range: ReadRange | None = None
        self.pending: list[Event] = []  # answers on their way, in any order
        self.got: list[int] = []
        self.is_over = False
        self.seen: set[FollowState] = set()

    def handle(self, event: Event) -> None:
        """Feed an event, and perform its effects."""
        effects = self.machine.handle(event)
        self.machine.validate()
        self.seen.add(self.machine.state)
        for effect in effects:
            self.perform(effect)

    def metadata(self) -> LedgerMetadata:
        """Return what the store holds."""
        state = LedgerState.OPEN if self.is_open else LedgerState.CLOSED
        last = -1 if self.is_open else self.lac
        quorum = quorum_of(4, 2, 2)
        return metadata_of((0, "ABCD"), quorum=quorum, state=state, last_entry_id=last)

    def perform(self, effect: Effect) -> None:  # noqa: C901 - one case for each kind
        """Take note, or answer later."""
        match effect:
            case Offer(offered):
                count = self.rng.randint(0, len(offered))
                self.take(offered[:count])
                if count < len(offered):
                    self.handle(Refused(offered[count:]))
                else:
                    self.listens = True
            case FollowStep(handed_out, _, closed):
                self.take(handed_out)
                self.is_over = closed
            case Follow():
                self.followed, self.listens = effect, True
            case Control.LISTEN:
                self.listens = True
            case Control.UNFOLLOW:
                self.followed = None
            case ReadRange():
                self.range = effect
                self.read()
            case Control.READ_ON:
                if self.range is not None:
                    self.read()
            case Call.READ_METADATA:
                self.pending.append(self.or_not(MetadataRead(self.metadata()), effect))
            case Call.READ_END:
                self.pending.append(self.or_not(EndRead(self.lac, self.metadata()), effect))
            case AskMembers(asked_bookies):
                lie = (self.liar, HeldEntries(self.lac + 5, 1000, ()))
                truth = [(each, HeldEntries(-1, 1000, ((0, self.lac),))) for each in asked_bookies]
                self.pending.append(MembersAnswered(self.rng.choice([[lie, *truth], truth])))
            case CheckLac(_, vouched, claimed):
                self.pending.append(Checked(claimed, max(vouched, min(claimed, self.proven))))
            case TickAt(at_s):
                self.now = max(self.now, at_s)
                self.pending.append(Tick(self.now))
            case Pause():
                self.pending.append(Signal.PAUSE_OVER)
            case _:
                raise AssertionError(effect)

    def or_not(self, answer: Event, call: Call) -> Event:
        """Return the answer, mostly."""
        return CallFailed(call, AWAY) if self.rng.random() < 0.3 else answer

    def take(self, taken: Sequence[EntryFrame]) -> None:
        """Note what the caller gets."""
        self.got += [each.entry_id for each in taken]

    def read(self) -> None:
        """Read a few of the range's entries, as far as there are any."""
        assert self.range is not None
        first, last = self.range.first, min(self.range.last, self.lac)
        if first > last:
            self.proven = self.lac  # what is confirmed later may be there, and is not missed
            self.pending.append(CallFailed(self.range, LOST))
            return
        last = self.rng.randint(first, last)
        self.range = ReadRange(last + 1, self.range.last) if last < self.range.last else None
        self.pending.append(RangeRead([entry_of(each) for each in range(first, last + 1)]))

    def push(self) -> None:
        """Let the followed bookie push what it holds, which is not all."""
        assert self.followed is not None
        first = self.machine._coming.first
        held = [each for each in range(first, self.lac + 1) if self.rng.random() < 0.7]
        is_lie = self.followed.bookie == self.liar and self.rng.random() < 0.5
        lac = self.lac + 3 if is_lie else self.lac
        self.listens = False
        fenced = not self.is_open and self.rng.random() < 0.5
        self.handle(Pushed([frame_of(each) for each in held], lac, fenced, self.now))

    def turn(self) -> None:
        """Let one thing happen."""
        choices = [self.grow, self.change]
        if self.machine.state is FollowState.IDLE:
            choices += [lambda: self.handle(Signal.STEP_WANTED)] * 3
        if self.followed is not None and self.listens:
            choices += [self.push] * 3 + [self.fail]
        if self.pending:
            choices += [self.answer] * 3
        self.rng.choice(choices)()

    def grow(self) -> None:
        """Let entries be confirmed."""
        if self.is_open and self.lac < 30:
            self.lac += self.rng.randint(0, 3)

    def change(self) -> None:
        """Let the ledger be closed, in the end, and the machine hear of it, or of the LAC."""
        if self.lac >= 30 and self.rng.random() < 0.1:
            self.is_open = False
        news: list[Event] = [Signal.METADATA_CHANGED, EndFound(self.lac)]
        self.handle(self.rng.choice(news))

    def fail(self) -> None:
        """Let the followed bookie fail."""
        self.followed = None
        self.handle(Signal.STREAM_ENDED)

    def answer(self) -> None:
        """Let an answer arrive."""
        self.handle(self.pending.pop(self.rng.randrange(len(self.pending))))


def test_every_entry_comes_once_whatever_happens() -> None:
    """In order, and the last step comes, in 300 histories that see every state."""
    seen: set[FollowState] = set()
    for seed in range(300):
        world = World(seed)
        first = world.machine._coming.first
        world.handle(Tick(0.0))
        turns = 0
        while not world.is_over:
            world.turn()
            turns += 1
            assert turns < 20_000, seed
        assert world.got == list(range(first, world.lac + 1)), seed
        seen |= world.seen
    assert seen == set(FollowState)
