"""Statuses on the wire: the outcome of a request that was not carried out.

Only NO_SUCH_LEDGER and NO_SUCH_ENTRY are a proven "no".  A status that this release does not know,
and everything from STORAGE_ERROR on, is "unknown".
"""

from __future__ import annotations

from enum import IntEnum

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
