"""Metadata of calls that one proxy makes at another for a client who asked for it.

A client asks with `FORWARD_KEY`.  The proxy that forwards leaves that out, and says instead who it
is and for whom it calls; a call with `BY_KEY` is never forwarded again, whoever makes it, so that
two proxies that disagree about an owner send nothing back and forth.

Promises: a call that says nothing is forwarded by nobody; a value that is none is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

FORWARD_KEY = "dlog-forward"
BY_KEY = "dlog-forwarded-by"
SESSION_KEY = "dlog-forwarder-session"
FOR_KEY = "dlog-forwarded-for-bin"
_WISHES = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Forwarder:
    """The proxy at `location` that makes a call for `client`; `session` proves that it is live."""

    location: str
    session: str
    client: str

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return what its call says of it."""
        told = self.client.encode()
        return (BY_KEY, self.location), (SESSION_KEY, self.session), (FOR_KEY, told)


@dataclass(frozen=True, slots=True)
class Wish:
    """How a call wants to be served: whether by another proxy where that one owns the log."""

    forward: bool = False
    forwarder: Forwarder | None = None


def wish_of(metadata: Iterable[tuple[str, str | bytes]]) -> Wish:
    """Return what the metadata of a call asks for.

    Raises:
        ConfigurationError: it asks for something else.
    """
    told = {key: _text(value) for key, value in metadata}
    wanted = told.get(FORWARD_KEY, "false")
    forward = _WISHES.get(wanted.lower())
    if forward is None:
        raise ConfigurationError(f"metadata {FORWARD_KEY}={wanted!r}: expected true or false")
    location = told.get(BY_KEY)
    if location is None:
        return Wish(forward)
    return Wish(
        forwarder=Forwarder(location, told.get(SESSION_KEY, ""), told.get(FOR_KEY, location))
    )


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
