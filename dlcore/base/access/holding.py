"""Capabilities in hand: those that a connection has presented, and those that a client may present.

Both ends of a connection keep the last ones, by the same rule.  Therefore a client knows which of
them a bookie still keeps, and presents another one, or one again, without being asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dlcore.base.access.capability import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dlcore.base.access.capability import Capability, Reach

KEPT_MAX = 64
KEPT_BYTES_MAX = 256 * 1024
"""The capabilities of a connection that are kept: most of them, and most bytes of them."""


class Kept:
    """The last capabilities of a connection, within bounds; iterates from the latest on."""

    def __init__(self) -> None:
        self._capabilities: dict[bytes, Capability] = {}
        self._bytes = 0

    def get(self, token: bytes) -> Capability | None:
        """Return the capability of a token that is kept."""
        return self._capabilities.get(token)

    def __iter__(self) -> Iterator[tuple[bytes, Capability]]:
        return reversed(self._capabilities.items())

    def keep(self, token: bytes, capability: Capability) -> None:
        """Keep a capability as the latest; drop the oldest ones that are too many."""
        if self._capabilities.pop(token, None) is None:
            self._bytes += len(token)
        self._capabilities[token] = capability
        while len(self._capabilities) > KEPT_MAX or self._bytes > KEPT_BYTES_MAX:
            oldest = next(iter(self._capabilities))
            del self._capabilities[oldest]
            self._bytes -= len(oldest)


class Purse(Protocol):
    """The capabilities that a client of bookies may present."""

    def token_for_all(self) -> bytes | None:
        """Return the token to present for every request; None if it depends on the request."""
        ...

    def token_for(self, reach: Reach) -> bytes | None:
        """Return the token to present for a request; None if there is none."""
        ...


class OwnPurse:
    """Presents one capability for everything, made anew once half of its time is over.

    Args:
        make: returns a capability that expires at a time.
        now_s: the time, in seconds since the epoch.
        lifetime_s: for how long each capability is valid.
    """

    def __init__(
        self, make: Callable[[int], bytes], now_s: Callable[[], float], *, lifetime_s: int
    ) -> None:
        self._make = make
        self._now_s = now_s
        self._lifetime_s = lifetime_s
        self._token = b""
        self._renewed_s = 0.0

    def token_for(self, _reach: Reach) -> bytes:
        """Return the present token."""
        return self.token_for_all()

    def token_for_all(self) -> bytes:
        """Return the present token."""
        now_s = self._now_s()
        if now_s >= self._renewed_s:
            self._token = self._make(int(now_s) + self._lifetime_s)
            self._renewed_s = now_s + self._lifetime_s / 2
        return self._token

    def renew(self) -> None:
        """Make another one for the next request: the keys have changed."""
        self._renewed_s = 0.0


class CarriedPurse:
    """Presents capabilities that came with the work of this process; the last ones are kept."""

    def __init__(self) -> None:
        self._kept = Kept()

    def learn(self, tokens: Iterable[bytes]) -> None:
        """Take capabilities.  Raises: AccessDeniedError: one is none."""
        for token in tokens:
            self._kept.keep(token, parse(token))

    def token_for_all(self) -> None:
        """Return nothing: each has entries of its own."""

    def token_for(self, reach: Reach) -> bytes | None:
        """Return the latest one that has the ledger and entries of a request."""
        fitting = (token for token, capability in self._kept if capability.grant_for(reach))
        return next(fitting, None)
