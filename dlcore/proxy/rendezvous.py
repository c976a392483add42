"""The choice of a log's owner among the live proxies; every proxy makes the same choice.

This is rendezvous hashing: each proxy has a weight for each log, and the highest weight wins.  If a
proxy comes or goes, only its own logs move.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def preferred_owner(log: str, proxies: Iterable[str]) -> str | None:
    """Return the address that should own a log; None if `proxies` is empty."""
    return max(proxies, key=lambda proxy: _weight(log, proxy), default=None)


def _weight(log: str, proxy: str) -> bytes:
    # Not `hash`, which each process salts in its own way: all proxies must find the same weights.
    return hashlib.blake2b(f"{proxy}\n{log}".encode(), digest_size=16).digest()
