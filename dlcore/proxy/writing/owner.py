"""The driver of `ownership`: it acquires logs for a proxy, and releases them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from dlcore.base.background import BackgroundTasks, outcome_of
from dlcore.base.errors import (
    DLError,
    LogElsewhereError,
    LogNotFoundError,
    LogNotReadyError,
    LogRenamedError,
    MetadataSessionExpiredError,
    OverCapacityError,
    OwnershipAcquireFailedError,
)
from dlcore.log.metadata.values import LogKey
from dlcore.log.proxied.extension import ProxyExtension
from dlcore.log.proxied.producers import Producers
from dlcore.metadata.port import SessionState
from dlcore.proxy.writing.budget import RETRY_AFTER_S
from dlcore.proxy.writing.owned_log import OwnedLog
from dlcore.proxy.writing.ownership import Elsewhere, Ownership, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.writing.writer import DirectWriter
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.membership import Membership

logger = logging.getLogger(__name__)

_DRAINED_AT_ONCE = 8
"""Most logs that are released at once: more of them would delay the busiest log."""
_GIVE_WAY_S = 1.0
"""Time in which a log is not acquired again after its release for a waiting writer."""
_LEAVE_S = 5.0
"""Time that streams get to send their last acknowledgements."""


class WriterOpener:
    """Opens the writers of a proxy, which need the locks of the logs."""

    def __init__(
        self, namespace: DirectNamespace, membership: Membership, config: ProxyConfig
    ) -> None:
        self._namespace = namespace
        self._membership = membership
        self._config = replace(namespace.log_context.config, lock_timeout_s=config.lock_timeout_s)

    async def open(self, name: str, *, lock_timeout_s: float | None = None) -> DirectLog:
        """Open a log; its writers wait for the lock for `lock_timeout_s`, or as configured.

        Raises: LogNotFoundError, MetadataError.
        """
        config = self._config
        if lock_timeout_s is not None:
            config = replace(config, lock_timeout_s=lock_timeout_s)
        return await self._namespace.open_log(name, config=config)

    @contextlib.contextmanager
    def redirecting(self, name: str) -> Iterator[None]:
        """Turn a failed acquisition into `LogElsewhereError` if another live proxy is the owner."""
        try:
            yield
        except OwnershipAcquireFailedError as error:
            if error.owner in self._membership.live - {self._membership.location}:
                raise elsewhere(name, Elsewhere(error.owner)) from error
            raise

    async def open_owned(self, name: str, unreached: Collection[str]) -> OwnedLog:
        """Open the log that has this name once we have its lock, to write to it.

        `unreached` has the locations of proxies that a client did not reach.

        Raises: as `LogOwner.get`.
        """
        extension = ProxyExtension(Producers())
        writer = await self._locked(name, extension, unreached)
        await self._require_same(name, writer)
        log = OwnedLog(writer, self._namespace.log_context.clock, extension)
        log.unreached = frozenset(unreached)
        return log

    async def _locked(
        self, name: str, extension: ProxyExtension, unreached: Collection[str]
    ) -> DirectWriter:
        # Without a wait at first: if a live proxy has the lock, the client is redirected at once.
        log = await self.open(name, lock_timeout_s=0.0)
        try:
            return await log.open_writer(extension=extension)
        except OwnershipAcquireFailedError as error:
            owner = error.owner
            if not await self._makes_way(log, owner, unreached):
                with self.redirecting(name):
                    raise
        # The holder of the lock is gone, or about to release it: now wait for the lock.
        log = await self.open(name)
        return await log.open_writer(extension=extension)

    async def _makes_way(self, log: DirectLog, owner: str, unreached: Collection[str]) -> bool:
        """Return whether the lock of a log will soon be free, or was deleted here.

        We delete it in two cases.  An earlier process at this proxy's own location left it.  Or a
        client did not reach the owner, and the owner refuses our connections as well.
        """
        membership = self._membership
        is_here = owner == membership.location
        if not is_here and owner not in membership.live:
            return True
        if is_here or (owner in unreached and await membership.is_gone(owner)):
            key = LogKey(name=log.name, log_id=log.log_id)
            if await self._namespace.log_context.logs.locks.break_one(key, owner):
                logger.warning(
                    "log=%s: its lock was left by %s, which is gone; to do: nothing, this proxy "
                    "takes it",
                    log.name,
                    owner,
                )
                return True
        return is_here

    async def _require_same(self, name: str, writer: DirectWriter) -> None:
        """End the writer if the log was renamed or deleted before we had its lock.

        Clients that use the name mean another log by then, if there is one.
        """
        is_same = False
        try:
            found = await self._namespace.log_context.logs.find_existing([name])
            is_same = [each.log_id for each in found] == [writer.log_id]
        finally:
            if not is_same:
                await writer.abort()
        if not is_same:
            raise LogNotReadyError(f"log {name!r} changed while it was acquired: try again")

    async def require_named(self, name: str, log_id: str | None) -> None:
        """Raise if the log of this id is gone, or has another name."""
        found = await self._namespace.log_context.logs.find(name, log_id)
        if found.name != name:
            raise LogRenamedError(f"log {name!r} is called {found.name!r} by now: open it again")

    async def wait_until_locked(self, key: LogKey) -> None:
        """Return once a writer has the lock of a log.  Raises: MetadataError."""
        context, changed = self._namespace.log_context, asyncio.Event()
        unsubscribe = context.store.watch(
            context.logs.paths_of(key).lock, changed.set, children=False
        )
        try:
            while await context.logs.locks.holder_of(key) is None:
                await changed.wait()
                changed.clear()
        finally:
            unsubscribe()


class OwnershipChanges:
    """The acquisitions and releases of logs under way, at most one of each log."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[None]] = {}
        self._tasks = BackgroundTasks(_report_defect)

    def begin(
        self, name: str, work: Callable[[str], Coroutine[Any, Any, None]]
    ) -> asyncio.Future[None]:
        """Begin to change the owner of a log; return the future of the end."""
        change = self._tasks.start(work(name), name=f"changing the owner of {name}")
        self._running[name] = change
        change.add_done_callback(lambda done: self.ended(name, done))
        return change

    def of(self, name: str) -> asyncio.Future[None]:
        """Return the change of a log that is under way."""
        return self._running[name]

    def all(self) -> list[asyncio.Future[None]]:
        """Return all that are under way."""
        return list(self._running.values())

    def ended(self, name: str, change: asyncio.Future[None]) -> None:
        """Forget a change, unless a later one of the log has begun."""
        if self._running.get(name) is change:
            del self._running[name]

    async def aclose(self) -> None:
        """End those under way."""
        await self._tasks.aclose()


