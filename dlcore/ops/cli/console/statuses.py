"""The HTTP statuses of errors."""

from __future__ import annotations

import math
from http import HTTPStatus

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
