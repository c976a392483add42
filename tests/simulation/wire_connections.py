"""Connections as they are: the real client and the real service, joined by simulated TCP.

Answers of a bookie are judged where they leave its storage: `JudgedStorage` is what a connection
sees of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from bookie.serving.service import BookieService
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import DLError
from dlcore.wire.client import WireBookieClient
from dlcore.wire.connection import Dialer
from dlcore.wire.frames import decode_frame
from tests.simulation.connections import (
    READ_CHUNK_BYTES,
    SimBookieClient,
    watch_entries,
    watch_entry,
    watch_follow,
    watch_held,
    watch_lac,
)
from tests.simulation.transport import couple

if TYPE_CHECKING:
    import random
    from collections.abc import Coroutine, Sequence

    from bookie.ledger_storage import LedgerStorage
    from bookie.serving.connection import Connection
    from dlcore.base.ids import BookieId
    from dlcore.wire.frames import BytesLike, FrameRun
    from dlcore.wire.port import EntryRange, FollowUpdate, HeldEntries
    from tests.simulation.connections import Judge
    from tests.simulation.network import Network
    from tests.simulation.processes import SimBookie
    from tests.simulation.transport import SimTransport


CONNECTION_TIMEOUT_S = 4.0
_CONNECTION_BYTES_MAX = 48 * 1024
_SILENCE_S = 3.0
REFUSAL_CHANCE = 0.7
"""How often a client learns that a process is gone; else there is silence."""


class SimDialer(Dialer):
    """Begins connections over the simulated network; the address of a bookie is its name."""

    def __init__(
        self,
        name: str,
        *,
        network: Network,
        bookies: Sequence[SimBookie],
        rng: random.Random,
        cluster_id: str,
        config: LedgerClientConfig,
    ) -> None:
        super().__init__(self.find, cluster_id=cluster_id, config=config)
        self.name = name
        self._rng = rng
        self._network = network
        self._bookies = bookies
        self._loop = asyncio.get_running_loop()

    async def find(self, bookie: BookieId) -> str:
        """Return the address of a bookie."""
        return bookie.name

    def _machine(self, name: str) -> SimBookie:
        return next(each for each in self._bookies if each.name == name)

    async def connect(self, protocol: asyncio.BufferedProtocol, address: str) -> None:
        """Connect to the bookie whose name is `address`: a message there and one back."""
        here = self._machine(address)
        accepted: asyncio.Future[bool] = self._loop.create_future()

        def answer(*, is_yes: bool) -> None:
            if not accepted.done():
                accepted.set_result(is_yes)

        def arrive() -> None:
            listener = here.listener
            if listener is None:
                here.refuse(self.name, lambda: answer(is_yes=False))
                return
            connection = listener.accept(self.name)
            near, far = couple(
                self._network,
                self._rng,
                protocol,
                connection,
                client_name=self.name,
                bookie_name=here.name,
            )
            listener.keep(far)
            connection.connection_made(far)

            def welcome() -> None:
                if accepted.done():
                    near.close()
                else:
                    protocol.connection_made(near)
                    answer(is_yes=True)

            self._network.send(here.name, self.name, welcome)

        self._network.send(self.name, here.name, arrive)
        if not await accepted:
            raise ConnectionRefusedError(f"{address} refuses connections")


class WireSimClient(WireBookieClient):
    """One client process's connections, which give up after `timeout_s`.

    Lists of entries are asked for by themselves: they do not travel on the wire.
    """

    def __init__(
        self,
        name: str,
        *,
        network: Network,
        bookies: Sequence[SimBookie],
        cluster_id: str,
        rng: random.Random,
        timeout_s: float,
    ) -> None:
        config = LedgerClientConfig(
            add_timeout_s=timeout_s,
            read_timeout_s=timeout_s,
            read_chunk_bytes=READ_CHUNK_BYTES,
        )
        dialer = SimDialer(
            name, network=network, bookies=bookies, rng=rng, cluster_id=cluster_id, config=config
        )
        super().__init__(dialer.find, cluster_id=cluster_id, config=config)
        self._dialer = dialer
        self._by_itself = SimBookieClient(
            name, network=network, bookies=bookies, timeout_s=timeout_s
        )

    async def list_entries(self, bookie: BookieId, *, ledger_id: int) -> Sequence[EntryRange]:
        """Return ranges."""
        return await self._by_itself.list_entries(bookie, ledger_id=ledger_id)


def new_bookie_client(
    name: str,
    *,
    network: Network,
    bookies: Sequence[SimBookie],
    cluster_id: str,
    rng: random.Random,
    timeout_s: float,
    has_wire: bool,
) -> SimBookieClient | WireSimClient:
    """Return a client process's way to bookies."""
    if not has_wire:
        return SimBookieClient(name, network=network, bookies=bookies, timeout_s=timeout_s)
    return WireSimClient(
        name,
        network=network,
        bookies=bookies,
        cluster_id=cluster_id,
        rng=rng,
        timeout_s=timeout_s,
    )


class Listener:
    """The network side of a bookie process: its service, and the connections that end with it."""

    def __init__(self, bookie: SimBookie, storage: LedgerStorage, *, cluster_id: str) -> None:
        assert bookie.bookie is not None
        self._bookie = bookie
        self._storage = storage
        self._transports: list[SimTransport] = []
        self._service = BookieService(
            storage,
            bookie=bookie.bookie,
            cluster_id=cluster_id,
            connection_bytes_max=_CONNECTION_BYTES_MAX,
            chunk_bytes_max=READ_CHUNK_BYTES,
            silence_s=_SILENCE_S,
        )

    @property
    def is_read_from(self) -> bool:
        """Whether it has not seen the end of some reader yet."""
        return any(each.reads.streams for each in self._service.connections)

    def accept(self, client: str) -> Connection:
        """Return the protocol of a new connection."""
        judged = JudgedStorage(self._bookie, client, self._storage)
        return self._service.new_connection(cast("LedgerStorage", judged))

    def keep(self, transport: SimTransport) -> None:
        """Remember a connection that ends with the process."""
        self._transports = [each for each in self._transports if not each.is_closing()]
        self._transports.append(transport)

    def hang_up(self, rng: random.Random) -> None:
        """End all connections with the process."""
        if self._transports:
            is_reported = rng.random() < REFUSAL_CHANCE
            for transport in self._transports:
                transport.vanish(is_reported=is_reported)


