"""The division of entries into runs: small entries are joined, and each run is one message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlcore.base.ids import DLSN
from dlcore.proxy.reading.ring import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dlcore.log.reading.rows import EntryRows, StoredRows
    from dlcore.proxy.reading.rows import View

RUN_BYTES = 256 * 1024
"""Size up to which entries are joined for a ring."""
CUT_FACTOR = 2
"""An entry is cut if it would make a message larger than its size by this factor.  By gRPC's
default clients accept 4 MiB."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Consecutive records of a log: entries, or a part of an entry."""

    start: DLSN
    end: DLSN
    firsts: tuple[tuple[DLSN, int], ...]
    rows: Sequence[StoredRows]
    size_bytes: int

    @classmethod
    def of(cls, rows: Sequence[StoredRows], end: DLSN, size_bytes: int) -> Fetched:
        """Return the rows of entries; `end` is the position behind them."""
        firsts = tuple((each.position, int(each.batch.num_rows)) for each in rows)
        return cls(firsts[0][0], end, firsts, rows, size_bytes)

    def followed_by(self, later: Fetched) -> Fetched:
        """Return the records of both, joined."""
        return Fetched(
            self.start,
            later.end,
            (*self.firsts, *later.firsts),
            (*self.rows, *later.rows),
            self.size_bytes + later.size_bytes,
        )

    def run(self, view: View, *, came_s: float = 0.0) -> Run:
        """Return a run with the columns of a view, whose first records came at a time."""
        data = view.message(self.rows, self.end)
        return Run(self.start, self.end, self.firsts, data, len(data), came_s)

    def part(self, view: View, end: DLSN) -> Any | None:
        """Return a message with the records before `end`; None if there are none."""
        if end >= self.end:
            return view.message(self.rows, self.end)
        left = Run(self.start, self.end, self.firsts, None, 0).rows_before(end)
        wanted = []
        for rows in self.rows:
            if left > 0:
                wanted.append(rows.slice(0, left))
            left -= rows.batch.num_rows
        return view.message(wanted, end) if wanted else None


def fetched(
    taken: Iterable[EntryRows], *, row_bytes: int, sizes: Iterator[int]
) -> Iterator[Fetched]:
    """Yield the entries of a reader's rows, with small entries joined and large ones cut.

    `sizes` has the wanted bytes of each message.  Rows count with their bytes in memory, because
    entries may be compressed and messages are not, and with `row_bytes` each beside these.
    """
    together: list[StoredRows] = []
    end, size_bytes, bytes_max = DLSN.INITIAL, 0, 0
    for entry in taken:
        rest = entry.take_stored()
        count = rest.batch.num_rows
        rest_bytes = int(rest.batch.get_total_buffer_size()) + count * row_bytes
        while count:
            if not together:
                bytes_max = next(sizes)
            # Computed anew for each part, since the wanted size changes from message to message.
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
