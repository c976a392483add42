"""The live proxies of a namespace; each has an ephemeral node that is named by its location.

Flight clients connect to a location: ``grpc://host:port``, or ``grpc+tls://`` with TLS.

A node holds the load that its proxy published some seconds ago, if it publishes any, and a secret
by which other proxies recognize its calls (`LiveProxy`).

The known list may be a moment old.  This does no harm: a log's lock, its fence and the version of
its head decide which proxy owns the log.  The list only determines which proxy is asked.
"""

from __future__ import annotations

import hmac
import logging
from typing import TYPE_CHECKING, Any

from dlcore.log.metadata.store import LogStore
from dlcore.metadata.following import NodeFollower
from dlcore.metadata.paths import unescape
from dlcore.metadata.stored import decode_or_tell
from dlcore.proxy.load import LiveProxy, ProxyLoad
from dlcore.proxy.outages import Outages
from dlcore.proxy.presence import Presence
from dlcore.proxy.probing import Probes, refuses_connections
from dlcore.proxy.rendezvous import preferred_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dlcore.log.metadata.values import LogKey
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)


class Membership:
    """The live proxies, as seen by the one at `location`."""

    def __init__(
        self,
        store: MetadataStore,
        paths: NamespacePaths,
        location: str,
        *,
        kafka: str | None = None,
        probe: Callable[[str], Coroutine[Any, Any, bool]] = refuses_connections,
    ) -> None:
        self.location = location
        self.presence = Presence(store, paths.proxy(location), kafka=kafka)
        """This proxy's own node."""
        self._probes = Probes(probe)
        self._paths = paths
        self._logs = LogStore(store, paths)
        self._secrets: dict[str, str] = {}  # of live proxies, as read last
        self._follower: NodeFollower | None = None
        self.outages = Outages(store)
        self.live: frozenset[str] = frozenset()
        """Locations of the proxies that acquire logs, with this one until it leaves."""
        self.changes = 0
        """Number of changes of `live`: after a restart of a proxy it may be the same as before."""

    def preferred(self, log: str) -> str | None:
        """Return the location of the proxy that should own a log; None if there is none."""
        return preferred_owner(log, self.live)

    async def owner_of(self, log: LogKey) -> str | None:
        """Return the live proxy that owns a log; if none does, the one that should own it.

        Raises: MetadataError.
        """
        holder = await self._logs.read_lock(log)
        if holder is not None and holder.owner in self.live:
            return holder.owner
        return self.preferred(log.name)

    async def is_gone(self, location: str) -> bool:
        """Return whether the location of a live proxy refuses connections now.

        The node of a dead proxy vanishes only with its session, seconds later.
        """
        if location not in self.live or location == self.location:
            return False
        return await self._probes.is_gone(location)

    async def loads_of(self, locations: Sequence[str]) -> dict[str, ProxyLoad | None]:
        """Return the last published loads of these proxies; None if one has none.

        Raises: MetadataError.
        """
        found = await self._read(locations)
        return {at: None if each is None else each.load for at, each in found.items()}

    async def kafka_addresses(self) -> dict[str, tuple[str, int]]:
        """Return host and port for Kafka's clients of each live proxy that has them.

        If there is none, because this one drains, it is this one's.

        Raises: MetadataError.
        """
        found = {at: each.kafka for at, each in (await self._read([*self.live])).items() if each}
        known = {at: address for at, address in found.items() if address}
        if not known and self.presence.kafka is not None:
            known = {self.location: self.presence.kafka}
        parts = {at: address.rpartition(":") for at, address in known.items()}
        return {at: (host.strip("[]"), int(port)) for at, (host, _, port) in parts.items()}

    async def _read(self, locations: Sequence[str]) -> dict[str, LiveProxy | None]:
        nodes = await self._logs.metadata_store.get_many(
            [self._paths.proxy(each) for each in locations]
        )
        return {
            # A node that does not parse is as good as none.
            location: decode_or_tell(LiveProxy, node, source=location, tell=lambda _: None)
            for location, node in zip(locations, nodes, strict=True)
        }

    async def proves(self, location: str, secret: str) -> bool:
        """Return whether a secret is that of the live proxy at a location.

        A secret that was read before is not read again while it fits.

        Raises: MetadataError, LogNotReadyError: that is not known now.
        """
        if location not in self.live:
            self._secrets.pop(location, None)
            return False
        if not _is_same(self._secrets.get(location, ""), secret):
            async with self.outages.bounded():
                found = (await self._read([location]))[location]
            if found is None or not _is_same(found.secret, secret):
                return False
            self._secrets = {
                each: given for each, given in self._secrets.items() if each in self.live
            }
            self._secrets[location] = found.secret
        return True

    async def join(self) -> None:
        """Join the live proxies, and begin to follow them.  Raises: MetadataError."""
        await self.presence.enter()
        await self._look()
        self._follower = NodeFollower(
            self._logs.metadata_store,
            self._paths.proxies,
            self._look,
            what="live proxies",
            children=True,
        )

    async def leave(self) -> None:
        """Leave the live proxies, but go on to follow them.  Idempotent."""
        await self.presence.leave()
        self.live -= {self.location}

    async def rejoin(self) -> None:
        """Join the live proxies again, after `leave`.  Raises: MetadataError."""
        if self.presence.has_left:
            await self.presence.enter()
            await self._look()

    async def aclose(self) -> None:
        """Stop following; the node vanishes with the session, unless the proxy left before."""
        if self._follower is not None:
            await self._follower.aclose()
        self.outages.close()
        await self.presence.aclose()
        await self._probes.aclose()

    async def _look(self) -> None:
        nodes = await self._logs.metadata_store.get_children(self._paths.proxies, fresh=True)
        live = frozenset(unescape(node) for node in nodes or ())
        if self.presence.has_left:
            live -= {self.location}
        if live != self.live:
            logger.info("live proxies: %s", ", ".join(sorted(live)) or "none")
            self.live = live
            self.changes += 1


def _is_same(known: str, given: str) -> bool:
    """Return whether a secret is known, in a time that tells nothing of how much of it fits."""
    return bool(known) and hmac.compare_digest(known.encode(), given.encode())
