"""Writers over an endpoint while proxies, as processes, are killed, stand still, and leave."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.backends.flight.namespace import open_namespace as open_remote_async
from dlcore.base.errors import (
    AlreadyClosedError,
)
from dlcore.base.records import LogRecord
from dlcore.flight import producer_client
from dlcore.sync import open_namespace, open_namespace as open_remote, portal as portals
from tests.fixtures.proxies import ProxyProcess, proxy_process, proxy_thread
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WAIT_S = 90
LOG = "written"


class Load:
    """Some writers of one log, each of which sends numbers until it gets the signal to stop."""

    def __init__(self, endpoint: str, writers: int) -> None:
        self.sent: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self._endpoint = endpoint
        self._stopped = threading.Event()
        names = [f"writer-{number}" for number in range(writers)]
        self._threads = [threading.Thread(target=self._write, args=(each,)) for each in names]

    def _write(self, name: str) -> None:
        try:
            with (
                open_remote(self._endpoint) as namespace,
                namespace.open_log(LOG).open_writer(producer=name) as writer,
            ):
                while not self._stopped.is_set():
                    for number in range(writer.next_sequence, writer.next_sequence + 10):
                        writer.write(LogRecord(0, b"%s/%d" % (name.encode(), number)))
                    writer.flush()
                    self.sent[name] = writer.next_sequence
                    self._stopped.wait(0.05)
        except BaseException as error:  # noqa: BLE001  # the test tells
            self.errors.append(error)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def goes_on(self) -> None:
        """Wait until every writer has written more, and some."""
        before = dict(self.sent)

        def all_did() -> bool:
            assert not self.errors, self.errors
            more = [self.sent.get(f"writer-{n}", 0) for n in range(len(self._threads))]
            return all(count >= before.get(f"writer-{n}", 0) + 50 for n, count in enumerate(more))

        wait_until(all_did, timeout_s=WAIT_S)


def owner_of(proxies: list[ProxyProcess]) -> ProxyProcess:
    """Return which of these owns the log."""
    found: list[ProxyProcess] = []

    def is_there() -> bool:
        found[:] = [each for each in proxies if LOG in each.act("logs")["logs"]]
        return bool(found)

    wait_until(is_there, timeout_s=WAIT_S)
    return found[0]


@pytest.fixture(scope="module", autouse=True)
def _silence() -> Iterator[None]:
    """Be less patient with a proxy that stands still."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(producer_client, "SILENCE_S", 3.0)
        yield


def test_owners_are_killed_stand_still_and_leave(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """Nothing is lost, doubled, or out of the order of its sender."""
    sandbox = fresh_sandbox(proxies=0)
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(LOG)
        with ExitStack() as steps:
            starting = [proxy_process(sandbox.uri, is_killed=True) for _ in range(3)]
            proxies = [steps.enter_context(each) for each in starting]
            hosts = [each.location.removeprefix("grpc://") for each in proxies]
            with Load(f"grpc://{','.join(hosts)}", 3) as load:
                load.goes_on()
                released = owner_of(proxies)
                released.act("release", log=LOG)
                load.goes_on()
                killed = owner_of(proxies)
                killed.kill()
                proxies.remove(killed)
                load.goes_on()
                paused = owner_of(proxies)
                paused.process.send_signal(signal.SIGSTOP)
                load.goes_on()
                paused.process.send_signal(signal.SIGCONT)
                load.goes_on()
                leaving = owner_of(proxies)
                assert leaving.stop() == 0
                proxies.remove(leaving)
                load.goes_on()
        assert not load.errors, load.errors
        found: dict[str, list[int]] = defaultdict(list)
        for record in namespace.open_log(LOG).open_reader().records():
            name, _, number = record.payload.decode().partition("/")
            found[name].append(int(number))
        assert set(found) == set(load.sent)
        for name, numbers in found.items():
            assert numbers == list(range(load.sent[name]))


LEAVING = """
import sys
from dlcore import LogRecord
from dlcore.sync import open_namespace
writer = open_namespace(sys.argv[1]).open_log(sys.argv[2]).open_writer()
writer.write(LogRecord(1, b"flushed"))
writer.flush()
print(flush=True)
sys.stdin.readline()
for txid in (2, 3, 4):
    writer.write(LogRecord(txid, b"x"))
"""


@pytest.mark.prove
def test_records_that_no_proxy_takes_any_more_are_counted_at_exit(namespace_uri: str) -> None:
    """Within a bounded time, and the exit status tells of it."""
    log = f"{LOG}/{uuid4().hex}"
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log(log)
    with proxy_process(namespace_uri, is_killed=True) as proxy:
        process = subprocess.Popen(
            [sys.executable, "-c", LEAVING, proxy.location, log],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        proxy.kill()
        _, errors = process.communicate("\n", timeout=WAIT_S)
    assert process.returncode == 120
    assert f"log {log!r}: not written: 3 records: the process ended with the writer open" in errors
    assert "Traceback" not in errors


def test_a_namespace_closes_its_writers(
    namespace_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their records are written, also at exit; else the log says how many were not."""
    log = f"{LOG}/{uuid4().hex}"
    monkeypatch.setattr(portals, "_exit_fails", False)
    with open_namespace(namespace_uri) as namespace, proxy_thread(namespace_uri) as proxy:
        namespace.create_log(log)
        for number in range(2):
            with open_remote(proxy.server.location) as remote:
                writer = remote.open_log(log).open_writer()
                writer.write(LogRecord(0, b"x"))
                writer._buffer_to_outbox()
                writer.write(LogRecord(0, b"y"))
                assert writer.next_sequence == 2
                if number:
                    writer._call(remote._finish())
        assert namespace.open_log(log).read().to_arrow().num_rows == 4
        assert not portals._exit_fails
        with open_remote(proxy.server.location) as remote:
            writer = remote.open_log(log).open_writer()
            writer.write(LogRecord(0, b"z"))
            writer._call(writer._writer.abort())
            writer._call(writer.finish())
        assert "not written: 1 record: the process ended with the writer open" in caplog.text
        assert portals._exit_fails


@pytest.mark.parametrize("ends", ["namespace", "loop"])
def test_the_async_writer_says_what_was_not_written(
    ends: str, namespace_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No one can flush once its loop or its namespace has ended."""
    log = f"{LOG}/{uuid4().hex}"

    async def leave(location: str) -> None:
        remote = await open_remote_async(location)
        writer = await (await remote.open_log(log)).open_writer()
        lost = writer.write(LogRecord(0, b"x"))
        if ends == "namespace":
            await remote.aclose()
            with pytest.raises(AlreadyClosedError):
                await lost

    with open_namespace(namespace_uri) as namespace, proxy_thread(namespace_uri) as proxy:
        namespace.create_log(log)
        asyncio.run(leave(proxy.server.location))
    reason = {"namespace": "its namespace was closed", "loop": "its event loop ended"}[ends]
    assert f"not written: 1 record: the writer was not closed, and {reason}" in caplog.text
