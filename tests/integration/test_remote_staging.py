"""Atomic appends through proxies alone: by plain Flight, and by this library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from dlcore import SharedStaging
from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.backends.flight.staging import KEPT_BYTES_MAX
from dlcore.base.errors import (
    WriteError,
)
from dlcore.log.upkeep.staged import list_all_staged
from dlcore.sync import StagedExtent, open_namespace, open_namespace as open_remote
from tests.fixtures.proxies import ask, proxy_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.sync import Namespace
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration
SCHEMA = pa.schema([("value", pa.binary())])


@pytest.fixture
def direct(namespace_uri: str) -> Iterator[Namespace]:
    """A client that reaches bookies."""
    with open_namespace(namespace_uri) as namespace:
        yield namespace


@pytest.fixture
def remote(proxy: ProxyProcess) -> Iterator[Namespace]:
    """One that reaches the proxy only."""
    with open_remote(proxy.location, patience_s=5.0) as namespace:
        yield namespace


@pytest.fixture
def logs(direct: Namespace) -> list[str]:
    """Two logs of bytes."""
    names = [f"{uuid4().hex}/{name}" for name in "ab"]
    for name in names:
        direct.create_log(name)
    return names


def rows(*payloads: str) -> pa.RecordBatch:
    """Return records without transaction ids."""
    return pa.record_batch([pa.array([each.encode() for each in payloads])], schema=SCHEMA)


def held(direct: Namespace, log: str) -> list[str]:
    """Return the payloads that a log holds."""
    payloads = direct.open_log(log).read().to_arrow()["value"].to_pylist()
    return [bytes(each).decode() for each in payloads]


def stage(
    remote: Namespace, identity: str, *parts: tuple[str, pa.RecordBatch], shared: bool = False
) -> list[StagedExtent]:
    """Stage as a task does."""
    with remote.open_staging_writer(identity=identity, shared=shared) as writer:
        writer.write_batches(parts)
        return writer.stage()


def put(
    location: str, command: dict[str, Any], *parts: tuple[dict[str, Any], pa.RecordBatch]
) -> Any:
    """Stage by Arrow's own client; return the last message."""
    descriptor = flight.FlightDescriptor.for_command(json.dumps(command))
    with flight.connect(location) as client:
        writer, reader = client.do_put(descriptor, parts[0][1].schema)
        with writer:
            assert "ready" in json.loads(reader.read().to_pybytes())
            for beside, batch in parts:
                writer.write_with_metadata(batch, json.dumps(beside).encode())
            writer.done_writing()
            return json.loads(reader.read().to_pybytes())


def test_plain_flight(direct: Namespace, proxy: ProxyProcess, logs: list[str]) -> None:
    """Two tasks stage for two logs, which hold nothing until an action commits, once."""
    identity = uuid4().hex
    extents = []
    for task in range(2):
        parts = [({"log": log}, rows(f"{task}.{n}", f"{task}:{n}")) for n, log in enumerate(logs)]
        extents += put(proxy.location, {"staging": identity}, *parts)["staged"]
    assert [held(direct, log) for log in logs] == [[], []]
    append = {"identity": identity, "version": 7, "extents": extents}
    for token, is_done in (("one", False), ("one", True), ("another", True)):
        answer = proxy.act("commit_append", **append, token=token)
        assert answer == {"already_committed": is_done}
    assert [held(direct, log) for log in logs] == [
        [f"{task}{sign}{n}" for task in range(2) for sign in ".:"] for n in range(2)
    ]
    assert proxy.act("abort_append", **append, token="one") == {}
    assert len(held(direct, logs[0])) == 4


