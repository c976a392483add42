"""Invariants of redactions: what readers of the log get, and what is in files.

Rows are known by their payloads, and where they are by what readers were given first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dlcore.base.ids import DLSN
from tests.simulation.life_checkers import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.simulation.cold_store import ColdStore
    from tests.simulation.processes import SimBookie

GONE = "R1 RedactedRowsAreGone"
OTHERS = "R2 OnlyRedactedRowsChange"
REDACTION_INVARIANTS = (GONE, OTHERS)

PERSON = "person"
PAYLOAD = "payload"


class _Place(NamedTuple):
    """Where a row is, and what beside its columns stays."""

    dlsn: DLSN
    sequence_id: int
    txid: int
    time: object


class RedactionCheckers:
    """Records what was written about whom, and judges redactions."""

    def __init__(self) -> None:
        self._persons: dict[bytes, int] = {}  # by payload
        self._acknowledged: dict[bytes, DLSN] = {}
        self._places: dict[bytes, _Place] = {}
        self._rows: dict[DLSN, bytes] = {}
        self._begun: set[int] = set()
        self.purged: frozenset[bytes] = frozenset()
        """The rows that are called gone."""
        self.cold: ColdStore | None = None

    def on_write(self, payload: bytes, person: int) -> None:
        """A client is going to write a row."""
        self._persons[payload] = person

    def on_acknowledged(self, payload: bytes, dlsn: DLSN) -> None:
        """A client learned that a row is at this position."""
        self._acknowledged[payload] = dlsn
        known = self._rows.get(dlsn, payload)
        require(
            OTHERS,
            holds=known == payload,
            message=f"{payload!r} is reported at {dlsn}: {known!r}",
        )

    def on_begin(self, person: int) -> frozenset[bytes]:
        """A client begins to redact; return the rows that must be gone when that has ended."""
        self._begun.add(person)
        return frozenset(each for each in self._places if self._persons[each] == person)

    def on_purged(self, owed: Iterable[bytes], bookies: Sequence[SimBookie]) -> None:
        """R1: a client learned that no file has the rows any more."""
        self.purged |= frozenset(owed)
        self._require_gone(bookies)

    def _require_gone(self, bookies: Sequence[SimBookie]) -> None:
        for where, data in self._files(bookies):
            found = [each for each in self.purged if each in data]
            require(GONE, holds=not found, message=f"{where} has {found[:3]}, which is called gone")

    def _files(self, bookies: Sequence[SimBookie]) -> Iterator[tuple[str, bytes]]:
        """Yield what files have, what objects should have, and what tables tell of them.

        Some objects are torn, or another's.
        """
        for bookie in bookies:
            for name, data in bookie.disk.folder.contents():
                yield f"{bookie.name}: {name}", data
        for url, stored in () if self.cold is None else self.cold.objects.items():
            table = pq.read_table(pa.BufferReader(stored.sent))
            if PAYLOAD in table.column_names:
                rows = table[PAYLOAD].to_pylist()
                yield url, b"".join(each or b"" for each in rows)
        if self.cold is not None and self.cold.catalog is not None:
            yield from self.cold.catalog.contents()

    def new_reading(self) -> PrivateReading:
        """Begin to judge a reader that reads from the log's start."""
        return PrivateReading(self)

    def check_row(self, payload: bytes | None, person: int | None, place: _Place) -> None:
        """R2: a row is where it was; its columns are as written, or null if it is redacted."""
        known = self._rows.get(place.dlsn, payload)
        if payload is None:
            require(
                OTHERS,
                holds=person is None and (known is None or self._persons[known] in self._begun),
                message=f"{known!r} at {place} is null, and no client redacts it",
            )
        else:
            require(
                OTHERS,
                holds=self._persons.get(payload) == person and known == payload,
                message=f"{payload!r} of {person} is at {place}, where {known!r} was",
            )
        if known is not None:
            self._rows[place.dlsn] = known
            before = self._places.setdefault(known, place)
            require(OTHERS, holds=before == place, message=f"{known!r} is at {before} and {place}")

    def check_whole(self, count: int, bookies: Sequence[SimBookie]) -> None:
        """R1, R2: all that was acknowledged is there, or was redacted; no file has more."""
        missing = self._acknowledged.items() - {(each, p.dlsn) for each, p in self._places.items()}
        lost = [each for each in missing if self._persons[each[0]] not in self._begun]
        require(OTHERS, holds=not lost, message=f"{lost[:3]} of {count} rows are not there")
        self._require_gone(bookies)


class PrivateReading:
    """The records of one reader from the log's start on; it may read ahead before a redaction."""

    def __init__(self, checkers: RedactionCheckers) -> None:
        self._checkers = checkers
        self._purged = checkers.purged
        self.count = 0

    def on_batch(self, batch: pa.RecordBatch) -> None:
        """Take the next rows, whose sequence ids are dense."""
        for row in batch.to_pylist():
            require(
                OTHERS,
                holds=row["_sequence_id"] == self.count,
                message=f"sequence id {row['_sequence_id']} comes where {self.count} should",
            )
            self.count += 1
            place = _Place(
                DLSN(*row["_dlsn"].values()), row["_sequence_id"], row["_txid"], row["_timestamp"]
            )
            require(
                GONE,
                holds=row[PAYLOAD] not in self._purged,
                message=f"{row[PAYLOAD]!r} at {place} is read, and was called gone before",
            )
            self._checkers.check_row(row[PAYLOAD], row[PERSON], place)
