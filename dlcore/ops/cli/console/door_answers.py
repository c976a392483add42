"""Answers of the HTTP door as text: lines of JSON, and server-sent events; no I/O.

The JSON written here has no line ends, so no record can end its line or event, or begin
another one.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias

from dlcore.base.errors import (
    AlreadyTruncatedError,
    CorruptMetadataError,
    DLError,
    LogNotFoundError,
    LogNotReadyError,
    OverCapacityError,
    SchemaMismatchError,
    UnexpectedError,
)
from dlcore.ops.cli.rows import record_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.ops.cli.rows import TypedRow


_OWN = {400, 401, 403, 413}
"""Codes of errors that are statuses of HTTP."""
_CONFIGURATION = range(600, 610)
_RETRY_S = 1


def status_of(error: DLError) -> int:
    """Return the status for an error.

    400: the request is wrong; 401, 403: the caller is not known, or has no right; 404: there is no
    such log; 410: the position was truncated; 413: too large; 429: a limit; 503: it may succeed
    later; 500: the stored state is damaged; 409: the log's state does not allow it.
    """
    match error:
        case LogNotFoundError():
            return HTTPStatus.NOT_FOUND
        case AlreadyTruncatedError():
            return HTTPStatus.GONE
        case SchemaMismatchError():
            return HTTPStatus.BAD_REQUEST
        case OverCapacityError():
            return HTTPStatus.TOO_MANY_REQUESTS
        case UnexpectedError() | CorruptMetadataError():
            return HTTPStatus.INTERNAL_SERVER_ERROR
        case _ if error.code in _OWN:
            return error.code
        case _ if error.code in _CONFIGURATION:
            return HTTPStatus.BAD_REQUEST
        case _ if error.retriable:
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return HTTPStatus.CONFLICT


def headers_of(error: DLError) -> dict[str, str]:
    """Return the headers that belong to an error: when to ask again, and how to prove a name."""
    status = status_of(error)
    if status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    if status not in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return {}
    after_s = 0.0
    if isinstance(error, OverCapacityError | LogNotReadyError):
        after_s = error.retry_after_s
    return {"Retry-After": str(max(_RETRY_S, math.ceil(after_s)))}


def error_value(error: DLError) -> dict[str, str]:
    """Return an error as the JSON that every answer without success has."""
    return {"error": str(error), "kind": type(error).__name__}


Shown: TypeAlias = "LogRecordWithDLSN | TypedRow"

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
