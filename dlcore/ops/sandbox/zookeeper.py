"""An embedded ZooKeeper: a child process from the jars in PySpark."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError, MetadataConnectionError
from dlcore.base.whole_files import naming
from dlcore.ops.sandbox.metadata_server import MetadataProcess
from dlcore.ops.sandbox.process import (
    HOST,
    ChildProcess,
    PortReservation,
    Warden,
    taken_port,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_START_TIMEOUT_S = 60.0
"""It takes half a second, or longer on a busy machine; a process that has ended is noticed at once.
"""
_PORT_ATTEMPTS_MAX = 5
_ANSWER_TIMEOUT_S = 1.0
_JAVA_HINT = (
    "install Java 17 or later, on Debian: apt-get install default-jre-headless; "
    "on Fedora: dnf install java-headless; "
    "on macOS: brew install openjdk@21 && export JAVA_HOME=$(brew --prefix openjdk@21)"
)
_NO_JAVA = "Unable to locate a Java Runtime"
"""Output of macOS's placeholder for `java`, if no Java is installed."""
_JARS = (
    "zookeeper-[0-9]*.jar",
    "zookeeper-jute-*.jar",
    "metrics-core-*.jar",
    "snappy-java-*.jar",
    "slf4j-api-*.jar",
    "netty-common-*.jar",
    "netty-buffer-*.jar",
    "netty-handler-*.jar",
    "netty-transport-[0-9]*.jar",
    "log4j-api-*.jar",
    "log4j-core-*.jar",
    "log4j-slf4j2-impl-*.jar",
)
_JARS_OF_TLS = (
    "netty-codec-base-*.jar",
    "netty-resolver-[0-9]*.jar",
    "netty-tcnative-classes-*.jar",
    "netty-transport-classes-epoll-*.jar",
    "netty-transport-native-unix-common-*.jar",
    "commons-io-*.jar",
)
"""Behind the others, so that an archive of classes for these fits both."""
_JVM_OPTIONS = (
    # Until its extents are merged, a commit over 1,000 logs leaves 77 KB there (measured).  A
    # thousand such commits leave 85 MB, with everything else, and half a megabyte more for some
    # seconds.  Unused memory is not allocated.
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # starts faster and needs less memory
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dlog4j2.level=WARN",
    "-Dzookeeper.preAllocSize=1024",
    "-Dzookeeper.audit.enable=false",
)
# With short ticks a session can expire after one second, which tests need.  `_answers` uses the
# only allowed command word to distinguish this server from another program on its port.
_CONFIG = """\
dataDir={data_dir}
clientPort={port}
clientPortAddress={host}
tickTime=500
minSessionTimeout=1000
maxSessionTimeout=60000
maxClientCnxns=0
autopurge.purgeInterval=1
admin.enableServer=false
4lw.commands.whitelist=conf
"""
# Java encodes file names by the locale, and the locale C allows only ASCII.  It also prints errors
# of the system in the locale's language, and `_start_and_wait` looks for one of them.
_ENVIRONMENT = {"LC_ALL": "C.UTF-8"}


