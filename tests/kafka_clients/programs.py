"""Builds and runs the programs over Kafka's clients in Java and Go; README.md has their words."""

from __future__ import annotations

import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import pytest

from benchmarks.peers.kafka import class_path
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
        self._errors = folder / f"{arguments[0]}-errors"
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
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._thread.join()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def succeed(self) -> None:
        """Wait until it ends by itself, and check that it has not failed."""
        self._process.wait(PATIENCE_S)
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
