"""Watches which logs a namespace has: reads changed buckets again, and reports differences."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks, reported_to_callers, together
from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import AlreadyClosedError, DLError
from dlcore.log.metadata.listing import read_names
from dlcore.log.metadata.names import KnownNames, LogChange
from dlcore.log.metadata.values import LogHead
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import BUCKETS
from dlcore.metadata.stored import decode_or_tell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.log.context import LogContext

logger = logging.getLogger(__name__)

_BUCKETS_AT_ONCE = 16
_RETRY_DELAY_S = 1.0


class NameLooks:
    """Reads the names of the buckets that may have changed, and finds what did.

    Args:
        context: the namespace's adapters.
        prefix: only changes of logs with this prefix are kept.
        on_due: called when a bucket may have changed.
    """

    def __init__(self, context: LogContext, prefix: str, on_due: Callable[[], None]) -> None:
        self._context = context
        self._prefix = prefix
        self._on_due = on_due
        self.known = KnownNames()
        self.changes: deque[LogChange] = deque()
        """Changes that were found, and that no caller has taken yet."""
        self.due = dict.fromkeys(BUCKETS)  # a set that keeps its order
        self._unsubscribe = [
            context.store.watch(context.paths.log_bucket(bucket), partial(self._mark, bucket))
            for bucket in BUCKETS
        ]

    def close(self) -> None:
        """Hear of no more changes."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []

    def _mark(self, bucket: str) -> None:
        self.due[bucket] = None
        self._on_due()

    async def look(self) -> None:
        """Look at buckets that may have changed; after a failure they are due again."""
        left = dict.fromkeys(islice(self.due, _BUCKETS_AT_ONCE))
        for bucket in left:
            del self.due[bucket]  # before the read: a change during it makes the bucket due again
        try:
            looks = await together(*map(self._read, left))
            for bucket, found in zip(list(left), looks, strict=True):
                present = await self._present_names(self.known.to_ask(bucket, found))
                changes = self.known.looked(bucket, found, present)
                del left[bucket]
                within = (change.within(self._prefix) for change in changes)
                self.changes.extend(change for change in within if change is not None)
        finally:
            self.due |= left

    async def _read(self, bucket: str) -> dict[str, str]:
        store, path = self._context.store, self._context.paths.log_bucket(bucket)
        components = await persistently(partial(store.get_children, path)) or []
        logs = await read_names(store, [f"{path}/{component}" for component in components])
        return {log.name: log.log_id for log in logs}

    async def _present_names(self, log_ids: Sequence[str]) -> dict[str, str | None]:
        """Return the present name of each log, from its head; None if it was deleted."""
        if not log_ids:
            return {}
        paths = [self._context.paths.log_of(log_id).head for log_id in log_ids]
        nodes = await persistently(partial(self._context.store.get_many, paths))
        present: dict[str, str | None] = {}
        tell = partial(logger.warning, "a log is listed under its last known name: %s")
        for log_id, path, node in zip(log_ids, paths, nodes, strict=True):
            head = decode_or_tell(LogHead, node, source=path, tell=tell)
            if head is None:
                present[log_id] = None if node is None else ""
            else:
                present[log_id] = None if head.deleted else head.name
        return present


class LogWatch(AsyncClosing):
    """The changes of a namespace's logs: an async iterator.  Use `Namespace.watch_logs`.

    It begins with the existing logs, each as created.  From then on it reports each log that is
    created, deleted or renamed, in an order that keeps names unique.  A log that came and went
    between two looks is not reported.  After a lost connection or session it reads everything again
    and reports the difference, so nothing is missed.

    It knows all names of the namespace, whatever its prefix.  A change makes it read the names of
    one bucket in 256 again.
    """

    def __init__(self, context: LogContext, prefix: str) -> None:
        self._context = context
        self._prefix = prefix
        self._wake = asyncio.Event()
        self._looks = NameLooks(context, prefix, self._wake.set)
        self._taking = asyncio.Lock()
        self._end: str | None = None
        self._listeners = BackgroundTasks()
        self._tasks = BackgroundTasks(reported_to_callers)
        self._looking: asyncio.Task[None] | None = None
        context.open_objects.add(self)

    def __repr__(self) -> str:
        return f"<LogWatch {self._context.paths.root} {self._prefix!r}>"

    @property
    def names(self) -> list[str]:
        """The sorted names of the existing logs, as far as they were read."""
        return self._looks.known.names(self._prefix)

    async def take(self, *, timeout_s: float | None = None) -> list[LogChange]:
        """Return the next changes, as many as were found; none if the time is up before.

        If the time is too short for a look, the look goes on, and the next call takes its result.

        Raises:
            AlreadyClosedError: the watch, or its namespace, was closed.
            MetadataConnectionError: no answer for longer than a session lives; a further call
                continues, and nothing is lost.
        """
        try:
            async with asyncio.timeout(timeout_s), self._taking:
                while not self._looks.changes:
                    self._require_open()
                    if self._looks.due or self._looking is not None:
                        await self._look_on()
                    else:
                        self._wake.clear()
                        await self._wake.wait()
        except TimeoutError:
            return []
        changes = list(self._looks.changes)
        self._looks.changes.clear()
        return changes

    def _require_open(self) -> None:
        if self._end is not None:
            raise AlreadyClosedError(
                f"the watch of the logs of {self._context.paths.root} ended: {self._end}"
            )

    async def _look_on(self) -> None:
        """Look, or wait for the look that an earlier call left running."""
        if self._looking is None:
            self._looking = self._tasks.start(self._looks.look(), name=f"log-look-{self._prefix}")
        # `wait`, unlike `await`, does not cancel the look if this call is cancelled.
        await asyncio.wait([self._looking])
        looking, self._looking = self._looking, None
        if not looking.cancelled():  # else the watch was closed
            looking.result()

    def listen(self, callback: Callable[[list[LogChange]], None]) -> None:
        """Call `callback` on the event loop with the changes, until the watch is closed.

        While the metadata store does not answer, the watch tries again and again.  An error of the
        callback is logged.
        """
        self._require_open()
        self._listeners.start(self._tell(callback), name=f"log-watch-{self._prefix}")

    async def _tell(self, callback: Callable[[list[LogChange]], None]) -> None:
        while True:
            try:
                changes = await self.take()
            except AlreadyClosedError:
                return
            except DLError as error:
                logger.warning(
                    "%r is tried again: %s: %s; to do: see to ZooKeeper if this goes on",
                    self,
                    type(error).__name__,
                    error,
                )
                await asyncio.sleep(_RETRY_DELAY_S)
                continue
            try:
                callback(changes)
            except Exception:
                logger.exception(
                    "%r: its listener failed; to do: correct the function that the program passed",
                    self,
                )

    async def abandon(self, reason: str) -> None:
        """Stop; callers that wait get an error with this reason."""
        self._end = self._end or reason
        self._context.open_objects.discard(self)
        self._looks.close()
        self._wake.set()
        await self._tasks.aclose()
        await self._listeners.aclose()

    async def aclose(self) -> None:
        """Stop watching; a loop over the changes ends."""
        await self.abandon("it was closed")

    def __aiter__(self) -> LogWatch:
        return self

    async def __anext__(self) -> LogChange:
        try:
            changes = await self.take()
        except AlreadyClosedError:
            if self._end == "it was closed":
                raise StopAsyncIteration from None
            raise
        # A loop that stops here leaves the other changes to the next call.
        self._looks.changes.extendleft(reversed(changes[1:]))
        return changes[0]
