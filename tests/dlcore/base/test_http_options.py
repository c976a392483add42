"""The options of the port for operators."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.base.http_options import address_of, http_address_of, require_http


@dataclass(frozen=True)
class Options:
    """The part of a configuration."""

    http_address: str = ""
    http_tls: str = "none"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", None),
        ("127.0.0.1:9190", ("127.0.0.1", 9190)),
        ("[::1]:0", ("::1", 0)),
        ("ops.example:65535", ("ops.example", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int] | None) -> None:
    """An empty one is none; an IPv6 address has brackets."""
    assert http_address_of(Options(text)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("9190", ":9190", "host:", "host:x", "host:65536", "host:-1"),
        *("host:" + "9" * 5000, "a..b:9190"),
    ],
)
def test_wrong_addresses_are_named(text: str) -> None:
    """The error has the key, the value and an example."""
    with pytest.raises(ConfigurationError, match=r"http_address.*127\.0\.0\.1:9190"):
        http_address_of(Options(text))


def test_tls_needs_a_certificate() -> None:
    """The modes are three, and two of them need files."""
    require_http(Options("h:1", "none"), has_certificate=False)
    require_http(Options("h:1", "required"), has_certificate=True)
    with pytest.raises(ConfigurationError, match="http_tls"):
        require_http(Options("h:1", "always"), has_certificate=True)
    with pytest.raises(ConfigurationError, match="tls_cert"):
        require_http(Options("h:1", "server"), has_certificate=False)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_has_brackets_around_ipv6_alone(host: str) -> None:
    """Goal: the text is one that `http_address_of` reads."""
    assert address_of(host, 4190) == "[::1]:4190"
    assert address_of("a.example", 4190) == "a.example:4190"
