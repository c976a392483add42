"""Logs on real processes that are killed: writers and bookies, with a count of every record."""

from __future__ import annotations

import signal
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from dlcore import LogConfig, LogRecord, QuorumConfig
from dlcore.sync import open_namespace
from tests.fixtures.forking import LOADED_PYTHON

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WRITER = """
import sys
from dlcore import LogRecord, LogConfig
from dlcore.sync import open_namespace
namespace = open_namespace(sys.argv[1], config=LogConfig(segment_bytes_max=200_000))
writer = namespace.open_log("faults/killed").open_writer()
for txid in range(10**9):
    writer.write(LogRecord(txid, b"%d" % txid * 50))
    if txid % 50 == 0:
        last = writer.commit()
        print(txid, last, flush=True)
"""


def test_a_killed_writer_loses_no_acknowledged_record(namespace_uri: str) -> None:
    """It commits and says so until SIGKILL; the next writer recovers all it said, and goes on."""
    with open_namespace(namespace_uri, config=LogConfig(lock_timeout_s=60)) as namespace:
        namespace.create_log("faults/killed")
        log = namespace.open_log("faults/killed")
        process = subprocess.Popen(
            [LOADED_PYTHON, "-c", WRITER, namespace_uri], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        acknowledged = ("", "")
        with process:
            for _ in range(40):
                txid, dlsn = process.stdout.readline().split()
                acknowledged = (txid, dlsn)
            process.send_signal(signal.SIGKILL)
            for line in process.stdout:
                if line.endswith("\n"):
                    txid, dlsn = line.split()
                    acknowledged = (txid, dlsn)
        with log.open_writer() as writer:
            writer.write(LogRecord(writer.last_txid + 1, b"after"))
        with log.open_reader() as reader:
            records = reader.read_bulk(10**6)
    assert [r.txid for r in records] == list(range(len(records)))
    assert [r.sequence_id for r in records] == list(range(len(records)))
    assert all(r.payload == b"%d" % r.txid * 50 for r in records[:-1])
    assert str(records[int(acknowledged[0])].dlsn) == acknowledged[1]
    assert records[-1].payload == b"after"
    assert len({r.dlsn.lssn for r in records}) > 1


def test_a_bookie_dies_while_a_log_is_written_and_tailed(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    """The writer goes on with another bookie; the reader sees every record, once, in order."""
    cluster = fresh_sandbox(4)
    count = 3000
    seen: list[int] = []
    with open_namespace(
        cluster.uri, config=LogConfig(quorum=QuorumConfig(), segment_bytes_max=500_000)
    ) as namespace:
        namespace.create_log("faults/bookie")
        log = namespace.open_log("faults/bookie")

        def tail() -> None:
            with log.open_reader() as reader:
                while len(seen) < count:
                    seen.extend(r.txid for r in reader.read_bulk(500))

        thread = threading.Thread(target=tail)
        thread.start()
        with log.open_writer() as writer:
            for txid in range(count):
                writer.write(LogRecord(txid, b"x" * 1000))
                if txid % 50 == 0:
                    writer.commit()
                if txid == count // 3:
                    cluster.bookies[0].kill()
            writer.commit()
        thread.join(120)
        assert not thread.is_alive()
        assert seen == list(range(count))
        with log.open_reader() as reader:
            assert [r.txid for r in reader.read_bulk(10 * count)] == list(range(count))
        assert log.get_log_record_count() == count
