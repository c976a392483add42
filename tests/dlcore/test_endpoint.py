"""Endpoints of proxies: what they are, and which error an answer is."""

from __future__ import annotations

import grpc
import pytest

from dlcore.backends.flight.endpoint import addresses_of, error_of
from dlcore.base import errors
from dlcore.base.errors import ConfigurationError, DLError, ProxyUnavailableError, UnexpectedError
from dlcore.flight.statuses import code_of, message_of

CLASSES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DLError)
]


def test_an_endpoint() -> None:
    """One proxy, or several."""
    assert addresses_of("grpc://a:1") == ["a:1"]
    assert addresses_of("grpc://a:1,b.c:22") == ["a:1", "b.c:22"]
    assert addresses_of("grpc+tls://[::1]:1,b:2") == ["[::1]:1", "b:2"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:1",
        "grpc://",
        "grpc://a",
        "grpc://a:1,",
        "grpc://a:1/b",
        "grpc+tls:a:1",
        "grpc://::1:5",
        "grpc://a:1,b..example:2",
        "grpc://a:65536",
        "grpc://a:1\u0661",
    ],
)
def test_texts_that_are_no_endpoint(text: str) -> None:
    """It is shown, with what would be right."""
    with pytest.raises(ConfigurationError, match="expected grpc://host:port") as caught:
        addresses_of(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_comes_as_it_left(kind: type[DLError]) -> None:
    """Whatever the proxy raised."""
    error = kind("log 'a': what was wrong\nand why")
    found = error_of(grpc.StatusCode[code_of(error)], message_of(error))
    assert (type(found), str(found)) == (kind, str(error))


def test_other_answers() -> None:
    """An address of no server, or of a server that is no proxy."""
    refused = error_of(grpc.StatusCode.UNAVAILABLE, "connection refused")
    assert isinstance(refused, ProxyUnavailableError)
    for details in ("no such method", "KeyError: 'a'", "AssertionError: b"):
        other = error_of(grpc.StatusCode.UNIMPLEMENTED, details)
        assert isinstance(other, UnexpectedError)
        assert details in str(other)
