"""A probe by which a proxy checks whether another one, unreachable for a client, is dead."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dlcore.base.background import BackgroundTasks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

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
    """Probes of other proxies; calls for the same one share one probe.

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
