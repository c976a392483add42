"""Versions of a user's own transactions, without Spark: each log takes each version once.

Goal: a log is known by its id, whatever its name was when it took a version.
Method: a real cluster, directly and through a proxy; this process is driver and task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from dlcore.base.errors import AppendAbortedError
from dlcore.sync import open_namespace
from dlspark import batch
from dlspark.options import Address
from dlspark.sessions import close_shared_namespace
from dlspark.source import DistributedLogDataSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.sync import Namespace
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration
VALUES = StructType([StructField("value", StringType())])


class TaskOfNoStream:
    """The facts that Spark gives a task of a batch write."""

    @staticmethod
    def get() -> TaskOfNoStream:
        """Return the task."""
        return TaskOfNoStream()

    def getLocalProperty(self, name: str) -> str | None:  # Spark's spelling
        """Return nothing: it belongs to no stream."""
        return None

    def partitionId(self) -> int:  # Spark's spelling
        """Return which task it is."""
        return 0


class Application:
    """An application whose writes have versions."""

    def __init__(self, namespace: Namespace, where: dict[str, str]) -> None:
        self.namespace = namespace
        self.where = where
        self.app = f"job-{uuid4().hex}"
        self.log = f"versions/{uuid4().hex}"
        namespace.create_log(self.log)

    def write(self, version: int, *values: str, between: Callable[[], None] | None = None) -> None:
        """Write rows as Spark does; `between` runs after the writer is made."""
        options = {"log": self.log, "txnAppId": self.app, "txnVersion": str(version)}
        source = DistributedLogDataSource({**self.where, **options})
        writer = source.writer(VALUES, overwrite=False)
        if between is not None:
            between()
        rows = [pa.record_batch({"value": list(values)})] if values else []
        writer.commit([writer.write(iter(rows))])

    def payloads(self, log: str) -> list[bytes]:
        """Return what a log holds."""
        with self.namespace.open_log(log) as opened:
            payloads: list[bytes] = opened.read().to_arrow()["value"].to_pylist()
        return payloads

    def create_again(self) -> None:
        """Delete the log, and create one of its name."""
        self.namespace.delete_log(self.log)
        self.namespace.create_log(self.log)


@pytest.fixture(params=["direct", "proxy"])
def application(
    request: pytest.FixtureRequest,
    namespace_uri: str,
    proxy: ProxyProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Application]:
    """An application that writes to bookies, or through a proxy."""
    monkeypatch.setattr(batch, "TaskContext", TaskOfNoStream)
    is_direct = request.param == "direct"
    where = {"uri": namespace_uri} if is_direct else {"endpoint": proxy.location}
    with open_namespace(namespace_uri) as namespace:
        yield Application(namespace, where)
    close_shared_namespace(Address(uri=next(iter(where.values()))))


def test_a_log_created_again_takes_the_first_version(application: Application) -> None:
    """The versions of the log before it are not its own, also where a write has no rows."""
    for version in (0, 1):
        application.write(version, "old")
    application.create_again()
    for version in (0, 0, 1):
        application.write(version, f"new {version}")
    application.write(2)
    application.write(2, "late")
    assert application.payloads(application.log) == [b"new 0", b"new 1"]


def test_a_renamed_log_takes_no_version_twice(application: Application) -> None:
    """Another log of its old name has versions of its own."""
    old, new = application.log, f"{application.log}-new"
    application.write(3, "a")
    application.namespace.rename_log(old, new)
    application.log = new
    application.write(3, "a")
    application.write(4, "b")
    assert application.payloads(new) == [b"a", b"b"]
    application.namespace.create_log(old)
    application.log = old
    application.write(3, "c")
    application.write(3, "c")
    assert application.payloads(old) == [b"c"]
    assert application.payloads(new) == [b"a", b"b"]


def test_a_log_that_is_replaced_during_a_write_gets_nothing(application: Application) -> None:
    """Its rows would count as written to the log before it; written again they arrive."""
    with pytest.raises(AppendAbortedError, match=r"during the write \(id \w+, now \w+\)"):
        application.write(0, "a", between=application.create_again)
    assert application.payloads(application.log) == []
    application.write(0, "a")
    assert application.payloads(application.log) == [b"a"]
