"""Builds and runs the programs of the black box, which share no code with dlog."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCE = Path(__file__).parent


class ProgramError(Exception):
    """A program cannot be built; the message says what is missing."""


def build(folder: Path) -> Path:
    """Build the Go program into a folder; return its path.

    Raises:
        ProgramError: there is no Go, or what it said of the program.
    """
    go = shutil.which("go")
    if go is None:
        raise ProgramError("go is not installed, which the black box needs (https://go.dev/dl)")
    program = folder / "blackbox"
    _make([go, "build", "-o", str(program), "."], SOURCE)
    return program


def build_java(folder: Path) -> list[str]:
    """Build the Java program into a folder; return the command that runs it.

    Raises:
        ProgramError: there is no Maven or no Java, or what it said of the program.
    """
    for tool in ("mvn", "java"):
        if shutil.which(tool) is None:
            raise ProgramError(f"{tool} is not installed, which the clients in Java need")
    built = folder / "java"
    shutil.copytree(SOURCE / "java", built)
    _make(
        ["mvn", "-q", "compile", "dependency:build-classpath", "-Dmdep.outputFile=classpath"], built
    )
    libraries = (built / "classpath").read_text(encoding="utf-8").strip()
    opens = "--add-opens=java.base/java.nio=ALL-UNNAMED"  # as Arrow asks for
    return [
        "java",
        "-Xmx512m",
        opens,
        "-cp",
        f"{built / 'target/classes'}:{libraries}",
        "Histories",
    ]


def _make(command: Sequence[str], folder: Path) -> None:
    made = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if made.returncode:
        raise ProgramError(f"{' '.join(command)}: {made.stdout}{made.stderr}")


def succeed(*commands: Sequence[str]) -> bool:
    """Run programs side by side; they end themselves at the end of their standard input."""
    with ExitStack() as stack:
        running = []
        for command in commands:
            each = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            stack.callback(each.kill)
            running.append(each)
        statuses = [each.wait() for each in running]
    return not any(statuses)
