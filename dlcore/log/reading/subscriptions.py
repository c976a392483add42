"""Positions that a log keeps for applications, each for one reader at a time.

A subscription is a node below the log's head: a position, and the token of the reader that may move
it.  A reader takes the subscription's lock, and writes its own token into the node.  The reader
that held it before then loses its compare-and-set, even if its session and its lock are gone and it
does not know that yet.

A reader without a session of its own, as a client of proxies, takes the lock only to write its
token.  From then on the token alone makes it the owner, until another reader takes the
subscription.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dlcore.base.background import BackgroundTasks
from dlcore.base.backoff import Wait
from dlcore.base.config import require_kind
from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    SubscriptionMovedError,
)
from dlcore.base.ids import DLSN
from dlcore.log.metadata.store import persistently
from dlcore.log.metadata.values import LockHolder, Mark
from dlcore.metadata.paths import unescape
from dlcore.metadata.port import ANY_VERSION, UNANSWERED, Delete, SessionState
from dlcore.metadata.stored import LAYOUT, Count, Number, decode, encode

if TYPE_CHECKING:
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)

SUBSCRIPTIONS_MAX = 1_000
"""Subscriptions of one log."""
_ID_BYTES_MAX = 200
_RETRY_S = 0.1
_TRIES_MAX = 50
_RELEASE_WAIT_S = 5.0
"""The longest wait for the release of a lock while the metadata store does not answer."""
_releases = BackgroundTasks()
"""Locks that are released in the background; each ends when its store is closed, or sooner."""


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A stored position: that of the next record to read; only `token`'s reader may move it."""

    layout: int = LAYOUT
    position: tuple[Number, Count, Count] = (1, 0, 0)
    reader: str = ""
    token: str = ""
    moved_ms: Count = 0

    @property
    def dlsn(self) -> DLSN:
        """The position."""
        return DLSN(*self.position)


_MADE = Mark(0, "")
"""The mark of a subscription that no reader has taken."""


class Seen(NamedTuple):
    """A position, and the mark of the subscription when it was read."""

    position: DLSN
    mark: Mark


def require_subscriber(subscriber: str) -> str:
    """Return the name of a subscriber, or raise `ConfigurationError`."""
    require_kind("subscriber", subscriber, str)
    if not 0 < len(subscriber.encode()) <= _ID_BYTES_MAX:
        raise ConfigurationError(
            f"subscriber={subscriber!r}: expected 1 … {_ID_BYTES_MAX} bytes of text"
        )
    return subscriber


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
        subscribers = [require_subscriber(subscriber)]
    nodes = await persistently(
        lambda: context.store.get_many([paths.subscriber(each) for each in subscribers])
    )
    return {
        name: _seen(node, paths.subscriber(name))
        for name, node in zip(subscribers, nodes, strict=True)
        if node is not None
    }


def _seen(node: Versioned, path: str) -> Seen:
    stored = decode(Subscription, node.value, source=path)
    return Seen(stored.dlsn, Mark(node.version, stored.token))


