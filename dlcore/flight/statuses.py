"""Errors as gRPC statuses with trailing metadata.

The message of a status is that of the error.  The trailing metadata has the error's number
(`ERROR_KEY`).  Depending on the error it also has the location of the proxy that owns the log
(`LOCATION_KEY`), the expected sequence of a producer (`EXPECTED_KEY`), the position of the log's
last record or "none" (`LAST_KEY`), or the milliseconds until a retry is useful (`RETRY_KEY`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    AccessDeniedError,
    AlreadyTruncatedError,
    AppendAbortedError,
    AppendMismatchError,
    AppendSupersededError,
    ConditionFailedError,
    ConfigurationError,
    DuplicateAppendError,
    EncryptionKeyError,
    EndOfStreamError,
    LogElsewhereError,
    LogEmptyError,
    LogExistsError,
    LogModeError,
    LogNotFoundError,
    LogNotReadyError,
    LogRecordTooLongError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    ProducerFencedError,
    SchemaMismatchError,
    SequenceGapError,
    SubscriptionMovedError,
    TransactionIdOutOfOrderError,
    TransactionTooLargeError,
    UnauthenticatedError,
    UnknownActionError,
    WriteCancelledError,
    WriteError,
)

if TYPE_CHECKING:
    from dlcore.base.errors import DLError

KEY_PREFIX = "dlog-"
ERROR_KEY = "dlog-error"
LOCATION_KEY = "dlog-location"
RETRY_KEY = "dlog-retry-after-ms"
EXPECTED_KEY = "dlog-expected-sequence"
LAST_KEY = "dlog-last-dlsn"
_MESSAGE_LENGTH_MAX = 2000
"""A status is sent as a header; clients accept 8 KiB of headers."""

_CODES: dict[type, str] = {
    AccessDeniedError: "PERMISSION_DENIED",
    ConfigurationError: "INVALID_ARGUMENT",
    UnknownActionError: "UNIMPLEMENTED",
    UnauthenticatedError: "UNAUTHENTICATED",
    SchemaMismatchError: "INVALID_ARGUMENT",
    LogRecordTooLongError: "INVALID_ARGUMENT",
    LogNotFoundError: "NOT_FOUND",
    LogExistsError: "ALREADY_EXISTS",
    LogModeError: "FAILED_PRECONDITION",
    EncryptionKeyError: "FAILED_PRECONDITION",
    LogEmptyError: "FAILED_PRECONDITION",
    TransactionIdOutOfOrderError: "FAILED_PRECONDITION",
    TransactionTooLargeError: "INVALID_ARGUMENT",
    AppendAbortedError: "FAILED_PRECONDITION",
    AppendMismatchError: "FAILED_PRECONDITION",
    AppendSupersededError: "FAILED_PRECONDITION",
    DuplicateAppendError: "FAILED_PRECONDITION",
    EndOfStreamError: "FAILED_PRECONDITION",
    SequenceGapError: "FAILED_PRECONDITION",
    ProducerFencedError: "FAILED_PRECONDITION",
    ConditionFailedError: "FAILED_PRECONDITION",
    SubscriptionMovedError: "FAILED_PRECONDITION",
    AlreadyTruncatedError: "OUT_OF_RANGE",
    OverCapacityError: "RESOURCE_EXHAUSTED",
    OwnershipAcquireFailedError: "UNAVAILABLE",
    WriteError: "UNAVAILABLE",
    WriteCancelledError: "UNAVAILABLE",
}


def code_of(error: DLError) -> str:
    """Return the name of the gRPC status for an error.

    UNAVAILABLE means that the same call may succeed later, or at another proxy.
    """
    for kind in type(error).__mro__:
        code = _CODES.get(kind)
        if code is not None:
            return code
    return "UNAVAILABLE" if error.retriable else "INTERNAL"


def message_of(error: DLError) -> str:
    """Return the message for an error, cut to the size of a header."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _MESSAGE_LENGTH_MAX else text[: _MESSAGE_LENGTH_MAX - 1] + "…"


def metadata_of(error: DLError) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata for an error."""
    number = ((ERROR_KEY, str(error.code)),)
    if isinstance(error, LogElsewhereError):
        return (*number, (LOCATION_KEY, error.location))
    if isinstance(error, SequenceGapError):
        return (*number, (EXPECTED_KEY, str(error.expected)))
    if isinstance(error, ConditionFailedError):
        return (*number, (LAST_KEY, error.last or "none"))
    if isinstance(error, (OverCapacityError, LogNotReadyError)) and error.retry_after_s:
        return (*number, (RETRY_KEY, str(math.ceil(error.retry_after_s * 1000))))
    return number
