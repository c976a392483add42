"""The story of a run, written so that a person finds the one ledger and entry that went wrong."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

_EXPLAINED_LINES_MAX = 400


class TraceLine(NamedTuple):
    """An action of a process at a virtual second, and its ledger and entry, if any."""

    time_s: float
    who: str
    what: str
    ledger_id: int | None
    entry_id: int | None

    def __str__(self) -> str:
        subject = "" if self.ledger_id is None else str(self.ledger_id)
        if self.entry_id is not None:
            subject += f":{self.entry_id}"
        return f"{self.time_s:9.4f}  {self.who:<14} {subject:>6}  {self.what}"


class Trace:
    """The lines of one run, in the order of events."""

    def __init__(self) -> None:
        self.lines: list[TraceLine] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def note(
        self, who: str, what: str, *, ledger_id: int | None = None, entry_id: int | None = None
    ) -> None:
        """Add a line."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self.lines.append(TraceLine(self._loop.time(), who, what, ledger_id, entry_id))

    def text(self) -> list[str]:
        """Return all lines as text."""
        return [str(line) for line in self.lines]

    def explain(self, ledger_id: int | None, entry_id: int | None) -> str:
        """Return the end of the run, and before it the history of a ledger and an entry."""
        parts: list[str] = []
        if ledger_id is not None:
            history = [
                str(line)
                for line in self.lines
                if line.ledger_id == ledger_id
                and (entry_id is None or line.entry_id is None or line.entry_id == entry_id)
            ]
            subject = f"ledger {ledger_id}" + ("" if entry_id is None else f", entry {entry_id}")
            parts += [f"--- history of {subject}", *history]
        left_out = max(0, len(self.lines) - _EXPLAINED_LINES_MAX)
        parts.append("--- everything" + (f", without the first {left_out} lines" * bool(left_out)))
        parts += map(str, self.lines[left_out:])
        return "\n".join(parts)
