"""The value of a live proxy's node: its load, and a secret."""

from __future__ import annotations

import msgspec

from dlcore.base.features import UNKNOWN_RELEASE, Release
from dlcore.metadata.stored import LAYOUT, Count, Text


class ProxyLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The number of owned logs, the number of further ones allowed, and the rate of all writes."""

    logs: Count
    room: Count
    bytes_per_s: Count


class LiveProxy(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy that lives, for those that may read the metadata.

    Attributes:
        layout: the version of the format.
        secret: the text by which other proxies know a call of this one; made anew by each process.
        load: the load that it reported last; None: none yet.
        release: the release that it runs.
        kafka: the ``host:port`` for clients of Kafka's protocol; None: it serves none, or is of
            version 0.2 or before.
    """

    layout: int = LAYOUT
    secret: Text
    load: ProxyLoad | None = None
    release: Release = UNKNOWN_RELEASE
    kafka: str | None = None

    def __repr__(self) -> str:
        return f"<LiveProxy {self.load}>"
