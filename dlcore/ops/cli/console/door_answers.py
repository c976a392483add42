"""Answers of the HTTP door as text: lines of JSON, and server-sent events; no I/O.

JSON has no line end in it, so no record can end its line or event, or begin another one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlcore.ops.cli.rows import record_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.ops.cli.rows import TypedRow

    Shown = LogRecordWithDLSN | TypedRow

PAGE_BYTES = 4 * 1024 * 1024
"""An answer with this many bytes takes no further record."""
WAITING = b": waiting\n\n"
"""A comment, by which a client that is gone is noticed."""


def line_of(value: dict[str, Any]) -> bytes:
    """Return a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


@dataclass(slots=True)
class Page:
    """The records of one answer, up to `limit` of them and some `PAGE_BYTES`."""

    limit: int
    lines: list[bytes] = field(default_factory=list)
    last: DLSN | None = None
    """The position of the last record."""
    size_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether no further record belongs to the answer."""
        return len(self.lines) >= self.limit or self.size_bytes >= PAGE_BYTES

    def add(self, records: Iterable[Shown]) -> None:
        """Take records as far as there is room."""
        for record in records:
            if self.is_full:
                return
            line = line_of(record_json(record))
            self.lines.append(line)
            self.size_bytes += len(line)
            self.last = record.dlsn


def events_of(records: Iterable[Shown]) -> bytes:
    """Return an event for each record; its id is its position."""
    return b"".join(
        b"id: %s\ndata: %s\n" % (str(record.dlsn).encode(), line_of(record_json(record)))
        for record in records
    )


def event(name: str, value: dict[str, Any] | None) -> bytes:
    """Return an event with a name: ``end`` of a sealed log, or ``failed`` with an error."""
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()
