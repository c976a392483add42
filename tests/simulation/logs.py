"""Logs in a run: processes that append, merge, truncate, delete and read, and die at any request.

Each process is a real `Namespace` over the simulated ports.  Appenders stage rows in two ledgers
and commit them to some logs at once, until they learn that it is done, from process to process.
Writers compete with them for the same logs (see `log_writers.py`).
Workers merge and sweep; one more merges without asking for a lock.  Readers and scanners give all
they get to the checkers.  In the end everybody leaves in good order, a last worker tidies up, and
every log is read once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from dlcore.backends.scanning import LedgerClients, ScanClients, scan
from dlcore.base.errors import AlreadyTruncatedError, DLError, EndOfStreamError
from dlcore.base.ids import DLSN
from dlcore.ledger.client import LedgerClient
from dlcore.log.upkeep.requests import ask_for_upkeep
from tests.simulation.checkers import LIVE
from tests.simulation.log_checkers import TIDY
from tests.simulation.log_life import Life, settings_of_new
from tests.simulation.log_process import LogProcess
from tests.simulation.log_types import TYPED, Types
from tests.simulation.log_writers import Writer, follow
from tests.simulation.proxies import PROXIED, Proxies
from tests.simulation.redactions import PRIVATE, Redactions
from tests.simulation.sinks import Sinks
from tests.simulation.tiers import TIER_ROLES, Tiers
from tests.simulation.truth import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.encryption_keys import EncryptionKeys
    from dlcore.base.ids import BookieId
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.log.metadata.values import LogKey
    from dlcore.log.staging.writer import DirectStagingWriter
    from tests.simulation.log_checkers import AppendId, LogCheckers, Reading, Rows
    from tests.simulation.world import World

_Result = TypeVar("_Result")

LOGS = ("a", "b", "c")
ROWS_MAX = 6
_APPENDERS = 2
_STEPS_TO_LIVE = 150
_APPENDING_S_MAX = 60.0
_TIDYING_S_MAX = 90.0
_SWEEPS_MIN = 4


class _Ledgers(LedgerClients):
    """Reads ledgers from the simulated bookies, without metadata."""

    def __init__(self, process: LogProcess) -> None:
        client = process.client
        super().__init__(client.config, None, lambda _: None)
        self._reading = LedgerClient(
            ledger_store=None,
            registry=None,
            bookies=client.bookies,
            config=client.config,
            clock=client.clock,
            rng=client.rng,
            cold=process.cold,
        )

    def client_of(self, _: str, __: Mapping[BookieId, str]) -> LedgerClient:
        """Return a client without metadata."""
        return self._reading


class _Scanning(ScanClients):
    """Reads by a plan alone, and asks a namespace once that fails."""

    def __init__(self, process: LogProcess) -> None:
        super().__init__()
        self._process = process
        self.ledgers = _Ledgers(process)

    async def fresh_context(self, _: str) -> LogContext:
        """Return the process's own."""
        return self._process.namespace.log_context

    async def encryption_keys(self) -> EncryptionKeys | None:
        """Return the process's own."""
        return self._process.namespace.log_context.encryption_keys


