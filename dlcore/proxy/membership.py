"""The live proxies of a namespace; each has an ephemeral node that is named by its location.

Flight clients connect to a location: ``grpc://host:port``, or ``grpc+tls://`` with TLS.

A node holds the load that its proxy published some seconds ago, if it publishes any, and a secret
by which other proxies recognize its calls (`LiveProxy`).

The known list may be a moment old.  This does no harm: a log's lock, its fence and the version of
its head decide which proxy owns the log.  The list only determines which proxy is asked.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dlcore.base.background import BackgroundTasks, end_tasks
from dlcore.base.errors import AlreadyClosedError, MetadataError, NoNodeError
from dlcore.base.features import own_release
from dlcore.log.metadata.store import WriterLocks
from dlcore.metadata.one_node import NodeFollower, persistently
from dlcore.metadata.paths import unescape
from dlcore.metadata.session_node import SessionNode
from dlcore.metadata.stored import decode_or_tell, encode
from dlcore.proxy.load import LiveProxy, ProxyLoad
from dlcore.proxy.outages import Outages
from dlcore.proxy.rendezvous import preferred_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from dlcore.log.metadata.values import LogKey
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)

# A drain or a stop must not wait for the end of an outage of the store.
_LEAVE_S = 2.0
_SECRET_BYTES = 32


class Presence:
    """One proxy's, from `enter` to `leave`, and again after another `enter`.

    Args:
        path: that of its node.
        kafka: where it listens for Kafka's clients.
    """

    def __init__(self, store: MetadataStore, path: str, *, kafka: str | None) -> None:
        self.secret = secrets.token_hex(_SECRET_BYTES)
        """The proof that a call is this proxy's, for those that may read the metadata."""
        self.kafka = kafka
        self.has_left = False
        """Whether it has left, even if others may still see it."""
        self._store = store
        self._node = self._new_node(path)
        self._node.value = encode(self._entry())
        self._tasks = BackgroundTasks()
        self._vanishing: asyncio.Task[None] | None = None

    def _new_node(self, path: str) -> SessionNode:
        return SessionNode(
            self._store, path, until_then="clients and other proxies do not find this proxy"
        )

    async def publish_load(self, load: ProxyLoad) -> None:
        """Publish its load.  Raises: MetadataError: it may not be published."""
        await self._node.put(encode(self._entry(load)))

    def _entry(self, load: ProxyLoad | None = None) -> LiveProxy:
        return LiveProxy(secret=self.secret, load=load, release=own_release(), kafka=self.kafka)

    async def enter(self) -> None:
        """Make its node.  Raises: MetadataError."""
        if self.has_left:
            if self._vanishing is not None:
                # Otherwise it could delete the node that is made now.
                await end_tasks(self._vanishing)
            entry = self._node.value
            self._node = self._new_node(self._node.path)
            self._node.value = entry
        await self._node.ensure()
        self.has_left = False

    async def leave(self) -> None:
        """Remove its node, now or in the background.  Idempotent."""
        self.has_left = True
        # First, because an open node would be made again after its deletion.
        await self._node.aclose()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._store.delete(self._node.path)
        except NoNodeError:
            pass
        except (MetadataError, TimeoutError):
            # While other proxies still see it, they redirect clients to it; it redirects them back.
            self._vanishing = self._tasks.start(self._vanish(), name="leaving the live proxies")

    async def _vanish(self) -> None:
        try:
            await persistently(lambda: self._store.delete(self._node.path))
        except (NoNodeError, AlreadyClosedError):
            pass  # a closed session has no nodes
        except MetadataError as error:
            logger.warning(
                "%s goes with the session: %s; to do: nothing, clients find other proxies after "
                "that",
                self._node.path,
                error,
            )

    async def aclose(self) -> None:
        """Let the node vanish with the session, unless it was removed before."""
        await self._node.aclose()
        await self._tasks.aclose()


_PROBE_S = 0.5
"""Timeout of a probe.  A host without the process refuses at once; silence proves nothing."""


async def refuses_connections(location: str) -> bool:
    """Return whether the host of a proxy's location refuses connections: no process serves there.

    A host that does not answer, or has no address, does not count: only we may be cut off from it.
    """
    host, _, port = location.partition("://")[2].rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_PROBE_S):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            refusals = [await _refuses(*address[:2]) for *_, address in found]
    except (OSError, TimeoutError, ValueError):
        return False
    return all(refusals) and bool(refusals)


async def _refuses(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
    return False


class Probes:
    """Probes whether other proxies, unreachable for a client, are dead; calls for one share one.

    Args:
        probe: returns whether the host of a location refuses connections.
    """

    def __init__(
        self, probe: Callable[[str], Coroutine[Any, Any, bool]] = refuses_connections
    ) -> None:
        self._probe = probe
        self._running: dict[str, asyncio.Task[bool]] = {}
        self._tasks = BackgroundTasks()

    async def is_gone(self, location: str) -> bool:
        """Return whether a location refuses connections now."""
        running = self._running.get(location)
        if running is None:
            running = self._tasks.start(self._probe(location), name=f"looking for {location}")
            self._running[location] = running
            running.add_done_callback(lambda _: self._running.pop(location, None))
        # Other calls wait for the same probe, which the end of this call must not cancel.
        is_gone = await asyncio.shield(running)
        if is_gone:
            logger.warning(
                "the proxy at %s is gone: no process listens there; to do: start it again if it "
                "should run; others serve its logs",
                location,
            )
        return is_gone

    async def aclose(self) -> None:
        """Give up probes under way."""
        await self._tasks.aclose()


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
        self._store = store
        self._locks = WriterLocks(store, paths)
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
        holder = await self._locks.holder_of(log)
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
        nodes = await self._store.get_many([self._paths.proxy(each) for each in locations])
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
        # Read again on a mismatch: a proxy that was started again has another secret.
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
            self._store,
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
        nodes = await self._store.get_children(self._paths.proxies, fresh=True)
        live = frozenset(unescape(node) for node in nodes or ())
        if self.presence.has_left:
            # Its node may still be there, if it could not be removed at once.
            live -= {self.location}
        if live != self.live:
            logger.info("live proxies: %s", ", ".join(sorted(live)) or "none")
            self.live = live
            self.changes += 1


def _is_same(known: str, given: str) -> bool:
    """Return whether a secret is known, in a time that tells nothing of how much of it fits."""
    return bool(known) and hmac.compare_digest(known.encode(), given.encode())
