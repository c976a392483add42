"""The choice of a log's owner among the live proxies: the same answer wherever it is asked.

Rendezvous hashing: each proxy has a weight for each log, the highest wins.  A proxy that comes or
goes moves its own logs only.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def preferred_owner(log: str, proxies: Iterable[str]) -> str | None:
    """Return which of these addresses should own a log; None if there is none."""
    return max(proxies, key=lambda proxy: _weight(log, proxy), default=None)


def _weight(log: str, proxy: str) -> bytes:
    return hashlib.blake2b(f"{proxy}\n{log}".encode(), digest_size=16).digest()