class Logs:
    """All that happens to the logs of a run."""

    def __init__(self, world: World) -> None:
        self.world = self._world = world
        self._rng = world.rng
        self._checkers: LogCheckers = world.log_checkers
        self.is_over = False
        self.names = PROXIED if world.plan.has_proxies else LOGS
        """The requests of appenders and writers."""
        self._pause_s = world.rng.choice((0.1, 0.2, 0.4))
        self.locked_share = world.rng.choice((1.0, 0.7, 0.2))
        """How many writers take the lock; the others are kept apart by fencing alone."""
        self._supervisors: list[asyncio.Task[None]] = []
        self._types = Types(self)
        self.sinks = Sinks(self) if world.plan.has_sinks else None
        """Queries of Spark that write to the logs."""
        self._proxies = Proxies(self) if world.plan.has_proxies else None
        self._tiers = Tiers(self) if world.plan.has_tier else None
        self._redactions = Redactions(self) if world.plan.has_redactions else None

    @property
    def appended(self) -> tuple[str, ...]:
        """The names of the logs that appenders append to."""
        return (*self.names, TYPED) if self._world.plan.has_types else self.names

    async def start(self) -> None:
        """Create the logs, and start all processes."""
        setup = LogProcess(self._world, "setup")
        for name in self.names:
            await self.create_again(setup.namespace, name)
        if self._proxies is not None:
            logs = [await setup.namespace.open_log(name) for name in self.names]
            await self._proxies.start(setup, {log.name: log.log_id for log in logs})
        if self._world.plan.has_types:
            await self._types.start(setup.namespace)
        if self._tiers is not None:
            await self._tiers.start(setup)
        if self._redactions is not None:
            tiered = None if self._tiers is None else self._tiers.settings_of_new(None)
            await self._redactions.start(setup, tiered)
        await setup.client.aclose()
        self._supervise_all()
        if self._world.plan.has_life:
            Life(self).start()
        if self.sinks is not None:
            self.sinks.start()

    def _supervise_all(self) -> None:
        # Beside sinks there are fewer others, so that such a run is no longer than the rest.
        for number in range(_APPENDERS if self.sinks is None else 1):
            self.supervise(f"appender-{number}", Appender(self, number).work)
        writers = self._world.plan.log_writers
        for number in range(self._rng.choice((0, 1, 2)) if writers is None else writers):
            self.supervise(f"writer-{number}", Writer(self, number, self._rng).work)
        for number in range(2):
            self.supervise(f"upkeep-{number}", self._keep_up)
        for number in range(self._world.plan.mergers):
            self.supervise(f"merger-{number}", self._merge)
        self.supervise("janitor", self._interfere)
        self.supervise("reader", self._read)
        self.supervise("follower", partial(follow, self))
        self.supervise("scanner", self._scan)

    def supervise(
        self,
        role: str,
        work: Callable[[LogProcess], Coroutine[object, object, None]],
        identity: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        """Let a process work until the run is over, and another one whenever it is dead.

        `identity` returns what the n-th of them is known by, if that is not its name.
        """
        self._supervisors.append(self._world.spawn(self._live(role, work, identity)))

    async def _live(
        self,
        role: str,
        work: Callable[[LogProcess], Coroutine[object, object, None]],
        identity: Callable[[int], str | None],
    ) -> None:
        """Start a process, and another one whenever it is dead."""
        number = 0
        while not self.is_over:
            process = LogProcess(self._world, f"{role}.{number}", identity=identity(number))
            if (steps := self._steps_to_live(role)) is not None:
                process.client.store.crash_after(steps, process.client.crash_at)
            task = self._world.spawn(self._persist(process, work), client=process.client)
            death = asyncio.ensure_future(process.client.died.wait())
            # Calls that a dead process had under way may wait for ever.
            await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            number += 1
            if process.client.is_alive:
                await process.client.aclose()
            else:
                process.note("is dead")
                await asyncio.sleep(self._rng.expovariate(4.0))

    def _steps_to_live(self, role: str) -> int | None:
        """Return the request at which a process dies; None: it may live on."""
        steps_max = self._world.plan.tier_steps_to_live
        if steps_max is not None and role.startswith(TIER_ROLES):
            return self._rng.randint(1, steps_max)
        return self._rng.randint(5, _STEPS_TO_LIVE) if self._rng.random() < 0.7 else None

    async def _persist(
        self, process: LogProcess, work: Callable[[LogProcess], Coroutine[object, object, None]]
    ) -> None:
        """Work until the run is over, whatever fails meanwhile."""
        while not self.is_over:
            try:
                await work(process)
            except DLError as error:
                process.note(f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._rng.expovariate(1 / self._pause_s))

    async def sleep(self, delay_s: float) -> None:
        """Wait, but not when the run is over."""
        if not self.is_over:
            await asyncio.sleep(delay_s)

    async def within(
        self, delay_s: float, work: Coroutine[object, object, _Result]
    ) -> _Result | None:
        """Return what comes of some work, None if it takes longer; it is cancelled then."""
        try:
            async with asyncio.timeout(delay_s):
                return await work
        except TimeoutError:
            return None

    def any_log(self) -> str:
        """Return the name of a log."""
        return self._rng.choice(self.names)

    # Appends: see `Appender`

    async def append(self, process: LogProcess, append: AppendId, rows: Rows) -> None:
        """Stage and commit rows as one append; return once it is known to be done."""
        identity, version = append
        self._checkers.on_append(append, rows)
        writers: list[DirectStagingWriter] = []
        try:
            namespace = process.namespace
            writers += [await namespace.open_staging_writer(identity=identity) for _ in range(2)]
            extents = await self._stage(process, writers, rows)
            staged_for = {(each.log, each.log_id) for each in extents}
            self._checkers.on_commit(append, sorted(staged_for))
            staged = await namespace.begin_append(identity, version)
            if self._rng.random() < 0.1:
                process.client.store.inner.lose_next_reply(applied=self._rng.random() < 0.6)
            result = await staged.commit(extents)
            log_ids = dict(staged_for)
            if len(log_ids) == len(staged_for) == len(set(log_ids.values())):
                placed = {name: (log_ids[name], *result.logs[name]) for name in result.logs}
            else:
                placed = {}  # names changed meanwhile: which logs are meant is unknown
            self._checkers.on_committed(append, placed)
            process.note(f"appended {append}, {len(extents)} extents: {result.committed}")
        finally:
            for writer in writers:
                with contextlib.suppress(DLError):
                    await writer.aclose()

    async def _stage(
        self, process: LogProcess, writers: Sequence[DirectStagingWriter], rows: Rows
    ) -> list[StagedExtent]:
        """Stage the rows of each log in two parts, of a ledger each, as tasks do."""
        txid = process.client.clock.now_ms() if self._rng.random() < 0.3 else None
        extents: list[StagedExtent] = []
        for number, writer in enumerate(writers):
            for row in range(ROWS_MAX):
                for name, payloads in rows.items():
                    half = len(payloads) // 2
                    part = (payloads[half:] if number else payloads[:half])[row : row + 1]
                    if part:
                        await writer.write_batch(name, self._batch(name, part, txid))
            extents += await writer.stage()
        return extents

    def _batch(self, name: str, payloads: list[bytes], txid: int | None) -> pa.RecordBatch:
        if name == TYPED:
            return self._types.batch(payloads, txid)
        columns: dict[str, list[bytes] | list[int]] = {"value": payloads}
        if txid is not None:
            columns["txid"] = [txid] * len(payloads)
        return pa.record_batch(columns)

    # Merges

    async def _keep_up(self, process: LogProcess) -> None:
        """Work as the service does, for as long as the run goes on."""
        upkeep = process.upkeep()
        work = asyncio.ensure_future(upkeep.run())
        try:
            while not self.is_over and not work.done():
                await asyncio.wait([work], timeout=0.2)
        finally:
            work.cancel()
            await asyncio.wait([work])
        if not work.cancelled():
            work.result()

    async def _merge(self, process: LogProcess) -> None:
        """Merge a log without asking whether others do."""
        log = await self._some_log(process)
        await process.merger().merge(log._log)
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))

    # Interference

    async def _some_log(self, process: LogProcess) -> DirectLog:
        return await process.namespace.open_log(self.any_log(), config=process.config)

    async def _interfere(self, process: LogProcess) -> None:
        """Ask for upkeep, truncate, or delete a log and create it again."""
        rng = self._rng
        await asyncio.sleep(rng.uniform(0.0, 0.6))
        log = await self._some_log(process)
        choice = rng.random()
        if choice < 0.6:
            await ask_for_upkeep(process.namespace.log_context, {log._log: 1})
        elif choice < 0.9:
            await self._truncate(process, log)
        elif choice < 0.93 and self._proxies is None:
            await self.replace_log(process, log)

    async def replace_log(self, process: LogProcess, log: DirectLog) -> None:
        """Delete a log, and create another one of its name."""
        process.note(f"deletes log {log.name}")
        self._checkers.life.on_delete(log.log_id)
        try:
            await log.delete()
        finally:
            await self.create_again(process.namespace, log.name)

    async def create_again(self, namespace: DirectNamespace, name: str) -> None:
        """Create a log unless there is one of that name."""
        if not await namespace.log_exists(name):
            settings = settings_of_new(name) if self._world.plan.has_life else None
            if self._tiers is not None:
                settings = self._tiers.settings_of_new(settings)
            await namespace.create_log(name, settings=settings)

    async def _truncate(self, process: LogProcess, log: DirectLog) -> None:
        key = log._log
        places = self._checkers.places(key.log_id)
        if places:
            place = places[min(self._rng.randrange(len(places)), self._rng.randrange(len(places)))]
            process.note(f"truncates log {log.name} below {place}")
            self._checkers.on_truncate(key.log_id, key.name, place)
            await log.truncate(place)

    # Readers

    async def _read(self, process: LogProcess) -> None:
        """Read a log for a while, from its start or from somewhere in it."""
        rng = self._rng
        log = await self._some_log(process)
        reading = self.new_reading(log._log, is_whole=rng.random() < 0.5)
        async with await log.open_reader(dlsn=reading.next_dlsn) as reader:
            for _ in range(rng.randint(1, 15)):
                count, floor = rng.choice((1, 5, 100)), reading.floor
                try:
                    records = await reader.read_bulk(count, until_caught_up=True)
                except AlreadyTruncatedError:
                    reading.on_truncated()
                    return
                except EndOfStreamError:
                    records = []
                reading.on_records(records)
                if not records:  # fewer than asked may stand before an error
                    reading.on_caught_up(floor)
                await asyncio.sleep(rng.expovariate(5.0))

    def new_reading(self, key: LogKey, *, is_whole: bool) -> Reading:
        """Begin to judge a reader, from the start of a log or from somewhere in it."""
        places = self._checkers.places(key.log_id)
        start = DLSN.INITIAL if is_whole or not places else self._rng.choice(places)
        return self._checkers.new_reading(key.log_id, key.name, start)

    async def _scan(self, process: LogProcess) -> None:
        """Read a log by a plan, slowly, so that much happens meanwhile."""
        log = await self._some_log(process)
        await self._scan_log(process, log, pause_s=self._rng.choice((0.0, 0.02, 0.2)))
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))

    async def _scan_log(self, process: LogProcess, log: DirectLog, *, pause_s: float) -> Reading:
        key = log._log
        reading = self._checkers.new_reading(key.log_id, key.name)
        floor = reading.floor
        snapshot = await log.get_snapshot()
        clients = _Scanning(process)
        scans = snapshot.scans(snapshot.first, snapshot.end)
        try:
            async for each in scan(scans, uri="simulated", clients=clients):
                columns = (each.batch.column(0).to_pylist(), each.batch.column(1).to_pylist())
                for row, (txid, payload) in enumerate(zip(*columns, strict=True)):
                    reading.on_record(
                        payload,
                        DLSN(each.lssn, each.entry_id, each.first_slot + row),
                        each.sequence_id + row,
                        txid,
                        each.timestamp_ms,
                    )
                await asyncio.sleep(pause_s)
        except AlreadyTruncatedError:
            return reading  # or deleted, which is called the same
        reading.on_caught_up(floor)
        return reading

    # The end

    async def finish(self) -> None:
        """Let everybody end in good order; tidy up, and judge what is there."""
        self.is_over = True
        await asyncio.wait(self._supervisors)
        keeper = LogProcess(self._world, "keeper")
        if self._proxies is not None:
            await self._proxies.finish()
        for name in self.names:
            await self.create_again(keeper.namespace, name)
        if self.sinks is not None:
            await self.sinks.finish()
        names = await keeper.namespace.get_logs()
        for name in names:
            await self._recover(keeper, name)
        await self._append_at_last(keeper)
        if self._redactions is not None:
            await self._redactions.finish(keeper)
        await self._tidy_up(keeper)
        self._world.faults["merge"] += self._checkers.merges
        self._world.faults["tiered run"] += self._checkers.tiers.count
        self._world.faults["rename"] += len(self._checkers.life.renamed)
        found = await self._judge(keeper, names)
        assert found.keys() == set(self._checkers.life.names.values())
        if self._proxies is not None:
            self._proxies.check_whole()
        if self.sinks is not None:
            self.sinks.check_whole([*found])
        self._checkers.check_whole(found)
        await keeper.client.aclose()

    async def _judge(self, keeper: LogProcess, names: Sequence[str]) -> dict[str, list[bytes]]:
        """Read all logs; return what each has that is judged by its payloads, by ids."""
        found: dict[str, list[bytes]] = {}
        for name in names:
            log = await keeper.namespace.open_log(name)
            if name == TYPED and self._world.plan.has_types:
                found[log.log_id] = (await self._types.read_whole(keeper)).payloads
                continue
            if name == PRIVATE and self._redactions is not None:
                await self._redactions.check_whole(keeper)
                found[log.log_id] = []
                continue
            reading = await self._read_whole(keeper, log)
            found[log.log_id] = reading.payloads
            scanned = await self._scan_log(keeper, log, pause_s=0.0)
            assert scanned.payloads == reading.payloads
        return found

    async def _append_at_last(self, keeper: LogProcess) -> None:
        """I8: now that nothing goes wrong an append goes through."""
        logs = [await keeper.namespace.open_log(name) for name in self.names]
        rows = {
            log.name: [b"final/0/%s/%d" % (log.name.encode(), row) for row in range(ROWS_MAX)]
            for log in logs
            if not await log.is_end_of_stream_marked()
        }
        deadline = self._world.loop.time() + _APPENDING_S_MAX
        while rows:
            try:
                await self.append(keeper, ("final", 0), rows)
            except DLError as error:
                keeper.note(f"{type(error).__name__}: {error}")
                if self._world.loop.time() > deadline:
                    raise InvariantViolatedError(
                        LIVE, f"no append goes through: {error}"
                    ) from error
                await asyncio.sleep(0.5)
            else:
                return

    async def _recover(self, keeper: LogProcess, name: str) -> None:
        """Complete what dead writers left, once their sessions are gone."""
        log = await keeper.namespace.open_log(name)
        while True:
            try:
                await log.recover()
            except DLError as error:
                keeper.note(f"log {name} is not recovered: {type(error).__name__}: {error}")
                await asyncio.sleep(0.5)
            else:
                return

    async def _tidy_up(self, keeper: LogProcess) -> None:
        """L5: merge and sweep, as the service does, until nothing is left that no one needs."""
        upkeep = keeper.upkeep()
        deadline = self._world.loop.time() + _TIDYING_S_MAX
        for name in await keeper.namespace.get_logs():
            log = await keeper.namespace.open_log(name)
            await ask_for_upkeep(keeper.namespace.log_context, {log._log: 1})
        for sweeps in itertools.count(1):
            await upkeep.serve()
            if self._tiers is not None:
                await upkeep.tier()
            await upkeep.sweep()
            left = self._checkers.leftovers()
            if not left and (self._tiers is None or self._tiers.is_done()):
                return
            # One sweep may take minutes beside a slow metadata store, and lists for the next.
            if sweeps >= _SWEEPS_MIN and self._world.loop.time() > deadline:
                if not left:
                    self._checkers.tiers.check_done()
                raise InvariantViolatedError(TIDY, f"{len(left)} are left: {left[:5]}")
            await asyncio.sleep(1.0)

    async def _read_whole(self, process: LogProcess, log: DirectLog) -> Reading:
        reading = self._checkers.new_reading(log._log.log_id, log.name)
        floor = reading.floor
        async with await log.open_reader() as reader:
            with contextlib.suppress(EndOfStreamError):
                while records := await reader.read_bulk(1000, until_caught_up=True):
                    reading.on_records(records)
        reading.on_caught_up(floor)
        process.note(f"read {len(reading.payloads)} records of log {log.name}")
        return reading


class Appender:
    """An identity, which appends one version after the other, whichever process it lives in."""

    def __init__(self, logs: Logs, number: int) -> None:
        self._logs = logs
        self._rng = logs._rng
        self._identity = f"job-{number}"
        self._version = 0
        self._rows: Rows = {}

    async def work(self, process: LogProcess) -> None:
        """Append the next version; the one that failed comes first, and again."""
        if not self._rows:
            logs = self._logs.appended
            names = self._rng.sample(logs, self._rng.randint(1, len(logs)))
            self._rows = {
                name: [
                    f"{self._identity}/{self._version}/{name}/{row}".encode()
                    for row in range(self._rng.randint(2, ROWS_MAX))
                ]
                for name in sorted(names)
            }
        await self._logs.append(process, (self._identity, self._version), self._rows)
        self._rows = {}
        self._version += 1
