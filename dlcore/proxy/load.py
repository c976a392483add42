"""The load of a proxy, which other proxies read from its node among the live proxies."""

from __future__ import annotations

import msgspec

from dlcore.metadata.stored import LAYOUT, Count


class ProxyLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The number of owned logs, the number of further ones allowed, and the rate of all writes."""

    layout: int = LAYOUT
    logs: Count
    room: Count
    bytes_per_s: Count
