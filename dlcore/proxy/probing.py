"""A probe by which a proxy checks whether another one, unreachable for a client, is dead."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

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