def test_wrong_requests_are_refused(
    direct: Namespace, proxy: ProxyProcess, logs: list[str]
) -> None:
    """With a clear status, and nothing of it is kept."""
    identity, good = uuid4().hex, ({"log": logs[0]}, rows("x"))
    for command, beside, reason in (
        ({"staging": ""}, good[0], "identity=''"),
        ({"staging": "x" * 201}, good[0], "1 … 200 bytes"),
        ({"staging": identity, "log": "x"}, good[0], "unknown field `log`"),
        ({"staging": 3}, good[0], "Expected `str`"),
        ({"staging": identity}, {}, "missing required field `log`"),
        ({"staging": identity}, {"log": "a//b"}, "a//b"),
    ):
        with pytest.raises(pa.ArrowInvalid, match=reason):
            put(proxy.location, command, (beside, good[1]))
    with pytest.raises(KeyError, match="no/such/log"):
        put(proxy.location, {"staging": identity}, good, ({"log": "no/such/log"}, good[1]))
    wrong = pa.record_batch({"city": ["x"]})
    with pytest.raises(pa.ArrowInvalid, match="needs a column value"):
        put(proxy.location, {"staging": identity}, ({"log": logs[0]}, wrong))
    staged = put(proxy.location, {"staging": identity}, good)["staged"]
    append = {"identity": identity, "version": 1, "token": "t", "extents": staged}
    (extent,) = msgspec.convert(staged, list[StagedExtent])
    forged = [msgspec.to_builtins(msgspec.structs.replace(extent, identity="other"))]
    unknown = [msgspec.to_builtins(msgspec.structs.replace(extent, ledger_id=10**12))]
    for changes, reason in (
        ({"identity": "other"}, "staged as"),
        ({"identity": "other", "extents": forged}, "cannot be committed by an append"),
        ({"extents": staged * 2}, "the same entries are given twice"),
        ({"extents": [{}]}, "Expected `array`"),
        ({"token": ""}, "token=''"),
        ({"version": -1}, "version=-1"),
    ):
        with pytest.raises(pa.ArrowInvalid, match=reason):
            proxy.act("commit_append", **append | changes)
    with pytest.raises(pa.ArrowInvalid, match="is gone"):
        proxy.act("commit_append", **append | {"extents": unknown})
    assert held(direct, logs[0]) == []
    assert proxy.act("commit_append", **append) == {"already_committed": False}
    assert held(direct, logs[0]) == ["x"]
    assert direct.list_commits()  # and none of a staging that was refused is left:
    assert all(each.staged.identity != "other" for each in _staged(direct))


def _staged(direct: Namespace) -> list[Any]:
    namespace = direct._namespace
    assert isinstance(namespace, DirectNamespace)
    return direct._call(list_all_staged(namespace.log_context))


def test_a_batch_larger_than_is_kept(direct: Namespace, remote: Namespace, logs: list[str]) -> None:
    """It is sent in several messages, and a client keeps none of them to send it again."""
    payloads = [f"{number:01000}" for number in range(20_000)]
    assert 2 * KEPT_BYTES_MAX < 20_000 * 1000
    with remote.begin_append(uuid4().hex, 1) as append:
        append.write_batch(logs[0], rows(*payloads))
        append.write_batch(logs[1], rows("b"))
        assert append.commit().committed
    assert held(direct, logs[0]) == payloads
    assert held(direct, logs[1]) == ["b"]


def test_proxies_that_die(direct: Namespace, namespace_uri: str, logs: list[str]) -> None:
    """Another task commits the staged records of a killed one; unstaged ones are sent again."""
    name = uuid4().hex
    with (
        proxy_process(namespace_uri, is_killed=True) as first,
        proxy_process(namespace_uri, is_killed=True) as second,
    ):
        there = second.location.partition("://")[2]
        with open_remote(f"{first.location},{there}", patience_s=20.0) as remote:
            shared = SharedStaging(identity=name, round="1")
            extents = stage(remote, name, (logs[0], rows("a")), shared=True)
            with remote.open_staging_writer(identity=name, shared=True) as writer:
                writer.write_batch(logs[0], rows("b"))
                first.kill()
                extents += writer.stage()
            with remote.begin_append(f"{name}>x", 1, shared=shared) as append:
                assert append.commit(extents).committed
                assert append.commit(extents).already_committed
            answer = ask(
                second.location,
                "commit_append",
                identity=f"{name}>x",
                version=1,
                token="later",
                shared={"identity": name, "round": "1"},
            )
            assert answer == {"already_committed": True}
            with remote.open_staging_writer(identity=name) as writer:
                for _ in range(2):  # more than is kept to be sent again
                    writer.write_batch(logs[0], rows(*["x" * 10_000] * 1_000))
                second.kill()
                with pytest.raises(WriteError, match="the stream that staged"):
                    writer.stage()
                with pytest.raises(WriteError, match="write all of them again"):
                    writer.stage()
                with pytest.raises(WriteError, match="write all of them again"):
                    writer.write_batch(logs[0], rows("x"))
    assert held(direct, logs[0]) == ["a", "b"]
