"""A query that goes on from its checkpoint with options that choose other logs than before.

Goal: no log is left behind in silence, and none is read twice when it is chosen again.  Method: a
real cluster; readers as Spark makes them, one for each run, go on from the offset that the run
before left, as the text that a checkpoint keeps.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from dlcore.base.clock import SystemClock
from dlcore.base.errors import ConfigurationError, DLError, LogNotFoundError
from dlcore.base.records import LogRecord
from dlcore.metadata.binding import ensure_namespace
from dlcore.sync import open_namespace
from dlspark.options import Address
from dlspark.sessions import close_shared_namespace
from dlspark.source import DistributedLogDataSource
from tests.fixtures.zookeeper import ask_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.sync import Namespace

pytestmark = pytest.mark.integration
LENIENT = {"failOnDataLoss": "false"}


class Query:
    """Logs below a prefix of their own, and what the checkpoint of a query keeps."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.prefix = f"chosen/{uuid4().hex}/"
        self.offset = ""
        self._written = 0

    def append(self, *logs: str) -> None:
        """Write the next number to each of these logs, which are created where they are missing."""
        for log in logs:
            opened = self.namespace.open_log(self.prefix + log, create_if_missing=True)
            with opened as manager, manager.open_writer() as writer:
                writer.write(LogRecord(self._written, b"%d" % self._written))
            self._written += 1

    def reader(self, **options: str) -> Any:
        """Return the reader of a run; `log`, `logs` and `logsPattern` lack the prefix."""
        for key in options.keys() & {"log", "logs", "logsPattern"}:
            named = options[key].split(",")
            options[key] = ",".join(self.prefix + log for log in named)
        given = {"uri": self.namespace.uri, "startingOffsets": "earliest"} | options
        source = DistributedLogDataSource(given)
        return source.streamReader(source.schema())

    def run(self, **options: str) -> dict[str, list[int]]:
        """Run batches until nothing is left; return the numbers that they read, by log."""
        reader = self.reader(**options)
        start = json.loads(self.offset) if self.offset else reader.initialOffset()
        found: dict[str, list[int]] = {}
        while (end := reader.latestOffset(start)) != start:
            for log, numbers in self.read(reader, start, end).items():
                found.setdefault(log, []).extend(numbers)
            start = end
        self.offset = json.dumps(start)
        return found

    def read(self, reader: Any, start: Any, end: Any) -> dict[str, list[int]]:
        """Return the numbers of a batch, by log."""
        found: dict[str, list[int]] = {}
        for part in reader.partitions(start, end):
            for batch in reader.read(part):
                for log, value in zip(batch["log"], batch["value"], strict=True):
                    name = log.as_py().removeprefix(self.prefix)
                    found.setdefault(name, []).append(int(value.as_py()))
        return found

    def refuse(self, error: type[DLError] = ConfigurationError, /, **options: str) -> str:
        """Run with options that must be refused; return why, without the prefix of logs."""
        before = self.offset
        with pytest.raises(error) as caught:
            self.run(**options)
        assert self.offset == before
        return str(caught.value).replace(self.prefix, "")


@pytest.fixture
def query(namespace_uri: str) -> Iterator[Query]:
    """A query that has not begun; what this process opened for it is closed."""
    with open_namespace(namespace_uri) as namespace:
        yield Query(namespace)
    close_shared_namespace(Address(uri=namespace_uri))


def test_another_log(query: Query, caplog: pytest.LogCaptureFixture) -> None:
    """Both are named, and what would be right; where the loss is accepted, it is logged once."""
    query.append("a")
    assert query.run(log="a") == {"a": [0]}
    query.append("a", "b")
    refused = query.refuse(log="b")
    assert refused.startswith(
        "log 'a': the query's checkpoint has it, read up to 1:1:0 (exclusive), and the option "
        "log='b' does not choose it; it holds 1:0:0 … 2:1:0 (exclusive). To go on with this "
        "checkpoint choose 'a' too, to read other logs start with a new one. The query stops"
    )
    with caplog.at_level(logging.WARNING):
        assert query.run(log="b", **LENIENT) == {"b": [2]}
        query.append("b")
        assert query.run(log="b", **LENIENT) == {"b": [3]}
    assert caplog.text.count("does not choose it") == 1
    query.append("b")
    assert query.run(log="b") == {"b": [4]}, "what was accepted is no error later"
    assert query.run(logs="a,b") == {"a": [1]}, "it goes on where it was"
    assert "choose 'a' too" in query.refuse(log="b")


