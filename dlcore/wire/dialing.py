"""The beginning of a client's connections to bookies: address, handshake and certificates."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from dlcore.base.access.tls_refusals import TLS_CLOSED, closed_unheard, explained
from dlcore.base.errors import BookieUnavailableError, MetadataError
from dlcore.wire.client_end import ClientEnd
from dlcore.wire.messages import FEATURES, PROTOCOL_VERSION, Hello
from dlcore.wire.receive_memory import ReceiveMemory
from dlcore.wire.session import ClientSession

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from dlcore.base.access.holding import Purse
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.config import LedgerClientConfig
    from dlcore.base.ids import BookieId
    from dlcore.wire.session import Sent

R = TypeVar("R")

Resolve: TypeAlias = "Callable[[BookieId], Awaitable[str]]"
"""Returns the address of a bookie as host:port."""


@contextmanager
def unknown_addresses(bookie: BookieId) -> Iterator[None]:
    """Map errors of an address look-up: an unknown address says nothing about the bookie."""
    try:
        yield
    except MetadataError as error:
        raise BookieUnavailableError(f"{bookie}: its address is not known: {error}") from error


class Dialer:
    """Begins the connections of one client.

    Args:
        resolve: returns a bookie's address; called for every new connection.
        cluster_id: the namespace's cluster; a bookie of another cluster is refused.
        config: time-outs and bounds.
        tls: the certificates for encrypted connections; None: connections are not encrypted.
        purse: capabilities that connections present before requests; None: they present none.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        cluster_id: str,
        config: LedgerClientConfig,
        tls: TlsInUse | None = None,
        purse: Purse | None = None,
    ) -> None:
        self.memory = ReceiveMemory()
        """The memory for received bytes, of all connections."""
        self.tls = tls
        self.purse = purse
        self._resolve = resolve
        self._cluster_id = cluster_id
        self._config = config

    def new_session(
        self, bookie: BookieId, now_s: float
    ) -> tuple[ClientEnd[Sent, R], ClientSession[R]]:
        """Return the two machines of a new connection."""
        hello = Hello(PROTOCOL_VERSION, FEATURES, self._cluster_id, bookie.name, bookie.incarnation)
        end: ClientEnd[Sent, R] = ClientEnd(hello, self.memory)
        presenter = None
        if self.purse is not None:
            from dlcore.wire.presenting import Presenter  # most clients have a certificate

            presenter = Presenter(self.purse)
        return end, ClientSession(bookie, end, self._config, presenter, now_s=now_s)

    async def dial(self, bookie: BookieId, protocol: asyncio.BufferedProtocol) -> None:
        """Connect a protocol to the bookie's present address.

        Raises:
            BookieUnavailableError: there is no connection.
        """
        with unknown_addresses(bookie):
            address = await self._resolve(bookie)
        try:
            async with asyncio.timeout(self._config.add_timeout_s):
                await self.connect(protocol, address)
        except (OSError, ValueError, OverflowError, TimeoutError) as error:
            reason = explained(error, None if self.tls is None else self.tls.files)
            raise BookieUnavailableError(
                f"{bookie}: no connection to {address}: {reason}"
            ) from error

    async def connect(self, protocol: asyncio.BufferedProtocol, address: str) -> None:
        """Connect a protocol to host:port; failures are an OSError or an error of the address."""
        host, _, port = address.rpartition(":")
        context = None if self.tls is None else self.tls.client_context()
        await asyncio.get_running_loop().create_connection(
            lambda: protocol, host.strip("[]"), int(port), ssl=context
        )

    def why_unheard(self) -> str:
        """Return why a bookie may have closed a connection before it said anything."""
        return TLS_CLOSED if self.tls is None else closed_unheard(self.tls.files)