class SubscriptionHold:
    """A subscription of a log, which is this holder's alone from `take` to `release`."""

    def __init__(self, context: LogContext, log: LogKey, subscriber: str) -> None:
        self._context = context
        self._store = context.store
        self._log = log
        self._subscriber = require_subscriber(subscriber)
        paths = context.logs.paths_of(log)
        self._parent, self._path = paths.subscribers, paths.subscriber(subscriber)
        self._lock_path = paths.subscriber_lock(subscriber)
        self._token = context.clock.new_token()
        self._stored = Subscription()
        self._version = -1
        self._is_locked = False
        self._has_attempted = False  # to lock it, even if the answer was not waited for
        self._unsubscribe = self._store.on_session(self._session_changed)

    def __repr__(self) -> str:
        return f"<SubscriptionHold {self._subscriber!r} of {self._log.name!r} at {self.position}>"

    @property
    def position(self) -> DLSN:
        """The stored position."""
        return self._stored.dlsn

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.EXPIRED:
            self._is_locked = False

    async def take(self, *, timeout_s: float) -> None:
        """Create the subscription if there is none, and lock it, waiting for another holder.

        During a long wait a warning names the holder.

        Raises:
            OwnershipAcquireFailedError: another reader held it for `timeout_s`.
            LogNotFoundError: the log is gone.
            OverCapacityError: the log has `SUBSCRIPTIONS_MAX` others.
        """
        try:
            await self._make()
            await self._lock(timeout_s=timeout_s)
            await self._take_over()
        except BaseException:
            await self.release()
            raise

    async def ensure_locked(self) -> None:
        """Lock it again after the session was lost.

        Raises:
            OwnershipAcquireFailedError, SubscriptionMovedError: another reader has it, or had it.
            MetadataConnectionError: there is no answer; the call may be repeated.
        """
        if self._is_locked:
            return
        await self._lock(timeout_s=0)
        # An equal version could be of another subscription, created after this one was deleted.
        if not self._take_up(await self._read()):
            await self.release()
            raise self._moved()

    def _take_up(self, node: Versioned | None) -> bool:
        """Use the stored state if it has our token: a cancelled commit may have written it."""
        if node is None:
            return False
        stored = decode(Subscription, node.value, source=self._path)
        if stored.token != self._token:
            return False
        self._stored, self._version = stored, node.version
        return True

    async def commit(self, position: DLSN) -> None:
        """Store a position, unless another reader has taken the subscription.

        Raises:
            SubscriptionMovedError: another reader has taken it.
            MetadataConnectionError: there is no answer; the call may be repeated.
        """
        stored = self._at(position, self._token)
        for _ in range(_TRIES_MAX):
            try:
                version = await self._store.put(self._path, encode(stored), version=self._version)
            except (MetadataVersionError, NoNodeError, *UNANSWERED) as error:
                node = await self._read()
                # Our last state: the store did not apply this attempt, so it is tried again.
                if node is not None and node.version == self._version:
                    await asyncio.sleep(_RETRY_S)
                elif not self._take_up(node):
                    raise self._moved() from error
                elif self._stored == stored:
                    return
            else:
                self._stored, self._version = stored, version
                return
        raise self._unanswered()

    def _at(self, position: DLSN, token: str) -> Subscription:
        return Subscription(
            position=(position.lssn, position.entry_id, position.slot_id),
            reader=self._context.client_id,
            token=token,
            moved_ms=self._context.clock.now_ms(),
        )

    async def look(self) -> Seen | None:
        """Return the stored state; None if there is no such subscription."""
        node = await self._read()
        return None if node is None else _seen(node, self._path)

    async def move(
        self, position: DLSN, *, token: str, mark: Mark | None, timeout_s: float
    ) -> Mark:
        """Store a position for a reader that is known by its token alone; return the new mark.

        `mark` is the mark that the reader has seen; None: there was no subscription.  If the reader
        does not own the subscription yet, it is locked meanwhile, so that no reader with the lock
        uses it.  A call that is repeated because its answer was lost is done once.

        Raises: as `take`; SubscriptionMovedError: the mark is another one.
        """
        if mark is None:
            await self._make()
            mark = _MADE
        if mark.token != token:
            await self._lock(timeout_s=timeout_s)
        value = encode(self._at(position, token))
        for _ in range(_TRIES_MAX):
            # An earlier attempt, or an earlier request with a lost answer, may have stored it.
            seen = await self.look()
            if seen == Seen(position, Mark(mark.version + 1, token)):
                return seen.mark
            if seen is None or seen.mark != mark:
                raise self._moved()
            try:
                version = await self._store.put(self._path, value, version=mark.version)
            except UNANSWERED:
                await asyncio.sleep(_RETRY_S)
            except (MetadataVersionError, NoNodeError):
                continue  # the next look shows who owns it
            else:
                return Mark(version, token)
        raise self._unanswered()

    async def forget(self, mark: Mark) -> None:
        """Remove the subscription, if it has this mark; no error if there is none.

        Raises: as `move`.
        """
        if await self.look() is None:
            return
        # Looked at again under the lock: only then no reader can change it before the deletion.
        await self._lock(timeout_s=0)
        seen = await self.look()
        if seen is None or seen.mark != mark:
            raise self._moved()
        self._version = mark.version
        await self.delete()

    async def delete(self) -> None:
        """Remove the subscription; it must be locked."""
        await self._store.multi([Delete(self._lock_path), Delete(self._path, self._version)])
        self._is_locked = self._has_attempted = False

    async def release(self) -> None:
        """Release it for others; a second call does nothing.

        If the metadata store does not answer, or this is cancelled, the release goes on in the
        background.
        """
        self._unsubscribe()
        self._is_locked = False
        if self._has_attempted:
            self._has_attempted = False
            release = _releases.start(self._unlock(), name=f"release {self!r}")
            await asyncio.wait({release}, timeout=_RELEASE_WAIT_S)

    async def _unlock(self) -> None:
        async def delete() -> None:
            node = await self._store.get(self._lock_path, fresh=True)
            if node is not None and self._locked_by(node).token == self._token:
                with contextlib.suppress(NoNodeError):  # it vanished with its session
                    await self._store.delete(self._lock_path, version=ANY_VERSION)

        try:
            await persistently(delete)
        except DLError as error:
            logger.info("%r: its lock goes with the session: %r", self, error)

    async def _make(self) -> None:
        if await self._read() is not None:
            return
        others = await persistently(lambda: self._store.get_children(self._parent, fresh=True))
        if len(others or ()) >= SUBSCRIPTIONS_MAX:
            raise OverCapacityError(
                f"log {self._log.name!r} has {len(others or ())} subscriptions, it can have "
                f"{SUBSCRIPTIONS_MAX}: delete some"
            )
        for path, value in ((self._parent, b""), (self._path, encode(Subscription()))):
            try:
                await persistently(lambda p=path, v=value: self._store.create(p, v))  # type: ignore[misc]
            except NodeExistsError:
                continue
            except NoNodeError:
                await self._context.logs.read(self._log)  # raises if the log is gone
                raise

    async def _read(self) -> Versioned | None:
        return await persistently(lambda: self._store.get(self._path, fresh=True))

    async def _holder(self) -> LockHolder | None:
        """Return the holder of the lock."""
        node = await persistently(lambda: self._store.get(self._lock_path, fresh=True))
        return None if node is None else self._locked_by(node)

    def _locked_by(self, node: Versioned) -> LockHolder:
        return decode(LockHolder, node.value, source=self._lock_path)

    async def _lock(self, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        wait = Wait(loop.time())
        deadline = wait.begun_s + timeout_s
        changed = asyncio.Event()
        unwatch = self._store.watch(self._lock_path, changed.set, children=False)
        try:
            while (other := await self._try_lock()) is not None:
                text = (
                    f"log {self._log.name!r}: another reader has subscriber {self._subscriber!r}: "
                    f"{other.described(self._context.client_id)}"
                )
                if (now := loop.time()) >= deadline:
                    raise OwnershipAcquireFailedError(text, owner=other.owner)
                if wait.is_due(now):
                    logger.warning("%s; waiting for %.0f s more", text, deadline - now)
                try:
                    async with asyncio.timeout_at(min(deadline, wait.due_s)):
                        await changed.wait()
                        changed.clear()
                except TimeoutError:
                    continue  # try once more
        finally:
            unwatch()

    async def _try_lock(self) -> LockHolder | None:
        """Lock it, or return the holder."""
        holder = LockHolder(
            owner=self._context.client_id,
            token=self._token,
            since_ms=self._context.clock.now_ms(),
        )
        while not self._is_locked:
            self._has_attempted = True
            try:
                await self._store.create(self._lock_path, encode(holder), ephemeral=True)
            except (NodeExistsError, *UNANSWERED):
                found = await self._holder()
                if found is not None and found.token != self._token:
                    return found
                self._is_locked = found is not None  # else it is free now: try again
            except NoNodeError:
                raise self._moved() from None
            else:
                self._is_locked = True
        return None

    async def _take_over(self) -> None:
        """Write our token, so that the former owner can no longer move it."""
        # The lock alone does not stop an owner that lost its session and does not know it yet.
        while True:
            node = await self._read()
            if node is None:
                raise self._moved()
            self._stored = decode(Subscription, node.value, source=self._path)
            self._version = node.version
            try:
                await self.commit(self.position)
            except SubscriptionMovedError:
                continue  # the former owner moved it
            return

    def _unanswered(self) -> MetadataConnectionError:
        return MetadataConnectionError(
            f"log {self._log.name!r}: the metadata store did not answer to the position of "
            f"subscriber {self._subscriber!r}"
        )

    def _moved(self) -> SubscriptionMovedError:
        return SubscriptionMovedError(
            f"log {self._log.name!r}: subscriber {self._subscriber!r} was taken over, moved or "
            "deleted by another client"
        )


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
