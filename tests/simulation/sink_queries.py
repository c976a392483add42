"""Queries of Spark in a run, and the drivers that run them.

A query has a checkpoint: the batch that was planned, and whether it is known to be committed.  A
driver that takes it over goes on there, while an older one may be in the middle of the same batch,
or of one before.  Each run divides the rows of a batch in its own way.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import (
    AppendAbortedError,
    AppendMismatchError,
    AppendSupersededError,
    DLError,
    DuplicateAppendError,
    EndOfStreamError,
    OwnershipAcquireFailedError,
)
from dlspark.batch import DlogWriter
from dlspark.commit import (
    APPLICATION_PROPERTIES,
    BATCH_ID_PROPERTY,
    EXECUTION_PROPERTY,
    QUERY_ID_PROPERTY,
)
from dlspark.options import Transaction, WriteOptions
from dlspark.schema import WriteColumns
from dlspark.stream import DlogStreamWriter
from tests.simulation.sink_checkers import WriteId
from tests.simulation.sink_hosts import last_result
from tests.simulation.sink_jobs import rows_by_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dlcore.log.reading.scan import CommitResult
    from tests.simulation.sink_hosts import Host
    from tests.simulation.sink_jobs import Row
    from tests.simulation.sinks import Sinks

STREAM, WRITES, TRANSACTIONS, ONCE = "stream", "writes", "transactions", "once"
"""How a query writes a batch: the streaming sink, several writes in ``foreachBatch``, a write
with a txnAppId, a write without one."""
_KINDS = (STREAM, STREAM, WRITES, WRITES, TRANSACTIONS, ONCE)
_BATCHES_MAX = 12
_ROWS_MAX = 5
_WRITES_MAX = 4
_COPIED_CHANCE = 0.25
_LOST_CHANCE = 0.1


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows of a batch, however often it is repeated."""

    query: str
    """The id of the query."""
    number: int
    writes: Sequence[Sequence[Row]]


@dataclass(frozen=True, slots=True)
class _Run:
    """One life of a query."""

    host: Host
    """Where its driver commits."""
    number: int
    is_copy: bool = False
    """Whether it goes on from a copy of an old checkpoint."""


class _JobFailedError(DLError):
    """A task failed too often."""


