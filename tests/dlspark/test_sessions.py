"""Staging writers of a process live as long as they are of use, and no longer.

Goal: micro-batches share a writer, and no failure leaves another task's records in it or takes them
away.  Method: a namespace that only notes what is asked of its writers.
"""

from __future__ import annotations

import contextlib
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from dlcore import SharedStaging
from dlcore.base.errors import LogNotFoundError, WriteError
from dlspark import sessions
from dlspark.commit import AppendIdentity
from dlspark.options import Address
from dlspark.sessions import (
    WRITER_IDLE_NS_MAX,
    close_shared_namespace,
    find_schemas,
    require_logs,
    staging_writer,
)
from dlspark.source import DistributedLogDataSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.sync import StagingWriter

ADDRESS = Address(uri="distributedlog://made-up:1/p")


class NotedWriter:
    """Notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rounds: list[int] = []
        self.is_broken = False

    def begin_round(self, number: int) -> None:
        """Note it."""
        self.rounds.append(number)

    def discard(self) -> None:
        """Note it, or fail."""
        self.calls.append("discard")
        if self.is_broken:
            raise WriteError("broken")

    def close(self, *, delete: bool = False) -> None:
        """Note it."""
        self.calls.append("delete" if delete else "close")


class NotedNamespace:
    """Holds two logs of bytes."""

    def __init__(self) -> None:
        self.kinds: dict[str, pa.Schema | None] = {"clicks": None, "clicks/a": None}
        self.looked_up = 0
        self.is_closed = False

    def get_schemas(
        self, names: list[str], *, for_write: bool = False
    ) -> dict[str, pa.Schema | None]:
        """Return those of them that there are; none is sealed."""
        self.looked_up += 1
        return {name: self.kinds[name] for name in names if name in self.kinds}

    def create_log(self, name: str, *, schema: pa.Schema | None) -> None:
        """Create one that is not there."""
        assert name not in self.kinds
        self.kinds[name] = schema

    def open_staging_writer(self, *, identity: str, shared: bool) -> StagingWriter:
        """Return another writer."""
        return cast("StagingWriter", NotedWriter())

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


@pytest.fixture
def namespace() -> Iterator[NotedNamespace]:
    """Put a namespace in the place of this process's own."""
    made_up = NotedNamespace()
    sessions._kept.namespaces[ADDRESS] = cast("Any", made_up)
    yield made_up
    close_shared_namespace(ADDRESS)
    assert made_up.is_closed


def stream(
    target: str = "clicks", run: str = "r", name: str = "stream:q", batch: int = 0
) -> AppendIdentity:
    """Return the identity of a stream's batch."""
    shared = SharedStaging(identity=name, round=str(batch))
    return AppendIdentity(identity=f"{name}>{target}", version=batch, run=run, shared=shared)


ONCE = AppendIdentity(identity="write:t", version=0, is_unique=True)


def use(append: AppendIdentity, *, fails: bool = False) -> NotedWriter:
    """Borrow a writer and give it back, perhaps by failing."""
    failure = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with failure, staging_writer(ADDRESS, append) as writer:
        found = cast("NotedWriter", writer)
        assert 1 / (0 if fails else 1)
    return found


@pytest.mark.usefixtures("namespace")
def test_batches_share_a_writer() -> None:
    """One for each query, whatever its targets."""
    first = use(stream())
    assert use(stream(run="another batch's")) is first
    assert use(stream("views")) is first
    assert use(stream(name="stream:other")) is not first
    assert use(stream(batch=7)) is first
    assert (first.calls, first.rounds) == ([], [0, 0, 0, 7])


@pytest.mark.usefixtures("namespace")
def test_a_failed_task_of_a_stream_keeps_what_was_staged() -> None:
    """Its own rows are forgotten; an earlier task's extents in the ledger may be yet to commit."""
    writer = use(stream(), fails=True)
    assert writer.calls == ["discard"]
    assert use(stream()) is writer


