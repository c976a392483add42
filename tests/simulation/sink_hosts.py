"""Processes in which Spark runs the Python code of the sink, without Spark.

The writers of `dlspark` are the real ones, with the namespaces and staging writers that a process
keeps.  Tasks have local properties and partitions, as Spark gives them.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest.mock import patch

from dlcore import sync
from dlcore.backends.flight import staging as remote_staging
from dlcore.backends.flight.log import client_config
from dlcore.backends.flight.namespace import FlightNamespace
from dlcore.backends.flight.planning import FlightSnapshots
from dlcore.sync.portal import forget
from dlcore.sync.staging import StagedAppend
from dlspark import batch, sessions, stream
from dlspark.options import Address
from tests.simulation.proxy_clients import PATIENCE_S
from tests.simulation.remote_calls import Calls
from tests.simulation.sink_threads import BlockingCall, HandingPortal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dlcore.base.clock import Clock
    from dlcore.log.reading.scan import CommitResult
    from dlcore.sync.portal import Portal
    from tests.fixtures.simulated_store import SimulatedStore
    from tests.simulation.log_process import LogProcess
    from tests.simulation.proxies import Proxies

_Result = TypeVar("_Result")

NAMESPACE = Address(uri="distributedlog://simulated/dlog")
ENDPOINT = Address(uri="grpc://simulated:1")
PORTAL = cast("Portal", HandingPortal())


class Host:
    """A process that runs one call after the other, and keeps what `dlspark.sessions` keeps."""

    def __init__(self, namespace: Any, address: Address, session: SimulatedStore | None) -> None:
        self._namespace = namespace
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._kept = sessions._Kept()
        self._kept.namespaces[address] = namespace

    @classmethod
    def of_process(cls, process: LogProcess) -> Host:
        """Return a host that reaches the cluster itself, in the process."""
        session = process.client.store.inner
        return cls(sync.Namespace(PORTAL, process.namespace), NAMESPACE, session)

    @classmethod
    def of_proxies(cls, proxies: Proxies, name: str) -> Host:
        """Return a host that reaches proxies.  Raises: ProxyUnavailableError: none serves yet."""
        calls = Calls(proxies, name)
        return cls(sync.Namespace(PORTAL, _RemoteTwin(calls)), ENDPOINT, None)

    async def run(self, work: Callable[[], _Result], context: Task | None = None) -> _Result:
        """Return what a blocking function returns here, in the task of Spark if there is one."""

        def run_here() -> _Result:
            _here.host, _here.task = self, context
            return work()

        return await BlockingCall(run_here).run()

    def lose_next_reply(self, *, applied: bool) -> None:
        """Lose the next answer of the metadata store; those of proxies are lost by themselves."""
        if self._session is not None:
            self._session.lose_next_reply(applied=applied)

    def now_ns(self) -> int:
        """Return the monotonic clock."""
        return round(self._loop.time() * 1e9)

    def close(self) -> None:
        """Forget the host, whose namespace ends with its process."""
        forget(self._namespace)


class Task:
    """The context of a task in Spark: its local properties, and its partition."""

    def __init__(self, properties: Mapping[str, str], partition_id: int) -> None:
        self._properties = properties
        self._partition_id = partition_id

    @staticmethod
    def get() -> Task | None:
        """Return the task of this thread."""
        return _here.task

    def getLocalProperty(self, name: str) -> str | None:
        """Return a local property."""
        return self._properties.get(name)

    def partitionId(self) -> int:
        """Return the partition."""
        return self._partition_id


class _Here(threading.local):
    """The owner of a blocking call's thread."""

    host: Host
    task: Task | None = None
    result: CommitResult | None = None


_here = _Here()


def last_result() -> CommitResult | None:
    """Return the answer to this thread's last commit, None if there was none."""
    return _here.result


class _KeptHere:
    """Stands for what `dlspark.sessions` keeps, of the process in which it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_here.host._kept, name)


class _RemoteTwin(FlightNamespace):
    """The real namespace of an endpoint, on the calls of the simulation."""

    def __init__(self, calls: Calls) -> None:
        self.patience_s = 2 * PATIENCE_S
        self._endpoint, self._config = ENDPOINT.uri, client_config(None)
        self._calls = calls
        self._snapshots = FlightSnapshots(calls)


@contextmanager
def spark_is_simulated(clock: Clock) -> Iterator[None]:
    """Let the sink run in hosts, on the virtual clock, and take its tokens from `clock`.

    The sink only logs what a commit tells, so that is noted, too.
    """
    of_host = SimpleNamespace(monotonic_ns=lambda: _here.host.now_ns())
    commit = StagedAppend.commit

    def noting(self: StagedAppend, *extents: Any, **more: Any) -> CommitResult:
        _here.result = commit(self, *extents, **more)
        return _here.result

    of_loop = SimpleNamespace(monotonic_ns=lambda: round(asyncio.get_running_loop().time() * 1e9))
    with (
        patch.object(sessions, "_kept", _KeptHere()),
        patch.object(sessions, "time", of_host),
        patch.object(batch, "time", of_host),
        patch.object(batch, "SystemClock", lambda: clock),
        patch.object(batch, "TaskContext", Task),
        patch.object(stream, "TaskContext", Task),
        patch.object(remote_staging, "time", of_loop),
        patch.object(StagedAppend, "commit", noting),
    ):
        yield
