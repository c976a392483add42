"""Parts of messages: statuses and texts; wrong ones are reported.

Only NO_SUCH_LEDGER and NO_SUCH_ENTRY are a proven "no".  A status that this release does not know,
and everything from STORAGE_ERROR on, is "unknown".
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TypeAlias

from dlcore.base.errors import (
    AlreadyClosedError,
    BadRequestError,
    BookieAccessDeniedError,
    BookieError,
    BookieOverloadedError,
    BookieReadOnlyError,
    BookieStorageError,
    BookieUnavailableError,
    DigestMismatchError,
    EntryTooLargeError,
    LedgerFencedError,
    NoSuchEntryError,
    NoSuchLedgerError,
    WrongIncarnationError,
)
from dlcore.wire.frames import WireError


class Status(IntEnum):
    """Why a request was not carried out."""

    NO_SUCH_LEDGER = 2
    NO_SUCH_ENTRY = 3
    FENCED = 4
    READ_ONLY = 5
    OVERLOADED = 6
    DIGEST_MISMATCH = 7
    WRONG_INCARNATION = 8
    BAD_REQUEST = 9
    ENTRY_TOO_LARGE = 10
    STORAGE_ERROR = 11
    UNAVAILABLE = 12
    ACCESS_DENIED = 13


_ERRORS: dict[int, type[BookieError]] = {
    Status.NO_SUCH_LEDGER: NoSuchLedgerError,
    Status.NO_SUCH_ENTRY: NoSuchEntryError,
    Status.FENCED: LedgerFencedError,
    Status.READ_ONLY: BookieReadOnlyError,
    Status.OVERLOADED: BookieOverloadedError,
    Status.DIGEST_MISMATCH: DigestMismatchError,
    Status.WRONG_INCARNATION: WrongIncarnationError,
    Status.BAD_REQUEST: BadRequestError,
    Status.ENTRY_TOO_LARGE: EntryTooLargeError,
    Status.STORAGE_ERROR: BookieStorageError,
    Status.UNAVAILABLE: BookieUnavailableError,
    Status.ACCESS_DENIED: BookieAccessDeniedError,
}
_STATUSES: dict[type, Status] = {
    **{error: Status(status) for status, error in _ERRORS.items()},
    AlreadyClosedError: Status.UNAVAILABLE,
}


def error_of(status: int, detail: str) -> BookieError:
    """Return the error of `status`; a status that this release does not know is "unknown"."""
    error = _ERRORS.get(status)
    if error is None:
        return BookieStorageError(f"unknown status {status}: {detail}")
    return error(detail)


def status_of(error: BaseException) -> tuple[Status, str]:
    """Return the status and detail that stand for `error`; by default STORAGE_ERROR."""
    for kind in type(error).__mro__:
        status = _STATUSES.get(kind)
        if status is not None:
            return status, str(error)
    return Status.STORAGE_ERROR, f"{type(error).__name__}: {error}"


Buffer: TypeAlias = bytes | memoryview
TEXT_BYTES_MAX = 1024
_TEXT = struct.Struct(">H")


def cut(detail: str) -> bytes:
    """Return text that fits a frame, cut between two characters."""
    text = detail.encode(errors="replace")
    return text[:TEXT_BYTES_MAX].decode(errors="ignore").encode()


def text(text: str) -> bytes:
    """Return the length of the text, then the text."""
    return blob(text.encode())


def blob(data: bytes) -> bytes:
    """Return the length of the bytes, then the bytes."""
    if len(data) > TEXT_BYTES_MAX:
        raise BadRequestError(f"{data[:40]!r}… has {len(data)} bytes, at most {TEXT_BYTES_MAX}")
    return _TEXT.pack(len(data)) + data


def blobs(data: Buffer, *, count: int) -> list[bytes]:
    """Return the `count` blobs that `data` consists of."""
    found: list[bytes] = []
    for _ in range(count):
        (size,) = _TEXT.unpack_from(data)
        data = data[_TEXT.size :]
        if size > len(data):
            raise WireError(f"a text of {size} bytes where {len(data)} are left")
        found.append(bytes(data[:size]))
        data = data[size:]
    if data:
        raise WireError(f"{len(data)} bytes too many")
    return found
