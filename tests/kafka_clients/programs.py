"""Builds and runs the programs over Kafka's clients; README.md has their words."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import pytest

from benchmarks.peers.kafka import class_path, connector_class_path
from dlcore.base.errors import ConfigurationError
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

SOURCE = Path(__file__).parent
JAVA_CLIENT = "org.apache.kafka:kafka-clients:4.3.1"
LANGUAGES = ("Java", "Go")
TOOLS = {"Java": ("mvn", "java"), "Go": ("go",)}
PATIENCE_S = 120.0
_HEAD_BYTES = 12
_LENGTH_BYTES = 4


class Record(NamedTuple):
    """A record that a client has read."""

    offset: int
    value: bytes


def command_of(language: str, folder: Path) -> list[str]:
    """Return the command of the program in a language, built in a folder.

    A machine without the tools leaves the test out.
    """
    for tool in TOOLS[language]:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, which the client in {language} needs")
    if language == "Java":
        return [
            "java",
            "-Xmx256m",
            "-cp",
            class_path(JAVA_CLIENT),
            f"{SOURCE}/java/KafkaClient.java",
        ]
    program = folder / "kafka-client"
    subprocess.run(["go", "build", "-o", str(program), "."], cwd=SOURCE / "go", check=True)
    return [str(program)]


def kcat_command() -> list[str]:
    """Return Debian's command; a machine without it leaves the test out."""
    if shutil.which("kcat") is None:
        pytest.skip("kcat is not installed: apt-get install kcat")
    return ["kcat"]


def spark_command() -> list[str]:
    """Return the command of the program over Spark's connector.

    A machine for which Maven has no connector leaves the test out.
    """
    try:
        jars = connector_class_path().replace(":", ",")
    except ConfigurationError as error:
        pytest.skip(str(error))
    return [sys.executable, f"{SOURCE}/spark_client.py", jars]


class Client:
    """A program that runs, and what it tells; it ends with its block.

    Args:
        command: of the program.
        arguments: as README.md has them.
        folder: for what it says of errors.
    """

    def __init__(self, command: Sequence[str], *arguments: object, folder: Path) -> None:
        self.failed: list[str] = []
        """Its lines about failures."""
        self._errors = folder / f"{Path(command[0]).name}-errors"
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [*command, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._process.kill()
        self.end()

    @property
    def count(self) -> int:
        """How many lines it has printed."""
        raise NotImplementedError

    def _listen(self) -> None:
        raise NotImplementedError

    def wait_for(self, count: int) -> None:
        """Wait until it has printed so much in all; it may take its time while it prints more."""
        while (before := self.count) < count:
            wait_until(partial(self._has_gone_on, before), timeout_s=PATIENCE_S)
            assert not self.failed, self.failed[:3]
            assert self._process.poll() is None or self.count >= count, self.errors

    def _has_gone_on(self, before: int) -> bool:
        return self.count > before or bool(self.failed) or self._process.poll() is not None

    def end(self) -> None:
        """Let it end its work, and wait until it has."""
        self._ask_for_end()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._thread.join()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _ask_for_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def succeed(self, *, within_s: float = PATIENCE_S) -> None:
        """Wait until it ends by itself, and check that it has not failed."""
        self._process.wait(within_s)
        assert self._process.returncode == 0, self.errors

    @property
    def errors(self) -> str:
        """Its lines about errors."""
        return self._errors.read_text(encoding="utf-8", errors="replace")[-3000:]


class Reader(Client):
    """A program that reads."""

    def __init__(self, command: Sequence[str], *arguments: object, folder: Path) -> None:
        self.records: list[Record] = []
        super().__init__(command, *arguments, folder=folder)

    @property
    def count(self) -> int:
        """How many records it has read."""
        return len(self.records)

    def _listen(self) -> None:
        out = self._process.stdout
        assert out is not None
        while len(head := out.read(_HEAD_BYTES)) == _HEAD_BYTES:
            value = out.read(int.from_bytes(head[8:]))
            self.records.append(Record(int.from_bytes(head[:8]), value))


class KcatReader(Reader):
    """kcat, which follows a topic from an offset on, from the earliest record if it must."""

    def __init__(
        self, command: Sequence[str], addresses: str, topic: str, offset: int, *, folder: Path
    ) -> None:
        options = ["-C", "-q", "-E", "-u", "-b", addresses, "-t", topic, "-p", "0", "-o", offset]
        options += ["-X", "auto.offset.reset=earliest", "-X", "reconnect.backoff.max.ms=200"]
        super().__init__(command, *options, "-f", r"%o\n%R%s", folder=folder)

    def _listen(self) -> None:
        out = self._process.stdout
        assert out is not None
        while offset := out.readline():
            value = out.read(int.from_bytes(out.read(_LENGTH_BYTES)))
            self.records.append(Record(int(offset), value))

    def _ask_for_end(self) -> None:
        super()._ask_for_end()
        self._process.terminate()  # it does not read its standard input


class Writer(Client):
    """A program that writes."""

    def __init__(self, command: Sequence[str], *arguments: object, folder: Path) -> None:
        self.offsets: dict[int, int] = {}
        """Offsets of the acknowledged records, by number; below 0: it does not know."""
        self.sent: int | None = None
        super().__init__(command, *arguments, folder=folder)

    @property
    def count(self) -> int:
        """How many records are acknowledged."""
        return len(self.offsets)

    def _listen(self) -> None:
        out = self._process.stdout
        assert out is not None
        for line in out:
            match line.decode().split(maxsplit=2):
                case ["written", number, offset]:
                    self.offsets[int(number)] = int(offset)
                case ["sent", count]:
                    self.sent = int(count)
                case _:
                    self.failed.append(line.decode())
