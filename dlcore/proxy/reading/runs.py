"""From a reader's entries to runs: small ones go together, and each run becomes one message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.ids import DLSN
from dlcore.proxy.reading.ring import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dlcore.log.reading.rows import EntryRows, StoredRows
    from dlcore.proxy.reading.rows import RowView

RUN_BYTES = 256 * 1024
"""Entries that are kept are put together up to so much."""
PART_BYTES = 1792 * 1024
"""Likewise those that are sent to one reader: three entries of the size that writers give them, as
half of a chunk is, and little more.  A message costs some tenth of a millisecond beside its bytes.
"""
CUT_FACTOR = 2
"""An entry that would make a message so many times larger is cut.  Most clients take 4 MiB, by
gRPC's default."""
_ROW_BYTES = 64
"""What a row takes in a message beside its own columns and the log's name."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records of a log that follow each other, in order: entries, or a part of one."""

    start: DLSN
    end: DLSN
    firsts: tuple[tuple[DLSN, int], ...]
    rows: Sequence[StoredRows]
    size_bytes: int

    @classmethod
    def of(cls, rows: Sequence[StoredRows], end: DLSN, size_bytes: int) -> Fetched:
        """Take what entries hold, up to `end`."""
        firsts = tuple((each.position, int(each.batch.num_rows)) for each in rows)
        return cls(firsts[0][0], end, firsts, rows, size_bytes)

    def followed_by(self, later: Fetched) -> Fetched:
        """Return both together."""
        return Fetched(
            self.start,
            later.end,
            (*self.firsts, *later.firsts),
            (*self.rows, *later.rows),
            self.size_bytes + later.size_bytes,
        )

    def run(self, view: RowView) -> Run:
        """Return it with the columns of a view."""
        data = view.message(self.rows, self.end)
        return Run(self.start, self.end, self.firsts, data, len(data))

    def part(self, view: RowView, end: DLSN) -> bytes | None:
        """Return a message with what lies before `end`; None if that is nothing."""
        if end >= self.end:
            return view.message(self.rows, self.end)
        left = Run(self.start, self.end, self.firsts, None, 0).rows_before(end)
        wanted = []
        for rows in self.rows:
            if left > 0:
                wanted.append(rows.slice(0, left))
            left -= rows.batch.num_rows
        return view.message(wanted, end) if wanted else None


def fetched(taken: Iterable[EntryRows], *, log: str, bytes_max: int) -> Iterator[Fetched]:
    """Yield entries that were taken from a reader of a log, those that are small together."""
    together: list[StoredRows] = []
    end, size_bytes = DLSN.INITIAL, 0
    row_bytes = _ROW_BYTES + len(log.encode())
    for entry in taken:
        for rows, rows_end, rows_bytes in _cut(entry, row_bytes, CUT_FACTOR * bytes_max):
            if together and size_bytes + rows_bytes > bytes_max:
                yield Fetched.of(together, end, size_bytes)
                together, size_bytes = [], 0
            together.append(rows)
            end = rows_end
            size_bytes += rows_bytes
    if together:
        yield Fetched.of(together, end, size_bytes)


def _cut(
    entry: EntryRows, row_bytes: int, bytes_max: int
) -> Iterator[tuple[StoredRows, DLSN, int]]:
    """Yield the rows of an entry, where they end, and about how many bytes a message has of them.

    They are as they are in memory: entries may be compressed, which messages are not.
    """
    rows = entry.take_stored()
    count = rows.batch.num_rows
    size_bytes = int(rows.batch.get_total_buffer_size()) + count * row_bytes
    part_count = -(-size_bytes // bytes_max)
    step = -(-count // min(part_count, count))
    for first in range(0, count, step):
        part = rows.slice(first, step)
        is_last = first + step >= count
        end = entry.place.end if is_last else rows.slice(first + step, 0).position
        yield part, end, size_bytes // part_count