class LogOwner:
    """The logs that one proxy owns."""

    def __init__(
        self, namespace: DirectNamespace, membership: Membership, config: ProxyConfig
    ) -> None:
        self.writers = WriterOpener(namespace, membership, config)
        self._membership = membership
        self._config = config
        self._ownership = Ownership(membership.location, logs_max=config.logs_max)
        self._logs: dict[str, OwnedLog] = {}
        self.changes = OwnershipChanges()
        self.acquired_count = 0
        """Logs acquired since the start."""
        self.lost_count = 0
        """Logs whose writer failed, so that they were released at once."""
        self._unsubscribe = namespace.log_context.store.on_session(self._session_changed)
        self._idle_looks = BackgroundTasks()
        self._idle_looks.start(self._release_idle(), name="releasing idle logs")

    def __len__(self) -> int:
        return len(self._ownership)

    @property
    def location(self) -> str:
        """The location of this proxy."""
        return self._membership.location

    def owned(self) -> list[str]:
        """Return the sorted names of the owned logs."""
        return self._ownership.owned()

    async def get(
        self, name: str, *, log_id: str | None = None, unreachable: Collection[str] = ()
    ) -> OwnedLog:
        """Return a log to write to, acquired if need be; with `log_id` only the log of this id.

        `unreachable` has locations of proxies that the client did not reach.  Such a proxy is
        passed over if it only should own the log.  If it does own the log, by its lock, the client
        is still redirected to it.

        Raises:
            LogElsewhereError: another proxy owns the log.
            LogNotReadyError: no live proxy acquires logs, or the metadata store has an outage.
            OverCapacityError: this proxy owns as many logs as it may.
            LogNotFoundError: the log is gone; LogRenamedError: it has another name.
            DLError: the log cannot be acquired.
        """
        async with self.bounded():
            try:
                log = await self._get(name, unreachable)
            except (LogNotFoundError, LogElsewhereError):
                # Do not redirect a client for a log that is gone.
                await self.writers.require_named(name, log_id)
                raise
            if log_id not in (None, log.log_id):
                await self.writers.require_named(name, log_id)
                # The client's log has this name now, so the log that is owned here was deleted or
                # renamed.
                error = LogNotReadyError(f"log {name!r} was created again: try again")
                self.lost(name, log, error)
                raise error
            return log

    def bounded(self) -> AbstractAsyncContextManager[None]:
        """Bound a block that needs the metadata store; see `Outages.bounded`."""
        return self._membership.outages.bounded()

    async def _get(self, name: str, unreachable: Collection[str]) -> OwnedLog:
        # The client reached this proxy, whatever it reports.
        passed_over = set(unreachable) - {self._membership.location}
        while True:
            decision = self._ownership.ask(name, self._membership.live - passed_over)
            if isinstance(decision, Elsewhere):
                raise elsewhere(name, decision)
            match decision:
                case Verdict.SERVE:
                    return self._logs[name]
                case Verdict.WAIT:
                    await outcome_of(self.changes.of(name))
                case Verdict.ACQUIRE:
                    # In a task of its own: other calls wait for it, even if this one is cancelled.
                    await outcome_of(self.changes.begin(name, partial(self._acquire, passed_over)))
                case Verdict.FULL:
                    raise OverCapacityError(
                        f"log {name!r}: this proxy owns {self._config.logs_max} logs, the limit "
                        "logs_max: try again when it has released one, or raise the limit",
                        retry_after_s=RETRY_AFTER_S,
                    )
                case Verdict.NO_PROXY:
                    raise LogNotReadyError(f"log {name!r}: no live proxy takes logs: try again")
                case _:
                    assert_never(decision)

    def lost(self, name: str, log: OwnedLog, error: DLError) -> None:
        """Release a log whose writer has failed, at once: nothing more is acknowledged."""
        log.end(error, is_lost=True)
        if self._logs.get(name) is log and self._ownership.release(name):
            self.lost_count += 1
            logger.warning(
                "log=%s is lost: %s: %s; to do: nothing, the next write takes it anew; see to the "
                "reason if it comes often",
                name,
                type(error).__name__,
                error,
            )
            self.changes.begin(name, self._abort)

    async def release(self, name: str) -> bool:
        """Release a log after all accepted records are durable; False if it is not owned."""
        if not self._ownership.release(name):
            return False
        await outcome_of(self.changes.begin(name, self._close))
        return True

    async def hand_over(self, name: str, to: str) -> bool:
        """Release a log if `to` should own it, and redirect its clients to `to`.

        Returns: False if nothing was done.
        """
        return self._membership.preferred(name) == to and await self.release(name)

    @property
    def logs(self) -> Mapping[str, OwnedLog]:
        """The logs that are owned or being released, by name."""
        return self._logs

    @property
    def room(self) -> int:
        """The number of further logs that this proxy may own."""
        return self._config.logs_max - len(self._ownership)

    async def drain(self) -> None:
        """Acquire no more logs, and release all; clients are redirected to the next owners.

        Logs with recent writes come first, a few at a time.  A log is served until its release.
        """
        # First, so that no successor of a log is this proxy.
        await self._membership.leave()
        logs = list(self._logs.values())
        closing: set[asyncio.Future[None]] = set()
        while len(self._ownership):
            for name in self._busiest_first():
                if self._ownership.release(name):
                    closing.add(self.changes.begin(name, self._close))
                if len(closing) == _DRAINED_AT_ONCE:
                    _, closing = await asyncio.wait(closing, return_when=asyncio.FIRST_COMPLETED)
            # A log that was being acquired may be owned when that ends, and has to be released as
            # well.
            running = self.changes.all()
            if not running:
                break  # a release failed by a defect, which was reported
            await asyncio.wait(running)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                for log in logs:
                    await log.streams.wait_left()

    def _busiest_first(self) -> list[str]:
        return sorted(self._ownership.owned(), key=lambda name: self._logs[name].streams.idle_s())

    async def undrain(self) -> None:
        """Acquire logs again, after a finished `drain`.  Raises: MetadataError."""
        await self._membership.rejoin()

    async def aclose(self) -> None:
        """Drain, and end the background tasks."""
        self._unsubscribe()
        await self._idle_looks.aclose()
        await self.drain()
        await self.changes.aclose()

    async def _acquire(self, unreached: Collection[str], name: str) -> None:
        try:
            log = await self.writers.open_owned(name, unreached)
        # Also when cancelled: requests would wait for ever for a log that stays in ACQUIRING.
        except BaseException:
            self._ownership.gone(name)
            raise
        self._logs[name] = log
        self._ownership.acquired(name)
        self.acquired_count += 1
        logger.info("log=%s is owned", name)
        log.extension.tell_when_wanted(partial(self._wanted, name, log))

    def _wanted(self, name: str, log: OwnedLog, who: str) -> None:
        """Release a log for a writer that is no proxy and waits for the lock."""
        if self._logs.get(name) is log and self._ownership.release(name):
            logger.info("log=%s is released for the waiting writer %s", name, who)
            self.changes.begin(name, self._give_way)

    async def _give_way(self, name: str) -> None:
        """Release a log, and leave its lock to the waiting writer for a while.

        Clients that request the log meanwhile wait.
        """
        log = self._logs[name]
        try:
            await self._end_writer(name, log)
            async with asyncio.timeout(_GIVE_WAY_S):
                await self.writers.wait_until_locked(LogKey(name=name, log_id=log.log_id))
        except (TimeoutError, DLError) as error:
            logger.info("log=%s: no writer took its lock: %s", name, type(error).__name__)
        finally:
            self._gone(name)

    async def _close(self, name: str) -> None:
        try:
            await self._end_writer(name, self._logs[name])
        finally:
            self._gone(name)

    async def _end_writer(self, name: str, log: OwnedLog) -> None:
        successor = self._ownership.successor(name, self._membership.live)
        # Before the writer closes: streams hand over nothing more, and redirect their clients.
        log.end(not_here(name) if successor is None else elsewhere(name, successor))
        try:
            await log.writer.aclose()
        except DLError as error:
            # Streams with unwritten batches get the error from their futures.
            logger.warning(
                "log=%s was released: %s: %s; to do: nothing, the next write takes it anew",
                name,
                type(error).__name__,
                error,
            )

    async def _abort(self, name: str) -> None:
        try:
            await self._logs[name].writer.abort()
        finally:
            self._gone(name)

    def _gone(self, name: str) -> None:
        del self._logs[name]
        self._ownership.gone(name)
        logger.info("log=%s is not owned any more", name)

    def _session_changed(self, state: SessionState) -> None:
        if state is not SessionState.EXPIRED:
            return
        for name, log in list(self._logs.items()):
            error = MetadataSessionExpiredError(
                f"the proxy's session expired, and with it the lock of log {name!r}"
            )
            self.lost(name, log, error)

    async def _release_idle(self) -> None:
        after_s = self._config.idle_release_s
        while True:
            # A log is released when it was idle for at most a quarter more than the configured
            # time.
            await asyncio.sleep(after_s / 4)
            for name in self._ownership.owned():
                if self._logs[name].streams.idle_s() >= after_s and self._ownership.release(name):
                    logger.info("log=%s is idle", name)
                    self.changes.begin(name, self._close)


def _report_defect(error: BaseException) -> None:
    """Leave an error of a log to its waiting callers, and report any other error as a defect."""
    if not isinstance(error, DLError):
        message = "a change of what a proxy owns failed"
        context = {"message": message, "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


def elsewhere(name: str, owner: Elsewhere) -> LogElsewhereError:
    """Return the error that redirects a client to the proxy that owns a log."""
    return LogElsewhereError(f"log {name!r} is served by {owner.location}", location=owner.location)


def not_here(name: str) -> LogNotReadyError:
    """Return the error for a log that this proxy released, and may acquire again."""
    return LogNotReadyError(f"log {name!r} was released: try again")
