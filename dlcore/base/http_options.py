"""The options of a process' port for operators: its address, and who may ask."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple, Protocol

from dlcore.base.addresses import is_address
from dlcore.base.config import require

TLS_MODES = ("none", "server", "required")


class HttpOptions(Protocol):
    """The part of a configuration that says it."""

    @property
    def http_address(self) -> str:
        """Address as host:port; empty: there is no such port."""
        ...

    @property
    def http_tls(self) -> str:
        """One of `TLS_MODES`."""
        ...


class Address(NamedTuple):
    """The address to listen on."""

    host: str
    port: int


def http_address_of(options: HttpOptions) -> Address | None:
    """Return the address, None for none.

    Raises:
        ConfigurationError: it is not like host:port.
    """
    return address_in("http_address", options.http_address)


def address_in(key: str, text: str) -> Address | None:
    """Return the address in the value of a setting, None for none.

    Raises:
        ConfigurationError: it is not like host:port.
    """
    if not text:
        return None
    host, _, port = text.rpartition(":")
    require(
        condition=is_address(host, port),
        key=key,
        value=text,
        rule="expected host:port, like 127.0.0.1:9190, or nothing",
    )
    return Address(host.strip("[]"), int(port))


def address_of(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def require_http(options: HttpOptions, *, has_certificate: bool) -> None:
    """Check the options; `has_certificate` tells whether the process has one of its own.

    Raises:
        ConfigurationError: it names the key, the value, and what is right.
    """
    http_address_of(options)
    require(
        condition=options.http_tls in TLS_MODES,
        key="http_tls",
        value=options.http_tls,
        rule=f"expected {' or '.join(TLS_MODES)}",
    )
    require(
        condition=options.http_tls == "none" or has_certificate,
        key="http_tls",
        value=options.http_tls,
        rule="expected tls_ca, tls_cert and tls_key as well",
    )
