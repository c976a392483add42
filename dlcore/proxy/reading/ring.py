"""The ring buffer of a followed log's latest entries, for its readers.

Each followed log has a ring of runs.  A run has consecutive entries, framed once for the wire; all
readers share the same object.  A reader holds only the index of its next run.  All rings share one
budget of bytes; what they do not use of it keeps messages of older records
(`kept.py`).  Beyond the budget the oldest run of all rings is dropped.  A run that some reader
of its ring has not passed yet is first moved behind all others, at most five times.  A ring drops
only its first runs, so that it never has a gap.  A reader whose next run was dropped is `behind`:
it reads from bookies until it joins the ring again.  Therefore a stalled reader costs other readers
no more than an earlier turn to the bookies.

The last run may grow while no reader is past it.  Readers that are slower than their log therefore
find fewer and larger runs, and do not fall behind further.

Promise: a ring returns the appended records in their order, from the requested position on, and
never skips one.

A run is one message; small entries are joined to one (`fetched`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlcore.base.config import require
from dlcore.base.errors import UnexpectedError
from dlcore.base.ids import DLSN
from dlcore.proxy.reading.kept import KeptMessages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dlcore.log.reading.entry_rows import EntryRows, StoredRows
    from dlcore.proxy.reading.rows import View


SKIPS_MAX = 5
"""How often a run is kept for readers that have not passed it."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The consecutive records in [start, end), as they are sent.

    `firsts` has for each entry the position of its first record here, and the number of records.
    """

    start: DLSN
    end: DLSN
    firsts: tuple[tuple[DLSN, int], ...]
    data: Any
    size_bytes: int
    came_s: float = 0.0
    """When its first records came, as `steady_s` tells."""

    @property
    def row_count(self) -> int:
        """The number of records."""
        return sum(count for _, count in self.firsts)

    def rows_before(self, position: DLSN) -> int:
        """Return how many of the run's records lie before a position."""
        rows = 0
        for first, count in self.firsts:
            if (first.lssn, first.entry_id) < (position.lssn, position.entry_id):
                rows += count
            elif (first.lssn, first.entry_id) == (position.lssn, position.entry_id):
                rows += min(count, max(0, position.slot_id - first.slot_id))
        return rows


class RingBudget:
    """The bytes that all rings of a process may keep; what they leave is for older messages."""

    def __init__(self, bytes_max: int) -> None:
        require(
            condition=bytes_max > 0, key="bytes_max", value=bytes_max, rule="expected a number > 0"
        )
        self.bytes_max = bytes_max
        self.size_bytes = 0
        self.older = KeptMessages(bytes_max)
        self._kept: OrderedDict[tuple[Ring, int], int] = OrderedDict()
        """Each run in the order of removal, and how often it was kept for a reader."""

    def open_ring(self, position: DLSN) -> Ring:
        """Return the ring of a log that is followed from `position` on."""
        return Ring(self, position)

    def _keep(self, ring: Ring, index: int, size_bytes: int) -> None:
        self._kept[ring, index] = 0
        self.size_bytes += size_bytes
        self._shrink()

    def resize(self, bytes_max: int) -> None:
        """Keep this many bytes from now on; what is too much goes at once."""
        self.bytes_max = bytes_max
        self._shrink()

    def _shrink(self) -> None:
        while self.size_bytes > self.bytes_max:
            oldest, skips = next(iter(self._kept.items()))
            if skips < SKIPS_MAX and oldest[0]._is_wanted(oldest[1]):
                self._kept[oldest] = skips + 1
                self._kept.move_to_end(oldest)
            else:
                oldest[0]._drop_through(oldest[1])
        self._leave_the_rest()

    def _forget(self, ring: Ring, index: int, size_bytes: int) -> None:
        del self._kept[ring, index]
        self.size_bytes -= size_bytes
        self._leave_the_rest()

    def _leave_the_rest(self) -> None:
        self.older.resize(max(0, self.bytes_max - self.size_bytes))


