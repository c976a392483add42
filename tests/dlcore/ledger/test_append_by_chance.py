"""Goal: the append machine keeps its promises whatever the order of events.

Method: seeded chance decides what happens next; a record of its own judges each acknowledgement.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from dlcore.base.errors import (
    BookieOverloadedError,
    DLError,
    EntryTooLargeError,
    LedgerFencedError,
    MetadataConnectionError,
    MetadataError,
    MetadataVersionError,
)
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ledger.placing.placement import Topology
from dlcore.ledger.writing.appender import (
    TRANSITIONS,
    AddFailed,
    AddSucceeded,
    After,
    Append,
    AppenderState,
    BookiesListed,
    Call,
    CallFailed,
    CloseEnded,
    CompleteAdds,
    Effect,
    Event,
    Fail,
    FailAdds,
    GoOnWithout,
    LacAccepted,
    LacFailed,
    LedgerClosed,
    MetadataRead,
    MetadataStored,
    NoteFailure,
    SendAdd,
    SendLac,
    Signal,
    StoreMetadata,
)
from tests.fixtures.append_bench import (
    UNAVAILABLE,
    GivenChoice,
    appender_of,
)
from tests.fixtures.ledgers import bookie, bookies, metadata_of, quorum_of
from tests.fixtures.lengths import for_each

METADATA_ERRORS = (*(MetadataConnectionError,) * 4, MetadataVersionError, MetadataError)


class RandomRun:
    """Answers in random order; its own record of each bookie's entries judges every ack."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        quorum = quorum_of(
            *self.rng.choice([(3, 3, 2), (5, 3, 2), (4, 2, 2), (3, 3, 3), (2, 2, 1)])
        )
        self.names = "ABCDEFGH"[: quorum.ensemble_size + self.rng.choice((0, 1, 3))]
        self.search = GivenChoice()
        self.machine = appender_of(
            metadata_of((0, self.names[: quorum.ensemble_size]), quorum=quorum), self.search
        )
        self.stored: dict[int, set[str]] = {}
        self.sent: list[tuple[int, int, str]] = []
        self.todo: list[Event | Effect] = []
        self.confirmed = -1
        self.now = 0.0
        self.closes_left = 2

    def step(self) -> Event | None:
        """Return one thing that happens."""
        self.now += self.rng.random()
        choice = self.rng.random()
        machine = self.machine
        if choice < 0.3 and not machine.is_closing and machine.error is None:
            return Append([b"x"])
        if choice < 0.8 and self.sent:
            return self.answer(*self.sent.pop(self.rng.randrange(len(self.sent))))
        if choice > 0.98 and self.closes_left:
            self.closes_left -= 1
            return self.rng.choice([Signal.CLOSE, Signal.PREPARE_CLOSE])
        is_prepared = machine.state in (AppenderState.SEALED, AppenderState.FAILED)
        if choice > 0.975 and machine.window.is_idle and is_prepared:
            return LedgerClosed(machine.window.closed(machine.metadata))
        if choice > 0.97:
            return Fail(DLError("enough")) if self.rng.random() < 0.1 else Signal.TELL_LAC
        return self.do(self.todo.pop(0)) if self.todo else None

    def answer(self, entry_id: int, position: int, name: str) -> Event:
        """Let a bookie answer an add."""
        luck = self.rng.random()
        if luck < 0.85:
            self.stored.setdefault(entry_id, set()).add(name)
            return AddSucceeded(entry_id, position, bookie(name))
        error = self.rng.choice([UNAVAILABLE, UNAVAILABLE, BookieOverloadedError("later")])
        if luck > 0.999:
            error = self.rng.choice([LedgerFencedError("fenced"), EntryTooLargeError("large")])
        return AddFailed(entry_id, position, bookie(name), error, self.now)

    def do(self, due: Event | Effect) -> Event:
        """Return the answer to what the machine asked for."""
        if self.rng.random() < 0.1 and isinstance(due, Call | StoreMetadata):
            error = self.rng.choice(METADATA_ERRORS)
            return CallFailed(due, error("no"), self.now)
        machine = self.machine
        match due:
            case Call.LIST_BOOKIES:
                self.search.may_wait = self.rng.random() < 0.8
                self.search.pause_s = self.rng.choice((0.0, 0.1))
                names = [each for each in self.names if self.rng.random() < 0.9]
                self.search.readmitted = bookies("".join(names)) if self.rng.random() < 0.3 else ()
                return BookiesListed(bookies("".join(names)), Topology(), self.now)
            case StoreMetadata(metadata):
                return MetadataStored(metadata, machine.version + 1)
            case Call.READ_METADATA:
                taken = replace(machine.metadata, state=LedgerState.IN_RECOVERY)
                metadata = taken if self.rng.random() < 0.05 else machine.metadata
                return MetadataRead(metadata, machine.version)
            case Call.RECOVER_LEDGER:
                return LedgerClosed(machine.window.closed(machine.metadata))
            case SendLac(target, lac):
                if self.rng.random() < 0.9:
                    return LacAccepted(target, lac)
                return LacFailed(target, UNAVAILABLE)
            case After(_, event):
                return event
            case GoOnWithout():
                return Signal.RETRY_DUE
        assert not isinstance(due, NoteFailure | CloseEnded | SendAdd | CompleteAdds | FailAdds)
        return due

    def take(self, effect: Effect) -> None:
        """Record an effect, and judge it if it is an ack."""
        match effect:
            case SendAdd():
                self.sent += [(effect.entry_id, p, each.name) for p, each in effect.targets]
            case CompleteAdds():
                assert effect.first_entry_id == self.confirmed + 1
                self.confirmed = effect.last_entry_id
                for entry_id in range(effect.first_entry_id, self.confirmed + 1):
                    self.judge(entry_id)
                self.todo.append(Signal.CALLERS_ANSWERED)
            case FailAdds() | CloseEnded() | NoteFailure():
                pass
            case _:
                self.todo.append(effect)

    def judge(self, entry_id: int) -> None:
        """Qa members of the entry's stored ensemble hold it."""
        members = {each.name for each in self.machine.metadata.ensemble_of(entry_id).bookies}
        holders = self.stored[entry_id] & members
        assert len(holders) >= self.machine.metadata.quorum.ack_quorum_size

    def run(self, steps: int) -> set[tuple[AppenderState, AppenderState]]:
        """Let that many things happen; return the transitions between states."""
        seen = set()
        become = self.machine._become

        def note(state: AppenderState) -> None:
            seen.add((self.machine.state, state))
            become(state)

        self.machine._become = note  # type: ignore[method-assign]
        for _ in range(steps):
            event = self.step()
            if event is not None:
                for effect in self.machine.handle(event):
                    self.take(effect)
                self.machine.validate()
        return seen


@for_each(range(150))
def test_random_answers_keep_the_promises(seed: int) -> None:
    """Whatever the order of answers, failures, changes and closes."""
    run = RandomRun(seed)
    run.run(400)
    assert run.confirmed == run.machine.window.last_add_confirmed


def test_every_transition_of_the_table_happens() -> None:
    """One that never does would be a line of the diagram that means nothing."""
    seen = {each for seed in range(400) for each in RandomRun(seed).run(400)}
    table = TRANSITIONS.causes.items()
    assert seen == {(before, after) for before, afters in table for after in afters}
