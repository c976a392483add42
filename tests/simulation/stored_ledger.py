"""Ledger metadata as the checkers read it: a second and simple implementation of what is promised.

Nothing here is the product's: bytes are read by the numbers in `metadata.proto`, and quorums are
counted as they are defined, so that an error of the product in either is one that checkers see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

from dlcore.ids import BookieId

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

OPEN, IN_RECOVERY, CLOSED = STATES = ("OPEN", "IN_RECOVERY", "CLOSED")
_VARINT, _BYTES = 0, 2


@dataclass(frozen=True, slots=True)
class StoredEnsemble:
    """The bookies of the entries from `first_entry_id` on."""

    first_entry_id: int
    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLedger:
    """What the metadata store holds of one ledger."""

    ledger_id: int
    ensemble_size: int
    write_quorum_size: int
    ack_quorum_size: int
    state: str
    ensembles: tuple[StoredEnsemble, ...]
    last_entry_id: int
    length_bytes: int

    @property
    def end(self) -> tuple[int, int]:
        """Last entry and length."""
        return self.last_entry_id, self.length_bytes

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
    numbers = dict.fromkeys(range(2, 12), 0)
    ensembles = []
    for field, content in _fields(value):
        if field == 7:
            assert isinstance(content, bytes)
            ensembles.append(_read_ensemble(content))
        elif isinstance(content, int):
            numbers[field] = content
    return StoredLedger(
        ledger_id=numbers[2],
        ensemble_size=numbers[3],
        write_quorum_size=numbers[4],
        ack_quorum_size=numbers[5],
        state=STATES[numbers[6] - 1],
        ensembles=tuple(ensembles),
        last_entry_id=numbers[10],
        length_bytes=numbers[11],
    )


def _read_ensemble(value: bytes) -> StoredEnsemble:
    first_entry_id = 0
    bookies = []
    for field, content in _fields(value):
        if isinstance(content, int):
            assert field == 1
            first_entry_id = content
        else:
            texts = {number: bytes(text).decode() for number, text in _fields(content)}
            bookies.append(BookieId(texts[1], texts[2]))
    return StoredEnsemble(first_entry_id, tuple(bookies))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field of a protobuf message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        content, at = _varint(message, at)
        if key & 7 == _VARINT:
            yield key >> 3, content - (content >> 63 << 64)  # two's complement of 64 bits
        else:
            assert key & 7 == _BYTES
            yield key >> 3, message[at : at + content]
            at += content


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return number, at
