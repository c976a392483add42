"""The embedded cluster: whole after a restart, clear when refused, and gone when its owner is.

Method: real processes; owners that are killed are processes of the test's own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import BookieUnavailableError, ConfigurationError
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.sandbox import Sandbox
from dlcore.ops.sandbox.process import HOST, python_path
from tests.fixtures.aio import run
from tests.fixtures.lengths import sample
from tests.fixtures.ports import free_ports
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).resolve().parents[4]
WAIT_S = 120.0


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_of(sandbox: Sandbox) -> list[int]:
    """Return the processes of a running sandbox."""
    pids = [sandbox.metadata_server.pid, *(bookie.pid for bookie in sandbox.bookies)]
    return pids if sandbox.autorecovery is None else [*pids, sandbox.autorecovery.pid]


def registered(sandbox: Sandbox) -> dict[str, str]:
    """Return incarnation and address by name of the bookies that are registered."""

    async def read() -> dict[str, str]:
        uri = parse_uri(sandbox.uri)
        store = await ZooKeeperStore.connect(uri.servers, connect_timeout_s=60)
        try:
            infos = await BookieRegistry(store, NamespacePaths(uri.root)).get_bookies()
            return {info.bookie.name: f"{info.bookie.incarnation} {info.address}" for info in infos}
        finally:
            await store.aclose()

    return run(read())


def described(sandbox: Sandbox) -> dict[str, str]:
    """Return the same from the sandbox's own view."""
    return {bookie.name: f"{bookie.incarnation} {bookie.address}" for bookie in sandbox.bookies}


def test_a_sandbox_is_whole_and_leaves_nothing() -> None:
    """All bookies are registered when `start` returns; later no process and no folder is left."""
    progress: list[str] = []
    sandbox = Sandbox(2, report=progress.append)
    with pytest.raises(ConfigurationError, match="not started"):
        _ = sandbox.uri
    with sandbox:
        assert [bookie.name for bookie in sandbox.bookies] == ["bookie-1", "bookie-2"]
        assert registered(sandbox) == described(sandbox)
        folder, pids = sandbox.data_dir, pids_of(sandbox)
        assert all(is_alive(pid) for pid in pids)
        sandbox.start()  # it runs: nothing happens
        assert pids_of(sandbox) == pids
    assert not any(is_alive(pid) for pid in pids)
    assert not folder.exists()
    assert progress[0] == "starting the metadata server"
    assert any("bookie-2 serves on 127.0.0.1:" in line for line in progress)
    sandbox.stop()


def test_a_sandbox_needs_neither_java_nor_pyspark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ZooKeeper it says what is missing; on the folder of one it stays with ZooKeeper."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with Sandbox(1, autorecovery=False) as sandbox:
        assert registered(sandbox) == described(sandbox)
    with pytest.raises(ConfigurationError, match="java was not found"):
        Sandbox(1, data_dir=tmp_path / "data", zookeeper=True).start()
    (tmp_path / "data" / "zookeeper").mkdir(exist_ok=True)
    with pytest.raises(ConfigurationError, match="java was not found"):
        Sandbox(1, data_dir=tmp_path / "data").start()


def test_a_server_that_is_not_started_says_so() -> None:
    """Instead of an error of Python's."""
    sandbox = Sandbox(2)
    assert repr(sandbox) == "<Sandbox stopped bookies=0>"
    assert repr(sandbox.autorecovery) == "<AutoRecoveryProcess stopped>"
    for ask in (lambda: sandbox.data_dir, lambda: sandbox.metadata_server, lambda: sandbox.uri):
        with pytest.raises(ConfigurationError, match="the sandbox is not started"):
            ask()
    assert sandbox.autorecovery is not None
    with pytest.raises(ConfigurationError, match="autorecovery is not started"):
        sandbox.autorecovery.pause()
    with pytest.raises(ConfigurationError, match="the sandbox is not started"):
        sandbox.autorecovery.restart()


def test_a_missing_bookie_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name by which it can be installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install distributed-dlog"):
        python_path()


@pytest.mark.prove  # the command's test restarts one, and finds all data
def test_a_restart_on_the_same_folder_has_the_same_bookies(tmp_path: Path) -> None:
    """The same incarnations of the same names, all of them, whatever number is asked for."""
    with Sandbox(2, data_dir=tmp_path / "data", autorecovery=False) as sandbox:
        before = {bookie.name: bookie.incarnation for bookie in sandbox.bookies}
        uri = sandbox.uri
    with Sandbox(1, data_dir=tmp_path / "data", autorecovery=False) as sandbox:
        assert {bookie.name: bookie.incarnation for bookie in sandbox.bookies} == before
        assert registered(sandbox) == described(sandbox)
        assert sandbox.uri.rpartition("/")[2] == uri.rpartition("/")[2]


def test_a_sandbox_starts_inside_a_running_loop() -> None:
    """As in a notebook."""

    async def scenario() -> None:
        with Sandbox(1, autorecovery=False) as sandbox:  # blocking, as a notebook's cell is
            assert sandbox.bookies[0].is_running
            assert sandbox.is_running
        await asyncio.sleep(0)

    asyncio.run(scenario())


