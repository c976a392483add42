"""The bookie client over the wire: for each bookie one connection for adds, others for reads.

Every failure of a connection is a `BookieUnavailableError`: the outcome is unknown.  A connection
that failed is dropped, and the bookie's address is looked up again, because a restarted bookie has
another port.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Self

from dlcore.base.background import BackgroundTasks, answer
from dlcore.base.backoff import Backoff
from dlcore.base.config import ENTRY_SIZE_BYTES_MAX
from dlcore.base.errors import (
    BookieError,
    BookieUnavailableError,
    DigestMismatchError,
    EntryTooLargeError,
    NoSuchEntryError,
)
from dlcore.wire.connection import Connection, Dialer, unknown_addresses
from dlcore.wire.messages import (
    ENTRY_BYTES_MIN,
    WINDOW_BYTES_MAX,
    Chunk,
    Follow,
    Held,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Update,
    cost_of,
)
from dlcore.wire.port import FollowUpdate, HeldEntries
from dlcore.wire.session import NotSpokenError

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Callable,
        Sequence,
    )

    from dlcore.base.access.capability import Purse
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.config import LedgerClientConfig
    from dlcore.base.ids import BookieId
    from dlcore.wire.connection import Incoming, Resolve
    from dlcore.wire.control import ControlClient
    from dlcore.wire.messages import Frame
    from dlcore.wire.port import EntryRange, OnAnswer
    from dlcore.wire.session import Answer, Read

_WINDOW_CHUNKS = 2
"""Chunks that a bookie sends ahead in a range read: one is used while the next one arrives."""
_FOLLOW_WINDOW_BYTES = 1024 * 1024
_PROBED_MAX = 16
"""Single entries that are read from a bookie of an earlier release, which has no READ_HELD."""
_RECONNECT_S = 0.05
_RECONNECT_S_MAX = 1.0
"""Pauses before a new connection to a bookie whose connection failed; none after an answer."""
_LAST_WRITES_S = 2.0
"""The longest time that a closing client waits for the answers to its last writes."""


class Lane(IntEnum):
    """The purpose of a connection; on one connection messages arrive in the order of sending."""

    WRITES = 1
    """Adds and LACs: no large answers come back, so nothing delays their answers."""
    NEWS = 2
    """Followers and single entries."""
    RANGES = 3
    """Range reads: each has its own window, so a read whose data is not taken delays no other.

    Measured beside four range reads that never end, on two busy cores: a single read takes 13 ms
    on its own connection and 27 to 39 on theirs; an add takes 39 to 44 ms, and 72 on theirs.  One
    range read delays no other request.
    """


class WireBookieClient:
    """`dlcore.wire.port.BookieClient`; it belongs to the event loop of its first use.

    Args:
        resolve: returns a bookie's address as host:port; called for every new connection.
        cluster_id: the namespace's cluster; a bookie of another cluster is refused.
        config: time-outs and bounds.
        resolve_control: returns the address of a bookie's control service, for `list_entries`.
        tls: the certificates for encrypted connections; None: connections are not encrypted.
        purse: capabilities for bookies that let a client without a certificate do nothing else.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        cluster_id: str,
        config: LedgerClientConfig,
        resolve_control: Resolve | None = None,
        tls: TlsInUse | None = None,
        purse: Purse | None = None,
    ) -> None:
        self._dialer = Dialer(resolve, cluster_id=cluster_id, config=config, tls=tls, purse=purse)
        self._resolve_control = resolve_control
        self._config = config
        self._peers: dict[BookieId, _Peer] = {}
        self._control: ControlClient | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<WireBookieClient {state} bookies={len(self._peers)}>"

    def send_add(
        self, bookie: BookieId, frame: Frame, on_answer: OnAnswer, *, is_recovery: bool = False
    ) -> None:
        """Queue an add; see the port."""
        try:
            size = len(frame)
            _check_size(bookie, size)
            connection = self._connection(bookie, Lane.WRITES)
        except BookieError as error:
            asyncio.get_running_loop().call_soon(on_answer, error)
        else:
            connection.add(frame, size, on_answer, is_recovery=is_recovery)

    def add_entry(
        self, bookie: BookieId, frame: Frame, *, is_recovery: bool = False
    ) -> asyncio.Future[None]:
        """Queue an add; see the port."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.send_add(bookie, frame, partial(answer, future), is_recovery=is_recovery)
        return future

    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> asyncio.Future[None]:
        """Queue an explicit LAC; see the port."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        on_answer = partial(answer, future)
        try:
            connection = self._connection(bookie, Lane.WRITES)
        except BookieError as error:
            # At once, unlike in `send_add`: the callbacks of a future run later in any case.
            on_answer(error)
        else:
            connection.write_lac(ledger_id, last_add_confirmed, on_answer)
        return future

    async def read_lac(self, bookie: BookieId, *, ledger_id: int, fence: bool) -> int:
        """Read the LAC; see the port."""
        with self._reading(bookie, Lane.NEWS, ReadLac(0, ledger_id, fence)) as reading:
            answer = await reading.next(self._config.read_timeout_s)
        assert isinstance(answer, int)
        return answer

    async def read_held(self, bookie: BookieId, *, ledger_id: int) -> HeldEntries:
        """Read the entries held above the LAC; see the port."""
        try:
            with self._reading(bookie, Lane.NEWS, ReadHeld(0, ledger_id)) as reading:
                answer = await reading.next(self._config.read_timeout_s)
        except NotSpokenError:
            return await self._probe(bookie, ledger_id)
        assert isinstance(answer, Held)
        return HeldEntries(*answer[1:])

    async def _probe(self, bookie: BookieId, ledger_id: int) -> HeldEntries:
        """Find the entries that a bookie of an earlier release holds: read them one by one."""
        lac = await self.read_lac(bookie, ledger_id=ledger_id, fence=False)
        entry_id = lac + 1
        ranges: list[tuple[int, int]] = []
        for entry_id in range(lac + 1, lac + 1 + _PROBED_MAX):
            try:
                await self.read_entry(bookie, ledger_id=ledger_id, entry_id=entry_id, fence=False)
            except NoSuchEntryError:
                break
            ranges = [(lac + 1, entry_id)]
        return HeldEntries(lac, entry_id, ranges)

    async def read_entry(
        self, bookie: BookieId, *, ledger_id: int, entry_id: int, fence: bool
    ) -> bytes | memoryview:
        """Read one frame; see the port."""
        request = ReadEntry(0, ledger_id, entry_id, fence)
        with self._reading(bookie, Lane.NEWS, request) as reading:
            answer = await reading.next(self._config.read_timeout_s)
        assert isinstance(answer, Chunk)
        if len(answer.frames) != 1:
            raise BookieUnavailableError(f"{bookie}: {len(answer.frames)} entries, expected one")
        return answer.frames[0]

    async def read_entries(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        last_entry_id: int,
        stride: int = 1,
    ) -> AsyncGenerator[Sequence[bytes | memoryview], None]:
        """Stream frames; see the port."""
        chunk_bytes = self._config.read_chunk_bytes
        request = ReadEntries(
            0,
            ledger_id,
            first_entry_id,
            last_entry_id,
            stride,
            chunk_bytes,
            min(_WINDOW_CHUNKS * chunk_bytes, WINDOW_BYTES_MAX),
        )
        with self._reading(bookie, Lane.RANGES, request) as reading:
            while True:
                answer = await reading.next(self._config.read_timeout_s)
                assert isinstance(answer, Chunk)
                yield answer.frames
                if answer.is_last:
                    return

    async def follow(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        take: Callable[[FollowUpdate], bool] | None = None,
    ) -> AsyncGenerator[FollowUpdate, None]:
        """Follow a ledger; see the port.  A dead connection shows by its silence."""
        request = Follow(0, ledger_id, first_entry_id, _FOLLOW_WINDOW_BYTES)
        with self._reading(bookie, Lane.NEWS, request) as reading:
            # The first update comes at once, later ones only when the ledger changes; a bookie that
            # is gone shows by the keepalive.
            yield _update_of(await reading.next(self._config.read_timeout_s))
            if take is not None:
                reading.offer_to(take)
            while True:
                yield _update_of(await reading.next(None))

    async def list_entries(self, bookie: BookieId, *, ledger_id: int) -> Sequence[EntryRange]:
        """List the entries held; see the port."""
        self._check_open(bookie)
        if self._resolve_control is None:
            raise BookieUnavailableError(f"{bookie}: its control service is not known here")
        if self._control is None:
            from dlcore.wire.control import ControlClient  # loads grpc

            self._control = ControlClient(
                timeout_s=self._config.read_timeout_s, tls=self._dialer.tls
            )
        with unknown_addresses(bookie):
            address = await self._resolve_control(bookie)
        return await self._control.list_entries(bookie, address, ledger_id=ledger_id)

    async def aclose(self) -> None:
        """Close every connection; pending requests fail with `BookieUnavailableError`.

        Writes on their way get a moment to arrive: an entry is acknowledged by an ack quorum, and
        a program that ends at once would else leave its last entries without their other copies.
        """
        self._is_closed = True
        async with AsyncExitStack() as ends:  # closes each one, also if this is cancelled
            for peer in self._peers.values():
                ends.push_async_callback(peer.aclose)
            if self._control is not None:
                ends.push_async_callback(self._control.aclose)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_LAST_WRITES_S, self._config.add_timeout_s)):
                    for peer in list(self._peers.values()):
                        await peer.settled()

    def forget_free_memory(self) -> None:
        """Release free memory for receiving; see the port."""
        self._dialer.memory.forget_free()

    def _check_open(self, bookie: BookieId) -> None:
        if self._is_closed:
            raise BookieUnavailableError(f"{bookie}: the bookie client is closed")

    def _connection(self, bookie: BookieId, lane: Lane) -> Connection:
        self._check_open(bookie)
        peer = self._peers.get(bookie)
        if peer is None:
            now_s = asyncio.get_running_loop().time()
            # Bookies come and go for years: keep only those that are in use.
            self._peers = {b: each for b, each in self._peers.items() if each.is_used(now_s)}
            peer = self._peers[bookie] = _Peer(bookie, self._dialer)
        return peer.connection(lane)

    def _reading(self, bookie: BookieId, lane: Lane, request: Read) -> _Reading:
        return _Reading(bookie, self._connection(bookie, lane), request)


