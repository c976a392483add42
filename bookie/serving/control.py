"""The bookie's control service over gRPC: its identity and figures, and which entries it holds.

Operators and auto-recovery send few messages here.  Entries use the framed protocol (service.py).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc

from dlcore.base.access.client_names import EVERY_CLIENT, ClientNames
from dlcore.base.access.entrances import Entrance
from dlcore.base.clock import SystemClock
from dlcore.base.errors import DLError, WrongIncarnationError
from dlcore.base.listening.listener import listening_error
from dlcore.base.proto import bookie_pb2 as pb
from dlcore.base.proto.bookie_pb2_grpc import (
    BookieControlServicer,
    add_BookieControlServicer_to_server,
)
from dlcore.wire.fields import status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from typing import TypeAlias

    from bookie.ledger_storage import LedgerStorage
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.ids import BookieId

    Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

logger = logging.getLogger(__name__)

LISTED_RANGES_MAX = 4096
"""Ranges of entries in one page of a list; few enough that a page delays no other request."""
_STOP_GRACE_S = 0.5
"""For answers under way: they are short, and callers ask again."""
_OPTIONS = [
    # With it, two processes on one port would share the clients between them.
    ("grpc.so_reuseport", 0),
]


def _entrance(name: str, resource: str) -> Entrance:
    return Entrance(
        name=name,
        resource=resource,
        right="none",
        callers="a machine's certificate; without TLS every caller that can connect",
        cost="one small request",
        logged="nothing",
    )


ENTRANCES = (
    _entrance("ListEntries", "the ranges of entries held of a ledger"),
    _entrance("GetInfo", "the bookie's name, space, counts and clock"),
)


class BookieControl(BookieControlServicer):
    """Answers questions about one storage.

    Args:
        storage: the storage; the caller closes it.
        bookie: this bookie; requests for another incarnation are refused.
        client_names: the names of clients that are let in.
    """

    def __init__(
        self,
        storage: LedgerStorage,
        *,
        bookie: BookieId,
        client_names: ClientNames = EVERY_CLIENT,
    ) -> None:
        self._reads = storage.reads
        self._status = storage.status
        self._bookie = bookie
        self._client_names = client_names
        self._tls: TlsInUse | None = None
        self._server = grpc.aio.server(options=_OPTIONS)
        add_BookieControlServicer_to_server(self, self._server)

    async def start(
        self, address: str, *, tls: TlsInUse | None = None, asks_clients: bool = True
    ) -> int:
        """Listen on host:port; return the port.

        With `tls` and `asks_clients` only clients with a certificate can connect.

        Raises:
            ConfigurationError: it cannot listen there.
        """
        self._tls = tls
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(
                    address, tls.server_credentials(asks_clients=asks_clients)
                )
        except RuntimeError as error:
            raise listening_error(f"{address} for control", error) from error
        await self._server.start()
        return port

    async def aclose(self) -> None:
        """Stop."""
        await self._server.stop(_STOP_GRACE_S)

    async def ListEntries(
        self, request: pb.ListEntriesRequest, context: Context
    ) -> AsyncIterator[pb.ListEntriesResponse]:
        """Send the ranges of entries held, in pages."""
        await self._let_in(context)
        try:
            # A list of another incarnation would count entries as held that were lost with its
            # disk.
            if request.incarnation != self._bookie.incarnation:
                raise WrongIncarnationError(
                    f"this is bookie {self._bookie.name}, incarnation {self._bookie.incarnation}; "
                    f"the request is for incarnation {request.incarnation}"
                )
            for ranges in self._reads.list_entries(request.ledger_id).pages():
                for start in range(0, len(ranges), LISTED_RANGES_MAX):
                    yield _page(ranges[start : start + LISTED_RANGES_MAX])
                await asyncio.sleep(0)  # let the event loop serve other requests
            yield _page(())  # so that a list without ranges has a page as well
        except DLError as error:
            status, detail = status_of(error)
            yield pb.ListEntriesResponse(status=status, detail=detail)

    async def GetInfo(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        """Send counts and space, the clock, and when TLS expires."""
        await self._let_in(context)
        stats = self._status.stats()
        return pb.InfoResponse(
            bookie_name=self._bookie.name,
            incarnation=self._bookie.incarnation,
            read_only=stats.is_read_only,
            failed=stats.failed,
            ledger_count=stats.ledger_count,
            stored_bytes=stats.stored_bytes,
            disk_free_bytes=stats.disk_free_bytes,
            disk_total_bytes=stats.disk_total_bytes,
            damaged_entries=stats.damaged_entry_count,
            repaired_entries=stats.repaired_entry_count,
            expires_at_ms=0 if self._tls is None else self._tls.expires_at_ms or 0,
            clock_ms=SystemClock().now_ms(),
        )

    async def _let_in(self, context: Context) -> None:
        """End the call of a client whose certificate has none of the names."""
        shown = context.auth_context().get("x509_subject_alternative_name", ())
        refusal = self._client_names.refusal([name.decode() for name in shown])
        if refusal is not None:
            logger.warning(
                "call refused peer=%s: %s; to do: if the peer is one of yours, name it in "
                "tls_client_names; else nothing",
                context.peer(),
                refusal,
            )
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)


def _page(ranges: Sequence[tuple[int, int]]) -> pb.ListEntriesResponse:
    page = pb.ListEntriesResponse()
    for first, last in ranges:
        page.ranges.add(first_entry_id=first, last_entry_id=last)
    return page
