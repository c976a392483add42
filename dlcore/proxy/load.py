"""The load of a proxy, as it tells the others in its node among the live ones."""

from __future__ import annotations

import msgspec

from dlcore.metadata.stored import LAYOUT, Count


class ProxyLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How many logs a proxy owns, how many more it may, and what is written to all of them."""

    layout: int = LAYOUT
    logs: Count
    room: Count
    bytes_per_s: Count