def test_bookies_can_be_killed_stopped_paused_and_restarted(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    """Each comes back as the same bookie and is registered at its new address."""
    sandbox = fresh_sandbox(2)
    first, second = sandbox.bookies
    incarnation = first.incarnation
    for stop in (first.kill, first.terminate):
        pid = first.pid
        stop()
        assert not is_alive(pid)
        first.restart()
        assert is_alive(first.pid)
        assert first.incarnation == incarnation
        wait_until(lambda: registered(sandbox) == described(sandbox), timeout_s=WAIT_S)
    pid = first.pid
    first.restart()  # while it runs
    assert not is_alive(pid)
    second.pause()
    assert Path(f"/proc/{second.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    second.resume()
    wait_until(
        lambda: Path(f"/proc/{second.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T",
        timeout_s=WAIT_S,
    )
    second.pause()
    pids = pids_of(sandbox)
    child = second._latest_child
    sandbox.stop()  # a paused one is no obstacle
    assert child.exit_status == 0  # it was woken to stop in order, not killed
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(ConfigurationError, match="the sandbox is not started"):
        first.restart()


def test_a_bookie_that_does_not_come_up_is_explained(tmp_path: Path) -> None:
    """With its own words; nothing is left running."""
    sandbox = Sandbox(1, data_dir=tmp_path, bookie_options=["--no-such-option"])
    with pytest.raises(BookieUnavailableError, match=r"(?s)bookie-1 ended: exit.*no-such-option"):
        sandbox.start()
    with pytest.raises(ConfigurationError, match="not started"):
        _ = sandbox.metadata_server
    with Sandbox(1, data_dir=tmp_path, autorecovery=False):
        pass  # the folder is free again


@pytest.mark.prove  # as the command's test has it
def test_a_taken_folder_is_refused_by_name(tmp_path: Path) -> None:
    """With the process that has it; the one that has it goes on."""
    with Sandbox(1, data_dir=tmp_path, autorecovery=False) as sandbox:
        with pytest.raises(ConfigurationError, match=f"{tmp_path} .* pid {os.getpid()}"):
            Sandbox(1, data_dir=tmp_path).start()
        assert all(is_alive(pid) for pid in pids_of(sandbox))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigurationError, match=f"cannot use the folder {file}"):
        Sandbox(1, data_dir=file).start()


def test_ports_follow_the_base_port_and_taken_ones_are_named(tmp_path: Path) -> None:
    """Before anything is started."""
    base = free_ports(3)
    with Sandbox(2, base, tmp_path / "data", autorecovery=False) as sandbox:
        assert sandbox.metadata_server.servers == f"{HOST}:{base}"
        assert [bookie.address for bookie in sandbox.bookies] == [
            f"{HOST}:{base + 1}",
            f"{HOST}:{base + 2}",
        ]
        sandbox.bookies[0].kill()
        sandbox.bookies[0].restart()
        assert sandbox.bookies[0].address == f"{HOST}:{base + 1}"
        with pytest.raises(ConfigurationError, match=f"port {base} of {HOST} is taken"):
            Sandbox(2, base).start()
    with (
        socket.create_server((HOST, base + 2)),
        pytest.raises(ConfigurationError, match=f"port {base + 2} of {HOST} is taken"),
    ):
        Sandbox(2, base).start()
    with pytest.raises(ConfigurationError, match="base_port=65535: expected 1 … 65533"):
        Sandbox(2, 65535)
    with pytest.raises(ConfigurationError, match="bookies=0: expected 1 or more"):
        Sandbox(0)


OWNER = """
import sys, time
from dlcore.ops.sandbox import Sandbox
sandbox = Sandbox(2, data_dir=sys.argv[1], autorecovery=False)
sandbox.start()
sandbox.bookies[1].pause()
children = sandbox.metadata_server.pid, *(bookie.pid for bookie in sandbox.bookies)
print(*children, sandbox._warden._process.pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(1000)
"""


def start_owner(folder: Path, ending: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process with a sandbox on `folder`; return it and its children, the warden last."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), ending],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    owner.stdout.close()
    assert len(pids) == 4
    return owner, pids


@pytest.mark.parametrize("ending", sample(["forgets", "SIGTERM", "SIGINT", "SIGKILL"], 1))
def test_no_process_outlives_its_owner(tmp_path: Path, ending: str) -> None:
    """However the owner ends, and even those that are paused; the folder is free afterwards."""
    owner, pids = start_owner(tmp_path, "return" if ending == "forgets" else "wait")
    if ending != "forgets":
        assert all(is_alive(pid) for pid in pids)
        owner.send_signal(signal.Signals[ending])
    owner.wait(WAIT_S)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), timeout_s=WAIT_S)
    with Sandbox(2, data_dir=tmp_path, autorecovery=False) as sandbox:
        assert set(registered(sandbox)) >= {"bookie-1", "bookie-2"}


def test_a_folder_whose_owner_was_killed_can_be_used_at_once(tmp_path: Path) -> None:
    """But not before what is left of the old sandbox is dead."""
    owner, pids = start_owner(tmp_path, "wait")
    warden = pids[-1]
    os.kill(warden, signal.SIGSTOP)
    try:
        owner.kill()
        owner.wait(WAIT_S)
        refusal = f"is used by another sandbox, pid {owner.pid}"
        with pytest.raises(ConfigurationError, match=refusal):
            Sandbox(2, data_dir=tmp_path).start()
        assert is_alive(pids[0])
    finally:
        os.kill(warden, signal.SIGCONT)
    with Sandbox(2, data_dir=tmp_path, autorecovery=False) as sandbox:
        assert not any(is_alive(pid) for pid in pids)
        assert len(sandbox.bookies) == 2