class _Reading:
    """One read under way; if the caller leaves it before its end, the bookie gets a CANCEL."""

    def __init__(self, bookie: BookieId, connection: Connection, request: Read) -> None:
        self._bookie = bookie
        self._connection = connection
        self._incoming: Incoming = connection.read(request)
        self._taken = 0

    def offer_to(self, take: Callable[[FollowUpdate], bool]) -> None:
        """Offer to `take` each update that comes while `next` waits; see `Incoming.taker`."""

        def take_now(answer: Answer) -> bool:
            if not take(_update_of(answer)):
                return False
            self._connection.take(self._incoming, _cost_of(answer))
            return True

        self._incoming.taker = take_now

    async def next(self, timeout_s: float | None) -> Answer:
        """Return the next answer; the caller is done with the one before."""
        if self._taken:
            self._connection.take(self._incoming, self._taken)
        if timeout_s is None:
            answer = await self._incoming.get()
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._incoming.get()
            except TimeoutError as error:
                raise BookieUnavailableError(
                    f"{self._bookie}: no answer to a read within {timeout_s:g} s"
                ) from error
        self._taken = _cost_of(answer)
        return answer

    def __enter__(self) -> Self:
        return self

    # Not a generator: an unclosed one would be finalized in no order with its holders.
    def __exit__(self, *_: object) -> None:
        self._connection.cancel(self._incoming)
        self._incoming.drop()


