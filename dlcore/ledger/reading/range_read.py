"""Reads a range of entries from the replicas of a write set: which to ask, and when it failed.

Theory of operation.  A range of one ensemble is read in *lanes*: entries with the same write set.
If every bookie has every entry (E = Qw), that is one lane.  If entries are striped, there are E
lanes, each with every E-th entry.  A lane has one open stream at a time, which starts at the next
needed entry.  A stream that fails, ends early or sends damaged bytes is replaced by one from
another replica, at the first entry still needed.  If a stream is silent, a second one is opened
beside it, and the one that delivers first stays.  The lane fails only when every replica has failed
for the same entry; the error names the answer of each.

A failure counts against a replica only for the entry that it was about.

The driver (`range_read_driver.py`) opens streams, verifies frames and measures silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.errors import BookieStorageError, DigestMismatchError, DLError, LedgerReadError
from dlcore.ledger.metadata.quorum import write_set

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble
    from dlcore.wire.digest import EntryFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStream:
    """Effect: read from `bookie`, starting with `first_entry_id`."""

    bookie: BookieId
    first_entry_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStream:
    """Effect: nothing more is needed of `bookie`'s stream."""

    bookie: BookieId


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Effect: these entries come next."""

    entries: Sequence[EntryFrame]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRead:
    """Effect: no replica could give the next entry."""

    error: LedgerReadError


Effect: TypeAlias = OpenStream | CloseStream | Deliver | FailRead


class ReadLane:
    """Entries `first_entry_id`, + `stride`, … up to `last_entry_id` from the given replicas."""

    def __init__(
        self,
        *,
        ledger_id: int,
        replicas: Sequence[BookieId],
        first_entry_id: int,
        last_entry_id: int,
        stride: int,
    ) -> None:
        assert replicas
        assert stride >= 1
        self.next_entry_id = first_entry_id
        self.last_entry_id = last_entry_id
        self.stride = stride
        self._ledger_id = ledger_id
        self._order = list(replicas)  # the order to ask in; one that fails goes to the end
        self._open: set[BookieId] = set()
        self._answers: dict[BookieId, DLError] = {}  # failures for the next entry

    @property
    def is_done(self) -> bool:
        """Whether every entry was delivered."""
        return self.next_entry_id > self.last_entry_id

    def start(self) -> list[Effect]:
        """Open the first stream."""
        return [] if self.is_done else self._ask_another()

    def received(self, bookie: BookieId, entries: Sequence[EntryFrame]) -> list[Effect]:
        """Take verified entries of an open stream, in the stream's order."""
        if bookie not in self._open:
            return []
        fresh = [entry for entry in entries if entry.entry_id >= self.next_entry_id]
        if not fresh:
            return []
        assert fresh[0].entry_id == self.next_entry_id
        self.next_entry_id = fresh[-1].entry_id + self.stride
        self._answers.clear()
        keep = set() if self.is_done else {bookie}
        closed = [each for each in self._order if each in self._open - keep]
        self._open &= keep
        return [Deliver(entries=fresh), *(CloseStream(bookie=each) for each in closed)]

    def failed(self, bookie: BookieId, error: DLError) -> list[Effect]:
        """Take the end of an open stream before its last entry, whatever the reason."""
        if bookie not in self._open:
            return []
        self._open.discard(bookie)
        self._answers[bookie] = error
        self._order.remove(bookie)
        self._order.append(bookie)
        return self._ask_another() or self._give_up()

    def silent(self) -> list[Effect]:
        """Nothing came for a while: ask another replica too, if one is left."""
        return self._ask_another()

    def _ask_another(self) -> list[Effect]:
        for bookie in self._order:
            if bookie not in self._open and bookie not in self._answers:
                self._open.add(bookie)
                return [OpenStream(bookie=bookie, first_entry_id=self.next_entry_id)]
        return []

    def _give_up(self) -> list[Effect]:
        if self._open:
            return []  # one may still answer
        answers = "; ".join(
            f"{bookie}: {type(error).__name__}: {error}" for bookie, error in self._answers.items()
        )
        return [
            FailRead(
                error=LedgerReadError(
                    f"ledger {self._ledger_id}: no replica returned entry {self.next_entry_id}: "
                    f"{answers}",
                    is_damaged=all(
                        isinstance(error, DigestMismatchError | BookieStorageError)
                        for error in self._answers.values()
                    ),
                )
            )
        ]


def plan_lanes(
    *,
    ledger_id: int,
    ensemble: Ensemble,
    quorum: QuorumConfig,
    first_entry_id: int,
    last_entry_id: int,
    suspects: Collection[BookieId] = (),
) -> list[ReadLane]:
    """Return the lanes of a range within one ensemble: entry e is in lane (e - first) % count.

    Neighbouring ranges and ledgers start at different replicas, so that readers spread over them.
    Bookies that are `suspects` are asked last.
    """
    size = quorum.ensemble_size
    is_striped = size > quorum.write_quorum_size
    lane_count = min(size if is_striped else 1, last_entry_id - first_entry_id + 1)
    lanes = []
    for first in range(first_entry_id, first_entry_id + lane_count):
        positions = write_set(quorum, first)
        start = 0 if is_striped else ledger_id % len(positions)
        replicas = [ensemble.bookies[p] for p in (*positions[start:], *positions[:start])]
        replicas.sort(key=lambda bookie: bookie in suspects)  # stable: keeps the order of the rest
        lanes.append(
            ReadLane(
                ledger_id=ledger_id,
                replicas=replicas,
                first_entry_id=first,
                last_entry_id=last_entry_id,
                stride=size if is_striped else 1,
            )
        )
    return lanes
