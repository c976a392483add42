"""Runs a `MetadataService`: the connections, the file, the time.

All that comes in one turn of the event loop is stored by one commit.  If a commit fails, the server
ends: its memory is ahead of its disk then, and no client may learn of the difference.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from typing import TYPE_CHECKING, cast

from dlcore.base.background import fulfil
from dlcore.base.clock import steady_s
from dlcore.base.errors import ConfigurationError, CorruptMetadataError, DLError
from dlcore.base.listening.listener import listening_error
from dlcore.base.metrics import Durations, counter, gauge, histogram
from dlcore.ops.metadata_server.database import Database
from dlcore.ops.metadata_server.jute import FRAME_BYTES_MAX
from dlcore.ops.metadata_server.service import (
    End,
    Event,
    Lost,
    MetadataService,
    Received,
    Send,
    Store,
    Turn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.base.metrics import Sample

logger = logging.getLogger(__name__)

_CONNECTIONS_MAX = 1000
_SILENT_S = 10.0
"""Time for the first frame of a connection."""
_UNSENT_BYTES_MAX = 16 * 1024 * 1024
"""A client that leaves more than this unread is disconnected."""
_TURN_S = 0.5
_FILE = "metadata.sqlite"

NODES = gauge("metadata_server_nodes", "Nodes that are kept")
SESSIONS = gauge("metadata_server_sessions", "Sessions of clients")
CONNECTIONS = gauge("metadata_server_connections", "Connections of clients")
TRANSACTIONS = counter("metadata_server_transactions_total", "Transactions since the file was made")
STORES = histogram("metadata_server_store_seconds", "A commit to the file, with its sync")
METRICS = (NODES, SESSIONS, CONNECTIONS, TRANSACTIONS, STORES)
"""The metrics of a metadata server, in the order of the documentation."""


class _Connections:
    """The connections that are open, by their numbers, which are never given again."""

    def __init__(self) -> None:
        self._open: dict[int, _Connection] = {}
        self._opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: _Connection) -> int | None:
        """Return the number of a new one; None: there are too many."""
        if len(self._open) >= _CONNECTIONS_MAX:
            return None
        self._opened += 1
        self._open[self._opened] = connection
        return self._opened

    def remove(self, number: int) -> None:
        """Forget one that has ended."""
        del self._open[number]

    def get(self, number: int) -> _Connection | None:
        """Return one, if it is open."""
        return self._open.get(number)

    def abort(self) -> None:
        """End all at once."""
        for connection in list(self._open.values()):
            connection.transport.abort()


class MetadataServer:
    """A server on one address, with its file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connections = _Connections()
        self._events: list[Event] = []
        self._is_due = False
        self._store_times = Durations()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done after `stop`, or when the server cannot go on, with the reason."""

    async def start(self, host: str, port: int) -> str:
        """Serve; return the address as host:port.

        Raises:
            ConfigurationError: the folder or the address cannot be used.
            CorruptMetadataError: the file is damaged.
        """
        loop = asyncio.get_running_loop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot use {self._folder}: {error.strerror}") from error
        self._database = Database(self._folder / _FILE)
        try:
            tree, sessions, number = self._database.load()
            self._service = MetadataService(tree, sessions, number=number, now_s=loop.time())
            self._server = await loop.create_server(lambda: _Connection(self), host, port)
        except (OSError, OverflowError, UnicodeError) as error:
            self._database.close()
            raise listening_error(f"{host}:{port}", error) from error
        except CorruptMetadataError:
            self._database.close()
            raise
        self._ticker = loop.call_later(_TURN_S, self._turn)
        address = self._server.sockets[0].getsockname()
        return f"{address[0]}:{address[1]}"

    def stop(self) -> None:
        """Let `ended` be done."""
        fulfil(self.ended, None)

    def samples(self) -> Iterator[Sample]:
        """Yield the present samples of `METRICS`."""
        yield NODES.of(self._service.node_count)
        yield SESSIONS.of(self._service.session_count)
        yield CONNECTIONS.of(len(self._connections))
        yield TRANSACTIONS.of(self._service.number)
        yield STORES.of(self._store_times)

    def not_serving(self) -> str | None:
        """Return why clients are not served, None if they are."""
        return "it ends" if self.ended.done() else None

    async def try_file(self) -> None:
        """Write the file, and change nothing in it.

        Raises:
            DLError: it cannot be written.
        """
        try:
            self._database.rewrite()
        except sqlite3.Error as error:
            raise DLError(f"cannot write {self._folder / _FILE}: {error}") from error

    def close(self) -> None:
        """End; the sessions stay for the next start."""
        self._ticker.cancel()
        self._server.close()
        self._connections.abort()
        self._database.close()

    def opened(self, connection: _Connection) -> int | None:
        """Return the number of a new connection; None: there are too many."""
        return None if self.ended.done() else self._connections.add(connection)

    def lost(self, number: int) -> None:
        """A connection has ended."""
        self._connections.remove(number)
        self.take(Lost(number))

    def take(self, event: Event) -> None:
        """Take an event into this turn of the loop."""
        self._events.append(event)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._perform)

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticker = loop.call_later(_TURN_S, self._turn)
        self.take(Turn(loop.time()))

    def _perform(self) -> None:
        events, self._events, self._is_due = self._events, [], False
        if self.ended.done():
            return
        effects = [effect for event in events for effect in self._service.handle(event)]
        stores = [effect for effect in effects if isinstance(effect, Store)]
        try:
            if stores:
                began_s = steady_s()
                self._database.store(stores)
                self._store_times.note(steady_s() - began_s)
        except sqlite3.Error as error:
            self.ended.set_exception(DLError(f"cannot write {self._folder / _FILE}: {error}"))
            return
        for effect in effects:
            match effect:
                case Send(number, data):
                    if (connection := self._connections.get(number)) is not None:
                        connection.send(data)
                case End(number, reason):
                    if (connection := self._connections.get(number)) is not None:
                        connection.end(reason)
                case Store():
                    pass  # done above, all at once


class _Connection(asyncio.Protocol):
    """One connection: cuts what comes into frames."""

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._number: int | None = None
        self._received = bytearray()
        self._silence: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast("asyncio.Transport", transport)
        self._number = self._server.opened(self)
        if self._number is None:
            self.transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._silence = loop.call_later(_SILENT_S, self.end, "it said nothing")

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        del exc
        if self._silence is not None:
            self._silence.cancel()
        if self._number is not None:
            self._server.lost(self._number)

    def data_received(self, data: bytes) -> None:
        """Take the frames that are whole."""
        assert self._number is not None
        self._received += data
        now_s = asyncio.get_running_loop().time()
        while len(self._received) >= 4:
            size = int.from_bytes(self._received[:4])
            if size > FRAME_BYTES_MAX:
                self.end(f"a frame of {size} bytes, the limit is {FRAME_BYTES_MAX}")
                return
            if len(self._received) < 4 + size:
                return
            frame = bytes(self._received[4 : 4 + size])
            del self._received[: 4 + size]
            password = b""
            if self._silence is not None:  # the first frame
                self._silence.cancel()
                self._silence = None
                password = secrets.token_bytes(16)
            self._server.take(Received(self._number, frame, now_s, password))

    def send(self, data: bytes) -> None:
        """Send bytes; a client that does not read is disconnected."""
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > _UNSENT_BYTES_MAX:
            self.end("it does not read")

    def end(self, reason: str = "") -> None:
        """End the connection, after what was sent."""
        if reason:
            logger.info(
                "connection ended peer=%s: %s", self.transport.get_extra_info("peername"), reason
            )
            self.transport.abort()
        else:
            self.transport.close()