@pytest.mark.usefixtures("namespace")
def test_a_broken_writer_is_not_used_again() -> None:
    """It is closed, not deleted."""
    writer = use(stream())
    writer.is_broken = True
    use(stream(), fails=True)
    assert writer.calls == ["discard", "close"]
    assert use(stream()) is not writer


@pytest.mark.usefixtures("namespace")
def test_a_writer_of_one_write_ends_with_its_task() -> None:
    """Closed when the task is done, its ledger deleted when it fails; it knows of no rounds."""
    writer = use(ONCE)
    assert (writer.calls, writer.rounds) == (["close"], [])
    assert use(ONCE, fails=True).calls == ["delete"]


@pytest.mark.usefixtures("namespace")
def test_writers_of_queries_that_have_stopped_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they were unused for long; those in use stay, however many."""
    writers = [use(stream(name=f"stream:{number}")) for number in range(200)]
    later_ns = time.monotonic_ns() + WRITER_IDLE_NS_MAX // 2
    monkeypatch.setattr(time, "monotonic_ns", lambda: later_ns)
    assert [use(stream(name=f"stream:{number}")) for number in range(100)] == writers[:100]
    assert all(writer.calls == [] for writer in writers)
    later_ns += WRITER_IDLE_NS_MAX // 2 + 10**9
    use(stream(name="stream:0"))
    assert all(writer.calls == [] for writer in writers[:100])
    assert all(writer.calls == ["close"] for writer in writers[100:])


def test_logs_are_looked_up_whenever_they_are_needed(namespace: NotedNamespace) -> None:
    """All at once; one that was deleted or is of the other kind by now is not taken for the old."""
    require_logs(ADDRESS, ["clicks", "clicks/a"])
    assert namespace.looked_up == 1
    assert find_schemas(ADDRESS, ["clicks"]) == {"clicks": None}
    namespace.kinds["clicks"] = typed = pa.schema([("id", pa.int64())])
    assert find_schemas(ADDRESS, ["clicks"]) == {"clicks": typed}
    del namespace.kinds["clicks"]
    assert find_schemas(ADDRESS, ["clicks"]) == {}
    with pytest.raises(LogNotFoundError, match=r"'clicks'.*dlog log create clicks"):
        require_logs(ADDRESS, ["clicks", "clicks/a"])
    require_logs(ADDRESS, ["clicks", "clicks/a"], create=True)
    assert namespace.kinds["clicks"] is None


@pytest.mark.parametrize("column", ["value", "id"])
def test_a_writer_looks_its_log_up_once(namespace: NotedNamespace, column: str) -> None:
    """Spark makes one for each micro-batch."""
    namespace.kinds["clicks"] = None if column == "value" else pa.schema([("id", pa.string())])
    source = DistributedLogDataSource({"uri": ADDRESS.uri, "log": "clicks"})
    columns = StructType([StructField(column, StringType())])
    written = source.streamWriter(columns, overwrite=False)._columns
    assert written is not None
    assert (written.typed is None) == (column == "value")
    assert namespace.looked_up == 1  # also for the seal


def test_a_commit_of_micro_batches_looks_no_log_up(
    namespace: NotedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark makes a writer there too, for each of them; the one that planned it did."""
    runner = "pyspark.sql.worker.python_streaming_sink_runner"
    monkeypatch.setitem(sys.modules, runner, ModuleType(runner))
    source = DistributedLogDataSource({"uri": ADDRESS.uri, "log": "clicks"})
    columns = StructType([StructField("value", StringType())])
    source.streamWriter(columns, overwrite=False).commit([], 0)
    assert namespace.looked_up == 0


@pytest.mark.usefixtures("namespace")
def test_tasks_that_run_at_once() -> None:
    """Each has a writer of its own; the one that is done last is kept."""
    with staging_writer(ADDRESS, stream()) as writer:
        outer = cast("NotedWriter", writer)
        inner = use(stream())
    assert inner is not outer
    assert inner.calls == ["close"]
    assert use(stream()) is outer
