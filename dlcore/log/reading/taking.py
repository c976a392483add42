"""Takes records from buffered rows: all that a call returns, or none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections import deque

    from dlcore.log.reading.rows import Rows

_Rows = TypeVar("_Rows", bound="Rows[Any]")


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