class JudgedStorage:
    """The view of one connection on a bookie's storage; judges every answer, adds nothing."""

    def __init__(self, bookie: SimBookie, client: str, storage: LedgerStorage) -> None:
        self.writes = JudgedWrites(bookie, storage)
        self.reads = JudgedReads(bookie, client, storage)
        self.followers = storage.followers


class JudgedWrites:
    """Judges what is called durable."""

    def __init__(self, bookie: SimBookie, storage: LedgerStorage) -> None:
        assert bookie.record is not None
        self._bookie = bookie
        self._record = bookie.record
        self._storage = storage

    def add_entry(self, frame: BytesLike, *, is_recovery: bool = False) -> asyncio.Future[None]:
        """Add; what is called durable is noted."""
        header = decode_frame(frame)
        entry = (header.ledger_id, header.entry_id)
        was_fenced = header.ledger_id in self._record.fenced
        future = self._storage.writes.add_entry(frame, is_recovery=is_recovery)
        self._bookie.on_add_taken(future)

        def on_done(done: asyncio.Future[None]) -> None:
            if done.exception() is None and self._is_alive:
                self._record.on_added(entry, is_recovery=is_recovery, was_fenced=was_fenced)

        future.add_done_callback(on_done)
        return future

    def add_run(self, run: FrameRun) -> asyncio.Future[None] | None:
        """Add many in the same way."""
        future = self._storage.writes.add_run(run)
        if future is None:
            return None
        self._bookie.on_add_taken(future)
        entries = [(each.ledger_id, each.entry_id) for each in map(decode_frame, run)]
        fenced = {ledger_id for ledger_id, _ in entries if ledger_id in self._record.fenced}

        def on_done(done: asyncio.Future[None]) -> None:
            if done.exception() is None and self._is_alive:
                for entry in entries:
                    self._record.on_added(entry, is_recovery=False, was_fenced=entry[0] in fenced)

        future.add_done_callback(on_done)
        return future

    def write_lac(self, ledger_id: int, last_add_confirmed: int) -> asyncio.Future[None]:
        """Write a LAC in the same way."""
        future = self._storage.writes.write_lac(ledger_id, last_add_confirmed)

        def on_done(done: asyncio.Future[None]) -> None:
            if done.exception() is None and self._is_alive:
                self._record.on_lac_written(ledger_id, last_add_confirmed)

        future.add_done_callback(on_done)
        return future

    @property
    def _is_alive(self) -> bool:
        return self._bookie.storage is self._storage


class JudgedReads:
    """Judges answers."""

    def __init__(self, bookie: SimBookie, client: str, storage: LedgerStorage) -> None:
        assert bookie.record is not None
        self._bookie = bookie
        self._record = bookie.record
        self._client = client
        self._storage = storage
        self.may_have_news = storage.reads.may_have_news

    async def read_lac(self, ledger_id: int, *, fence: bool) -> int:
        """Read the LAC."""
        judge = watch_lac(ledger_id, fence, self._record)
        work = self._storage.reads.read_lac(ledger_id, fence=fence)
        result: int = await self._judged(work, judge, fence=fence)
        return result

    async def read_held(self, ledger_id: int) -> HeldEntries:
        """Read what is held above the LAC."""
        judge = watch_held(ledger_id, self._record)
        result: HeldEntries = await self._judged(self._storage.reads.read_held(ledger_id), judge)
        return result

    async def read_entry(
        self, ledger_id: int, entry_id: int, *, fence: bool, bytes_max: int
    ) -> memoryview:
        """Read an entry."""
        judge = watch_entry(ledger_id, entry_id, fence, self._record)
        work = self._storage.reads.read_entry(ledger_id, entry_id, fence=fence, bytes_max=bytes_max)
        result: memoryview = await self._judged(work, judge, fence=fence)
        return result

    async def read_chunk(
        self, ledger_id: int, *, first_entry_id: int, stride: int, **more: int
    ) -> Sequence[memoryview]:
        """Read a part of a range."""
        judge = watch_entries(ledger_id, first_entry_id, stride, self._record)
        work = self._storage.reads.read_chunk(
            ledger_id, first_entry_id=first_entry_id, stride=stride, **more
        )
        result: Sequence[memoryview] = await self._judged(work, judge)
        return result

    async def follow_chunk(
        self, ledger_id: int, *, first_entry_id: int, sent: FollowUpdate | None, bytes_max: int
    ) -> FollowUpdate | None:
        """Read what is new."""
        judge = watch_follow(ledger_id, first_entry_id, self._record)
        work = self._storage.reads.follow_chunk(
            ledger_id, first_entry_id=first_entry_id, sent=sent, bytes_max=bytes_max
        )
        result: FollowUpdate | None = await self._judged(work, judge)
        return result

    async def _judged(
        self, work: Coroutine[Any, Any, Any], judge: Judge, *, fence: bool = False
    ) -> Any:
        try:
            result = await work
        except DLError as error:
            result = error
        if self._bookie.storage is self._storage:
            judge(result)
            if fence:
                self._bookie.on_fence_answered(self._bookie, self._client)
        if isinstance(result, DLError):
            raise result
        return result
