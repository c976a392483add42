"""Simulated bookies, which run the real storage, and the client side of their connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from bookie.config import StorageConfig
from bookie.memory_disk import MemoryDisk
from bookie.storage import LedgerStorage
from dlcore.errors import (
    BookieStorageError,
    BookieUnavailableError,
    DLError,
    NodeExistsError,
    NoNodeError,
)
from dlcore.ids import BookieId
from dlcore.ledger.codec import BookieRegistration, encode_registration
from dlcore.ledger.digest import decode_frame

if TYPE_CHECKING:
    import random

    from dlcore.clock import Clock
    from dlcore.ledger.port import EntryRange, FollowUpdate
    from dlcore.metadata.memory import MemoryStore, MemoryTree
    from dlcore.metadata.paths import NamespacePaths
    from tests.simulation.network import Network

Reply = Callable[[Any], None]
Trace = Callable[[str], None]
DurableEntry = tuple[BookieId, int, int]

STORAGE_CONFIG = StorageConfig(file_bytes_max=4096, file_entries_max=64, follow_chunk_bytes=256)
"""Small files, so that sealing and replay of several files happen in every run."""
READ_CHUNK_BYTES = 256
_SESSION_TIMEOUT_S = 3.0


class SimBookie:
    """A bookie process: the real `LedgerStorage` on a disk that forgets what was not synced."""

    storage_class: type[LedgerStorage] = LedgerStorage

    def __init__(
        self,
        name: str,
        *,
        rng: random.Random,
        network: Network,
        tree: MemoryTree,
        paths: NamespacePaths,
        clock: Clock,
        trace: Trace,
        disk_latency_s: float,
    ) -> None:
        self.bookie = BookieId(name, f"{rng.getrandbits(128):032x}")
        self.name = name
        self.storage: LedgerStorage | None = None
        self.acknowledged: set[tuple[int, int]] = set()
        """(ledger, entry) that it ever called durable: the checkers' own truth."""
        self.on_fence_answered: Callable[[SimBookie, str], None] = lambda _, __: None
        self.up = asyncio.Event()
        self._network = network
        self._tree = tree
        self._paths = paths
        self._clock = clock
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._rng = rng
        self.disk = MemoryDisk(rng, latency_s=lambda: rng.uniform(0.0, 2 * disk_latency_s))
        self._life = 0
        self._is_starting = False
        self._is_wanted = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._burials: dict[asyncio.Task[None], None] = {}
        self._session: MemoryStore | None = None

    async def start(self) -> None:
        """Replay the disk and register; one that dies at it is started again by who asks again."""
        self._is_wanted = True
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._is_wanted and self.storage is None:
                self._is_wanted = False
                await self._try_to_start()
        finally:
            self._is_starting = False

    async def _try_to_start(self) -> None:
        life = self._life
        try:
            storage = await self.storage_class.open(self.disk, STORAGE_CONFIG, clock=self._clock)
        except BookieStorageError:
            if life == self._life:
                raise  # its disk is in order: it must come up
            return
        if life != self._life:
            await _bury(storage)
            return
        self.storage = storage
        self.up.set()
        self._session = self._tree.connect()
        await self._register(self._session)
        self._trace(f"{self.name} up")

    async def _register(self, session: MemoryStore) -> None:
        path = self._paths.bookie_available(self.name)
        value = encode_registration(
            BookieRegistration(
                name=self.name, incarnation=self.bookie.incarnation, address="127.0.0.1:1"
            )
        )
        while session is self._session:
            try:
                await session.create(path, value, ephemeral=True)
            except NodeExistsError:
                # Of an earlier life whose session did not expire yet.
                with contextlib.suppress(NoNodeError):
                    await session.delete(path)
            else:
                return

    def crash(self, *, keep_cache: bool) -> None:
        """Die at once: answers on their way out are lost, and un-synced bytes with the power."""
        if self.storage is None and not self._is_starting:
            return
        self._trace(f"{self.name} {'killed' if keep_cache else 'power lost'}")
        self._life += 1
        self.up.clear()
        storage, self.storage = self.storage, None
        self.disk.crash(keep_cache=keep_cache)
        for task in self._tasks:
            task.cancel()
        if storage is not None:
            self._keep(self._loop.create_task(_bury(storage)))
        session, self._session = self._session, None
        if session is not None:
            self._loop.call_later(_SESSION_TIMEOUT_S, session.expire)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._burials[task] = None
        task.add_done_callback(lambda done: self._burials.pop(done, None))

    async def aclose(self) -> None:
        """Stop in good order."""
        for task in list(self._tasks):
            task.cancel()
        if self.storage is not None:
            await self.storage.aclose()
        await asyncio.gather(*self._burials, return_exceptions=True)

    def serve_add(self, client: str, frame: bytes, reply: Reply, *, is_recovery: bool) -> None:
        """Take an add in the order of arrival; answer when it is durable."""
        if self.storage is None:
            self._refuse(client, reply)
            return
        life = self._life
        entry = decode_frame(frame)
        future = self.storage.add_entry(frame, is_recovery=is_recovery)

        def on_done(done: asyncio.Future[None]) -> None:
            error = done.exception()
            if life != self._life:
                return
            if error is None:
                self.acknowledged.add((entry.ledger_id, entry.entry_id))
            self._network.send(self.name, client, lambda: reply(error))

        future.add_done_callback(on_done)

    def serve_lac(self, client: str, ledger_id: int, lac: int, reply: Reply) -> None:
        """Take an explicit LAC."""
        if self.storage is None:
            self._refuse(client, reply)
            return
        life = self._life
        try:
            future = self.storage.write_lac(ledger_id, lac)
        except DLError as error:
            failure = error
            self._network.send(self.name, client, lambda: reply(failure))
            return

        def on_done(done: asyncio.Future[None]) -> None:
            result = done.exception()
            if life == self._life:
                self._network.send(self.name, client, lambda: reply(result))

        future.add_done_callback(on_done)

    def serve(
        self,
        client: str,
        work: Callable[[LedgerStorage], Coroutine[Any, Any, Any]],
        reply: Reply,
        *,
        fence: bool = False,
    ) -> None:
        """Answer a request with the result of `work`."""
        if self.storage is None:
            self._refuse(client, reply)
            return
        storage = self.storage

        async def answer() -> None:
            try:
                result = await work(storage)
            except DLError as error:
                result = error
            self._network.send(self.name, client, lambda: reply(result))
            if fence:
                self.on_fence_answered(self, client)

        self._spawn(answer())

    def serve_stream(
        self,
        client: str,
        work: Callable[[LedgerStorage], AsyncIterator[Any]],
        stream: SimStream,
    ) -> None:
        """Send the items of `work` in order; a lost one ends the stream silently."""
        if self.storage is None:
            self._refuse(client, stream.put)
            return
        storage = self.storage

        async def answer() -> None:
            items = work(storage)
            try:
                async for item in items:
                    if not self._send_in_order(client, stream, item):
                        return
                self._send_in_order(client, stream, None)
            except DLError as error:
                self._send_in_order(client, stream, error)
            finally:
                await items.aclose()  # type: ignore[attr-defined]  # the storage's are generators

        if not stream.is_cancelled:
            stream.server = self._spawn(answer())

    def _send_in_order(self, client: str, stream: SimStream, item: object) -> bool:
        if self._network.loses(self.name, client):
            return False
        arrival = self._loop.time() + self._network.delay(self.name, client)
        stream.arrives_at = max(stream.arrives_at + 1e-5, arrival)
        self._loop.call_at(
            stream.arrives_at,
            lambda: self._network._arrive(self.name, client, lambda: stream.put(item)),
        )
        return True

    def _refuse(self, client: str, reply: Reply) -> None:
        """A dead process's machine refuses connections; a dead machine is silent."""
        if self._rng.random() < 0.7:
            error = BookieUnavailableError(f"{self.name}: connection refused")
            self._network.send(self.name, client, lambda: reply(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task


async def _bury(storage: LedgerStorage) -> None:
    """Stop the tasks of a storage whose process is dead; its disk refuses everything."""
    try:
        await storage.aclose()
    except DLError:
        return


class SimStream:
    """The receiving end of a stream."""

    def __init__(self) -> None:
        self.arrives_at = 0.0
        self.server: asyncio.Task[None] | None = None
        self.is_cancelled = False
        self._items: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: object) -> None:
        """Take an item that arrived; None is the end, an error ends too."""
        self._items.put_nowait(item)

    async def get(self) -> Any:
        """Return the next item, or raise the error that came."""
        item = await self._items.get()
        if isinstance(item, DLError):
            raise item
        return item

    def cancel(self) -> None:
        """End the request at the server."""
        self.is_cancelled = True
        if self.server is not None:
            self.server.cancel()


class SimBookieClient:
    """One client process's `BookieClient`: requests and answers travel over the network."""

    def __init__(self, name: str, *, network: Network, bookies: Sequence[SimBookie]) -> None:
        self.name = name
        self._network = network
        self._bookies = {each.bookie: each for each in bookies}
        self._loop = asyncio.get_running_loop()

    def _request(
        self, bookie: BookieId, serve: Callable[[SimBookie, Reply], None]
    ) -> Awaitable[Any]:
        here = self._bookies[bookie]
        future: asyncio.Future[Any] = self._loop.create_future()

        def reply(result: Any) -> None:
            if future.done():
                return
            if isinstance(result, DLError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self._network.send(self.name, here.name, lambda: serve(here, reply))
        return future

    def add_entry(
        self, bookie: BookieId, frame: bytes, *, is_recovery: bool = False
    ) -> Awaitable[None]:
        """Store `frame`."""
        return self._request(
            bookie, lambda b, reply: b.serve_add(self.name, frame, reply, is_recovery=is_recovery)
        )

    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> Awaitable[None]:
        """Tell the LAC."""
        return self._request(
            bookie, lambda b, reply: b.serve_lac(self.name, ledger_id, last_add_confirmed, reply)
        )

    async def read_lac(self, bookie: BookieId, *, ledger_id: int, fence: bool) -> int:
        """Return the LAC."""
        result: int = await self._request(
            bookie,
            lambda b, reply: b.serve(
                self.name, lambda s: s.read_lac(ledger_id, fence=fence), reply, fence=fence
            ),
        )
        return result

    async def read_entry(
        self, bookie: BookieId, *, ledger_id: int, entry_id: int, fence: bool
    ) -> bytes | memoryview:
        """Return one frame."""
        result: memoryview = await self._request(
            bookie,
            lambda b, reply: b.serve(
                self.name,
                lambda s: s.read_entry(ledger_id, entry_id, fence=fence),
                reply,
                fence=fence,
            ),
        )
        return result

    async def read_entries(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        last_entry_id: int,
        stride: int = 1,
    ) -> AsyncIterator[Sequence[bytes | memoryview]]:
        """Stream frames."""
        stream = self._open(
            bookie,
            lambda storage: storage.read_entries(
                ledger_id,
                first_entry_id=first_entry_id,
                last_entry_id=last_entry_id,
                stride=stride,
                chunk_bytes=READ_CHUNK_BYTES,
            ),
        )
        try:
            while (item := await stream.get()) is not None:
                yield item
        finally:
            stream.cancel()

    async def follow(
        self, bookie: BookieId, *, ledger_id: int, first_entry_id: int
    ) -> AsyncIterator[FollowUpdate]:
        """Push updates."""
        stream = self._open(
            bookie, lambda storage: storage.follow(ledger_id, first_entry_id=first_entry_id)
        )
        try:
            while (item := await stream.get()) is not None:
                yield item
        finally:
            stream.cancel()

    def _open(
        self, bookie: BookieId, work: Callable[[LedgerStorage], AsyncIterator[Any]]
    ) -> SimStream:
        stream = SimStream()
        here = self._bookies[bookie]
        self._network.send(self.name, here.name, lambda: here.serve_stream(self.name, work, stream))
        return stream

    async def list_entries(self, bookie: BookieId, *, ledger_id: int) -> Sequence[EntryRange]:
        """Return ranges."""

        async def work(storage: LedgerStorage) -> list[EntryRange]:
            return storage.list_entries(ledger_id)

        result: list[EntryRange] = await self._request(
            bookie, lambda b, reply: b.serve(self.name, work, reply)
        )
        return result

    async def aclose(self) -> None:
        """Nothing is held open here."""
