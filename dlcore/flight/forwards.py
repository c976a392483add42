"""Metadata of calls that one proxy makes at another for a client that asked for forwarding.

A client asks with `FORWARD_KEY`.  The forwarding proxy leaves this key out, and sends its own
identity and the client's instead.  A call with `BY_KEY` is never forwarded again.  Therefore two
proxies that disagree about an owner do not forward a call back and forth.

Promises: a call without these keys is not forwarded; an invalid value is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.base.access.rights import ANONYMOUS, Caller, Principal
from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

FORWARD_KEY = "dlog-forward"
BY_KEY = "dlog-forwarded-by"
SECRET_KEY = "dlog-forwarder-secret"
FOR_KEY = "dlog-forwarded-for-bin"
FROM_KEY = "dlog-forwarded-from-bin"
_WISHES = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Forwarder:
    """The proxy at `location`, which calls for `caller`; `secret` proves that it is that proxy."""

    location: str
    secret: str = field(repr=False)
    caller: Caller

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata of its calls."""
        return (
            (BY_KEY, self.location),
            (SECRET_KEY, self.secret),
            (FOR_KEY, str(self.caller.principal).encode()),
            (FROM_KEY, self.caller.address.encode()),
        )


@dataclass(frozen=True, slots=True)
class Wish:
    """The wish of a call: to be forwarded if another proxy owns the log, or already forwarded."""

    forward: bool = False
    forwarder: Forwarder | None = None


def wish_of(metadata: Iterable[tuple[str, str | bytes]]) -> Wish:
    """Return the wish in the metadata of a call.

    Raises:
        ConfigurationError: the metadata is invalid.
    """
    headers = {key: _text(value) for key, value in metadata}
    wanted = headers.get(FORWARD_KEY, "false")
    forward = _WISHES.get(wanted.lower())
    if forward is None:
        raise ConfigurationError(f"metadata {FORWARD_KEY}={wanted!r}: expected true or false")
    location = headers.get(BY_KEY)
    if location is None:
        return Wish(forward)
    principal = Principal.parse(headers.get(FOR_KEY, str(ANONYMOUS)))
    caller = Caller(principal, headers.get(FROM_KEY, location))
    return Wish(forwarder=Forwarder(location, headers.get(SECRET_KEY, ""), caller))


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
