"""The writer lock of a log: its node, and an `Ownership` over the metadata store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import (
    AlreadyClosedError,
    DLError,
    MetadataVersionError,
    NoNodeError,
    UnexpectedError,
)
from dlcore.base.features import own_release
from dlcore.log.metadata.values import LockHolder
from dlcore.log.writing.ownership import (
    Acquire,
    After,
    AskHolder,
    Broken,
    Call,
    CallFailed,
    CreateLock,
    Denied,
    Effect,
    Event,
    LockRead,
    Notice,
    Ownership,
    Report,
    ReportDue,
    Signal,
    Verified,
)
from dlcore.metadata.one_node import persistently
from dlcore.metadata.port import UNANSWERED, Check, Create, Delete, Put, SessionState, Unsubscribe
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.base.clock import Clock
    from dlcore.log.metadata.store import LogStore
    from dlcore.log.metadata.values import LogKey, Turn
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)


class LockNode:
    """The node of a log's writer lock, as one client sees it.

    Args:
        log: the log.
        client_id: this client, which the node names as its owner.
        clock: gives the token of each attempt to make it.
        gives_turns: whether the node says that others may ask for turns.
        is_own: whether an attempt of ours made a node.
    """

    def __init__(
        self,
        logs: LogStore,
        log: LogKey,
        *,
        client_id: str,
        clock: Clock,
        gives_turns: bool,
        is_own: Callable[[LockHolder], bool],
    ) -> None:
        self.log = log
        self.gives_turns = gives_turns
        self._store = logs.metadata_store
        self._paths = logs.paths_of(log)
        self._client_id = client_id
        self._clock = clock
        self._is_own = is_own

    def watch(
        self, on_change: Callable[[], None], on_session: Callable[[SessionState], None]
    ) -> list[Unsubscribe]:
        """Call when the node, or the session, has changed; return what ends the calls."""
        return [
            self._store.watch(self._paths.lock, on_change, children=False),
            self._store.on_session(on_session),
        ]

    async def create(self, guard: int | None, on_attempt: Callable[[str], None]) -> None:
        """Make the node, if the head has the version `guard`; give `on_attempt` its token before.

        Raises: MetadataError.
        """
        holder = LockHolder(
            owner=self._client_id,
            token=self._clock.new_token(),
            turn="free" if self.gives_turns else "refused",
            since_ms=self._clock.now_ms(),
            release=own_release(),
        )
        on_attempt(holder.token)
        create = Create(self._paths.lock, encode(holder), ephemeral=True)
        await self._store.multi(
            [create] if guard is None else [Check(self._paths.head, guard), create]
        )

    async def read(self, now: float) -> LockRead:
        """Return who holds the lock.  Raises: MetadataError."""
        node = await persistently(lambda: self._store.get(self._paths.lock, fresh=True))
        if node is None:
            return LockRead(None, -1, False, now)
        is_current = node.session == self._store.session_token
        return LockRead(self._holder_of(node), node.version, is_current, now)

    async def ask(self, holder: LockHolder, version: int) -> None:
        """Ask its holder to release it.  Raises: MetadataError."""
        value = encode(replace(holder, wanted_by=self._client_id))
        try:
            await self._store.multi([Put(self._paths.lock, value, version)])
        except (MetadataVersionError, NoNodeError):
            return  # it has changed, and the watch fires
        except UNANSWERED as error:
            # After a reconnection the watch fires, and the next look asks again.
            name = self.log.name
            logger.info("log=%s: its owner may have no request to release: %s", name, error)
        else:
            logger.info("log=%s: its owner %s is asked to release it", self.log.name, holder.owner)

    async def own_holder(self) -> LockHolder | None:
        """Return what our node says, None if there is none.  Raises: MetadataError."""
        found = await self._own()
        return None if found is None else self._holder_of(found)

    async def set_turn(self, before: Turn, turn: Turn) -> bool:
        """Change the turn in our node from `before`; return False if it was another one.

        Raises: MetadataError.
        """
        node = await self._own()
        if node is None or self._holder_of(node).turn != before:
            return False
        # Compare-and-set: an append may ask for its turn, or end it, at the same time.
        value = encode(replace(self._holder_of(node), turn=turn))
        try:
            await self._store.multi([Put(self._paths.lock, value, node.version)])
        except (MetadataVersionError, NoNodeError):
            return False
        return True

    async def delete_own(self) -> None:
        """Delete our node, if there is one.  Raises: MetadataError."""

        async def delete() -> None:
            if await self._own() is not None:
                with contextlib.suppress(NoNodeError):  # it vanished with its session
                    await self._store.multi([Delete(self._paths.lock)])

        await persistently(delete)

    async def _own(self) -> Versioned | None:
        node = await self._store.get(self._paths.lock, fresh=True)
        return node if node is not None and self._is_own(self._holder_of(node)) else None

    def _holder_of(self, node: Versioned) -> LockHolder:
        return decode(LockHolder, node.value, source=self._paths.lock)


_RELEASE_WAIT_S = 5.0
"""The longest wait for the release of a lock while the metadata store does not answer."""
# One for all locks: a writer may be gone, and its lock with it, before the release has ended.
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
        self._ownership = Ownership(log.name, client_id, asks=asks)
        self.node = LockNode(
            logs,
            log,
            client_id=client_id,
            clock=clock,
            gives_turns=turns,
            is_own=self._ownership.is_own,
        )
        self._changed = asyncio.Event()
        self._unsubscribe: list[Unsubscribe] = []
        self._tasks = BackgroundTasks(self._on_defect)
        self.verify: Callable[[], Awaitable[int | None]] | None = None
        self.on_change: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<WriterLock {self.node.log.name!r} {self._ownership.state.name}>"

    @property
    def is_owner(self) -> bool:
        """Whether records may be acknowledged now."""
        return self._ownership.is_owner

    @property
    def denial(self) -> DLError | None:
        """The error for which the lock can never be held again; None: it can."""
        return self._ownership.denial

    async def acquire(self, *, timeout_s: float) -> None:
        """Take the lock, once; wait up to `timeout_s` for another owner, which a warning names.

        Raises:
            OwnershipAcquireFailedError: another writer owns the log.
            LogNotFoundError: there is no such log.
        """
        # Before the first attempt, so that no change behind it is missed.
        self._unsubscribe = self.node.watch(
            partial(self._handle, Signal.CHANGED), self._session_changed
        )
        self._handle(Acquire(timeout_s, asyncio.get_running_loop().time()))
        try:
            while self._ownership.is_waiting:
                self._changed.clear()
                await self._changed.wait()
        # Also if the wait is cancelled: an attempt that is under way may still make the node.
        except BaseException:
            await self.release()
            raise
        if self.denial is not None:
            await self.release()
            raise self.denial

    async def wait_owned(self) -> None:
        """Wait while the lock is lost; raise once ownership is denied."""
        while not self.is_owner:
            if self.denial is not None:
                raise self.denial
            self._changed.clear()
            await self._changed.wait()

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.EXPIRED:
            self._handle(Signal.EXPIRED)
        elif state is SessionState.CONNECTED:
            self._handle(Signal.RESUMED)

    def _on_defect(self, error: BaseException) -> None:
        text = f"lock of log {self.node.log.name!r} broke: {error!r}"
        self._handle(Broken(UnexpectedError(text)))  # no caller may wait for ever

    def _handle(self, event: Event) -> None:
        for effect in self._ownership.handle(event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Call() | CreateLock():
                self._tasks.start(self._call(effect), name=f"writer-lock-{self.node.log.name}")
            case AskHolder(holder, version):
                self._tasks.start(self.node.ask(holder, version))
            case After(timeout_s, report_s):
                self._tasks.start(self._time(timeout_s, report_s))
            case Notice():
                logger.info("writer lock log=%s: %s", self.node.log.name, effect.name.lower())
                self._announce()
            case Denied():
                self._announce()
            case Report(text):
                logger.warning("%s; to do: if the other writer hangs, end it; else nothing", text)
            case _:
                assert_never(effect)

    def _announce(self) -> None:
        self._changed.set()
        self.on_change()

    async def _time(self, timeout_s: float, report_s: float) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        if report_s < timeout_s:
            await asyncio.sleep(report_s)
            self._handle(ReportDue(loop.time()))
        await asyncio.sleep(begun_s + timeout_s - loop.time())
        self._handle(Signal.TIMED_OUT)

    async def _call(self, call: Call | CreateLock) -> None:
        try:
            event = await self._answer_of(call)
        except DLError as error:
            event = CallFailed(call, error)
        self._handle(event)

    async def _answer_of(self, call: Call | CreateLock) -> Event:
        match call:
            case Call.VERIFY:
                return Verified(None if self.verify is None else await self.verify())
            case CreateLock(guard):
                await self.node.create(guard, self._ownership.attempted)
                return Signal.CREATED
            case Call.READ:
                return await self.node.read(asyncio.get_running_loop().time())
            case _:
                assert_never(call)

    async def release(self) -> None:
        """Release the lock; no error if it is not held.

        If the metadata store does not answer, or this is cancelled, the release goes on in the
        background.
        """
        self._handle(Signal.RELEASE)
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []
        self._tasks.cancel()
        if self._tasks or self._ownership.has_attempted:
            deletion = _deletions.start(
                self._delete_own_node(), name=f"release-{self.node.log.name}"
            )
            await asyncio.wait({deletion}, timeout=_RELEASE_WAIT_S)

    async def _delete_own_node(self) -> None:
        await self._tasks.aclose()  # one of them may still be creating the node
        try:
            if self._ownership.has_attempted:
                await self.node.delete_own()
        except (*UNANSWERED, AlreadyClosedError) as error:
            # The node vanishes with the session.
            name = self.node.log.name
            logger.warning(
                "writer lock of log=%s is left to expire: %s; to do: nothing, the next writer "
                "waits for at most the time-out of a session",
                name,
                error,
            )
