"""The status of each error of the tree, and what a client gets beside it."""

from __future__ import annotations

import pytest

from dlcore.base import errors
from dlcore.ops.cli.console.door_answers import error_value, headers_of, status_of


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.ConfigurationError, 400),
        (errors.InvalidLogNameError, 400),
        (errors.UnsupportedError, 400),
        (errors.SchemaMismatchError, 400),
        (errors.UnauthenticatedError, 401),
        (errors.AccessDeniedError, 403),
        (errors.LogNotFoundError, 404),
        (errors.LogRenamedError, 404),
        (errors.EndOfStreamError, 409),
        (errors.LogModeError, 409),
        (errors.ProducerFencedError, 409),
        (errors.AlreadyTruncatedError, 410),
        (errors.LogRecordTooLongError, 413),
        (errors.OverCapacityError, 429),
        (errors.UnexpectedError, 500),
        (errors.CorruptMetadataError, 500),
        (errors.LogNotReadyError, 503),
        (errors.ProxyUnavailableError, 503),
        (errors.LedgerReadError, 503),
    ],
)
def test_statuses(kind: type[errors.DLError], status: int) -> None:
    """An error is sent as its text and its name, in one form."""
    error = kind("it is so")
    assert status_of(error) == status
    assert error_value(error) == {"error": "it is so", "kind": kind.__name__}


def test_when_to_ask_again() -> None:
    """After the time that the proxies tell, a second at least; an unknown caller learns how."""
    assert headers_of(errors.OverCapacityError("full", retry_after_s=2.5)) == {"Retry-After": "3"}
    assert headers_of(errors.LogNotReadyError("rolls", retry_after_s=0.1)) == {"Retry-After": "1"}
    assert headers_of(errors.ProxyUnavailableError("away")) == {"Retry-After": "1"}
    assert headers_of(errors.UnauthenticatedError("who")) == {"WWW-Authenticate": "Bearer"}
    assert headers_of(errors.LogNotFoundError("gone")) == {}
