"""Jobs of Spark in a run: tasks, their attempts, and the workers that run them.

A task may be attempted several times, at once or one after the other.  One of the attempts counts;
others are lost after they staged their rows, die halfway, or are late.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore.base.errors import DLError
from tests.simulation.life_checkers import require
from tests.simulation.sink_checkers import BATCH_ONCE
from tests.simulation.sink_hosts import PORTAL, Task

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dlspark.commit import StagedTask
    from tests.simulation.sink_hosts import Host

_FAILURES_MAX = 3
_LOST_CHANCE = 0.1
_UPSTREAM_CHANCE = 0.1
_LATE_CHANCE = 0.1
_LATE_S_MAX = 4.0
_TWICE_CHANCE = 0.15
_BATCH_ROWS = 2

Row = tuple[str, str]
"""The log of a row, and what tells it from the other rows of its query."""


class _UpstreamError(Exception):
    """Something failed that is to make the rows: a task ends, and its worker goes on."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a task."""

    writer: bytes
    """The sink's writer, as it is sent to workers."""
    properties: Mapping[str, str]
    partition_id: int
    rows: Sequence[tuple[str, bytes]]
    """In order: the name of the log, and the bytes."""
    has_log: bool
    delay_s: float
    fails_at: int
    """The row where what is upstream fails; -1: it does not."""
    ended: asyncio.Future[StagedTask | None]

    def run(self) -> StagedTask:
        """Stage the rows, and return the message for the driver; in the worker."""
        message: StagedTask = pickle.loads(self.writer).write(self._batches())
        task: StagedTask = pickle.loads(pickle.dumps(message))
        return task

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows as Spark does, some time or other."""
        for first in range(0, len(self.rows), _BATCH_ROWS):
            if first <= self.fails_at < first + _BATCH_ROWS:
                raise _UpstreamError
            PORTAL.call(asyncio.sleep(self.delay_s))
            part = self.rows[first : first + _BATCH_ROWS]
            columns: dict[str, list[Any]] = {"value": [payload for _, payload in part]}
            if self.has_log:
                columns["log"] = [log for log, _ in part]
            yield pa.record_batch(columns)

    def end(self, message: StagedTask | None) -> None:
        """Tell the driver, if it waits: the message, or that the attempt failed."""
        if not self.ended.done():
            self.ended.set_result(message)


@dataclass(frozen=True, slots=True)
class Done:
    """The valid result of a task: the rows of the attempt that ended first, and its message."""

    rows: Sequence[tuple[str, bytes]]
    message: StagedTask


class Workers:
    """The processes that run tasks."""

    def __init__(self, rng: random.Random, count: Callable[[str], None]) -> None:
        self._rng = rng
        self._count = count
        self._queue: asyncio.Queue[Attempt] = asyncio.Queue()
        self._attempts = 0

    async def serve(self, host: Host, *, until: Callable[[], bool]) -> None:
        """Run one attempt after the other.

        Raises: asyncio.CancelledError: the process died.
        """
        while not until():
            try:
                attempt = await asyncio.wait_for(self._queue.get(), 0.2)
            except TimeoutError:
                continue
            try:
                message = await host.run(
                    attempt.run, Task(attempt.properties, attempt.partition_id)
                )
            except (DLError, _UpstreamError):
                self._count("task that failed")
            else:
                if self._rng.random() < _LOST_CHANCE and not until():
                    self._count("task lost after it staged")
                    return
                attempt.end(message)
            finally:
                attempt.end(None)

    async def run_job(
        self,
        writer: object,
        partitions: Sequence[Sequence[Row]],
        properties: Mapping[str, str],
        *,
        has_log: bool,
    ) -> list[Done | None]:
        """Run a task for each partition; return what counts of each, None if it failed too often.

        `properties` are those of the tasks; `has_log` says whether a column names the log.
        """
        shipped = pickle.dumps(writer)

        def begin(partition_id: int) -> Attempt:
            self._attempts += 1
            rows = [
                (log, f"{row}@{self._attempts}".encode()) for log, row in partitions[partition_id]
            ]
            is_late = self._rng.random() < _LATE_CHANCE
            delay_s = self._rng.uniform(0.0, _LATE_S_MAX if is_late else 0.02)
            is_to_fail = rows and self._rng.random() < _UPSTREAM_CHANCE
            attempt = Attempt(
                shipped,
                properties,
                partition_id,
                rows,
                has_log,
                delay_s,
                self._rng.randrange(len(rows)) if is_to_fail else -1,
                asyncio.get_running_loop().create_future(),
            )
            self._queue.put_nowait(attempt)
            return attempt

        tasks = (self._run_task(begin, partition_id) for partition_id in range(len(partitions)))
        return await asyncio.gather(*tasks)

    async def _run_task(self, begin: Callable[[int], Attempt], partition_id: int) -> Done | None:
        for _ in range(_FAILURES_MAX):
            attempts = [begin(partition_id)]
            if self._rng.random() < _TWICE_CHANCE:
                self._count("task attempted twice at once")
                attempts.append(begin(partition_id))
            while attempts:
                waiting = [each.ended for each in attempts]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for attempt in attempts:
                    if attempt.ended.done() and (message := attempt.ended.result()) is not None:
                        return Done(attempt.rows, message)
                attempts = [each for each in attempts if not each.ended.done()]
        self._count("task that failed too often")
        return None


def rows_by_log(tasks: Sequence[Done]) -> dict[tuple[str, str], list[bytes]]:
    """Return what tasks staged, in the order of partitions, by the name and the id of the log.

    S1: for each log that a task has rows for there are extents.
    """
    rows: dict[tuple[str, str], list[bytes]] = {}
    for task in tasks:
        ids = {each.log: each.log_id for each in task.message.extents}
        for log, payload in task.rows:
            require(
                BATCH_ONCE,
                holds=log in ids,
                message=f"{payload!r} was staged for log {log}: no extent of {task.message} is",
            )
            rows.setdefault((log, ids[log]), []).append(payload)
    return rows