@pytest.mark.parametrize("options", [{"logs": "a,b,c"}, {"logsPattern": "[a-z]"}])
def test_more_logs(query: Query, options: dict[str, str]) -> None:
    """They are read from their beginning, the others go on."""
    query.append("a", "b")
    assert query.run(logs="a,b") == {"a": [0], "b": [1]}
    query.append("b", "c")
    assert query.run(**options) == {"b": [2], "c": [3]}


@pytest.mark.parametrize(
    ("options", "shown"), [({"logs": "a,b"}, "logs='a,b'"), ({"logsPattern": "[ab]"}, "")]
)
def test_fewer_logs(query: Query, options: dict[str, str], shown: str) -> None:
    """All that are left out are named, as far as that can be read."""
    for log in "abcdefgh":
        query.namespace.create_log(query.prefix + log)
    query.append("a")
    query.run(logsPattern="[a-z]")
    query.namespace.delete_log(f"{query.prefix}c")
    refused = query.refuse(**options)
    assert refused.startswith("log 'c': the query's checkpoint has it")
    assert "does not choose it; it is gone." in refused
    assert "choose 'c', 'd', 'e', 'f', 'g' and 1 more logs too" in refused
    assert f"option {shown}" in refused
    assert query.run(**options, **LENIENT) == {}
    query.append("a")
    assert query.run(**options) == {"a": [1]}


def test_a_log_that_was_created_again_after_it_was_left_out(query: Query) -> None:
    """It is reported once when it was left out; the new one is read from its beginning."""
    query.append("a", "b")
    query.run(logs="a,b")
    query.run(log="b", **LENIENT)
    query.namespace.delete_log(f"{query.prefix}a")
    query.append("a", "a")
    assert query.run(logs="a,b") == {"a": [2, 3]}


def test_a_log_that_is_chosen_by_the_name_that_it_has_now(query: Query) -> None:
    """It is the one that the checkpoint has."""
    query.append("a", "b")
    query.run(logs="a,b")
    query.namespace.rename_log(f"{query.prefix}a", f"{query.prefix}c")
    query.append("c")
    assert query.run(logs="b,c") == {"c": [2]}
    query.namespace.rename_log(f"{query.prefix}c", f"{query.prefix}d")
    query.append("c", "d")
    assert "it is gone. To go on with this checkpoint choose 'c' too" in query.refuse(log="b")
    assert query.run(logs="b,d") == {"d": [4]}


def test_a_batch_that_was_planned_reads_what_it_was_planned_to(query: Query) -> None:
    """Spark runs it again before it asks for the next one, which is refused."""
    query.append("a", "b")
    before = query.reader(log="a")
    start = before.initialOffset()
    end = before.latestOffset(start)
    reader = query.reader(log="b")
    assert query.read(reader, reader.initialOffset(), end) == {"a": [0]}
    with pytest.raises(ConfigurationError, match="does not choose it"):
        reader.latestOffset(end)
    reader.prepareForTriggerAvailableNow()
    with pytest.raises(ConfigurationError, match="does not choose it"):
        reader.latestOffset(end)


def test_a_log_of_the_same_name_in_another_namespace(query: Query) -> None:
    """It is another one, whatever it holds; where there is none, that is reported, too."""
    query.append("a")
    query.run(log="a")
    uri = f"{query.namespace.uri}-{uuid4().hex}"
    ask_store(uri, lambda store, paths: ensure_namespace(store, paths, SystemClock()))
    with open_namespace(uri) as namespace:
        other = Query(namespace)
        other.prefix, other.offset = query.prefix, query.offset
        assert "or is in another namespace; the query has read" in other.refuse(
            LogNotFoundError, log="a"
        )
        namespace.create_log(f"{query.prefix}a")
        refused = other.refuse(LogNotFoundError, log="a")
        assert "or is in another namespace, and another has its name" in refused
        assert other.run(log="a", **LENIENT) == {}
        assert other.run(log="a") == {}
    close_shared_namespace(Address(uri=uri))
