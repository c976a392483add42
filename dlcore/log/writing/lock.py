"""The writer lock of a log: the driver of the ownership machine, over the metadata store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from dlcore.base.background import BackgroundTasks
from dlcore.base.backoff import Wait
from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    LogNotFoundError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    OwnershipAcquireFailedError,
    UnexpectedError,
)
from dlcore.log.metadata.store import LogStore, persistently
from dlcore.log.metadata.values import (
    LockHolder,
    LogKey,
    Turn,
)
from dlcore.log.writing.ownership import (
    AskHolder,
    Denied,
    Effect,
    Event,
    Granted,
    LockChanged,
    LockHeld,
    LockTaken,
    LogMoved,
    Ownership,
    OwnershipState,
    Resumed,
    SessionExpired,
    SessionResumed,
    Suspended,
    TimedOut,
    TryLock,
)
from dlcore.metadata.port import (
    UNANSWERED,
    Check,
    Create,
    Delete,
    Op,
    Put,
    SessionState,
    Unsubscribe,
)
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.base.clock import Clock
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)

_GUARDED_ATTEMPTS_MAX = 100
_RELEASE_WAIT_S = 5.0
"""The longest wait for the release of a lock while the metadata store does not answer."""
_deletions = BackgroundTasks()
"""Locks that are released in the background; each ends when its store is closed, or sooner."""


class WriterLock:
    """Holds a log for one writer from `acquire` to `release`.

    After a lost session `verify` is called: it returns the version of the head at which the log is
    as its owner left it, or None if another client changed it.  `on_change` is called after the
    lock was lost, regained or denied.  With `asks` a proxy that holds it is asked to release it.
    """

    def __init__(
        self,
        logs: LogStore,
        log: LogKey,
        *,
        client_id: str,
        clock: Clock,
        turns: bool = False,
        asks: bool = False,
    ) -> None:
        self._logs = logs
        self._store = logs.metadata_store
        self._log = log
        self._name = log.name
        self._path = logs.paths_of(log).lock
        self._guard_path = logs.paths_of(log).head
        self._client_id = client_id
        self._clock = clock
        self.gives_turns = turns
        self._asks = asks
        self._ownership = Ownership(waits=False)
        self._denial: DLError | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue(maxsize=1000)
        self._changed = asyncio.Event()
        self._unsubscribe: list[Unsubscribe] = []
        self._task: asyncio.Task[None] | None = None
        self.verify: Callable[[], Awaitable[int | None]] | None = None
        self.on_change: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<WriterLock {self._name!r} {self._ownership.state.name}>"

    @property
    def is_owner(self) -> bool:
        """Whether records may be acknowledged now."""
        return self._ownership.is_owner

    @property
    def denial(self) -> DLError | None:
        """The error for which the lock can never be held again; None: it can."""
        return self._denial

    async def acquire(self, *, timeout_s: float) -> None:
        """Take the lock; wait up to `timeout_s` for another owner, which a warning names.

        Raises:
            OwnershipAcquireFailedError: another writer owns the log.
            LogNotFoundError: there is no such log.
        """
        self._ownership = Ownership(waits=timeout_s > 0, asks=self._asks)
        self._unsubscribe = [
            self._store.watch(self._path, lambda: self._tell(LockChanged()), children=False),
            self._store.on_session(self._session_changed),
        ]
        self._task = asyncio.create_task(self._run(), name=f"writer-lock-{self._name}")
        self._task.add_done_callback(self._stopped)
        loop = asyncio.get_running_loop()
        wait = Wait(loop.time())
        timer = loop.call_later(timeout_s, self._tell, TimedOut())
        to_tell = loop.call_at(wait.due_s, self._changed.set)
        try:
            if timeout_s <= 0:
                timer.cancel()  # the first refusal is final
            while self._ownership.state is OwnershipState.ACQUIRING and self._denial is None:
                if self._ownership.holder is not None and wait.is_due(now := loop.time()):
                    left_s = max(wait.begun_s + timeout_s - now, 0.0)
                    logger.warning("%s; waiting for %.0f s more", self._owned_text(), left_s)
                self._changed.clear()
                await self._changed.wait()
        except BaseException:
            await self.release()
            raise
        finally:
            timer.cancel()
            to_tell.cancel()
        if self._denial is not None:
            await self.release()
            raise self._denial

    async def wait_owned(self) -> None:
        """Wait while the lock is lost; raise once ownership is denied."""
        while not self.is_owner:
            if self._denial is not None:
                raise self._denial
            self._changed.clear()
            await self._changed.wait()

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.EXPIRED:
            # Directly, not through the queue: nothing may be acknowledged from here on.
            self._perform_now(self._ownership.handle(SessionExpired()))
        elif state is SessionState.CONNECTED:
            self._tell(SessionResumed())

    def _tell(self, event: Event) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            # Each queued event makes the machine try again, which is all that this one would do.
            logger.warning("writer lock of log=%s: event queue is full", self._name)

    async def _run(self) -> None:
        try:
            await self._perform(self._ownership.start())
            while True:
                await self._perform(self._ownership.handle(await self._events.get()))
        except DLError as error:
            self._denied(error)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # DLErrors are handled inside: this is a defect, and no caller may wait for ever.
            self._denied(UnexpectedError(f"lock of log {self._name!r} broke: {error!r}"))

    async def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, TryLock):
                event = await self._try_lock(guarded=effect.guarded)
                await self._perform(self._ownership.handle(event))
            elif isinstance(effect, AskHolder):
                await self._ask(effect.holder)
            else:
                self._perform_now([effect])

    def _perform_now(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Granted() | Suspended() | Resumed():
                    logger.info("writer lock log=%s: %s", self._name, type(effect).__name__)
                    self._announce()
                case Denied():
                    self._denied(
                        OwnershipAcquireFailedError(
                            self._owned_text(), owner=effect.holder.owner if effect.holder else ""
                        )
                    )
                case TryLock() | AskHolder():
                    raise AssertionError("what asks the metadata store is awaited")
                case _:
                    assert_never(effect)

    def _denied(self, error: DLError) -> None:
        self._denial = self._denial or error
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self.on_change()

    async def _try_lock(self, *, guarded: bool) -> Event:
        """Try to create the node; the returned event says who holds it."""
        token = self._clock.new_token()
        holder = LockHolder(
            owner=self._client_id,
            token=token,
            turn="free" if self.gives_turns else "refused",
            since_ms=self._clock.now_ms(),
        )
        create = Create(self._path, encode(holder), ephemeral=True)
        for _ in range(_GUARDED_ATTEMPTS_MAX):
            ops: list[Op] = [create]
            if guarded:
                # Between the lost session and this attempt another writer may have come and gone.
                version = await self._verify()
                if version is None:
                    return LogMoved()
                ops = [Check(self._guard_path, version), create]
            # Before the attempt: without an answer the node may exist, and only its token shows
            # that it is ours.
            self._ownership.attempted(token)
            try:
                await self._store.multi(ops)
            except MetadataVersionError:
                continue  # the head changed since it was verified; perhaps only by a truncation
            except NodeExistsError:
                pass
            except NoNodeError as error:
                raise LogNotFoundError(f"log {self._name!r} does not exist") from error
            except UNANSWERED:
                pass  # the node shows the outcome
            else:
                return LockTaken()
            node = await persistently(lambda: self._store.get(self._path, fresh=True))
            if node is not None:
                # Only the node shows its session: an attempt may have been sent in one session and
                # carried out in the next.
                is_ours = self._is_own(node) and node.session == self._store.session_token
                return LockTaken() if is_ours else LockHeld(self._holder_of(node))
        return LogMoved() if guarded else TimedOut()

    async def _ask(self, holder: LockHolder) -> None:
        """Write into the node that this client wants the lock, if `holder` still has it."""
        try:
            node = await self._store.get(self._path, fresh=True)
            if node is None or self._holder_of(node) != holder:
                return  # it has changed, and the watch fires
            value = encode(replace(holder, wanted_by=self._client_id))
            await self._store.multi([Put(self._path, value, node.version)])
        except (MetadataVersionError, NoNodeError):
            return  # it has changed, and the watch fires
        except UNANSWERED as error:
            # After a reconnection the watch fires, and the next look asks again.
            logger.info("log=%s: its owner may have no request to release: %s", self._name, error)
        else:
            logger.info("log=%s: its owner %s is asked to release it", self._name, holder.owner)

    async def _verify(self) -> int | None:
        return None if self.verify is None else await self.verify()

    async def look(self) -> LockHolder | None:
        """Return the holder in the node, if this writer has the lock.  Raises: MetadataError."""
        node = await self._store.get(self._path, fresh=True)
        return self._holder_of(node) if node is not None and self._is_own(node) else None

    async def set_turn(self, before: Turn, turn: Turn) -> bool:
        """Change the turn of the lock from `before`; return False if it was another one.

        Raises: MetadataError.
        """
        node = await self._store.get(self._path, fresh=True)
        if node is None or not self._is_own(node) or self._holder_of(node).turn != before:
            return False
        # Compare-and-set: an append may ask for its turn, or end it, at the same time.
        value = encode(replace(self._holder_of(node), turn=turn))
        try:
            await self._store.multi([Put(self._path, value, node.version)])
        except (MetadataVersionError, NoNodeError):
            return False
        return True

    async def release(self) -> None:
        """Release the lock; no error if it is not held.

        If the metadata store does not answer, or this is cancelled, the release goes on in the
        background.
        """
        self._ownership.release()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        if task is not None or self._ownership.has_attempted:
            deletion = _deletions.start(self._delete_own_node(task), name=f"release-{self._name}")
            await asyncio.wait({deletion}, timeout=_RELEASE_WAIT_S)

    async def _delete_own_node(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:  # the task may still be creating the node
            await asyncio.gather(task, return_exceptions=True)
        if not self._ownership.has_attempted:
            return

        async def delete() -> None:
            node = await self._store.get(self._path, fresh=True)
            if node is None or not self._is_own(node):
                return
            with contextlib.suppress(NoNodeError):  # it vanished with its session
                await self._store.multi([Delete(self._path)])

        try:
            await persistently(delete)
        except (*UNANSWERED, AlreadyClosedError) as error:
            # The node vanishes with the session.
            logger.warning("writer lock of log=%s is left to expire: %s", self._name, error)

    def _is_own(self, node: Versioned) -> bool:
        return self._ownership.is_own(self._holder_of(node))

    def _holder_of(self, node: Versioned) -> LockHolder:
        return decode(LockHolder, node.value, source=self._path)

    def _owned_text(self) -> str:
        holder = self._ownership.holder
        who = "another writer" if holder is None else holder.described(self._client_id)
        if holder is not None and holder.owner.startswith("grpc"):
            who += (
                ", a proxy: reach the log through it (--endpoint of dlog, endpoint of Spark, "
                "dlcore.remote), or wait until it was idle for so long that the proxy lets go of "
                "it (idle_release_s)"
            )
        return f"log {self._name!r} is owned by {who}"
