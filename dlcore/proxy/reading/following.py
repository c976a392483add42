"""The logs that a proxy follows: each one once, for any number of readers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks, fulfil
from dlcore.base.clock import steady_s
from dlcore.base.errors import DLError, EndOfStreamError, UnexpectedError
from dlcore.proxy.reading.awaited import Awaited
from dlcore.proxy.reading.ring import RUN_BYTES, fetched
from dlcore.proxy.reading.rows import key_of, row_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan
    from dlcore.proxy.reading.ring import Fetched, Ring, RingBudget
    from dlcore.proxy.reading.rows import View

logger = logging.getLogger(__name__)


class _ViewRing:
    """A ring whose runs have the columns of one view, and the number of its readers."""

    def __init__(self, view: View, ring: Ring) -> None:
        self.view = view
        self.ring = ring
        self.users = 0
        self._last: Fetched | None = None
        self._last_s = 0.0

    def append(self, more: Fetched, came_s: float) -> None:
        """Put entries that came now into the ring; few join the last run, if it may grow."""
        last = self._last
        if (
            last is not None
            and self.ring.may_grow
            and last.size_bytes + more.size_bytes <= RUN_BYTES
        ):
            self._last = last.followed_by(more)
            self.ring.grow(self._last.run(self.view, came_s=self._last_s))
        else:
            self._last, self._last_s = more, came_s
            self.ring.append(more.run(self.view, came_s=came_s))


class _Rings:
    """The rings of one log: readers with the same columns share one."""

    def __init__(self, budget: RingBudget) -> None:
        self._budget = budget
        self._rings: dict[bytes, _ViewRing] = {}

    def append(self, more: Fetched, came_s: float) -> None:
        """Put entries that came now into each ring."""
        for known in self._rings.values():
            known.append(more, came_s)

    @contextmanager
    def ring(self, view: View, end: DLSN) -> Iterator[Ring]:
        """Yield the ring of a view; a new one begins at `end`."""
        key = key_of(view)
        known = self._rings.get(key)
        if known is None:
            known = self._rings[key] = _ViewRing(view, self._budget.open_ring(end))
        known.users += 1
        try:
            yield known.ring
        finally:
            known.users -= 1
            if not known.users:
                del self._rings[key]
                known.ring.close()


class FollowedLog:
    """One log, followed from its end on, for readers in rings.

    A reader of `dlcore` reads the log, and its rows go into each ring at once.  Then `news` is set
    and replaced by a new event.  After an error, or the end of a sealed log, no rows follow.
    """

    def __init__(
        self, log: DirectLog, end: DLSN, budget: RingBudget, tasks: BackgroundTasks
    ) -> None:
        self._log = log
        self.end = end
        """The position up to which the log is followed; its records before that are readable."""
        self._rings = _Rings(budget)
        self._awaited: Awaited[asyncio.Future[DLSN]] = Awaited()
        self.records = 0
        """The number of records before the end, once some came."""
        self.users = 0
        self.news = asyncio.Event()
        self.has_ended = False
        self.error: DLError | None = None
        self.task = tasks.start(self._run(), name=f"following log {log.name!r}")

    def __repr__(self) -> str:
        return f"<FollowedLog {self._log.name!r} at {self.end}, {self.users} readers>"

    def require_unbroken(self) -> None:
        """Raise the error that ended the following, if there is one."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # else each reader would extend the traceback

    async def _run(self) -> None:
        """Follow the log until its end or an error."""
        row_bytes = row_bytes_of(self._log.name)
        try:
            async with await self._log.open_reader(dlsn=self.end) as reader:
                while True:
                    taken = await reader.take_entries()
                    came_s = steady_s()
                    for each in fetched(taken, row_bytes=row_bytes, sizes=repeat(RUN_BYTES)):
                        self._rings.append(each, came_s)
                        self.end = each.end
                        last = each.rows[-1]
                        before = last.place.sequence_id + last.first_slot
                        self.records = before + last.batch.num_rows
                        for rows in each.rows:
                            for found, position in self._awaited.came(rows):
                                fulfil(found, position)
                    self._tell()
        except EndOfStreamError:
            self.has_ended = True
        except DLError as error:
            logger.warning(
                "following log=%s ended: %s; to do: nothing, readers ask again; see to the reason "
                "if it comes again",
                self._log.name,
                error,
            )
            self.error = error
        except Exception as error:
            self.error = UnexpectedError(f"following log {self._log.name!r} broke: {error!r}")
            raise
        finally:
            for found in self._awaited.give_up():
                fulfil(found, self.end)
            self._tell()

    @contextmanager
    def awaiting(self, wanted: NotLessThan) -> Iterator[asyncio.Future[DLSN]]:
        """Yield a future of the position of the first new record that is not below `wanted`.

        If no record can follow, the result is the log's end.
        """
        found: asyncio.Future[DLSN] = asyncio.get_running_loop().create_future()
        if self.has_ended or self.error is not None:
            found.set_result(self.end)
        else:
            self._awaited.wait(wanted, found)
        try:
            yield found
        finally:
            self._awaited.leave(found)

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    @contextmanager
    def ring(self, view: View) -> Iterator[Ring]:
        """Yield the ring of a view; a new ring begins at the position up to which we followed."""
        with self._rings.ring(view, self.end) as ring:
            yield ring


class FollowedLogs:
    """The logs that a proxy follows, by their ids; each is followed while it has readers."""

    def __init__(self, budget: RingBudget) -> None:
        self.budget = budget
        self._logs: dict[str, FollowedLog] = {}
        self._tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._logs)

    def __iter__(self) -> Iterator[FollowedLog]:
        return iter(list(self._logs.values()))

    def __contains__(self, log_id: str) -> bool:
        return log_id in self._logs

    def records_of(self, log_id: str) -> int:
        """Return the number of records of a log, as far as it is known here."""
        followed = self._logs.get(log_id)
        return 0 if followed is None else followed.records

    @contextmanager
    def follow(self, log: DirectLog, end: DLSN) -> Iterator[FollowedLog]:
        """Yield a followed log; it is followed until its last user leaves the block.

        If no reader follows it yet, or if the following ended with an error, it is followed from
        its known `end` on.
        """
        followed = self._logs.get(log.log_id)
        if followed is None or followed.error is not None:
            followed = self._logs[log.log_id] = FollowedLog(log, end, self.budget, self._tasks)
        followed.users += 1
        try:
            yield followed
        finally:
            followed.users -= 1
            if not followed.users:
                followed.task.cancel()
                if self._logs.get(log.log_id) is followed:
                    del self._logs[log.log_id]

    async def aclose(self) -> None:
        """Stop following all logs."""
        await self._tasks.aclose()
