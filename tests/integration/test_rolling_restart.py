"""A rolling restart of a whole cluster while it is written, by the command.

Goal: every bookie and proxy begins another life, one at a time, and no acknowledged record is lost,
neither of a direct writer nor of a producer at the proxies.  A command that does nothing stops it.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.backends.direct.namespace import open_namespace as open_namespace_async
from dlcore.base.records import LogRecord
from dlcore.ledger.metadata.values import BookieCookie
from dlcore.metadata.stored import decode
from dlcore.ops.rolling.restarting import Restarter, find_members
from dlcore.sync import open_namespace
from tests.fixtures.ports import free_ports
from tests.fixtures.shell import Shell
from tests.fixtures.waiting import wait_until
from tests.fixtures.zookeeper import ask_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore
    from dlcore.ops.rolling.restart import Member

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
_STOP = "import os, signal, sys; os.kill(int(open(sys.argv[1]).read()), signal.SIGTERM)"


@contextmanager
def running_sandbox(bookies: int = 4) -> Iterator[dict[str, Any]]:
    """Yield what `dlog sandbox` says of a cluster that starts its processes again."""
    command = [sys.executable, "-m", "dlcore.ops.cli", "sandbox", "--json", "--restart"]
    # On ports of their own, so that a restarted process has the address that it had.
    command += ["--bookies", str(bookies), "--proxies", "2"]
    command += ["--base-port", str(free_ports(bookies + 3))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(180)


class Writers:
    """Two threads that append all the time, each with rests: to bookies, and to proxies."""

    def __init__(self, uri: str, endpoint: str) -> None:
        self.count = {"direct": 0, "proxied": 0}
        self.longest_s = {"direct": 0.0, "proxied": 0.0}
        self.failed: list[BaseException] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(uri, "direct", None)),
            threading.Thread(target=self._run, args=(endpoint, "proxied", "me")),
        ]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def wait_more(self) -> None:
        """Wait until both had some records acknowledged."""
        before = dict(self.count)
        wait_until(
            lambda: self.failed or all(self.count[log] > before[log] + 20 for log in before),
            timeout_s=180,
        )
        assert not self.failed

    def _run(self, where: str, name: str, producer: str | None) -> None:
        try:
            with open_namespace(where) as namespace, namespace.open_log(name) as log:
                self._write(name, log.open_writer(producer=producer))
        except BaseException as error:
            self.failed.append(error)
            raise

    def _write(self, name: str, writer: Any) -> None:
        with writer:
            while not self._is_over.is_set():
                number, began_s = self.count[name], time.monotonic()
                writer.write(LogRecord(number, b"%d" % number))
                writer.flush()  # until it is acknowledged
                self.longest_s[name] = max(self.longest_s[name], time.monotonic() - began_s)
                self.count[name] = number + 1
                self._is_over.wait(0.05)


def lives(uri: str) -> dict[str, int]:
    """Return how often each bookie was started."""

    async def read(store: MetadataStore, paths: NamespacePaths) -> dict[str, int]:
        found = await store.get_many([paths.cookie(f"bookie-{number}") for number in range(1, 5)])
        cookies = [decode(BookieCookie, node.value, source="") for node in found if node]
        return {each.name: each.life for each in cookies}

    return ask_store(uri, read)


def test_a_rolling_restart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A restart of four bookies and two proxies."""
    with running_sandbox() as uris:
        shell = Shell(uris["uri"], capsys)
        processes = {each["name"]: each["pid"] for each in uris["bookies"]}
        processes |= {each["location"].rpartition(":")[2]: each["pid"] for each in uris["proxies"]}
        for name, pid in processes.items():
            (tmp_path / name).write_text(str(pid))
        stop = f"{shlex.quote(sys.executable)} -c {shlex.quote(_STOP)} {tmp_path}"
        for log in ("direct", "proxied"):
            shell.text("log", "create", log)
        proxies = sorted(each["location"] for each in uris["proxies"])
        endpoint = "grpc://" + ",".join(each.partition("://")[2] for each in proxies)
        with Writers(uris["uri"], endpoint) as writers:
            writers.wait_more()
            restart = ("cluster", "restart", "--yes", "--wait")
            code, _, err = shell.outcome(*restart, "2", "--bookies", "true {name}")
            assert code == 1
            assert "bookie-1: the command ended, but it was not restarted" in err
            before = lives(uris["uri"])
            done = shell.json(
                *restart, "100", "--bookies", f"{stop}/{{name}}", "--proxies", f"{stop}/{{port}}"
            )
            assert done["restarted"] == [
                *sorted(before),
                *proxies,
            ]
            assert lives(uris["uri"]) == {name: life + 1 for name, life in before.items()}
            writers.wait_more()
        print("longest append", writers.longest_s, "appends", writers.count)
        with open_namespace(uris["uri"]) as namespace:
            for name, count in writers.count.items():
                with namespace.open_log(name) as manager:
                    found = [v for batch in manager.read() for v in batch["value"].to_pylist()]
                assert found == [b"%d" % number for number in range(count)]


def _has(file: Path, text: str) -> bool:
    return text in file.read_text()


def test_a_proxy_that_was_not_restarted_takes_logs_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """After a command that fails, and after Ctrl-C and SIGTERM while the command runs."""
    with running_sandbox(bookies=1) as uris:
        shell = Shell(uris["uri"], capsys)
        proxies = sorted(each["location"] for each in uris["proxies"])

        def all_serve() -> bool:
            rows = shell.json("proxy", "list")
            assert sorted(row["location"] for row in rows) == proxies, "a drained one is not listed"
            # On a busy machine one may not answer in time.
            return all(row["state"] == "serves" for row in rows)

        restart = ("cluster", "restart", "--yes", "--proxies")
        code, _, err = shell.outcome(*restart, "false")
        assert code == 1
        assert f"letting {proxies[0]} take logs again" in err
        wait_until(all_serve, timeout_s=120)

        command = [sys.executable, "-m", "dlcore.ops.cli", "--uri", uris["uri"], *restart]
        for stop, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            report = tmp_path / str(code)
            with (
                report.open("w") as out,
                subprocess.Popen([*command, "sleep 600"], stderr=out) as process,
            ):
                wait_until(partial(_has, report, "restarting "), timeout_s=120)
                process.send_signal(stop)
                assert process.wait(120) == code
            wait_until(all_serve, timeout_s=120)


def test_a_signal_during_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Its handler exits where the program stands: here within the step that restarts a proxy."""
    with running_sandbox(bookies=1) as uris:
        shell = Shell(uris["uri"], capsys)
        proxies = sorted(each["location"] for each in uris["proxies"])
        reports: list[str] = []

        async def exits(member: Member) -> None:
            raise SystemExit(f"{member.name} is not restarted")

        async def restart() -> None:
            async with await open_namespace_async(uris["uri"]) as namespace:
                members = await find_members(namespace)
                chosen = [each for each in members if each.is_proxy]
                restarter = Restarter(namespace, run=exits, report=reports.append)
                await restarter.restart(members, chosen, patience_s=120)

        with pytest.raises(SystemExit, match="is not restarted"):
            asyncio.run(restart())
        assert f"letting {proxies[0]} take logs again" in reports
        assert sorted(row["location"] for row in shell.json("proxy", "list")) == proxies
