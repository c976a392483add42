"""Records written by Arrow's own Flight client, unmodified, through proxies over real bookies."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from dlcore.sync import open_namespace
from tests.fixtures.proxies import ask, knows, payloads_in
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

WAIT_S = 60
SCHEMA = pa.schema([("value", pa.binary())])


@pytest.fixture
def log(namespace_uri: str) -> str:
    """A fresh log."""
    name = f"proxied/{uuid4().hex}"
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log(name)
    return name


def batch(*payloads: bytes) -> pa.RecordBatch:
    """Return rows to write."""
    return pa.record_batch([pa.array(payloads, pa.binary())], schema=SCHEMA)


def reply(reader: flight.FlightMetadataReader) -> Any:
    """Return the next message of the proxy; None at the end."""
    message = reader.read()
    return None if message is None else json.loads(message.to_pybytes())


def test_a_plain_client_writes_and_is_acknowledged(
    proxy: ProxyProcess, namespace_uri: str, log: str
) -> None:
    """It needs a path and a column; acknowledged rows are durable."""
    rows = [b"%d" % number for number in range(1000)]
    with proxy.client() as client:
        writer, reader = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
        ready = reply(reader)["ready"]
        assert ready["log"] == log
        assert ready["window_records"] > 0
        with writer:
            for start in range(0, len(rows), 50):
                writer.write_batch(batch(*rows[start : start + 50]))
            writer.done_writing()
            acked = 0
            while acked < len(rows):
                message = reply(reader)
                assert acked < message["acked"] <= len(rows)
                acked = message["acked"]
            assert reply(reader) is None
    assert payloads_in(namespace_uri, log) == rows


def test_many_clients_write_one_log(proxy: ProxyProcess, namespace_uri: str, log: str) -> None:
    """Each waits for its acknowledgements, and keeps its order."""

    def write(number: int) -> None:
        with proxy.client() as client:
            writer, reader = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
            with writer:
                reply(reader)
                for turn in range(20):
                    writer.write_batch(batch(b"%d/%d" % (number, turn)))
                    assert reply(reader)["acked"] == turn + 1
                writer.done_writing()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    found = payloads_in(namespace_uri, log)
    assert len(found) == 160
    for number in range(8):
        mine = [each for each in found if each.startswith(b"%d/" % number)]
        assert mine == [b"%d/%d" % (number, turn) for turn in range(20)]


def test_a_wrong_stream_is_refused_and_others_go_on(
    proxy: ProxyProcess, namespace_uri: str, log: str
) -> None:
    """An unknown log, a wrong schema, random bytes, a message that is too large."""
    with proxy.client() as client:
        writer, reader = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
        reply(reader)
        for descriptor, schema, error in (
            (flight.FlightDescriptor.for_path("no/such/log"), SCHEMA, "LogNotFoundError"),
            (flight.FlightDescriptor.for_command(b"\x00\xff"), SCHEMA, "command"),
            (flight.FlightDescriptor.for_path(log), pa.schema([("a", pa.int8())]), "value"),
        ):
            wrong, answers = client.do_put(descriptor, schema)
            assert reply(answers) is None
            with pytest.raises(pa.ArrowException, match=error):
                wrong.close()
        large, answers = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
        reply(answers)
        write_and_close = partial(send_all, large, answers, batch(*[bytes(1000 * 1000)] * 5))
        with pytest.raises(pa.ArrowException, match="larger than max"):
            write_and_close()
        writer.write_batch(batch(b"fine"))
        assert reply(reader)["acked"] == 1
        writer.done_writing()
        writer.close()
    assert payloads_in(namespace_uri, log) == [b"fine"]


def send_all(
    writer: flight.FlightStreamWriter, reader: flight.FlightMetadataReader, rows: pa.RecordBatch
) -> None:
    """Send rows that are refused."""
    writer.write_batch(rows)
    assert reply(reader) is None
    writer.close()


def test_proxies_share_the_logs_and_one_that_is_killed_is_replaced(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    """They agree on owners and name them; what a dead one acknowledged is there."""
    cluster = fresh_sandbox(proxies=2)
    proxies = {each.location: each for each in cluster.proxies}
    for location in proxies:
        wait_until(partial(knows, location, set(proxies)), timeout_s=WAIT_S)
    names = [f"log-{number}" for number in range(20)]
    owners = [ask(location, "owner", log=name) for location in proxies for name in names]
    assert owners[:20] == owners[20:]
    assert {each["location"] for each in owners} == set(proxies)
    ask(owners[0]["location"], "create", log=names[0])
    owner = owners[0]["location"]
    (other,) = proxies.keys() - {owner}
    with flight.connect(owner) as client:
        writer, reader = client.do_put(flight.FlightDescriptor.for_path(names[0]), SCHEMA)
        reply(reader)
        writer.write_batch(batch(b"before"))
        assert reply(reader)["acked"] == 1
        assert serving(other, names[0]) == owner, "a redirect names the owner"
        proxies[owner].kill()
        assert reply(reader) is None
        with pytest.raises(pa.ArrowException):
            writer.close()
    wait_until(lambda: serving(other, names[0]) == other, timeout_s=WAIT_S)
    with flight.connect(other) as client:
        writer, reader = client.do_put(flight.FlightDescriptor.for_path(names[0]), SCHEMA)
        with writer:
            reply(reader)
            writer.write_batch(batch(b"after"))
            assert reply(reader)["acked"] == 1
    assert payloads_in(cluster.uri, names[0]) == [b"before", b"after"]
    proxies[owner].restart()
    assert knows(proxies[owner].location, {other, proxies[owner].location})
    proxies[owner].terminate()
    wait_until(lambda: not knows(other, {proxies[owner].location}), timeout_s=WAIT_S)


def serving(location: str, log: str) -> str | None:
    """Return where a proxy says that a log is served; None if it cannot tell yet."""
    with flight.connect(location) as client:
        writer, reader = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
        if reply(reader) is not None:
            writer.done_writing()
            writer.close()
            return location
        with pytest.raises(flight.FlightUnavailableError) as error:
            writer.close()
    _, found, rest = str(error.value).partition("is served by ")
    return rest.split(". ")[0] if found else None
