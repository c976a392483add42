"""The sink of Spark in a run, without Spark: workers that run tasks, drivers that run queries.

The writers of `dlspark` are the real ones.  Workers and drivers are processes beside the cluster,
or know proxies alone.  They die, and others take their places; two drivers take each query over
from each other.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import DLError, EndOfStreamError
from tests.simulation.checkers import LIVE
from tests.simulation.log_process import LogProcess
from tests.simulation.sink_checkers import SinkCheckers
from tests.simulation.sink_hosts import ENDPOINT, NAMESPACE, Host
from tests.simulation.sink_jobs import Workers
from tests.simulation.sink_queries import Driver, Query
from tests.simulation.truth import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from tests.simulation.logs import Logs
    from tests.simulation.proxies import Proxies

_QUERIES = 2
_WORKERS = 2
_DRIVERS = 2
"""The number of batches of each query."""
_DEATH_CHANCE = 0.2
_LIFE_S_MAX = 2.0
_LOOK_S = 0.2
_TURN_S_MAX = 3.0
"""For so long at most a driver waits before it takes the query over."""
_ENDING_S_MAX = 90.0


class Sinks:
    """The roles."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._world = logs.world
        self.rng = logs.world.rng
        self.names = logs.names
        self.checkers = SinkCheckers(logs.world.log_checkers)
        self.workers = Workers(self.rng, self.count)
        has_endpoint = logs.world.plan.has_proxies and self.rng.random() < 0.7
        self.address = ENDPOINT if has_endpoint else NAMESPACE
        self._queries = [Query(self, number) for number in range(_QUERIES)]

    def count(self, what: str) -> None:
        """Count what happened."""
        self._world.faults[what] += 1

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        self._world.trace.note(who, what)

    @property
    def is_remote(self) -> bool:
        """Whether workers and drivers know proxies alone."""
        return self.address.uri.startswith("grpc")

    @property
    def has_other_logs(self) -> bool:
        """Whether names may lead to other logs than before."""
        return not self._world.plan.has_proxies

    def start(self) -> None:
        """Start all processes, unless they are clients of proxies."""
        if not self.is_remote:
            for number in range(_WORKERS):
                self._logs.supervise(f"worker-{number}", self._serve)
            for driver in self._drivers():
                self._logs.supervise(driver.name, partial(self._drive, driver))

    def _drivers(self) -> Iterator[Driver]:
        for number, query in enumerate(self._queries):
            for turn in range(_DRIVERS):
                yield Driver(self, query, f"driver-{number}-{turn}", is_last=not turn)

    # Beside the cluster

    async def _serve(self, process: LogProcess) -> None:
        """Run tasks until the process dies, or loses what a task staged."""
        host = Host.of_process(process)
        try:
            await self.workers.serve(host, until=lambda: self._logs.is_over)
        finally:
            host.close()
        if not self._logs.is_over:
            process.note("dies with what a task staged")
            process.client.crash()

    async def _drive(self, driver: Driver, process: LogProcess) -> None:
        """Wait for a while, and run the query."""
        await self._logs.sleep(self.rng.uniform(0.0, _TURN_S_MAX))
        host = Host.of_process(process)
        try:
            await ended(driver.work(host), is_over=lambda: self._logs.is_over)
        finally:
            host.close()

    async def finish(self) -> None:
        """I8: now that nothing goes wrong each batch that was begun is committed."""
        if self.is_remote:
            return
        processes = [LogProcess(self._world, f"{each}-last") for each in ("worker", "driver")]
        worker, last = (Host.of_process(each) for each in processes)
        is_done = False
        serving = self._world.spawn(self.serve_at_last(worker, lambda: is_done))
        try:
            last_drivers = [each for each in self._drivers() if each.is_last]
            await asyncio.gather(*(self.end(each, last) for each in last_drivers))
        finally:
            is_done = True
            await asyncio.wait([serving])
            for host, process in zip((worker, last), processes, strict=True):
                host.close()
                await process.client.aclose()

    async def serve_at_last(self, host: Host, is_done: Callable[[], bool]) -> None:
        """Run tasks, and go on with what is lost."""
        while not is_done():
            await self.workers.serve(host, until=is_done)

    async def end(self, driver: Driver, host: Host) -> None:
        """Run what was begun, until it is committed, or the log is sealed."""
        query, loop = driver.query, self._world.loop
        deadline = loop.time() + _ENDING_S_MAX
        while query.planned is not None:
            try:
                await driver.complete(host)
            except EndOfStreamError:
                return  # its log was sealed meanwhile, and no one makes another one now
            except DLError as error:
                self.note(driver.name, f"{type(error).__name__}: {error}")
                if loop.time() > deadline:
                    raise InvariantViolatedError(
                        LIVE, f"{query.name} cannot go on: {error}"
                    ) from error
                await asyncio.sleep(0.5)

    # Over proxies

    def clients(self, proxies: Proxies) -> Iterator[SinkClient]:
        """Yield those that are clients of proxies."""
        if self.is_remote:
            for number in range(_WORKERS):
                yield SinkClient(self, proxies, f"worker-{number}", None)
            for driver in self._drivers():
                yield SinkClient(self, proxies, driver.name, driver)

    @property
    def is_done(self) -> bool:
        """Whether all that was begun is committed."""
        return all(query.planned is None for query in self._queries)

    def check_whole(self, log_ids: Sequence[str]) -> None:
        """Judge the answers to drivers, once everything that there is was read."""
        self.checkers.check_whole(log_ids)


class SinkClient:
    """A worker, or a driver, that knows proxies alone; it dies, and another one takes its place."""

    def __init__(self, sinks: Sinks, proxies: Proxies, name: str, driver: Driver | None) -> None:
        self.name = name
        self._sinks = sinks
        self._proxies = proxies
        self._rng = proxies.rng
        self._driver = driver

    async def run(self) -> None:
        """Work until the end is near, and what was begun is done."""
        driver = self._driver
        while not self._proxies.is_ending:
            if driver is not None:
                await asyncio.sleep(self._rng.uniform(0.0, _TURN_S_MAX))
            try:
                await self._live()
            except DLError as error:
                self._sinks.note(self.name, f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._rng.expovariate(4.0))
        host = Host.of_proxies(self._proxies, self.name)
        try:
            if driver is None:
                await self._sinks.serve_at_last(host, lambda: self._sinks.is_done)
            elif driver.is_last:
                await self._sinks.end(driver, host)
        finally:
            host.close()

    async def _live(self) -> None:
        """Live until the end is near, or something kills it.  Raises: DLError: it gives up."""
        proxies, rng = self._proxies, self._rng
        host = Host.of_proxies(proxies, self.name)
        if self._driver is None:
            work = self._sinks.workers.serve(host, until=lambda: proxies.is_ending)
        else:
            work = self._driver.work(host)
        life_s = rng.uniform(0.0, _LIFE_S_MAX) if rng.random() < _DEATH_CHANCE else None
        try:
            await ended(work, is_over=lambda: proxies.is_ending, within_s=life_s)
        finally:
            host.close()


async def ended(
    work: Coroutine[Any, Any, None], *, is_over: Callable[[], bool], within_s: float | None = None
) -> None:
    """Let a task work to the end, or until all is over, or for so long.  Raises: what it does."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    until = float("inf") if within_s is None else loop.time() + within_s
    try:
        while not (is_over() or task.done() or loop.time() >= until):
            await asyncio.wait([task], timeout=min(_LOOK_S, until - loop.time()))
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()
