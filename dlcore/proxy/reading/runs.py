"""From a reader's entries to runs: small ones go together, and each run becomes one message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.proxy.flight.sending import batch_message
from dlcore.proxy.reading.ring import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from dlcore.ids import DLSN
    from dlcore.log.reading.rows import EntryRows
    from dlcore.proxy.reading.rows import RowView

RUN_BYTES = 256 * 1024
"""Entries are put together up to so much: what a message costs is then little beside its bytes."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Entries of a log that follow each other, in order, with the batches of their records."""

    start: DLSN
    end: DLSN
    firsts: tuple[tuple[DLSN, int], ...]
    batches: Sequence[pa.RecordBatch]
    size_bytes: int

    @classmethod
    def of(cls, taken: Sequence[EntryRows]) -> Fetched:
        """Take what entries hold."""
        firsts = tuple((rows.position, rows.rows_left) for rows in taken)
        batches = [rows.take_batch() for rows in taken]
        size_bytes = sum(rows.size_bytes for rows in taken)
        return cls(firsts[0][0], taken[-1].place.end, firsts, batches, size_bytes)

    def followed_by(self, later: Fetched) -> Fetched:
        """Return both together."""
        return Fetched(
            self.start,
            later.end,
            (*self.firsts, *later.firsts),
            (*self.batches, *later.batches),
            self.size_bytes + later.size_bytes,
        )

    def run(self, view: RowView) -> Run:
        """Return it with the columns of a view."""
        data = batch_message(view.of(self.batches), self.end)
        return Run(self.start, self.end, self.firsts, data, len(data))

    def part(self, view: RowView, end: DLSN) -> bytes | None:
        """Return a message with what lies before `end`; None if that is nothing."""
        batch = view.of(self.batches)
        if end < self.end:
            batch = batch.slice(0, Run(self.start, self.end, self.firsts, None, 0).rows_before(end))
        return batch_message(batch, min(end, self.end)) if batch.num_rows else None


def fetched(taken: Iterable[EntryRows]) -> Iterator[Fetched]:
    """Yield entries that were taken from a reader, those that are small together."""
    together: list[EntryRows] = []
    size_bytes = 0
    for rows in taken:
        if together and size_bytes + rows.size_bytes > RUN_BYTES:
            yield Fetched.of(together)
            together, size_bytes = [], 0
        together.append(rows)
        size_bytes += rows.size_bytes
    if together:
        yield Fetched.of(together)