class _Peer:
    """One bookie: its connections, and the pause before the next one."""

    def __init__(self, bookie: BookieId, dialer: Dialer) -> None:
        self._bookie = bookie
        self._dialer = dialer
        self._backoff = Backoff(_RECONNECT_S, _RECONNECT_S_MAX)
        self._connections: dict[Lane, Connection] = {}
        self._opening = BackgroundTasks()

    def is_used(self, now_s: float) -> bool:
        """Whether there is a connection, or the pause before the next one is not over."""
        return bool(self._connections or len(self._opening)) or now_s < self._backoff.due_s

    def connection(self, lane: Lane) -> Connection:
        """Return the lane's connection, or start a new one."""
        connection = self._connections.get(lane)
        if connection is None:
            connection = Connection(
                self._bookie,
                self._dialer,
                backoff=self._backoff,
                on_broken=lambda: self._drop(lane),
            )
            # Registered before it is open: requests that come meanwhile wait in it.
            self._connections[lane] = connection
            self._opening.start(self._open(connection), name=f"connecting to {self._bookie}")
        return connection

    async def settled(self) -> None:
        """Return once every write so far has its answer or its error."""
        connection = self._connections.get(Lane.WRITES)
        if connection is not None:
            await connection.settled()

    async def aclose(self) -> None:
        """Close every connection and wait for its end."""
        connections = list(self._connections.values())
        for connection in connections:
            connection.fail(BookieUnavailableError(f"{self._bookie}: the client was closed"))
        await self._opening.aclose()
        for connection in connections:
            await connection.closed.wait()

    def _drop(self, lane: Lane) -> None:
        del self._connections[lane]

    async def _open(self, connection: Connection) -> None:
        """Connect to the bookie's present address, after the pause of the back-off."""
        await asyncio.sleep(self._backoff.due_s - asyncio.get_running_loop().time())
        try:
            await self._dialer.dial(self._bookie, connection)
        except BookieError as error:
            self._backoff.failed(asyncio.get_running_loop().time())
            connection.fail(error)


def _cost_of(answer: Answer) -> int:
    return 0 if isinstance(answer, int | Held) else cost_of(answer)


def _update_of(answer: Answer) -> FollowUpdate:
    assert isinstance(answer, Update)
    return FollowUpdate(
        frames=answer.frames, last_add_confirmed=answer.last_add_confirmed, fenced=answer.fenced
    )


def _check_size(bookie: BookieId, size: int) -> None:
    if size > ENTRY_SIZE_BYTES_MAX:
        raise EntryTooLargeError(
            f"{bookie}: an entry of {size} bytes, the limit is {ENTRY_SIZE_BYTES_MAX}"
        )
    if size < ENTRY_BYTES_MIN:
        raise DigestMismatchError(
            f"{bookie}: an entry frame of {size} bytes, without a body it has {ENTRY_BYTES_MIN}"
        )
