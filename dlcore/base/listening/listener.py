"""A port whose certificates may change while clients are connected."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlcore.base.access.tls_refusals import log_refusals
from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence


def listening_error(where: str, error: Exception) -> ConfigurationError:
    """Return the error of a server that cannot listen at `where`, its address or setting.

    The system says why: the port is taken or needs root, the host is none of this machine, or the
    process has no file descriptor left.
    """
    return ConfigurationError(
        f"cannot listen on {where}: {error}; expected a free port that this process may take, and "
        "an address of this machine"
    )


class Listener:
    """Accepts connections on one address.

    A server keeps the context of TLS that it began with.  Therefore another one takes over its
    sockets when there are new certificates; no connection is refused or lost meanwhile.

    Args:
        new_connection: returns the protocol of an accepted connection.
        tls: returns the context for the next connections; None: no TLS.
        handshake_s: most seconds of a handshake of TLS.
    """

    def __init__(
        self,
        new_connection: Callable[[], asyncio.BaseProtocol],
        tls: Callable[[], ssl.SSLContext] | None,
        *,
        handshake_s: float,
    ) -> None:
        self._new_connection = new_connection
        self._tls = tls
        self._handshake_s = handshake_s
        self._context: ssl.SSLContext | None = None
        self._servers: list[asyncio.Server] = []

    @property
    def sockets(self) -> Sequence[Any]:
        """The sockets that listen."""
        return [each for server in self._servers for each in server.sockets]

    async def open(self, host: str, port: int) -> None:
        """Begin.  Raises: OSError: it cannot listen there; see `listening_error`."""
        self._context = self._tls and self._tls()
        self._servers = [await self._serve(self._context, host=host, port=port)]

    async def renew(self) -> None:
        """Accept with the present context from now on."""
        context = self._tls and self._tls()
        if context is self._context:
            return
        # Duplicates, because `close` closes the sockets of the servers before.
        servers = [await self._serve(context, sock=each.dup()) for each in self.sockets]
        self.close()
        self._context, self._servers = context, servers

    def close(self) -> None:
        """Accept no more; those that are connected stay."""
        for each in self._servers:
            each.close()

    async def _serve(self, context: ssl.SSLContext | None, **address: Any) -> asyncio.Server:
        if context is not None:
            log_refusals(context)
        try:
            return await asyncio.get_running_loop().create_server(
                self._new_connection,
                **address,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._handshake_s,
            )
        except UnicodeError as error:  # Python's look-up of a name like a..b or one without an end
            raise OSError(str(error)) from error
