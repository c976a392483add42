"""One client's write stream at the bookie: adds in, results out as flushes settle them.

A child task reads and hands requests to the storage; the stream's own task sends results, many per
message.  Neither waits for the other, except that reading pauses while too many bytes of this
stream are in flight: then flow control holds the client back.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.errors import (
    BadRequestError,
    BookieUnavailableError,
    DLError,
    WrongIncarnationError,
)
from dlcore.transport import wire

if TYPE_CHECKING:
    from typing import Protocol

    from bookie.storage import LedgerStorage

    class MessageStream(Protocol):
        """The part of a gRPC call's context that is used here."""

        async def read(self) -> object:
            """Return the next message, or what is not bytes at the end."""

        async def write(self, message: bytes) -> None:
            """Send a message; returns when flow control has taken it."""


logger = logging.getLogger(__name__)

_HANDSHAKE_ID = 0
_LAC_BYTES = 64
"""What an explicit LAC counts for in flight: about what it takes on disk."""


class WriteStream:
    """One write stream; `run` carries it from its handshake to its end.

    Args:
        messages: the gRPC call.
        storage: where adds go.
        expected: the handshake that is accepted.
        bytes_max: entry bytes in flight beyond which the stream is not read.
    """

    def __init__(
        self,
        messages: MessageStream,
        storage: LedgerStorage,
        *,
        expected: wire.Handshake,
        bytes_max: int,
    ) -> None:
        self._messages = messages
        self._storage = storage
        self._expected = expected
        self._bytes_max = bytes_max
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._ok_request_ids: list[int] = []
        self._failures: list[tuple[int, BaseException]] = []
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_ending = False
        self._is_draining = False
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Carry the stream until the client has ended it or broke its rules, or until `drain`."""
        reader = asyncio.create_task(self._read_all(), name="bookie-write-stream-reader")
        try:
            await self._send_all()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._ended.set()

    async def drain(self) -> None:
        """Refuse adds from now on; return when all that was taken has been answered."""
        self.begin_drain()
        await self._ended.wait()

    def begin_drain(self) -> None:
        """Refuse adds from now on; `run` returns when all that was taken has been answered."""
        self._is_draining = self._is_ending = True
        self._has_news.set()

    async def _read_all(self) -> None:
        try:
            take = self._shake_hands
            while (batch := await self._read()) is not None:
                take(batch)
                take = self._take
                await self._has_room.wait()
        except DLError as error:
            # Whose request this was cannot be told, so the stream ends with it.
            logger.warning("write stream refused: %s", error)
            self._failures.append((_HANDSHAKE_ID, error))
        finally:
            self._is_ending = True
            self._has_news.set()

    async def _read(self) -> wire.WriteBatch | None:
        data = await self._messages.read()
        return wire.decode_write_request(data) if isinstance(data, bytes) else None

    def _shake_hands(self, batch: wire.WriteBatch) -> None:
        """Judge the first message; nothing that comes with a wrong one is looked at."""
        if batch.handshake is None or batch.frames or batch.lacs:
            raise BadRequestError("a write stream begins with a handshake, alone")
        self._check(batch.handshake)
        self._settle(_HANDSHAKE_ID, None)

    def _check(self, offered: wire.Handshake) -> None:
        expected = self._expected
        if offered.protocol_version != expected.protocol_version:
            raise BadRequestError(
                f"protocol version {offered.protocol_version}, expected {expected.protocol_version}"
            )
        if offered.cluster_id != expected.cluster_id:
            raise BadRequestError(
                f"this bookie is of cluster {expected.cluster_id}, not {offered.cluster_id}"
            )
        if (offered.bookie_name, offered.incarnation) != (
            expected.bookie_name,
            expected.incarnation,
        ):
            raise WrongIncarnationError(
                f"this is {expected.bookie_name}, incarnation {expected.incarnation}; "
                f"not {offered.bookie_name}, incarnation {offered.incarnation}"
            )

    def _take(self, batch: wire.WriteBatch) -> None:
        if batch.handshake is not None or batch.first_request_id <= _HANDSHAKE_ID:
            raise BadRequestError(
                f"expected adds from request id 1 on, not request id {batch.first_request_id}"
                f"{' with a second handshake' if batch.handshake else ''}"
            )
        request_id = batch.first_request_id
        for frame in batch.frames:
            self._add(request_id, frame, is_recovery=batch.is_recovery)
            request_id += 1
        for ledger_id, last_add_confirmed in batch.lacs:
            self._write_lac(request_id, ledger_id, last_add_confirmed)
            request_id += 1

    def _add(self, request_id: int, frame: memoryview, *, is_recovery: bool) -> None:
        if self._is_draining:
            self._settle(request_id, BookieUnavailableError("the bookie is shutting down"))
            return
        future = self._storage.add_entry(frame, is_recovery=is_recovery)
        if future.done():
            self._settle(request_id, future.exception())
            return
        self._fly(request_id, len(frame), future)

    def _fly(self, request_id: int, size_bytes: int, future: asyncio.Future[None]) -> None:
        """Settle the request once `future` is done."""
        self._in_flight += 1
        self._in_flight_bytes += size_bytes
        if self._in_flight_bytes >= self._bytes_max:
            self._has_room.clear()
        future.add_done_callback(partial(self._land, request_id, size_bytes))

    def _land(self, request_id: int, size_bytes: int, future: asyncio.Future[None]) -> None:
        """Settle a request that was in flight."""
        self._in_flight -= 1
        self._in_flight_bytes -= size_bytes
        assert self._in_flight_bytes >= 0
        if self._in_flight_bytes < self._bytes_max:
            self._has_room.set()
        if future.cancelled():
            self._settle(request_id, BookieUnavailableError("the bookie gave the request up"))
        else:
            self._settle(request_id, future.exception())

    def _write_lac(self, request_id: int, ledger_id: int, last_add_confirmed: int) -> None:
        try:
            if self._is_draining:
                raise BookieUnavailableError("the bookie is shutting down")
            if ledger_id < 0 or last_add_confirmed < -1:
                raise BadRequestError(
                    f"ledger {ledger_id} with last add confirmed {last_add_confirmed}: "
                    "expected a ledger >= 0 and an entry >= -1"
                )
            future = self._storage.write_lac(ledger_id, last_add_confirmed)
        except DLError as error:
            self._settle(request_id, error)
        else:
            self._fly(request_id, _LAC_BYTES, future)

    def _settle(self, request_id: int, error: BaseException | None) -> None:
        if error is None:
            self._ok_request_ids.append(request_id)
        else:
            if not isinstance(error, DLError):
                logger.error("an add failed unexpectedly", exc_info=error)
            self._failures.append((request_id, error))
        self._has_news.set()

    async def _send_all(self) -> None:
        while not (self._is_ending and self._is_settled):
            await self._has_news.wait()
            self._has_news.clear()
            if self._ok_request_ids or self._failures:
                message = wire.encode_write_response(self._ok_request_ids, self._failures)
                self._ok_request_ids, self._failures = [], []
                await self._messages.write(message)

    @property
    def _is_settled(self) -> bool:
        return not self._in_flight and not self._ok_request_ids and not self._failures
