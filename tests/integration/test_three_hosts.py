"""Goal: of three hosts one may be down.  Method: three bookies as processes, one of them killed."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from dlcore import LogConfig, LogRecord, QuorumConfig
from dlcore.base.errors import DLError
from dlcore.sync import open_namespace
from tests.fixtures.proxies import ask, knows
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace

pytestmark = pytest.mark.integration

WAIT_S = 120.0
QUICK = ("--lost-bookie-delay-s=300", "--poll-interval-s=0.5", "--retry-pause-s=0.5")
SCHEMA = pa.schema([("value", pa.binary())])
SMALL = LogConfig(entry_bytes=1024, segment_bytes_max=4096)


def small_at_first(namespace: Namespace) -> list[LedgerMetadata]:
    """Return the closed ledgers that began with fewer bookies than were wanted."""
    found = [each for each in namespace.list_ledgers().values() if not isinstance(each, DLError)]
    return [each for each in found if each.wanted and each.state.name == "CLOSED"]


def small_ledgers(namespace: Namespace) -> list[LedgerMetadata]:
    """Return those that have fewer even now."""
    return [each for each in small_at_first(namespace) if each.copies_lacking]


def put(location: str, log: str, payload: bytes) -> bool:
    """Write a row through a proxy; False if it does not serve the log."""
    with flight.connect(location) as client:
        writer, reader = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
        try:
            if reader.read() is None:
                writer.close()
                return False
            rows = pa.record_batch([pa.array([payload], pa.binary())], schema=SCHEMA)
            writer.write_batch(rows)
            answer = reader.read()
            writer.close()
        except flight.FlightUnavailableError:
            return False
        return answer is not None and json.loads(answer.to_pybytes())["acked"] == 1


def payloads_of(namespace: Namespace, log: str) -> list[bytes]:
    """Return the payloads of all records."""
    with namespace.open_log(log) as manager, manager.open_reader() as reader:
        return [bytes(record.payload) for record in reader.read_bulk(10**6)]


def test_one_of_three_may_be_down(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """Segments, writers, appends and take-overs go on; a host that comes back gets the records."""
    cluster = fresh_sandbox(
        3,
        proxies=2,
        autorecovery=True,
        autorecovery_options=list(QUICK),
        bookie_options=("--session-timeout-s=8",),
    )
    proxies = {each.location: each for each in cluster.proxies}
    for location in proxies:
        wait_until(partial(knows, location, set(proxies)), timeout_s=WAIT_S)
    expected: dict[str, list[bytes]] = {"direct": [], "appended": [], "proxied": []}
    with open_namespace(cluster.uri) as namespace:
        for name in expected:
            namespace.create_log(name, config=SMALL)
        owner = ask(next(iter(proxies)), "owner", log="proxied")["location"]
        (other,) = proxies.keys() - {owner}
        assert put(owner, "proxied", b"before")
        cluster.bookies[0].kill()
        wait_until(lambda: len(namespace.get_bookies()) == 2, timeout_s=WAIT_S)

        with namespace.open_log("direct", config=SMALL) as log, log.open_writer() as writer:
            for txid in range(20):  # a new writer, and new segments
                expected["direct"].append(b"%04d" % txid * 250)
                writer.write(LogRecord(txid, expected["direct"][-1]))
                writer.commit()
            assert len(log.get_log_segments()) > 3
        with namespace.begin_append("three-hosts", 1) as append:
            rows = {"txid": [1], "value": [b"staged"]}
            append.write_batch("appended", pa.RecordBatch.from_pydict(rows))
            assert append.commit().committed
        proxies[owner].kill()
        wait_until(lambda: put(other, "proxied", b"after"), timeout_s=WAIT_S)
        expected["appended"], expected["proxied"] = [b"staged"], [b"before", b"after"]
        for name, payloads in expected.items():
            assert payloads_of(namespace, name) == payloads
        assert small_ledgers(namespace)

        cluster.bookies[0].restart()
        wait_until(lambda: not small_ledgers(namespace), timeout_s=WAIT_S)
        wait_until(lambda: put(other, "proxied", b"again"), timeout_s=WAIT_S)
        expected["proxied"].append(b"again")
        assert {each.quorum for each in small_at_first(namespace)} == {QuorumConfig()}

        cluster.bookies[1].kill()
        for name in ("direct", "appended"):
            assert payloads_of(namespace, name) == expected[name]
        wait_until(lambda: len(namespace.get_bookies()) == 2, timeout_s=WAIT_S)
        assert payloads_of(namespace, "proxied") == expected["proxied"]
