"""Takes records from buffered rows: all that a call returns, or none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dlcore.base.errors import SchemaMismatchError

if TYPE_CHECKING:
    from collections import deque


class Taken(Protocol):
    """The part of `dlcore.log.reading.rows.Rows` that taking needs."""

    @property
    def rows_left(self) -> int:
        """The number of rows that were not taken yet."""

    def peek_records(self, count: int) -> list[Any]:
        """Return the next records, at most `count`, without taking them."""

    def skip(self, count: int) -> None:
        """Take rows without decoding them."""


_Rows = TypeVar("_Rows", bound=Taken)


def take_records(rows: deque[_Rows], count: int) -> list[Any]:
    """Take up to `count` records from the first rows; nothing is taken before all are decoded.

    Therefore a caller that is interrupted meanwhile, by a signal, gets them with the next call.
    """
    records: list[Any] = []
    for each in rows:
        if len(records) == count:
            break
        records += each.peek_records(count - len(records))
    left = len(records)
    while left:
        taken = min(left, rows[0].rows_left)
        rows[0].skip(taken)
        left -= taken
        drop_taken(rows)
    return records


def drop_taken(rows: deque[_Rows]) -> None:
    """Remove the first rows that have none left."""
    while rows and not rows[0].rows_left:
        rows.popleft()


def no_records() -> SchemaMismatchError:
    """Return the error for a caller that wants records of a typed log."""
    return SchemaMismatchError(
        "the log is typed, it has rows and no records of bytes: use read_batch() or batches() of "
        "a reader, or read() of the log, which returns tables and frames"
    )
