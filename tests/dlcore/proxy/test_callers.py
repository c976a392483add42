"""The caller of a call, by its certificate and the rule for it, by a proxy, or not known."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from dlcore.base.access.rights import ANONYMOUS, Caller, Principal, Proof
from dlcore.base.errors import ConfigurationError
from dlcore.proxy.callers import Callers
from dlcore.proxy.config import ProxyConfig

CERTIFICATE = {
    "x509_common_name": [b"alice"],
    "peer_dns": [b"a.example", b"b.example"],
    "peer_uri": [b"spiffe://example/alice"],
}


@dataclass
class Call:
    """A call as gRPC shows it."""

    certificate: dict[str, list[bytes]] = field(default_factory=dict)
    peer_is: str = "ipv4:10.0.0.7:5001"
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what the certificate proves."""
        return self.certificate

    def peer(self) -> str:
        """Return the other end."""
        return self.peer_is

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return what the call says beside its request."""
        return self.metadata


def caller_of(call: Call, **settings: Any) -> Caller:
    """Return the caller of a call to a proxy with these settings."""
    callers = Callers(cast("Any", None), ProxyConfig(**settings))
    return asyncio.run(callers.of(cast("Any", call)))


@pytest.mark.parametrize(
    ("rule", "name"),
    [("common_name", "alice"), ("dns", "a.example"), ("uri", "spiffe://example/alice")],
)
def test_the_rule_says_which_part_of_a_certificate_is_the_principal(rule: str, name: str) -> None:
    """The first of several; a certificate without such a part is anonymous, whatever else it
    has."""
    caller = caller_of(Call(CERTIFICATE), certificate_principal=rule)
    assert caller == Caller(Principal(Proof.CERTIFICATE, name), "10.0.0.7")
    others = {key: value for key, value in CERTIFICATE.items() if name.encode() not in value}
    assert caller_of(Call(others), certificate_principal=rule).principal == ANONYMOUS


def test_another_rule_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(ConfigurationError, match="expected common_name or dns or uri"):
        ProxyConfig(certificate_principal="email")


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:5001", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%5D:5001", "fe80::1"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:5001", "10.0.0.7"),
        ("unix:/run/proxy", "/run/proxy"),
    ],
)
def test_anonymous_callers_are_counted_by_their_host(peer: str, host: str) -> None:
    """Others by their principal, from wherever they come."""
    caller = caller_of(Call(peer_is=peer))
    assert (caller.address, caller.account) == (host, f"host {host!r}")
    assert caller_of(Call(CERTIFICATE, peer)).account == "certificate:alice"
