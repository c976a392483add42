"""Positions that a log keeps for applications: runs a `Hold` for each reader that moves one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import (
    DLError,
    NodeExistsError,
    NoNodeError,
    SubscriptionMovedError,
)
from dlcore.base.features import own_release
from dlcore.base.ids import require_identity
from dlcore.base.machines import run_to_end
from dlcore.log.metadata.values import LockHolder
from dlcore.log.reading.holding import (
    AwaitLock,
    Call,
    CommitPosition,
    Counted,
    Event,
    Forget,
    Hold,
    HolderRead,
    Job,
    Move,
    NodeRead,
    Pause,
    Put,
    Relock,
    Remove,
    RemoveNodes,
    Seen,
    Signal,
    Stored,
    Subscription,
    Take,
    Work,
    seen_in,
)
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import unescape
from dlcore.metadata.port import UNANSWERED, Delete, SessionState
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from dlcore.base.ids import DLSN
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey, Mark
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)

_RELEASE_WAIT_S = 5.0
"""The longest wait for the release of a lock while the metadata store does not answer."""
# One for all subscriptions: a reader may be gone before the release has ended.
_releases = BackgroundTasks()
"""Locks that are released in the background; each ends when its store is closed, or sooner."""


async def list_subscriptions(
    context: LogContext, log: LogKey, subscriber: str | None = None
) -> dict[str, Seen]:
    """Return the stored positions by subscriber, sorted; only that of `subscriber` if given."""
    await context.logs.read(log)  # raises if it is gone
    paths = context.logs.paths_of(log)
    if subscriber is None:
        parent = paths.subscribers
        names = await persistently(lambda: context.store.get_children(parent, fresh=True))
        subscribers = sorted(map(unescape, names or []))
    else:
        subscribers = [require_identity("subscriber", subscriber)]
    nodes = await persistently(
        lambda: context.store.get_many([paths.subscriber(each) for each in subscribers])
    )
    found = {
        name: seen_in(_node_read(node, paths.subscriber(name)))
        for name, node in zip(subscribers, nodes, strict=True)
    }
    return {name: seen for name, seen in found.items() if seen is not None}


def _node_read(node: Versioned | None, path: str) -> NodeRead:
    if node is None:
        return NodeRead(None, -1)
    return NodeRead(decode(Subscription, node.value, source=path), node.version)


class SubscriptionHold:
    """A subscription of a log, which is this holder's alone from `take` to `release`."""

    def __init__(self, context: LogContext, log: LogKey, subscriber: str) -> None:
        require_identity("subscriber", subscriber)
        paths = context.logs.paths_of(log)
        self._context = context
        self._log = log
        self._parent, self._path = paths.subscribers, paths.subscriber(subscriber)
        self._lock_path = paths.subscriber_lock(subscriber)
        token = context.clock.new_token()
        self._hold = Hold(log.name, subscriber, context.client_id, token)
        self._turn = asyncio.Lock()  # of callers: one at a time
        self._has_attempted = False  # to lock it, even if the answer was not waited for
        self._unsubscribe = context.store.on_session(self._session_changed)

    def __repr__(self) -> str:
        return f"<SubscriptionHold {self._path} at {self.position}>"

    @property
    def position(self) -> DLSN:
        """The stored position."""
        return self._hold.position

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.EXPIRED:
            self._hold.handle(Signal.EXPIRED)

    async def take(self, *, timeout_s: float) -> None:
        """Create the subscription if there is none, and lock it, waiting for another holder.

        During a long wait a warning names the holder.

        Raises:
            OwnershipAcquireFailedError: another reader held it for `timeout_s`.
            LogNotFoundError: the log is gone.
            OverCapacityError: the log has `SUBSCRIPTIONS_MAX` others.
        """
        try:
            await self._run(Take(timeout_s, self._now()))
        # Also if it is cancelled: an attempt that is under way may still make the lock.
        except BaseException:
            await self.release()
            raise

    async def ensure_locked(self) -> None:
        """Lock it again after the session was lost.

        Raises:
            OwnershipAcquireFailedError, SubscriptionMovedError: another reader has it, or had it.
            MetadataConnectionError: there is no answer; the call may be repeated.
        """
        if self._hold.is_locked:
            return
        try:
            await self._run(Relock(self._now()))
        except SubscriptionMovedError:
            await self.release()
            raise

    async def commit(self, position: DLSN) -> None:
        """Store a position, unless another reader has taken the subscription.

        Raises:
            SubscriptionMovedError: another reader has taken it.
            MetadataConnectionError: there is no answer; the call may be repeated.
        """
        await self._run(CommitPosition(position))

    async def look(self) -> Seen | None:
        """Return the stored state; None if there is no such subscription."""
        return seen_in(await self._read())

    async def move(
        self, position: DLSN, *, token: str, mark: Mark | None, timeout_s: float
    ) -> Mark:
        """Store a position for a reader that is known by its token alone; return the new mark.

        `mark` is the mark that the reader has seen; None: there was no subscription.  If the reader
        does not own the subscription yet, it is locked meanwhile, so that no reader with the lock
        uses it.  A call that is repeated because its answer was lost is done once.

        Raises: as `take`; SubscriptionMovedError: the mark is another one.
        """
        moved = await self._run(Move(position, token, mark, timeout_s, self._now()))
        assert moved is not None
        return moved

    async def forget(self, mark: Mark) -> None:
        """Remove the subscription, if it has this mark; no error if there is none.

        Raises: as `move`.
        """
        await self._run(Forget(mark, self._now()))

    async def delete(self) -> None:
        """Remove the subscription; it must be locked."""
        await self._run(Remove())

    async def release(self) -> None:
        """Release it for others, after the call under way; a second call does nothing.

        If the metadata store does not answer, or this is cancelled, the release goes on in the
        background.
        """
        self._unsubscribe()
        self._hold.handle(Signal.RELEASED)
        if self._has_attempted or self._turn.locked():
            release = _releases.start(self._unlock(), name=f"release {self!r}")
            await asyncio.wait({release}, timeout=_RELEASE_WAIT_S)

    async def _unlock(self) -> None:
        store, path = self._context.store, self._lock_path

        async def delete() -> None:
            node = await store.get(path, fresh=True)
            if node is not None and self._locked_by(node).token == self._hold.token:
                with contextlib.suppress(NoNodeError):  # it vanished with its session
                    await store.delete(path)

        # A call under way may be the one that creates the lock.
        async with self._turn:
            if not self._has_attempted:
                return
            self._has_attempted = False
            try:
                await persistently(delete)
            except DLError as error:
                logger.info("%r: its lock goes with the session: %r", self, error)

    # The machine

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _run(self, job: Job) -> Mark | None:
        async with self._turn:
            try:
                return await run_to_end(self._hold, job, self._answer_of)
            except BaseException:
                self._hold.handle(Signal.GIVEN_UP)
                raise

    async def _answer_of(self, work: Work | None) -> Event:
        assert work is not None
        store = self._context.store
        match work:
            case Call():
                return await self._call(work)
            case Put(position, token, version):
                value = encode(self._at(position, token))
                return Stored(await store.put(self._path, value, version=version))
            case AwaitLock(at_most_s, report):
                await self._await_lock(at_most_s, report)
                return Signal.WAIT_OVER
            case Pause(after_s):
                await asyncio.sleep(after_s)
                return Signal.PAUSE_OVER
            case RemoveNodes(version):
                # The lock first, for it is a child of the other node.
                await store.multi([Delete(self._lock_path), Delete(self._path, version)])
                self._has_attempted = False
                return Signal.REMOVED
            case _:
                assert_never(work)

    async def _call(self, call: Call) -> Event:
        store, parent, path = self._context.store, self._parent, self._lock_path
        match call:
            case Call.READ:
                return await self._read()
            case Call.COUNT:
                others = await persistently(lambda: store.get_children(parent, fresh=True))
                return Counted(len(others or ()))
            case Call.MAKE:
                await self._make()
                return Signal.MADE
            case Call.LOCK:
                holder = LockHolder(
                    owner=self._context.client_id,
                    token=self._hold.token,
                    since_ms=self._context.clock.now_ms(),
                    release=own_release(),
                )
                # Before the call, which may make the lock although its answer is not waited for.
                self._has_attempted = True
                await store.create(path, encode(holder), ephemeral=True)
                return Signal.LOCKED
            case Call.READ_HOLDER:
                node = await persistently(lambda: store.get(path, fresh=True))
                return HolderRead(None if node is None else self._locked_by(node), self._now())
            case _:
                assert_never(call)

    async def _read(self) -> NodeRead:
        store = self._context.store
        node = await persistently(lambda: store.get(self._path, fresh=True))
        return _node_read(node, self._path)

    async def _make(self) -> None:
        create = self._context.store.create
        for path, value in ((self._parent, b""), (self._path, encode(Subscription()))):
            try:
                await persistently(lambda p=path, v=value: create(p, v))  # type: ignore[misc]
            except NodeExistsError:
                continue
            except NoNodeError:
                await self._context.logs.read(self._log)  # raises if the log is gone
                raise

    async def _await_lock(self, at_most_s: float, report: str | None) -> None:
        if report is not None:
            logger.warning("%s; to do: if the other process hangs, end it; else nothing", report)
        changed, store, path = asyncio.Event(), self._context.store, self._lock_path
        unwatch = store.watch(path, changed.set, children=False)
        try:
            async with asyncio.timeout(at_most_s):
                # Read again under the watch: the lock may have changed before.
                while await store.get(path, fresh=True) is not None:
                    await changed.wait()
                    changed.clear()
        except (TimeoutError, *UNANSWERED):
            return  # the next try shows the holder
        finally:
            unwatch()

    def _at(self, position: DLSN, token: str) -> Subscription:
        return Subscription(
            position=(position.lssn, position.entry_id, position.slot_id),
            reader=self._context.client_id,
            token=token,
            moved_ms=self._context.clock.now_ms(),
        )

    def _locked_by(self, node: Versioned) -> LockHolder:
        return decode(LockHolder, node.value, source=self._lock_path)


async def move_subscription(
    context: LogContext, log: LogKey, subscriber: str, position: DLSN
) -> None:
    """Set a subscription's position, forward or back, if it has no reader."""
    hold = SubscriptionHold(context, log, subscriber)
    await hold.take(timeout_s=0)
    try:
        await hold.commit(position)
    finally:
        await hold.release()


async def delete_subscription(context: LogContext, log: LogKey, subscriber: str) -> bool:
    """Remove a subscription without a reader; return whether there was one."""
    if not await list_subscriptions(context, log, subscriber):
        return False
    hold = SubscriptionHold(context, log, subscriber)
    await hold.take(timeout_s=0)
    try:
        await hold.delete()
    finally:
        await hold.release()
    return True
