"""The client of a bookie's control service, over gRPC; imported only when it is needed."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from dlcore.base.access.tls_refusals import TLS_CLOSED, grpc_failure
from dlcore.base.errors import BookieUnavailableError
from dlcore.base.proto import bookie_pb2 as pb
from dlcore.base.proto.bookie_pb2_grpc import BookieControlStub
from dlcore.wire.fields import error_of
from dlcore.wire.port import EntryRanges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.ids import BookieId
    from dlcore.wire.port import EntryRange

_OPTIONS = [
    ("grpc.enable_retries", 0),
    # Bookies are contacted directly, even if the environment sets a web proxy.
    ("grpc.enable_http_proxy", 0),
    # Else a new channel to an address would share the back-off of the one that it replaces.
    ("grpc.use_local_subchannel_pool", 1),
]


_CHANNELS_MAX = 100
"""Channels that are kept open; beyond this the oldest one is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieInfo:
    """A bookie's figures, as its control service tells them now."""

    read_only: bool
    failed: bool
    ledgers: int
    stored_bytes: int
    free_bytes: int
    total_bytes: int
    damaged_entries: int
    repaired_entries: int
    expires_at_ms: int | None
    clock_ms: int | None
    """Its clock; None: it is of a release that does not tell it."""


class ControlClient:
    """Channels to the control services of bookies, by address; used on one event loop."""

    def __init__(self, *, timeout_s: float, tls: TlsInUse | None = None) -> None:
        self._timeout_s = timeout_s
        self._tls = tls
        self._credentials: grpc.ChannelCredentials | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def list_entries(
        self, bookie: BookieId, address: str, *, ledger_id: int
    ) -> Sequence[EntryRange]:
        """Return the ranges of entries that `bookie` holds; see `BookieClient.list_entries`."""
        ranges = EntryRanges()
        pages = 0
        end = -1
        request = pb.ListEntriesRequest(incarnation=bookie.incarnation, ledger_id=ledger_id)
        with self._failures(bookie, address):
            call = BookieControlStub(self._channel(address)).ListEntries(request)
            try:
                while (page := await self._next_page(call)) is not None:
                    pages += 1
                    if page.status:
                        error = error_of(page.status, page.detail)
                        raise type(error)(f"{bookie}: {error}")
                    for each in page.ranges:
                        if not end < each.first_entry_id <= each.last_entry_id:
                            raise BookieUnavailableError(
                                f"{bookie}: it listed entries {each.first_entry_id} to "
                                f"{each.last_entry_id} after entry {end}, expected ascending ranges"
                            )
                        ranges.add(each.first_entry_id, each.last_entry_id)
                        end = each.last_entry_id
            finally:
                # If the list is not read to its end, the bookie would go on sending it.
                call.cancel()
        if not pages:
            raise BookieUnavailableError(f"{bookie}: it ended the list before its first page")
        return ranges

    async def ask(self, bookie: BookieId, address: str) -> BookieInfo:
        """Return what `bookie` tells of itself.

        Raises:
            BookieUnavailableError: it does not answer, or another bookie answers.
        """
        with self._failures(bookie, address):
            async with asyncio.timeout(self._timeout_s):
                info = await BookieControlStub(self._channel(address)).GetInfo(pb.InfoRequest())
        if info.incarnation != bookie.incarnation:
            raise BookieUnavailableError(
                f"{bookie}: at {address} is incarnation {info.incarnation} of {info.bookie_name}"
            )
        return BookieInfo(
            read_only=info.read_only,
            failed=info.failed,
            ledgers=info.ledger_count,
            stored_bytes=info.stored_bytes,
            free_bytes=info.disk_free_bytes,
            total_bytes=info.disk_total_bytes,
            damaged_entries=info.damaged_entries,
            repaired_entries=info.repaired_entries,
            expires_at_ms=info.expires_at_ms or None,
            clock_ms=info.clock_ms or None,
        )

    async def aclose(self) -> None:
        """Close every channel."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _next_page(
        self, call: grpc.aio.UnaryStreamCall[pb.ListEntriesRequest, pb.ListEntriesResponse]
    ) -> pb.ListEntriesResponse | None:
        async with asyncio.timeout(self._timeout_s):
            page = await call.read()
        return page if isinstance(page, pb.ListEntriesResponse) else None

    def _channel(self, address: str) -> grpc.aio.Channel:
        credentials = None if self._tls is None else self._tls.channel_credentials()
        # A channel keeps the certificates that it was made with: new ones need new channels.
        if credentials is not self._credentials:
            self._credentials = credentials
            for known in list(self._channels):
                self._retire(known)
        channel = self._channels.get(address)
        if channel is None:
            while len(self._channels) >= _CHANNELS_MAX:
                self._retire(next(iter(self._channels)))
            channel = self._channels[address] = (
                grpc.aio.insecure_channel(address, _OPTIONS)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials, _OPTIONS)
            )
        return channel

    @contextmanager
    def _failures(self, bookie: BookieId, address: str) -> Iterator[None]:
        """Map foreign errors: after any failure on the way the answer is unknown."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            # gRPC's own back-off would delay requests to a bookie that is back.
            self._retire(address)
            code, details = error.code().name, error.details() or ""
            if self._tls is not None:
                details = grpc_failure(details, self._tls.files)
            elif "Socket closed" in details:
                details += f"; {TLS_CLOSED}"
            raise BookieUnavailableError(f"{bookie}: {code}: {details}") from error
        except TimeoutError as error:
            self._retire(address)
            raise BookieUnavailableError(
                f"{bookie}: its control service at {address} did not answer "
                f"within {self._timeout_s:g} s"
            ) from error
        except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise BookieUnavailableError(f"{bookie}: the connection was closed: {error}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc.aio reports a call on a closed channel as cancelled, though no task was.
            raise BookieUnavailableError(f"{bookie}: the connection was closed") from error

    def _retire(self, address: str) -> None:
        """Let the next request use a new channel; the old one closes when its calls have ended."""
        self._channels.pop(address, None)
