"""Errors as a client gets to know them: status, message, number, and where to go."""

from __future__ import annotations

import grpc
import pytest

from dlcore.base.errors import (
    CorruptMetadataError,
    DLError,
    InvalidLogNameError,
    LogElsewhereError,
    LogNotFoundError,
    LogRenamedError,
    MetadataConnectionError,
    UnexpectedError,
    WriteError,
)
from dlcore.flight import statuses


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidLogNameError("a//b"), "INVALID_ARGUMENT"),
        (LogNotFoundError("none"), "NOT_FOUND"),
        (LogRenamedError("b"), "NOT_FOUND"),
        (WriteError("fenced"), "UNAVAILABLE"),
        (LogElsewhereError("there", location="grpc://b:1"), "UNAVAILABLE"),
        (MetadataConnectionError("away"), "UNAVAILABLE"),
        (CorruptMetadataError("damaged"), "INTERNAL"),
        (UnexpectedError("broken"), "INTERNAL"),
    ],
)
def test_the_status_of_an_error(error: DLError, code: str) -> None:
    """That of its nearest kind; what may succeed later is UNAVAILABLE."""
    assert statuses.code_of(error) == code


def test_every_status_is_one_of_grpc() -> None:
    """A name that gRPC does not know would reach a user."""
    names = {code.name for code in grpc.StatusCode}
    assert set(statuses._CODES.values()) <= names


def test_the_number_goes_along_and_the_location_where_there_is_one() -> None:
    """A program need not parse the message."""
    assert statuses.metadata_of(LogNotFoundError("none")) == (("dlog-error", "510"),)
    elsewhere = LogElsewhereError("there", location="grpc://b:1")
    assert statuses.metadata_of(elsewhere) == (
        ("dlog-error", "307"),
        ("dlog-location", "grpc://b:1"),
    )


def test_a_long_message_is_cut() -> None:
    """It is a header, and too large a header fails the call."""
    assert statuses.message_of(DLError("short")) == "DLError: short"
    long = statuses.message_of(DLError("x" * 10_000))
    assert len(long) == 2000
    assert long.endswith("x…")
