"""Atomic appends, as of Spark's sink, to logs that proxies are writing meanwhile."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from dlcore.base.errors import LogModeError
from dlcore.sync import open_namespace
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import act, knows, produce, proxy_process
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

WAIT_S = 90
PRODUCERS = 4
VERSIONS = amount(15, sampled=8)
SCHEMA = pa.schema([("value", pa.binary())])


def logs_for_each(proxies: Sequence[ProxyProcess], home: str) -> dict[str, str]:
    """Return names below `home`, two that each of the proxies should own, with its location."""
    locations = {each.location for each in proxies}
    first = proxies[0]
    wait_until(lambda: knows(first.location, locations), timeout_s=WAIT_S)
    owners: dict[str, str] = {}
    names = (f"{home}/{number}" for number in count())
    while len(owners) < 2 * len(proxies):
        name = next(names)
        location = first.act("owner", log=name)["location"]
        if location in locations and list(owners.values()).count(location) < 2:
            owners[name] = location
    return owners


def test_producers_and_appends_over_logs_of_two_proxies(sandbox: Sandbox) -> None:
    """All records are there once and in order, no stream is broken, and each append is whole."""
    uri, home = sandbox.uri, f"turns/{uuid4().hex}"
    with ExitStack() as steps:
        proxies = [steps.enter_context(proxy_process(uri)) for _ in range(2)]
        namespace = steps.enter_context(open_namespace(uri))
        owners = logs_for_each(proxies, home)
        logs = list(owners)
        for log in logs:
            namespace.create_log(log)
        stop = threading.Event()
        sent: dict[tuple[str, str], list[bytes]] = {
            (log, f"p{number}"): [] for log in logs for number in range(PRODUCERS // 2)
        }
        threads = [
            threading.Thread(target=produce, args=(owners[log], log, name, stop, rows))
            for (log, name), rows in sent.items()
        ]
        for thread in threads:
            thread.start()
        try:
            for version in range(VERSIONS):
                appending = namespace.begin_append(home, version)
                for log in logs:
                    rows = [f"s:{2 * version}".encode(), f"s:{2 * version + 1}".encode()]
                    appending.write_batch(log, pa.record_batch({"value": rows}))
                assert appending.commit().committed
                assert namespace.begin_append(home, version).commit([]).already_committed
        finally:
            stop.set()
            for thread in threads:
                thread.join(WAIT_S)
        for log in logs:
            table = namespace.open_log(log).read().to_arrow()
            found = [bytes(each) for each in table["value"].to_pylist()]
            txids = table["txid"].to_pylist()
            assert txids == sorted(txids)
            staged = [f"s:{number}".encode() for number in range(2 * VERSIONS)]
            assert [each for each in found if each.startswith(b"s:")] == staged
            for (written, name), rows in sent.items():
                if written == log:
                    mine = [each for each in found if each.startswith(f"{name}:".encode())]
                    assert mine == rows
                    assert rows


def test_a_mode_keeps_proxies_or_all_others_out(proxy: ProxyProcess, namespace_uri: str) -> None:
    """A client without the right to write is refused at once, though another one holds the log."""
    log = f"modes/{uuid4().hex}"
    batch = pa.record_batch([pa.array([b"one"], pa.binary())], schema=SCHEMA)
    with open_namespace(namespace_uri) as namespace, proxy.client() as client:
        namespace.create_log(log)
        manager = namespace.open_log(log)
        manager.update_settings(mode="proxied")
        writer, reader = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
        with writer:
            reader.read()
            writer.write_batch(batch)
            assert json.loads(reader.read().to_pybytes())["acked"] == 1
            with pytest.raises(LogModeError, match="written through proxies"):
                manager.open_writer()
            writer.done_writing()
        act(client, "release", log=log)
        manager.update_settings(mode="direct")
        refused, answers = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
        assert answers.read() is None
        with pytest.raises(pa.ArrowException, match="not written through proxies"):
            refused.close()
        with manager.open_writer() as direct:
            direct.write_batch(pa.record_batch({"txid": [direct.last_txid], "value": [b"two"]}))
        assert manager.get_log_record_count() == 2