class Query:
    """A query, whichever driver runs it: its checkpoint, and its options."""

    def __init__(self, sinks: Sinks, number: int) -> None:
        self._sinks = sinks
        self._rng = sinks.rng
        self._number = number
        self.kind = self._rng.choice(_KINDS)
        self._log = self._rng.choice((None, *sinks.names))
        self._creates = self._rng.random() < 0.3
        self._restarts = self._writes = 0
        self._next = 0
        self.planned: _Batch | None = None
        """The batch that is not known to be committed."""
        self._runs = 0

    @property
    def name(self) -> str:
        """Its id; a query that starts again from nothing gets another one."""
        return f"query-{self._number}-{self._restarts}"

    def take_over(self) -> int:
        """Begin a run, which goes on where the checkpoint says; return its number."""
        self._runs += 1
        return self._runs

    def is_newest(self, run: int) -> bool:
        """Return whether no other run has begun since."""
        return run == self._runs

    @property
    def has_more(self) -> bool:
        """Whether batches are left to be planned."""
        return self._next < _BATCHES_MAX

    def plan(self) -> _Batch:
        """Return the batch that is due, and keep it until it is known to be committed."""
        if self.planned is None:
            self.planned = self._some_batch(self._next, "")
            self._next += 1
        return self.planned

    def copied(self) -> _Batch | None:
        """Return a batch that a copy of an older checkpoint would plan, if there is any.

        It has rows in each write: without any nothing is committed, and nothing to be refused.
        """
        before = self._next - (2 if self.planned is None else 3)
        if self.kind not in (STREAM, WRITES) or before < 0:
            return None
        return self._some_batch(before, "copied/", rows_min=1)

    def on_committed(self, batch: _Batch) -> None:
        """Keep in the checkpoint that a batch is committed."""
        if self.planned is batch:
            self.planned = None

    def start_again(self) -> None:
        """Begin a new query, with a new checkpoint."""
        self._restarts += 1
        self._next, self.planned = 0, None

    def _some_batch(self, number: int, how: str, *, rows_min: int = 0) -> _Batch:
        rng = self._rng
        names = [self._log] if self._log is not None else self._sinks.names
        writes = rng.randint(1, _WRITES_MAX) if self.kind == WRITES else 1
        return _Batch(
            self.name,
            number,
            [
                [
                    (rng.choice(names), f"{self.name}/{how}{number}/{write}/{row}")
                    for row in range(rng.randint(rows_min, _ROWS_MAX))
                ]
                for write in range(writes)
            ],
        )

    # Messages of Spark

    def options(self, batch: _Batch) -> WriteOptions:
        """Return the options of a write."""
        is_transaction = self.kind == TRANSACTIONS
        return WriteOptions(
            address=self._sinks.address,
            log=self._log,
            transaction=Transaction(app_id=batch.query, version=batch.number)
            if is_transaction
            else None,
            create_log=self._creates,
        )

    @property
    def columns(self) -> WriteColumns:
        """The columns of its rows."""
        return WriteColumns(has_txid=False, has_log=self._log is None)

    def properties(self, batch: _Batch, run: int) -> dict[str, str]:
        """Return the local properties of its tasks in a run of a batch."""
        if self.kind in (TRANSACTIONS, ONCE):
            return {}
        stream = {QUERY_ID_PROPERTY: batch.query, BATCH_ID_PROPERTY: str(batch.number)}
        if self.kind == STREAM:
            return stream
        application = dict.fromkeys(APPLICATION_PROPERTIES, f"application-{run}")
        return {**stream, **application, EXECUTION_PROPERTY: str(batch.number)}

    def write_id(
        self, batch: _Batch, ordinal: int, rows: Mapping[tuple[str, str], Sequence[bytes]]
    ) -> WriteId:
        """Return how the checkers know a write, whose rows were staged for these logs."""
        if self.kind == ONCE:  # a repetition makes another one
            self._writes += 1
            return WriteId(f"{batch.query}/{self._writes}", batch.number, ordinal, "")
        target = "" if self._log is None else next(log_id for _, log_id in rows)
        return WriteId(batch.query, batch.number, ordinal, target)


