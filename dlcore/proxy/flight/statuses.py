"""Errors as gRPC statuses, and how much of an error a client gets to know.

A status' message is the error's.  Beside it go, as trailing metadata, the error's number
(`ERROR_KEY`), and where to turn to if another proxy serves the log (`LOCATION_KEY`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.errors import (
    AlreadyTruncatedError,
    ConfigurationError,
    EndOfStreamError,
    LogElsewhereError,
    LogEmptyError,
    LogExistsError,
    LogNotFoundError,
    LogRecordTooLongError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    SchemaMismatchError,
    TransactionIdOutOfOrderError,
    WriteCancelledError,
    WriteError,
)

if TYPE_CHECKING:
    from dlcore.errors import DLError

ERROR_KEY = "dlog-error"
LOCATION_KEY = "dlog-location"
_MESSAGE_LENGTH_MAX = 2000
"""A status is a header, of which clients take 8 KiB."""

_CODES: dict[type, str] = {
    ConfigurationError: "INVALID_ARGUMENT",
    SchemaMismatchError: "INVALID_ARGUMENT",
    LogRecordTooLongError: "INVALID_ARGUMENT",
    LogNotFoundError: "NOT_FOUND",
    LogExistsError: "ALREADY_EXISTS",
    LogEmptyError: "FAILED_PRECONDITION",
    TransactionIdOutOfOrderError: "FAILED_PRECONDITION",
    EndOfStreamError: "FAILED_PRECONDITION",
    AlreadyTruncatedError: "OUT_OF_RANGE",
    OverCapacityError: "RESOURCE_EXHAUSTED",
    OwnershipAcquireFailedError: "UNAVAILABLE",
    WriteError: "UNAVAILABLE",
    WriteCancelledError: "UNAVAILABLE",
}


def code_of(error: DLError) -> str:
    """Return the name of the gRPC status for an error.

    UNAVAILABLE says that the same call may succeed later, or elsewhere, without a change.
    """
    for kind in type(error).__mro__:
        code = _CODES.get(kind)
        if code is not None:
            return code
    return "UNAVAILABLE" if error.retriable else "INTERNAL"


def message_of(error: DLError) -> str:
    """Return the message for an error, which fits a header."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _MESSAGE_LENGTH_MAX else text[: _MESSAGE_LENGTH_MAX - 1] + "…"


def metadata_of(error: DLError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata for an error."""
    number = ((ERROR_KEY, str(error.code)),)
    if isinstance(error, LogElsewhereError):
        return (*number, (LOCATION_KEY, error.location))
    return number
