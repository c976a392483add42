"""`dlog --endpoint`: what proxies answer is what a client with a way to bookies is told."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.ids import DLSN
from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY

if TYPE_CHECKING:
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def log(namespace_uri: str) -> str:
    """Thirty records in two segments, of which two are truncated."""
    name = f"remote/{uuid4().hex}"
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log(name)
        manager = namespace.open_log(name)
        for segment in range(2):
            with manager.open_writer() as writer:
                for entry in range(3):
                    txids = [100 * segment + 10 * entry + each for each in range(5)]
                    payloads = [f"{txid}".encode() for txid in txids]
                    writer.write_batch(pa.record_batch({"txid": txids, "payload": payloads}))
                    writer.flush()
        manager.truncate(DLSN(1, 0, 2))
    return name


def dlog(*arguments: str, environment: dict[str, str], given: bytes = b"") -> tuple[int, str]:
    """Run a command; return its status and all that it printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DLOG_")}
    done = subprocess.run(
        [sys.executable, "-m", "dlcore.cli", *arguments],
        cwd=REPOSITORY,
        env=kept | environment,
        input=given,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize(
    "command",
    [
        "list remote/",
        "count {log}",
        "count {log} 1:1:3 2:0:4",
        "position {log} --txid 103",
        "position {log} --timestamp 0",
        "position {log} --txid 5000 --json",
        "tail {log} -n 4",
        "tail {log} --from-txid 14 -n 3",
        "tail {log} --from-dlsn 1:2:0 --raw",
        "tail {log} --from-timestamp 0 --format {{txid}}",
        "dump {log} --json",
        "dump {log} --from-dlsn 1:1:0 --to-dlsn 2:0:2",
    ],
)
def test_proxies_answer_as_bookies_do(
    command: str, log: str, namespace_uri: str, proxy: ProxyProcess
) -> None:
    """To the letter."""
    arguments = ["log", *command.format(log=log).split()]
    there = dlog(*arguments, environment={"DLOG_URI": namespace_uri})
    assert there[0] == 0
    assert dlog(*arguments, "--endpoint", proxy.location, environment={}) == there
    assert there[1]


def test_what_is_shown_and_what_is_not(log: str, namespace_uri: str, proxy: ProxyProcess) -> None:
    """Of a log what proxies know; other commands say what they need, and which need it not."""
    endpoint = {"DLOG_ENDPOINT": proxy.location, "DLOG_URI": namespace_uri}
    code, shown = dlog("log", "show", log, environment=endpoint)
    assert code == 0
    assert "1:0:2" in shown
    assert "28" in shown
    for command in ("log space", f"log settings {log}", "bookie list", f"log dump {log} --entries"):
        code, told = dlog(*command.split(), environment=endpoint)
        assert code != 0
        assert "give --uri and no --endpoint" in told
    code, told = dlog("log", "count", "no/such/log", environment=endpoint)
    assert (code, "'no/such/log' does not exist" in told) == (1, True)
    nowhere = dlog(
        "log", "list", "--patience", "0.3", environment={"DLOG_ENDPOINT": "grpc://127.0.0.1:1"}
    )
    assert nowhere[0] == 1


@pytest.mark.parametrize("options", ["", "--txid line-number", "--framed", "--whole"])
def test_records_are_written_through_proxies(
    options: str, namespace_uri: str, proxy: ProxyProcess
) -> None:
    """They are there as a writer with a way to bookies would have written them."""
    there, here = (f"remote/{uuid4().hex}" for _ in range(2))
    lines = b"one\ntwo\nthree\n"
    given = len(lines).to_bytes(4, "big") + lines if "framed" in options else lines
    with open_namespace(namespace_uri) as namespace:
        for name, environment in (
            (there, {"DLOG_URI": namespace_uri}),
            (here, {"DLOG_ENDPOINT": proxy.location}),
        ):
            namespace.create_log(name)
            code, told = dlog(
                *("log", "write", name, *options.split()), environment=environment, given=given
            )
            assert code == 0, told
            assert f"to log {name}, the last one at " in told
        tables = [namespace.open_log(name).read().to_arrow() for name in (there, here)]
    assert tables[0]["payload"] == tables[1]["payload"]
    assert len(tables[0])
    if "line-number" in options:
        assert tables[0]["txid"] == tables[1]["txid"]
