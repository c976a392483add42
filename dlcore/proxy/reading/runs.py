"""From a reader's entries to runs: small ones go together, and each run becomes one message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
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


def fetched(taken: Iterable[EntryRows], *, log: str, sizes: Iterator[int]) -> Iterator[Fetched]:
    """Yield entries that were taken from a reader of a log, those that are small together.

    `sizes` says how many bytes each message shall have.  Its rows count as they are in memory:
    entries may be compressed, which messages are not.
    """
    together: list[StoredRows] = []
    end, size_bytes, bytes_max = DLSN.INITIAL, 0, 0
    row_bytes = _ROW_BYTES + len(log.encode())
    for entry in taken:
        rest = entry.take_stored()
        count = rest.batch.num_rows
        rest_bytes = int(rest.batch.get_total_buffer_size()) + count * row_bytes
        while count:
            if not together:
                bytes_max = next(sizes)
            part_count = min(-(-rest_bytes // (CUT_FACTOR * bytes_max)), count)
            part_bytes = rest_bytes // part_count
            if together and size_bytes + part_bytes > bytes_max:
                yield Fetched.of(together, end, size_bytes)
                together, size_bytes = [], 0
                continue
            part, part_rows = rest, -(-count // part_count)
            if part_count > 1:
                part, rest = rest.slice(0, part_rows), rest.slice(part_rows, count)
            together.append(part)
            count -= part_rows
            end = rest.position if count else entry.place.end
            size_bytes += part_bytes
            rest_bytes -= part_bytes
    if together:
        yield Fetched.of(together, end, size_bytes)
