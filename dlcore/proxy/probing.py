"""Whether a proxy that somebody did not reach is gone: asked by a connection to where it served."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

_PROBE_S = 0.5
"""A host refuses a connection at once; one that says nothing for so long proves nothing."""


async def refuses_connections(location: str) -> bool:
    """Return whether nobody listens at a proxy's location, so that no process serves there.

    A host that does not answer, or whose name leads nowhere, may be cut off from here alone.
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
