"""Ledger metadata as the checkers read it: a second and simple implementation of what is promised.

Nothing here is the product's: bytes are read by the places of their fields, and quorums are counted
as they are defined, so that an error of the product in either is one that checkers see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

from msgspec.msgpack import decode as unpackb

from dlcore.base.ids import BookieId

if TYPE_CHECKING:
    from collections.abc import Collection

OPEN, IN_RECOVERY, CLOSED = STATES = ("OPEN", "IN_RECOVERY", "CLOSED")


@dataclass(frozen=True, slots=True)
class StoredEnsemble:
    """The bookies of the entries from `first_entry_id` on."""

    first_entry_id: int
    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLedger:
    """The value of one ledger in the metadata store."""

    ledger_id: int
    ensemble_size: int
    write_quorum_size: int
    ack_quorum_size: int
    state: str
    ensembles: tuple[StoredEnsemble, ...]
    last_entry_id: int
    length_bytes: int
    wanted_copies: int
    """How many bookies are to store each entry."""
    is_cold: bool = False
    objects: tuple[str, ...] = ()
    """The URLs of a cold ledger's objects."""

    @property
    def end(self) -> tuple[int, int]:
        """Last entry and length."""
        return self.last_entry_id, self.length_bytes

    @property
    def is_open(self) -> bool:
        """Whether its writer may add to it."""
        return self.state == OPEN

    def bookies_of(self, entry_id: int) -> tuple[BookieId, ...]:
        """Return the ensemble of an entry: the last one that starts at it or before."""
        return [each.bookies for each in self.ensembles if each.first_entry_id <= entry_id][-1]

    def positions_of(self, entry_id: int) -> list[int]:
        """Return where in its ensemble an entry is stored: Qw places, round-robin."""
        size = self.ensemble_size
        return [p for p in range(size) if (p - entry_id) % size < self.write_quorum_size]

    def members_of(self, entry_id: int) -> list[BookieId]:
        """Return the bookies that store an entry."""
        bookies = self.bookies_of(entry_id)
        return [bookies[position] for position in self.positions_of(entry_id)]

    def is_fenced_by(self, bookies: Collection[BookieId]) -> bool:
        """Return whether no entry of the last ensemble can get an ack quorum without `bookies`."""
        last = self.ensembles[-1].bookies
        quorums = [
            quorum
            for entry_id in range(self.ensemble_size)
            for quorum in combinations(self.positions_of(entry_id), self.ack_quorum_size)
        ]
        return all(any(last[position] in bookies for position in quorum) for quorum in quorums)


@lru_cache(maxsize=1024)
def read_ledger(value: bytes) -> StoredLedger:
    """Read the value of a ledger's node."""
    layout, ledger_id, sizes, state, ensembles, _, _, *others = unpackb(value)
    last_entry_id, length_bytes, _, wanted, folder, objects = others
    assert layout == (3 if folder else 2), "a cold ledger has a layout of its own"
    ensemble_size, write_quorum_size, ack_quorum_size = sizes
    return StoredLedger(
        ledger_id=ledger_id,
        ensemble_size=ensemble_size,
        write_quorum_size=write_quorum_size,
        ack_quorum_size=ack_quorum_size,
        state=STATES[state - 1],
        ensembles=tuple(
            StoredEnsemble(first_entry_id, tuple(BookieId(*bookie) for bookie in bookies))
            for first_entry_id, bookies in ensembles
        ),
        last_entry_id=last_entry_id,
        length_bytes=length_bytes,
        wanted_copies=max((wanted or sizes)[1], write_quorum_size),
        is_cold=bool(folder),
        objects=tuple(f"{folder}/{name}" for _, _, name, *_ in objects),
    )