class Driver:
    """Runs a query, one run after the other."""

    def __init__(self, sinks: Sinks, query: Query, name: str, *, is_last: bool) -> None:
        self.name = name
        self.query = query
        self.is_last = is_last
        """Whether it completes in the end what was begun."""
        self._sinks = sinks
        self._rng = sinks.rng

    async def work(self, host: Host) -> None:
        """Take the query over, and run batches until another driver has it.

        Raises: DLError: a batch failed, and with it the run.
        """
        query, rng = self.query, self._rng
        run = _Run(host, query.take_over())
        for _ in range(rng.randint(1, 6)):
            # Before each batch: when a run begins, there are often no older ones.
            if rng.random() < _COPIED_CHANCE and (copied := query.copied()) is not None:
                with contextlib.suppress(AppendMismatchError):
                    await self._run_batch(_Run(host, query.take_over(), is_copy=True), copied)
                return
            if not query.is_newest(run.number) or not (query.planned or query.has_more):
                return
            await self._run_next(run)
            await asyncio.sleep(rng.expovariate(8.0))

    async def complete(self, host: Host) -> None:
        """Run the batch that was begun, in a new run.  Raises: DLError: it failed."""
        await self._run_next(_Run(host, self.query.take_over()))

    async def _run_next(self, run: _Run) -> None:
        query = self.query
        batch = query.plan()
        try:
            await self._run_batch(run, batch)
        except AppendMismatchError:
            if query.is_newest(run.number):
                self._sinks.count("query that started again")
                query.start_again()
            raise
        query.on_committed(batch)

    async def _run_batch(self, run: _Run, batch: _Batch) -> None:
        for ordinal, rows in enumerate(batch.writes):
            await self._write(run, batch, ordinal, self._divided(rows))
        self._sinks.count("batch of a sink")

    def _divided(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Return the rows in partitions, one way or another."""
        count = self._rng.choice((1, 2, 3))
        if self._rng.random() < 0.5:
            return [[*rows[number::count]] for number in range(count)]
        size = -(-len(rows) // count)
        return [[*rows[number * size : (number + 1) * size]] for number in range(count)]

    async def _write(
        self, run: _Run, batch: _Batch, ordinal: int, partitions: Sequence[Sequence[Row]]
    ) -> None:
        """Do one write of a batch as Spark does."""
        query, host = self.query, run.host
        options, columns = query.options(batch), query.columns
        is_stream = query.kind == STREAM
        kind = DlogStreamWriter if is_stream else DlogWriter
        about = (batch.number,) if is_stream else ()
        writer: Any = await host.run(lambda: kind(options, columns))
        properties, has_log = query.properties(batch, run.number), columns.has_log
        job = self._sinks.workers.run_job(writer, partitions, properties, has_log=has_log)
        tasks = await job
        if is_stream:
            writer = DlogStreamWriter(options, None)
        messages = [task and task.message for task in tasks]
        try:
            done = [task for task in tasks if task is not None]
            if len(done) < len(tasks):
                raise _JobFailedError("a task failed too often")
            shuffled = self._rng.sample(messages, len(messages))
            commit = partial(_commit, pickle.dumps(writer), shuffled, about)
            rows = rows_by_log(done)
            if rows:
                await self._commit(run, query.write_id(batch, ordinal, rows), rows, commit)
            else:
                await host.run(commit)
        except DLError:
            if self._rng.random() < 0.8:
                self._sinks.count("write that was aborted")
                with contextlib.suppress(DLError):
                    await host.run(lambda: writer.abort(messages, *about))
            raise

    async def _commit(
        self,
        run: _Run,
        write_id: WriteId,
        rows: Mapping[tuple[str, str], Sequence[bytes]],
        commit: Callable[[], CommitResult | None],
    ) -> None:
        """Commit, and judge what is reported of it."""
        query, checkers = self.query, self._sinks.checkers
        newest = checkers.newest(write_id) if query.kind in (STREAM, WRITES) else -1
        asked = checkers.begin(write_id, rows)
        if self._rng.random() < _LOST_CHANCE:
            run.host.lose_next_reply(applied=self._rng.random() < 0.6)
        try:
            result = await run.host.run(commit)
        except (AppendMismatchError, AppendSupersededError, DuplicateAppendError) as error:
            is_alone = query.is_newest(run.number) and not run.is_copy
            is_other_run = isinstance(error, AppendSupersededError) and run.number > 1
            may_be = not is_alone or is_other_run or self._sinks.has_other_logs
            checkers.on_refused(write_id, error, may_be=may_be)
            self._sinks.count("write of a sink that was refused")
            raise
        except (AppendAbortedError, OwnershipAcquireFailedError, EndOfStreamError):
            # Over proxies the same may be carried out once more, when it goes through.
            asked.has_failed = not self._sinks.is_remote
            raise
        checkers.on_answered(write_id, asked, result, newest=newest)
        is_repeated = result is not None and result.already_committed
        self._sinks.count("write of a sink that was there" if is_repeated else "write of a sink")
        self._sinks.note(self.name, f"run {run.number} committed {write_id}: {result}")


def _commit(writer: bytes, messages: Sequence[Any], about: tuple[int, ...]) -> CommitResult | None:
    """Commit in a process of its own; return its answer."""
    pickle.loads(writer).commit(pickle.loads(pickle.dumps(messages)), *about)
    return last_result()
