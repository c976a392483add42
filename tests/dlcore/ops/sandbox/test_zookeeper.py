"""The embedded ZooKeeper: it starts quickly, keeps its data and port, and says what is missing."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError, MetadataConnectionError
from dlcore.metadata.port import REQUEST_BYTES_MAX, Versioned
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.sandbox import zookeeper as module
from dlcore.ops.sandbox.process import HOST, PortReservation, Warden
from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper, find_java
from tests.fixtures.aio import run
from tests.fixtures.lengths import sample
from tests.fixtures.resident import resident_kb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.integration


def with_store(servers: str, use: Callable[[ZooKeeperStore], Awaitable[None]]) -> None:
    """Connect, use, close."""

    async def scenario() -> None:
        store = await ZooKeeperStore.connect(servers, session_timeout_s=20, connect_timeout_s=60)
        try:
            await use(store)
        finally:
            await store.aclose()

    run(scenario())


@pytest.mark.parametrize("ending", sample(["kill", "stop"], 1))
def test_data_and_port_survive(tmp_path: Path, ending: str) -> None:
    """A clean stop and SIGKILL alike: what was acknowledged is on the disk."""

    async def write(store: ZooKeeperStore) -> None:
        await store.create("/kept", b"value")

    async def check(store: ZooKeeperStore) -> None:
        assert await store.get("/kept") == Versioned(b"value", 0)

    server = EmbeddedZooKeeper(tmp_path)
    with server:
        servers, pid = server.servers, server.pid
        with_store(servers, write)
        server.start()  # it runs: nothing happens
        assert server.pid == pid
        getattr(server, ending)()
        assert not server.is_running
        server.start()
        assert server.servers == servers
        assert server.pid != pid
        with_store(servers, check)
    assert not server.is_running
    server.stop()
    with EmbeddedZooKeeper(tmp_path) as another:
        with_store(another.servers, check)


@pytest.mark.parametrize("locale", sample(["C", "de_DE.UTF-8"], 1))
@pytest.mark.parametrize("name", sample(["Größe ü 😀 a\\tb=#", "a b", "a\\b", "ü"], 1))
def test_any_name_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, locale: str
) -> None:
    """Blanks, letters of any language and what Java's files of properties escape with."""
    monkeypatch.setenv("LC_ALL", locale)
    folder = tmp_path / name
    with EmbeddedZooKeeper(folder) as server:
        with_store(server.servers, lambda store: store.create("/kept", b"value"))
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "data" / "version-2").is_dir()


def test_a_name_that_java_cannot_have_is_refused(tmp_path: Path) -> None:
    """Names of files are bytes; Java takes them for UTF-8."""
    folder = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(ConfigurationError, match=r"'.*/\\udcff': its name is not UTF-8"):
        EmbeddedZooKeeper(folder).start()
    assert not folder.exists()


def test_values_up_to_the_promised_size(tmp_path: Path) -> None:
    """A request of the size that we allow fits the server, both ways; its own limit is 1 MB."""
    value = b"x" * (REQUEST_BYTES_MAX - 1000)

    async def write(store: ZooKeeperStore) -> None:
        await store.create("/large", value)
        assert await store.get("/large") == Versioned(value, 0)

    with EmbeddedZooKeeper(tmp_path) as server:
        with_store(server.servers, write)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """Nothing is started, and the process that has it is not disturbed."""
    with socket.create_server((HOST, 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} of {HOST} is taken"):
            EmbeddedZooKeeper(tmp_path, port=port).start()
    with pytest.raises(ConfigurationError, match="port 70000: expected 0 … 65535"):
        EmbeddedZooKeeper(tmp_path, port=70000).start()


def test_two_servers_that_want_one_port_do_not_both_believe_they_have_it(tmp_path: Path) -> None:
    """The other's answers are not taken for one's own, even when both passed the first check."""
    reservation = PortReservation(0)
    port = reservation.port
    one = EmbeddedZooKeeper(tmp_path / "one", port=port)
    two = EmbeddedZooKeeper(tmp_path / "two", port=port)
    with one:
        command = [find_java(), *module._JVM_OPTIONS, "-cp", module._class_path()]
        two._warden = Warden()
        (tmp_path / "two").mkdir()
        assert not two._start_and_wait(command, port)
        assert one.is_running
        two.stop()
    reservation.release()


def assert_tells_what_to_install(message: str) -> None:
    """A command to type, for each system."""
    for command in (
        "on Debian: apt-get install default-jre-headless",
        "on Fedora: dnf install java-headless",
        "on macOS: brew install openjdk@21 && export JAVA_HOME=$(brew --prefix openjdk@21)",
    ):
        assert command in message


def test_missing_java_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is a command to type."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(
        ConfigurationError, match="java was not found in JAVA_HOME or PATH"
    ) as refused:
        EmbeddedZooKeeper(tmp_path / "data").start()
    assert_tells_what_to_install(str(refused.value))
    assert not (tmp_path / "data").exists()


def test_the_java_of_macos_that_is_none_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac without Java has a program of that name."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    printed = "The operation cannot be completed. Unable to locate a Java Runtime."
    java.write_text(f"#!/bin/sh\necho '{printed}' >&2\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"{java} finds no Java") as refused:
        EmbeddedZooKeeper(tmp_path / "data").start()
    assert_tells_what_to_install(str(refused.value))


def test_java_home_goes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does for PySpark."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho this Java is broken >&2\nexit 3\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() == str(java)
    server = EmbeddedZooKeeper(tmp_path / "data")
    with pytest.raises(MetadataConnectionError, match=r"(?s)exit status 3.*this Java is broken"):
        server.start()
    assert not server.is_running


def test_missing_pyspark_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an optional dependency, of the Python that lacks it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/my environment/bin/python")
    with pytest.raises(ConfigurationError) as refused:
        EmbeddedZooKeeper(tmp_path).start()
    command = "'/my environment/bin/python' -m pip install 'distributed-dlog[spark]'"
    assert f"on Debian, Fedora and macOS: {command}" in str(refused.value)


def test_a_pyspark_without_its_jars_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the folder where they should be."""
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigurationError, match=f"no ZooKeeper jars in {tmp_path}/jars: reinstal"):
        EmbeddedZooKeeper(tmp_path / "data").start()


def test_a_server_that_was_never_started_says_so(tmp_path: Path) -> None:
    """Instead of an error of Python's."""
    server = EmbeddedZooKeeper(tmp_path)
    assert not server.is_running
    assert "stopped" in repr(server)
    for action in (server.kill, server.pause, server.resume):
        with pytest.raises(ConfigurationError, match="ZooKeeper is not started"):
            action()
    server.stop()


def test_it_is_small(tmp_path: Path) -> None:
    """It runs beside Spark and the bookies on a machine with 4 GB."""
    with EmbeddedZooKeeper(tmp_path) as server:
        assert resident_kb(server.pid) < 200 * 1024
        assert os.getsid(server.pid) != os.getsid(0)  # Ctrl-C in our terminal is not for it