class EmbeddedZooKeeper(MetadataProcess):
    """One ZooKeeper server on the loopback interface.

    With `launcher`, arguments before its command, it may run on another host and listen at `host`.
    `settings` are more lines of its configuration, also for TLS.

    Raises (from `start`):
        ConfigurationError: Java or PySpark is missing, the port is in use, or the name of
            `data_dir` is not UTF-8.
        MetadataConnectionError: the server ended, or did not answer in time.
    """

    name = "ZooKeeper"

    def __init__(
        self,
        data_dir: Path | str,
        *,
        port: int | None = None,
        warden: Warden | None = None,
        host: str = HOST,
        launcher: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(data_dir, host=host, port=port, warden=warden)
        self._launcher = tuple(launcher)
        self._settings = dict(settings or {})

    def _start(self) -> None:
        class_path = _class_path(_JARS + _JARS_OF_TLS if self._settings else _JARS)
        command = [*self._launcher, find_java(), *_JVM_OPTIONS, "-cp", class_path]
        _as_property(self._data_dir)  # raises before anything is created
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._start_on_a_port(command)

    def _start_on_a_port(self, command: list[str]) -> None:
        is_free_choice = self._port is None
        for attempt in range(1, _PORT_ATTEMPTS_MAX + 1):
            reservation = PortReservation(self._port or 0)
            try:
                if self._start_and_wait(command, reservation.port):
                    self._port = reservation.port
                    return
            finally:
                reservation.release()
            if not is_free_choice or attempt == _PORT_ATTEMPTS_MAX:
                raise taken_port(self._host, reservation.port)

    def _start_and_wait(self, command: list[str], port: int) -> bool:
        """Start the server; return False if its port is in use."""
        config = self._data_dir / "zoo.cfg"
        data_dir = _as_property(self._data_dir / "data")
        lines = _CONFIG.format(data_dir=data_dir, port=port, host=self._host)
        lines += "".join(f"{key}={value}\n" for key, value in self._settings.items())
        with naming(config):
            config.write_text(lines, encoding="ascii")
        child = self._child = ChildProcess(
            [*command, "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(config)],
            log_path=self._data_dir / "zookeeper.log",
            warden=self._watching(),
            environment=_ENVIRONMENT,
        )
        has_settled = wait_until(
            lambda: not child.is_running or self._answers(port),
            timeout_s=_START_TIMEOUT_S,
            child=child,
        )
        if has_settled and child.is_running:
            return True
        if "Address already in use" in child.output():
            return False
        if _NO_JAVA in child.output():
            raise ConfigurationError(f"{command[len(self._launcher)]} finds no Java: {_JAVA_HINT}")
        problem = "ended" if has_settled else f"did not answer within {_START_TIMEOUT_S:g} s"
        raise MetadataConnectionError(f"the embedded ZooKeeper {problem}: {child.describe_end()}")

    def _answers(self, port: int) -> bool:
        with contextlib.suppress(OSError):
            with socket.create_connection(
                (self._host, port), timeout=_ANSWER_TIMEOUT_S
            ) as connection:
                connection.sendall(b"conf")
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
            return b"dataDir=" + os.fsencode(self._data_dir / "data") + b"/" in answer
        return False


def _as_property(path: Path) -> str:
    r"""Return a path as a file of properties has it: `\\` and all beyond ASCII are escaped."""
    try:
        # The bytes of the name: another locale has decoded them to other letters.
        coded = os.fsencode(path).decode("utf-8").encode("utf-16-be")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"data folder {str(path)!r}: its name is not UTF-8, by which Java finds files; "
            "choose another folder"
        ) from error
    units = (int.from_bytes(coded[start : start + 2]) for start in range(0, len(coded), 2))
    return "".join(
        chr(unit) if ord(" ") <= unit <= ord("~") and unit != ord("\\") else f"\\u{unit:04x}"
        for unit in units
    )


def find_java() -> str:
    """Return the path of `java`, or raise `ConfigurationError` with advice on installing it."""
    # PySpark finds Java by JAVA_HOME too; the same one is used here.
    home = os.environ.get("JAVA_HOME")
    candidate = shutil.which("java", path=f"{home}/bin") if home else None
    java = candidate or shutil.which("java")
    if java is None:
        raise ConfigurationError(f"java was not found in JAVA_HOME or PATH: {_JAVA_HINT}")
    return java


def _class_path(patterns: Sequence[str] = _JARS) -> str:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"PySpark, whose jars hold ZooKeeper, is not installed for {sys.executable}: "
            f"on Debian, Fedora and macOS: {shlex.quote(sys.executable)} -m pip install "
            "'distributed-dlog[spark]'"
        )
    folder = Path(spec.submodule_search_locations[0]) / "jars"
    jars = [jar for pattern in patterns for jar in sorted(folder.glob(pattern))]
    if not any(jar.name.startswith("zookeeper-jute") for jar in jars):
        raise ConfigurationError(f"there are no ZooKeeper jars in {folder}: reinstall pyspark")
    return os.pathsep.join(map(str, jars))
