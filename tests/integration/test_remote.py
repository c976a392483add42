"""Logs read through proxies alone, by the core's names."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import aclosing
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.backends.flight import endpoint
from dlcore.backends.flight.namespace import open_namespace as open_remote_async
from dlcore.base import backoff
from dlcore.base.errors import (
    AlreadyClosedError,
    ProxyUnavailableError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.proxy import server
from dlcore.sync import open_namespace, open_namespace as open_remote
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.ports import free_ports
from tests.fixtures.proxies import ProxyThread, knows, proxy_process, proxy_thread
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import DistributedLogManager, Namespace

pytestmark = pytest.mark.integration

WAIT_S = 60


@pytest.fixture(scope="module")
def proxy(sandbox: Sandbox) -> Iterator[ProxyThread]:
    """A proxy that the tests of this module share."""
    with proxy_thread(sandbox.uri) as serving:
        yield serving


@pytest.fixture(scope="module")
def namespace(sandbox: Sandbox) -> Iterator[Namespace]:
    """The same logs, without it."""
    with open_namespace(sandbox.uri) as opened:
        yield opened


@pytest.fixture
def log(namespace: Namespace) -> DistributedLogManager:
    """An empty log."""
    return namespace.open_log(f"remote/{uuid4().hex}", create_if_missing=True)


def write(log: DistributedLogManager, first: int, count: int) -> None:
    """Write records whose transaction ids are their numbers."""
    with log.open_writer() as writer:
        for number in range(first, first + count):
            writer.write(LogRecord(number, b"%d" % number))
            if number % 7 == 0:
                writer.flush()


def test_a_program_that_uses_proxies_loads_no_pandas(
    proxy: ProxyThread, log: DistributedLogManager, tmp_path: Path
) -> None:
    """It would take half of the time of a command that prints a few records."""
    lines = tmp_path / "lines"
    lines.write_text("a\nb\n")
    script = """
import sys
from dlcore.ops.cli.app import run
from dlcore.sync import open_namespace
endpoint, log, lines = sys.argv[1:]
assert run(["--endpoint", endpoint, "log", "write", log, "--file", lines]) == 0
assert run(["--endpoint", endpoint, "log", "tail", log, "--raw"]) == 0
with open_namespace(endpoint) as namespace:
    snapshot = namespace.open_log(log).get_snapshot()
    (part,) = snapshot.scans(snapshot.first, snapshot.end)
    print([batch.batch.num_rows for batch in namespace.scan(part)])
print("pandas" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, proxy.server.location, log.name, str(lines)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[1:] == ["a", "b", "[2]", "False"]


def test_a_long_wait_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, of what fails and for how long it is tried; what is raised is one error, not three."""
    monkeypatch.setattr(backoff, "REPORTED_AFTER_S", 0.1)
    with (
        open_remote(f"grpc://127.0.0.1:{free_ports(1)}", patience_s=0.5) as nowhere,
        pytest.raises(ProxyUnavailableError, match="no proxy answers") as raised,
    ):
        nowhere.get_logs()
    (line,) = [each.message for each in caplog.records if each.name == endpoint.__name__]
    assert line.startswith("no proxy answers: ")
    assert "; trying for 0 s more; to do: " in line
    assert "AioRpcError" not in "".join(traceback.format_exception(raised.value))


def test_a_proxy_is_killed_under_a_follower(sandbox: Sandbox, log: DistributedLogManager) -> None:
    """The reader goes on with the other one, with each record once."""
    with (
        proxy_process(sandbox.uri, is_killed=True) as first,
        proxy_process(sandbox.uri) as second,
    ):
        endpoint = f"{first.location},{second.location.removeprefix('grpc://')}"
        lines: list[int] = []

        def tail() -> None:
            with open_remote(endpoint) as opened:
                records = opened.open_log(log.name).open_reader().records(follow=True)
                lines.extend(record.txid for record in records)

        thread = threading.Thread(target=tail)
        thread.start()
        write(log, 0, 100)
        wait_until(lambda: len(lines) >= 100, timeout_s=WAIT_S)
        first.kill()
        write(log, 100, 100)
        log.mark_end_of_stream()
        thread.join(WAIT_S)
        assert lines == list(range(200))
        # Until its session is gone it would be named the owner of logs to tests that follow.
        wait_until(lambda: not knows(second.location, {first.location}), timeout_s=WAIT_S)


def test_async_and_closed_meanwhile(proxy: ProxyThread, log: DistributedLogManager) -> None:
    """A loop that ends closes its reader; a caller that waits at the close gets an error."""
    write(log, 0, 10)
    followed = proxy.server.reads.followed

    async def use() -> None:
        namespace = await open_remote_async(proxy.server.location)
        async with namespace:
            opened = await namespace.open_log(log.name)
            reader = await opened.open_reader()
            async with reader, aclosing(reader.records(follow=True)) as records:
                assert (await anext(records)).txid == 0
                assert len(followed) == 1
            last = await opened.get_last_dlsn()
            waits = await opened.open_reader(dlsn=DLSN(last.lssn, last.entry_id + 1, 0))
            waiting = asyncio.create_task(anext(waits.batches(follow=True)))
            await asyncio.to_thread(
                wait_until, lambda: any(each.users for each in followed), timeout_s=WAIT_S
            )
        with pytest.raises(AlreadyClosedError):
            await waiting

    asyncio.run(use())
    wait_until(lambda: not len(followed), timeout_s=WAIT_S)


CLIENT = """
import sys
from dlcore.sync import open_namespace
with open_namespace(sys.argv[1]) as namespace:
    for batch in namespace.open_log(sys.argv[2]).open_reader().batches(follow=True):
        print(batch.num_rows, flush=True)
"""


def test_nothing_is_held_for_who_is_gone_without_a_word(
    sandbox: Sandbox, log: DistributedLogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose machine lost its power: here it stands still."""
    monkeypatch.setattr(server, "_SILENCE_MS", 1000)
    write(log, 0, 10)
    with proxy_thread(sandbox.uri) as proxy:
        command = [LOADED_PYTHON, "-c", CLIENT, proxy.server.location, log.name]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        ) as process:
            try:
                assert process.stdout is not None
                rows = 0
                while rows < 10:  # in one message or several
                    rows += int(process.stdout.readline())
                assert rows == 10
                process.send_signal(signal.SIGSTOP)
                wait_until(lambda: not len(proxy.server.reads.followed), timeout_s=WAIT_S)
            finally:
                process.kill()
