"""Builds and runs the programs of the black box, which share no code with dlog."""

from __future__ import annotations

import shutil
import subprocess
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
    command = [go, "build", "-o", str(program), "."]
    built = subprocess.run(command, cwd=SOURCE, check=False, capture_output=True, text=True)
    if built.returncode:
        raise ProgramError(f"{' '.join(command)}: {built.stderr}")
    return program


def succeeds(command: Sequence[str]) -> bool:
    """Run a program to its end; it ends itself at the end of its standard input, as ours does."""
    with subprocess.Popen(command, stdin=subprocess.PIPE) as running:
        try:
            return running.wait() == 0
        finally:
            running.kill()
