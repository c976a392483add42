"""Simulated bookies: the real identity, storage, registration and garbage collection of a bookie.

A bookie process lives until it is killed, loses power or fails; its supervisor starts it again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bookie.ledger_storage import LedgerStorage
from bookie.membership.identity import COOKIE_FILE, begin_life, establish_identity
from bookie.membership.registration_driver import Registrar
from bookie.storage.status import StorageState
from dlcore.base.errors import (
    BookieStorageError,
    BookieUnavailableError,
    ConfigurationError,
    CorruptMetadataError,
    DLError,
    MetadataError,
    WrongIncarnationError,
)
from dlcore.metadata.port import Delete
from dlcore.wire.frames import decode_frame
from tests.fixtures.memory_disk import MemoryDisk
from tests.simulation.clients import SESSION_TIMEOUT_S, GatedStore
from tests.simulation.endings import bury, kill
from tests.simulation.housekeeping import Housekeeping
from tests.simulation.ledger_ids import JudgedIds
from tests.simulation.truth import InvariantViolatedError
from tests.simulation.wire_connections import REFUSAL_CHANCE, Listener, new_bookie_client

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from dlcore.base.clock import Clock
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import BookieCookie
    from dlcore.metadata.paths import NamespacePaths
    from tests.fixtures.simulated_store import SimulatedTree
    from tests.simulation.connections import Reply, SimBookieClient, SimStream, Watch
    from tests.simulation.network import Network
    from tests.simulation.plan import BookieSettings
    from tests.simulation.trace import Trace
    from tests.simulation.truth import BookieRecord
    from tests.simulation.wire_connections import WireSimClient

_REGISTER_PATIENCE_S = 5.0
_RETRY_S = 0.5
_PEER_TIMEOUT_S = 2.0
DISK_BYTES = 1 << 26
MADE_TO_FAIL = "made to fail"
"""The text of injected errors."""
_OWN_BYTES = 16 << 10
"""The records that a bookie may be writing beside entries: marks, fences, garbage."""
_EXTRA_FILES = 4
"""Handles beyond the limit that a pass of reading or writing may hold for a moment."""


class SimBookie:
    """A bookie process on a disk that forgets what was not synced."""

    def __init__(
        self,
        name: str,
        *,
        rng: random.Random,
        network: Network,
        tree: SimulatedTree,
        paths: NamespacePaths,
        clock: Clock,
        trace: Trace,
        settings: BookieSettings,
        disk_latency_s: float,
        new_record: Callable[[BookieId], BookieRecord],
        on_violation: Callable[[BaseException], None],
        peers: Sequence[SimBookie],
    ) -> None:
        self.name = name
        self._peers = peers
        self.bookie: BookieId | None = None
        """Its identity; None before its first start and after its disk was replaced."""
        self.storage: LedgerStorage | None = None
        self.record: BookieRecord | None = None
        self.on_fence_answered: Callable[[SimBookie, str], None] = lambda _, __: None
        self.on_died: Callable[[SimBookie], None] = lambda _: None
        """Called when it died by itself, after a failure or a loss of power at some step."""
        self.up = asyncio.Event()
        self.registered = asyncio.Event()
        """Set once it was registered for the first time."""
        self.refusal = ""
        """Why it does not start; empty if it may be tried (again)."""
        self.is_damaged = False
        """Whether something durable on its disk was damaged: then it may refuse to start."""
        self.is_without_its_disk = False
        """Whether its disk was replaced and the cluster does not know it yet."""
        self.is_kept_down = False
        """Whether it does not start before everything heals."""
        self.is_spent = False
        """Whether it has lost a disk already: its next identity counts as another bookie."""
        self.session: GatedStore | None = None
        self._network = network
        self._tree = tree
        self._paths = paths
        self._clock = clock
        self._trace = trace
        self._settings = settings
        self._new_record = new_record
        self._on_violation = on_violation
        self._loop = asyncio.get_running_loop()
        self._rng = rng
        self.disk_latency_s = disk_latency_s
        """Mean time of each step of its disk."""
        self.disk = self._new_disk()
        self.adds_in_flight = 0
        """Adds taken and not answered, in this life."""
        self._life = 0
        self._is_starting = False
        self._is_wanted = False
        self._is_paused = False
        self._opening: asyncio.Task[tuple[BookieCookie, LedgerStorage]] | None = None
        self._registrar: Registrar | None = None
        self.listener: Listener | None = None
        """Takes connections, while the process serves."""
        self._client: SimBookieClient | WireSimClient | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._burials: dict[asyncio.Task[None], None] = {}

    @property
    def acknowledged(self) -> set[tuple[int, int]]:
        """(ledger, entry) that this identity ever called durable: the checkers' own truth."""
        assert self.record is not None
        return self.record.acknowledged

    def _new_disk(self) -> MemoryDisk:
        disk = MemoryDisk(
            self._rng,
            total_bytes=DISK_BYTES,
            latency_s=lambda: self._rng.uniform(0.0, 2 * self.disk_latency_s),
        )
        disk.device.on_crash = self._on_power_lost
        quick_share = self._settings.quick_share
        if quick_share:
            disk.device.is_quick = lambda: self._rng.random() < quick_share
        return disk

    def _note(self, what: str, *, ledger_id: int | None = None) -> None:
        self._trace.note(self.name, what, ledger_id=ledger_id)

    # Life

    async def start(self) -> None:
        """Replay the disk and register; one that dies at it is started again by the next caller."""
        if self.is_kept_down:
            return
        self._is_wanted = True
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._is_wanted and self.storage is None and not self.refusal:
                self._is_wanted = False
                await self._try_to_start()
        finally:
            self._is_starting = False

    async def _try_to_start(self) -> None:
        life = self._life
        disk = self.disk
        session = GatedStore(self._tree.connect(), rng=self._rng, write_delay_s=0.0)
        opening = self._opening = self._loop.create_task(self._open(disk, session))
        await asyncio.wait([opening])
        self._opening = None
        error = None if opening.cancelled() else opening.exception()
        if error is not None or life != self._life:
            await session.aclose()
            if life != self._life:
                if not opening.cancelled() and error is None:
                    await bury(opening.result()[1])
            elif error is not None:
                await disk.aclose()  # the process ends, and all its handles
                await self._on_start_failed(error, is_excused=MADE_TO_FAIL in str(error))
            return
        cookie, storage = opening.result()
        self._take_identity(cookie.bookie)
        self.storage = storage
        self.listener = Listener(self, storage, cluster_id=self._settings.cluster_id)
        self.session = session
        session.hiding_chance = self._settings.hiding_chance
        if self._is_paused:
            session.gate.clear()
        storage.status.on_state(self._follow_state)
        self.up.set()
        self._note("up")
        if storage.status.state is StorageState.FAILED:
            self._fail("storage failed")
            return
        self._spawn(self._register(session, storage))
        if self._settings.maintenance_interval_s > 0:
            client = self._client = new_bookie_client(
                self.name,
                network=self._network,
                bookies=self._peers,
                cluster_id=self._settings.cluster_id,
                rng=self._rng,
                timeout_s=_PEER_TIMEOUT_S,
                has_wire=self._settings.has_wire,
            )
            assert self.record is not None
            house = Housekeeping(
                storage,
                bookie=cookie.bookie,
                on_collected=self.record.on_collected,
                session=session,
                paths=self._paths,
                cluster_id=self._settings.cluster_id,
                interval_s=self._settings.maintenance_interval_s,
                erases=self._settings.erases,
                rng=self._rng,
                note=self._note,
            )
            for work in house.works(client):
                self._spawn(work)

    async def _open(
        self, disk: MemoryDisk, session: GatedStore
    ) -> tuple[BookieCookie, LedgerStorage]:
        cluster_id = self._settings.cluster_id
        cookie = await establish_identity(
            disk, session, self._paths, name=self.name, cluster_id=cluster_id, clock=self._clock
        )
        storage = await LedgerStorage.open(
            disk,
            self._settings.storage,
            clock=self._clock,
            owner=f"{cluster_id}/{cookie.incarnation}",
            given_ids=JudgedIds(session, self._paths, self._tree, self.on_false_no),
        )
        try:
            await begin_life(disk, session, self._paths, cookie, clock=self._clock)
        except (DLError, asyncio.CancelledError):
            await bury(storage)
            raise
        return cookie, storage

    def on_false_no(self, what: str) -> None:
        """It denied what is true."""
        self._on_violation(InvariantViolatedError("I7 NoFalseNo", f"{self.name} {what}"))

    def _take_identity(self, bookie: BookieId) -> None:
        self.is_without_its_disk = False
        if self.bookie != bookie or self.record is None:
            self.bookie = bookie
            self.record = self._new_record(bookie)
        if self.record.is_lost:
            self.on_false_no("took an empty disk for its old one")

    async def _on_start_failed(self, error: BaseException, *, is_excused: bool) -> None:
        self._note(f"does not start: {type(error).__name__}: {error}")
        is_refusal = isinstance(
            error, BookieStorageError | ConfigurationError | CorruptMetadataError
        )
        # With an empty disk it is refused until the cluster knows it, and not longer; then a
        # disk without any room keeps it from beginning, until it has its cookie.
        names = self.disk.names()
        is_new = COOKIE_FILE not in names and (not names or "cookie.new" in names)
        is_passing = is_new and not self.is_without_its_disk
        if is_refusal and not is_excused and not is_passing:
            self.refusal = str(error)
            if not self.is_without_its_disk and not self.is_damaged:
                self._on_violation(
                    InvariantViolatedError(
                        "I8 LiveAfterHealing", f"{self.name} is sound and does not start: {error}"
                    )
                )
            return
        self._is_wanted = True
        await asyncio.sleep(_RETRY_S)

    async def _register(self, session: GatedStore, storage: LedgerStorage) -> None:
        assert self.bookie is not None
        registrar = self._registrar = Registrar(
            session,
            self._paths,
            bookie=self.bookie,
            address=f"{self.name}:1",
            control_address=f"{self.name}:2",
            on_conflict=lambda error: self._fail(f"registration: {error}"),
        )
        while True:
            try:
                await registrar.register(
                    is_read_only=storage.status.state is StorageState.READ_ONLY,
                    patience_s=_REGISTER_PATIENCE_S,
                )
            except (MetadataError, ConfigurationError) as error:
                self._note(f"not registered: {type(error).__name__}: {error}")
            else:
                self.registered.set()
                return

    def _follow_state(self, state: StorageState) -> None:
        if state is StorageState.FAILED:
            self._fail("storage failed")
            return
        self._note(f"is {state.value}")
        if self._registrar is not None:
            self._registrar.set_read_only(is_read_only=state is StorageState.READ_ONLY)

    def _fail(self, reason: str) -> None:
        """The process ends itself, as a bookie does that cannot go on."""
        if self.storage is not None:
            self._note(f"ends: {reason}")
            self.crash(keep_cache=True)
            self.on_died(self)

    def _on_power_lost(self) -> None:
        self.crash(keep_cache=False)
        self.on_died(self)

    def crash(self, *, keep_cache: bool) -> None:
        """Die at once: answers on their way out are lost, and un-synced bytes with the power."""
        if self.storage is None and not self._is_starting:
            return
        self._note("killed" if keep_cache else "power lost")
        self._life += 1
        self.adds_in_flight = 0
        self.up.clear()
        storage, self.storage = self.storage, None
        self._hang_up()
        self.disk.crash(keep_cache=keep_cache)
        for task in self._tasks:
            task.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if storage is not None:
            self._keep(self._loop.create_task(bury(storage)))
        registrar, self._registrar = self._registrar, None
        if registrar is not None:
            kill(registrar)
        session, self.session = self.session, None
        if session is not None:
            session.gate.set()
            self._loop.call_later(SESSION_TIMEOUT_S, self._end_session, session)

    def _hang_up(self) -> None:
        """End all connections with the process."""
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.hang_up(self._rng)
        client, self._client = self._client, None
        if client is not None:
            self._keep(self._loop.create_task(client.aclose()))

    def _end_session(self, session: GatedStore) -> None:
        self._keep(self._loop.create_task(session.aclose()))

    def replace_disk(self) -> None:
        """Lose power and the disk for good; the new one is empty, without a report."""
        self.crash(keep_cache=False)
        self._note("lost its disk")
        self.is_without_its_disk = True
        self.is_spent = True
        if self.record is not None:
            self.record.is_lost = True
        self.disk = self._new_disk()
        self.is_damaged = False
        self.refusal = ""

    def forget_identity(self) -> None:
        """Delete the cookie, as an operator does who accepts that the bookie's data is lost."""
        if not self.is_without_its_disk:
            return  # another operator was here before
        path = self._paths.cookie(self.name)
        if self._tree._find(path) is not None:
            self._tree._apply([Delete(path)], 0)
        self.bookie = None
        self.record = None
        self.is_without_its_disk = False
        self.refusal = ""

    def pause(self) -> None:
        """Stop sending and receiving."""
        self._is_paused = True
        self._network.pause(self.name)
        if self.session is not None:
            self.session.gate.clear()

    def resume(self) -> None:
        """Go on as if nothing had happened."""
        self._is_paused = False
        if self.session is not None:
            self.session.gate.set()
        self._network.resume(self.name)

    async def aclose(self) -> None:
        """Stop in good order."""
        self.resume()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._registrar is not None:
            kill(self._registrar)
        self._hang_up()
        if self.storage is not None:
            await self.storage.aclose()
        await asyncio.gather(*self._burials, return_exceptions=True)
        if self.session is not None:
            await self.session.aclose()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._burials[task] = None
        task.add_done_callback(lambda done: self._burials.pop(done, None))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_violation(error)

    # Requests

    def admits(self, client: str, bookie: BookieId, reply: Reply) -> bool:
        """Return whether a request for `bookie` has come to the right one; answer if not."""
        if self.storage is not None and self.bookie == bookie:
            return True
        if self.storage is None:
            self._refuse(client, reply)
        else:
            error = WrongIncarnationError(f"this is {self.bookie}, not {bookie}")
            self._network.send(self.name, client, lambda: reply(error))
        return False

    def refuse(self, client: str, reply: Callable[[], None]) -> None:
        """A dead process's machine refuses connections; a dead machine is silent."""
        if self._rng.random() < REFUSAL_CHANCE:
            self._network.send(self.name, client, reply)

    def on_add_taken(self, future: asyncio.Future[None]) -> None:
        """Count an add until it is answered."""
        life = self._life
        self.adds_in_flight += 1
        self._check_bounds()

        def on_done(_: asyncio.Future[None]) -> None:
            if life == self._life:
                self.adds_in_flight -= 1

        future.add_done_callback(on_done)

    def serve_add(self, client: str, frame: bytes, reply: Reply, *, is_recovery: bool) -> None:
        """Take an add in the order of arrival; answer when it is durable."""
        if self.storage is None:
            self._refuse(client, reply)
            return
        life, record = self._life, self.record
        assert record is not None
        header = decode_frame(frame)
        entry = (header.ledger_id, header.entry_id)
        was_fenced = header.ledger_id in record.fenced
        future = self.storage.writes.add_entry(frame, is_recovery=is_recovery)
        self.adds_in_flight += 1
        self._check_bounds()

        def on_done(done: asyncio.Future[None]) -> None:
            error = done.exception()
            if life != self._life:
                return
            self.adds_in_flight -= 1
            if error is None:
                record.on_added(entry, is_recovery=is_recovery, was_fenced=was_fenced)
            self._network.send(self.name, client, lambda: reply(error))

        future.add_done_callback(on_done)

    def serve_lac(self, client: str, ledger_id: int, lac: int, reply: Reply) -> None:
        """Take an explicit LAC."""
        if self.storage is None:
            self._refuse(client, reply)
            return
        life, record = self._life, self.record
        assert record is not None
        try:
            future = self.storage.writes.write_lac(ledger_id, lac)
        except DLError as error:
            failure = error
            self._network.send(self.name, client, lambda: reply(failure))
            return

        def on_done(done: asyncio.Future[None]) -> None:
            result = done.exception()
            if life != self._life:
                return
            if result is None:
                record.on_lac_written(ledger_id, lac)
            self._network.send(self.name, client, lambda: reply(result))

        future.add_done_callback(on_done)

    def serve(
        self,
        client: str,
        work: Callable[[LedgerStorage], Coroutine[Any, Any, Any]],
        reply: Reply,
        *,
        watch: Watch,
        fence: bool = False,
    ) -> None:
        """Answer a request with the result of `work`."""
        if self.storage is None:
            self._refuse(client, reply)
            return
        storage = self.storage
        assert self.record is not None
        judge = watch(self.record)

        async def answer() -> None:
            try:
                result = await work(storage)
            except DLError as error:
                result = error
            judge(result)
            self._network.send(self.name, client, lambda: reply(result))
            if fence:
                self.on_fence_answered(self, client)

        self._spawn(answer())

    def serve_stream(
        self,
        client: str,
        work: Callable[[LedgerStorage], AsyncIterator[Any]],
        stream: SimStream,
        *,
        watch: Watch,
    ) -> None:
        """Send the items of `work` in order; a lost one ends the stream silently."""
        if self.storage is None:
            self._refuse(client, stream.put)
            return
        storage = self.storage
        assert self.record is not None
        judge = watch(self.record)

        async def answer() -> None:
            items = work(storage)
            try:
                async for item in items:
                    judge(item)
                    if not self._send_in_order(client, stream, item):
                        return
                self._send_in_order(client, stream, None)
            except DLError as error:
                judge(error)
                self._send_in_order(client, stream, error)
            finally:
                await items.aclose()  # type: ignore[attr-defined]  # the storage's are generators

        if not stream.is_cancelled and stream.server is None:  # requests may come twice
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
        error = BookieUnavailableError(f"{self.name}: connection refused")
        self.refuse(client, lambda: reply(error))

    def _check_bounds(self) -> None:
        """I9: what waits and what is open stays within the limits."""
        assert self.storage is not None
        limits, log = self._settings.storage, self.storage.core.log
        copied_bytes = limits.file_bytes_max if self._settings.maintenance_interval_s else 0
        most = limits.in_flight_bytes_max + limits.entry_size_bytes_max + copied_bytes + _OWN_BYTES
        files_max = limits.open_files_max + len(log.unsealed.indexes()) + _EXTRA_FILES
        if log.commits.queue.pending_bytes > most or self.disk.open_files > files_max:
            self._on_violation(
                InvariantViolatedError(
                    "I9 ResourcesAreBounded",
                    f"{self.name}: {log.commits.queue.pending_bytes} bytes pending of {most}, "
                    f"{self.disk.open_files} files open of {files_max}",
                )
            )
