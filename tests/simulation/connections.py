"""Requests that travel by themselves: lost, late, twice and in any order, more than TCP allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import BookieUnavailableError, DLError
from dlcore.wire.frames import decode_frame
from dlcore.wire.port import BookieClient, HeldEntries
from tests.fixtures.storage import follow, read_entries
from tests.simulation.truth import BookieRecord, is_known, is_no

if TYPE_CHECKING:
    from bookie.ledger_storage import LedgerStorage
    from dlcore.base.ids import BookieId
    from dlcore.wire.frames import FrameParts
    from dlcore.wire.port import EntryRange, FollowUpdate
    from tests.simulation.network import Network
    from tests.simulation.processes import SimBookie

Reply = Callable[[Any], None]
Judge = Callable[[Any], None]
"""Takes an answer (a result or an error) when it leaves the bookie, and judges it."""
Watch = Callable[[BookieRecord], Judge]
"""Called when a request arrives: notes what the bookie has promised until then."""

READ_CHUNK_BYTES = 256


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


class SimBookieClient(BookieClient):
    """One client process's `BookieClient`: requests and answers travel over the network.

    It gives up after `timeout_s`, as a real connection does.
    """

    def __init__(
        self,
        name: str,
        *,
        network: Network,
        bookies: Sequence[SimBookie],
        timeout_s: float,
    ) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._network = network
        self._bookies = bookies
        self._loop = asyncio.get_running_loop()

    def _machine(self, bookie: BookieId) -> SimBookie:
        return next(each for each in self._bookies if each.name == bookie.name)

    def _request(
        self, bookie: BookieId, serve: Callable[[SimBookie, Reply], None]
    ) -> asyncio.Future[Any]:
        here = self._machine(bookie)
        future: asyncio.Future[Any] = self._loop.create_future()

        def reply(result: Any) -> None:
            if future.done():
                return
            if isinstance(result, DLError):
                future.set_exception(result)
            else:
                future.set_result(result)

        def arrive() -> None:
            if here.admits(self.name, bookie, reply):
                serve(here, reply)

        self._network.send(self.name, here.name, arrive)
        silence = BookieUnavailableError(f"{bookie} did not answer")
        timer = self._loop.call_later(self._timeout_s, reply, silence)
        future.add_done_callback(lambda _: timer.cancel())
        return future

    def add_entry(
        self, bookie: BookieId, frame: bytes | FrameParts, *, is_recovery: bool = False
    ) -> asyncio.Future[None]:
        """Store `frame`."""
        data = bytes(frame)
        return self._request(
            bookie, lambda b, reply: b.serve_add(self.name, data, reply, is_recovery=is_recovery)
        )

    def write_lac(
        self, bookie: BookieId, *, ledger_id: int, last_add_confirmed: int
    ) -> asyncio.Future[None]:
        """Tell the LAC."""
        return self._request(
            bookie, lambda b, reply: b.serve_lac(self.name, ledger_id, last_add_confirmed, reply)
        )

    async def read_lac(self, bookie: BookieId, *, ledger_id: int, fence: bool) -> int:
        """Return the LAC."""
        result: int = await self._request(
            bookie,
            lambda b, reply: b.serve(
                self.name,
                lambda s: s.reads.read_lac(ledger_id, fence=fence),
                reply,
                watch=partial(watch_lac, ledger_id, fence),
                fence=fence,
            ),
        )
        return result

    def forget_free_memory(self) -> None:
        """Keep nothing."""

    async def read_held(self, bookie: BookieId, *, ledger_id: int) -> HeldEntries:
        """Return what is held above the LAC."""
        result: HeldEntries = await self._request(
            bookie,
            lambda b, reply: b.serve(
                self.name,
                lambda s: s.reads.read_held(ledger_id),
                reply,
                watch=partial(watch_held, ledger_id),
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
                lambda s: s.reads.read_entry(ledger_id, entry_id, fence=fence),
                reply,
                watch=partial(watch_entry, ledger_id, entry_id, fence),
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
    ) -> AsyncGenerator[Sequence[bytes | memoryview], None]:
        """Stream frames."""
        stream = self._open(
            bookie,
            lambda storage: read_entries(
                storage,
                ledger_id,
                first_entry_id=first_entry_id,
                last_entry_id=last_entry_id,
                stride=stride,
                chunk_bytes=READ_CHUNK_BYTES,
            ),
            partial(watch_entries, ledger_id, first_entry_id, stride),
        )
        try:
            while (item := await self._next(stream)) is not None:
                yield item
        finally:
            stream.cancel()

    async def _next(self, stream: SimStream) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await stream.get()
        except TimeoutError:
            raise BookieUnavailableError("the stream is silent") from None

    async def follow(
        self,
        bookie: BookieId,
        *,
        ledger_id: int,
        first_entry_id: int,
        take: Callable[[FollowUpdate], bool] | None = None,
    ) -> AsyncGenerator[FollowUpdate, None]:
        """Push updates."""
        stream = self._open(
            bookie,
            lambda storage: follow(
                storage, ledger_id, first_entry_id=first_entry_id, chunk_bytes=READ_CHUNK_BYTES
            ),
            partial(watch_follow, ledger_id, first_entry_id),
        )
        try:
            while (item := await stream.get()) is not None:
                if take is None or not take(item):
                    yield item
        finally:
            stream.cancel()

    def _open(
        self,
        bookie: BookieId,
        work: Callable[[LedgerStorage], AsyncIterator[Any]],
        watch: Watch,
    ) -> SimStream:
        stream = SimStream()
        here = self._machine(bookie)

        def arrive() -> None:
            if here.admits(self.name, bookie, stream.put):
                here.serve_stream(self.name, work, stream, watch=watch)

        self._network.send(self.name, here.name, arrive)
        return stream

    async def list_entries(self, bookie: BookieId, *, ledger_id: int) -> Sequence[EntryRange]:
        """Return ranges."""

        async def work(storage: LedgerStorage) -> list[EntryRange]:
            return list(storage.reads.list_entries(ledger_id))

        result: list[EntryRange] = await self._request(
            bookie,
            lambda b, reply: b.serve(self.name, work, reply, watch=partial(watch_list, ledger_id)),
        )
        return result

    async def aclose(self) -> None:
        """Nothing is held open here."""


def watch_lac(ledger_id: int, fence: bool, record: BookieRecord) -> Judge:
    """Return the judge of a LAC read."""
    held = record.held(ledger_id)
    known = record.lacs.get(ledger_id, -1)

    def judge(answer: Any) -> None:
        if fence and is_known(answer):
            record.on_fence_answered(ledger_id)
        if is_no(answer):
            record.on_ledger_denied(ledger_id, held)
        elif isinstance(answer, int):
            record.on_lac(ledger_id, answer, known)

    return judge


def watch_held(ledger_id: int, record: BookieRecord) -> Judge:
    """Return the judge of what is pairs to be held above the LAC."""
    held = sorted(record.held(ledger_id))
    known = record.lacs.get(ledger_id, -1)

    def judge(answer: Any) -> None:
        if is_no(answer):
            record.on_ledger_denied(ledger_id, held)
        elif isinstance(answer, HeldEntries):
            lac, known_to, pairs = answer
            record.on_lac(ledger_id, lac, known)
            ranges = [range(first, last + 1) for first, last in pairs]
            record.on_listed(ledger_id, [e for e in held if lac < e <= known_to], ranges)
            for each in ranges:
                record.on_shown(ledger_id, each)

    return judge


def watch_entry(ledger_id: int, entry_id: int, fence: bool, record: BookieRecord) -> Judge:
    """Return the judge of a read of an entry."""
    held = (ledger_id, entry_id) in record.acknowledged

    def judge(answer: Any) -> None:
        if fence and is_known(answer):
            record.on_fence_answered(ledger_id)
        if is_no(answer):
            record.on_denied(ledger_id, entry_id, held, fence=fence)
        elif is_known(answer):
            record.on_shown(ledger_id, [entry_id])

    return judge


def watch_entries(ledger_id: int, first_entry_id: int, stride: int, record: BookieRecord) -> Judge:
    """Return the judge of a range read."""
    next_entry_id = first_entry_id
    held = record.held(ledger_id)

    def judge(answer: Any) -> None:
        nonlocal next_entry_id
        if is_no(answer):
            record.on_denied(ledger_id, next_entry_id, next_entry_id in held, fence=False)
        elif not isinstance(answer, DLError):
            shown = [decode_frame(frame).entry_id for frame in answer]
            record.on_shown(ledger_id, shown)
            next_entry_id = shown[-1] + stride

    return judge


def watch_follow(ledger_id: int, first_entry_id: int, record: BookieRecord) -> Judge:
    """Return the judge of what a follower is sent."""
    next_entry_id = first_entry_id
    held = record.held(ledger_id)

    def judge(answer: Any) -> None:
        nonlocal next_entry_id, held
        if answer is None or isinstance(answer, DLError):
            return
        ranges = range(next_entry_id, answer.last_add_confirmed + 1)
        delivered = [decode_frame(frame).entry_id for frame in answer.frames]
        record.on_listed(
            ledger_id,
            [entry_id for entry_id in sorted(held) if entry_id in ranges],
            [range(entry_id, entry_id + 1) for entry_id in delivered],
        )
        record.on_shown(ledger_id, delivered)
        next_entry_id = max(next_entry_id, answer.last_add_confirmed + 1)
        held = record.held(ledger_id)

    return judge


def watch_list(ledger_id: int, record: BookieRecord) -> Judge:
    """Return the judge of a list of entries."""
    held = sorted(record.held(ledger_id))

    def judge(answer: Any) -> None:
        if is_no(answer):
            record.on_ledger_denied(ledger_id, held)
        elif not isinstance(answer, DLError):
            ranges = [range(each.first_entry_id, each.last_entry_id + 1) for each in answer]
            record.on_listed(ledger_id, held, ranges)
            for each in ranges:
                record.on_shown(ledger_id, each)

    return judge
