"""Goal: recovery loses no acknowledged entry.  Method: bookies of any knowledge, in any order."""

from __future__ import annotations

import itertools
import random

from dlcore.base.errors import (
    BookieUnavailableError,
)
from dlcore.ledger.recovering.recovery import (
    AbortRecovery,
    Effect,
    FenceBookie,
    Fenced,
    FenceFailed,
    Found,
    LengthRead,
    Missing,
    ReadEntry,
    ReadLength,
    StartWriteBack,
    Unknown,
    WriteBack,
    WrittenBack,
)
from dlcore.ledger.writing.appender import StoreMetadata
from tests.fixtures.ledgers import entry_of, metadata_of, quorum_of
from tests.fixtures.lengths import for_each
from tests.fixtures.recovery_machine import begun

UNKNOWN = BookieUnavailableError("silent")


class RandomRecovery:
    """Some bookies are silent, the others hold what they hold; answers come in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        quorum = quorum_of(*rng.choice([(3, 3, 2), (5, 3, 2), (3, 3, 3), (3, 2, 1)]))
        size = quorum.ensemble_size
        ensemble = (0, "ABCDE"[:size])
        self.machine, self.first = begun(ensemble, quorum=quorum, ahead=rng.choice((1, 3, 16)))
        self.ensembles = metadata_of(ensemble, quorum=quorum).ensembles
        self.acked = -1
        self.holders: list[set[int]] = []
        for entry_id in range(rng.randint(0, 8)):
            positions = [(entry_id + i) % size for i in range(quorum.write_quorum_size)]
            holders = set(rng.sample(positions, rng.randint(0, len(positions))))
            self.holders.append(holders)
            if len(holders) >= quorum.ack_quorum_size and self.acked == entry_id - 1:
                self.acked = entry_id
        self.silent = set(rng.sample(range(size), rng.choice((0, 0, 1, 2))))
        self.requests: list[Effect] = []
        self.written = -1
        self.ends: list[int] = []
        self.aborts = 0

    def take(self, effects: list[Effect]) -> None:
        """Do what needs no bookie; queue the rest."""
        for effect in effects:
            match effect:
                case StartWriteBack(last_add_confirmed=lac):
                    self.written = lac
                case WriteBack(entry=entry):
                    assert entry.entry_id == self.written + 1
                    self.written += 1
                    self.requests.append(effect)
                case ReadLength(entry_id=entry_id):
                    self.take(self.machine.handle(LengthRead(entry_id + 1)))
                case StoreMetadata(metadata):
                    self.ends.append(metadata.last_entry_id)
                case AbortRecovery():
                    self.aborts += 1
                case _:
                    self.requests.append(effect)

    def answer(self) -> list[Effect]:
        """Let one of the requests be answered."""
        effect = self.requests.pop(self.rng.randrange(len(self.requests)))
        match effect:
            case FenceBookie(position=position):
                return self.answer_fence(position)
            case ReadEntry(entry_id=entry_id, position=position):
                return self.answer_read(entry_id, position)
            case _:
                # Confirmations come in order, whatever arrives first.
                waiting = [e.entry.entry_id for e in self.requests if isinstance(e, WriteBack)]
                last = min(waiting, default=self.written + 1) - 1
                assert isinstance(effect, WriteBack)
                if last < effect.entry.entry_id:
                    self.requests.append(effect)
                    return []
                return self.machine.handle(WrittenBack(last, self.ensembles))

    def answer_fence(self, position: int) -> list[Effect]:
        """Answer with any LAC that the writer may have sent."""
        if position in self.silent:
            return self.machine.handle(FenceFailed(position, UNKNOWN))
        lac = self.rng.randint(-1, self.acked)
        return self.machine.handle(Fenced(position, lac))

    def answer_read(self, entry_id: int, position: int) -> list[Effect]:
        """Answer truthfully, or not at all."""
        if position in self.silent:
            return self.machine.handle(Unknown(entry_id, position, UNKNOWN))
        if entry_id < len(self.holders) and position in self.holders[entry_id]:
            return self.machine.handle(Found(entry_of(entry_id), position))
        return self.machine.handle(Missing(entry_id, position))


@for_each(range(200))
def test_random_answers_lose_nothing_and_invent_nothing(seed: int) -> None:
    """Entries of Qa bookies are kept, entries of none are not made, and every run ends."""
    run = RandomRecovery(seed)
    run.take(run.first)
    while run.requests:
        run.take(run.answer())
    assert len(run.ends) + run.aborts == 1
    for end in run.ends:
        assert run.acked <= end
        assert run.written == end
        assert all(run.holders[entry_id] for entry_id in range(end + 1))
    if not run.silent:
        held = list(itertools.takewhile(bool, run.holders))
        # Where one no is enough, one bookie that lacks the entry may end it earlier.
        assert run.ends[0] <= len(held) - 1