class Ring:
    """The latest runs of one followed log.  Use `RingBudget.open_ring`.

    The ring has every record in [begin, end).
    """

    def __init__(self, budget: RingBudget, position: DLSN) -> None:
        self._budget = budget
        self.begin = self.end = position
        self._runs: dict[int, Run] = {}
        self._first = self._next = 0
        self._lowest = 0  # lower bound of the indexes of all readers that are not behind
        self._waiting: dict[int, int] = {}  # index -> number of its readers that are not behind
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._runs)

    def append(self, run: Run) -> None:
        """Append the next run of the log."""
        if self._is_closed or not self.end <= run.start < run.end:
            raise UnexpectedError(
                f"a ring that ends at {self.end} got a run from {run.start} to {run.end}"
            )
        index, self._next = self._next, self._next + 1
        self._runs[index] = run
        self.end = run.end
        self._budget._keep(self, index, run.size_bytes)

    @property
    def may_grow(self) -> bool:
        """Whether the last run may still be replaced by a longer one."""
        # A reader at `_next` was sent the last run, and would miss what is added to it.
        return self._next > self._first and self._next not in self._waiting

    def grow(self, run: Run) -> None:
        """Replace the last run, which may grow, by one that begins with its records."""
        last = self._runs[self._next - 1] if self.may_grow else None
        if last is None or run.start != last.start or not last.end <= run.end:
            raise UnexpectedError(
                f"the last run of a ring that ends at {self.end} cannot become one from "
                f"{run.start} to {run.end}"
            )
        index = self._next - 1
        self._budget._forget(self, index, last.size_bytes)
        self._runs[index] = run
        self.end = run.end
        self._budget._keep(self, index, run.size_bytes)

    def join(self, position: DLSN) -> RingReader | None:
        """Return a reader from `position` on; None if the ring begins behind it.

        If the position is beyond the end, the reader waits for its record.
        """
        if position < self.begin:
            return None
        low, high = self._first, self._next
        while low < high:
            middle = (low + high) // 2
            if self._runs[middle].end <= position:
                low = middle + 1
            else:
                high = middle
        return RingReader(self, low, position)

    def close(self) -> None:
        """Drop all runs: the log is not followed any more."""
        self._is_closed = True
        self._drop_through(self._next - 1)

    def _is_wanted(self, index: int) -> bool:
        # `_lowest` is only a lower bound; it is made exact here, where it matters.
        while self._lowest < self._next and self._lowest not in self._waiting:
            self._lowest += 1
        return self._lowest <= index

    def _drop_through(self, index: int) -> None:
        """Drop all runs up to index `index`, inclusive."""
        while self._first <= index:
            run = self._runs.pop(self._first)
            self._budget._forget(self, self._first, run.size_bytes)
            self._waiting.pop(self._first, None)
            self.begin = run.end
            self._first += 1
        self._lowest = max(self._lowest, self._first)

    def _enter(self, index: int) -> None:
        self._waiting[index] = self._waiting.get(index, 0) + 1
        self._lowest = min(self._lowest, index)

    def _leave(self, index: int) -> None:
        if index >= self._first:
            # `_drop_through` has forgotten the readers of dropped runs.
            self._waiting[index] -= 1
            if not self._waiting[index]:
                del self._waiting[index]


class RingReader:
    """The position of one reader in a ring.  Use `Ring.join`."""

    __slots__ = ("_index", "_ring", "position")

    def __init__(self, ring: Ring, index: int, position: DLSN) -> None:
        self._ring = ring
        self._index = index
        self.position = position
        """The next wanted record: the reader has all records before it, or does not want them."""
        ring._enter(index)

    @property
    def is_behind(self) -> bool:
        """Whether the next run was dropped: the reader must leave, and join again later."""
        return self._index < self._ring._first

    def peek(self) -> tuple[Run, int] | None:
        """Return the next run, and how many of its first records to skip; None without a run.

        Raises: UnexpectedError: the reader is behind.
        """
        run = self._ring._runs.get(self._index)
        if run is not None:
            return run, run.rows_before(self.position) if self.position > run.start else 0
        if self.is_behind:
            raise UnexpectedError(f"run {self._index} of a ring has left it: its reader is behind")
        return None

    def advance(self) -> None:
        """Pass the run that `peek` returned; the caller must not await between the two calls."""
        run = self._ring._runs[self._index]
        self._ring._leave(self._index)
        self._index += 1
        self._ring._enter(self._index)
        self.position = max(self.position, run.end)

    def leave(self) -> None:
        """Stop reading; call this once."""
        self._ring._leave(self._index)


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
