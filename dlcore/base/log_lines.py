"""Lines of a log: plain or JSON, at a limited rate, and the levels of modules.

A log contains names, addresses and answers of others.  One message is one line: what
would begin another one, or moves the cursor of a terminal, is escaped.  A traceback of a plain log
follows its message, each line of it indented.

A client that is refused causes a line in the log, and may come again at once, thousands of times a
second.  Therefore a server writes only some lines of one kind in a minute, and then the number of
the others.  Lines from the same place of the program are of the same kind, whatever their text is.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dlcore.base.clock import steady_s
from dlcore.base.settings import log_levels_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from typing import TextIO


PERIOD_S = 60.0
_WARNINGS_MAX = 20
_NOTES_MAX = 600
"""Most lines of one kind in a period, below the level of a warning; a program writes many at its
start."""
_SHOWN_MAX = 200


@dataclass(slots=True)
class _Period:
    begun_s: float
    written: int = 0
    left_out: int = 0


class Seldom:
    """Decides which lines of each kind are written: the first `count_max` in `period_s` seconds."""

    def __init__(self, count_max: int, *, period_s: float = PERIOD_S) -> None:
        self._count_max = count_max
        self._period_s = period_s
        self._periods: dict[Hashable, _Period] = {}

    def is_written(self, kind: Hashable, *, now_s: float) -> bool:
        """Return whether to write one more line of a kind; call `left_out` before."""
        period = self._periods.setdefault(kind, _Period(now_s))
        if period.written < self._count_max:
            period.written += 1
            return True
        period.left_out += 1
        return False

    def left_out(self, *, now_s: float) -> dict[Hashable, int]:
        """Return how many lines of each kind were left out in past periods, and forget these."""
        over = {
            kind: period
            for kind, period in self._periods.items()
            if now_s - period.begun_s >= self._period_s
        }
        for kind in over:
            del self._periods[kind]
        return {kind: period.left_out for kind, period in over.items() if period.left_out}


class SeldomHandler(logging.StreamHandler[Any]):
    """Writes a log with a limited rate of each kind of line.

    The number of omitted lines is written once their minute is over, and at the latest when the
    program ends.
    """

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = steady_s
    ) -> None:
        super().__init__(stream)
        self._clock = clock
        self._warnings = Seldom(_WARNINGS_MAX)
        self._notes = Seldom(_NOTES_MAX)
        self._like: dict[Hashable, str] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless there were too many of its kind."""
        now_s = self._clock()
        self._tell_left_out(now_s)
        if record.levelno < logging.INFO:
            super().emit(record)
            return
        kind = (record.name, record.levelno, record.pathname, record.lineno)
        seldom = self._warnings if record.levelno >= logging.WARNING else self._notes
        if seldom.is_written(kind, now_s=now_s):
            super().emit(record)
            return
        self._like[kind] = str(record.msg)[:_SHOWN_MAX]
        if self._timer is None:
            self._timer = threading.Timer(PERIOD_S, self._tell_later)
            self._timer.daemon = True
            self._timer.start()

    def _tell_later(self) -> None:
        # In the timer's thread: others call `emit` with this lock held.
        with self.lock or threading.RLock():
            self._timer = None
            self._tell_left_out(self._clock())

    def _tell_left_out(self, now_s: float) -> None:
        for seldom in (self._warnings, self._notes):
            for kind, count in seldom.left_out(now_s=now_s).items():
                assert isinstance(kind, tuple)
                name, level, path, line = kind
                text, like = "%d more like this were left out: %s", self._like.pop(kind)
                super().emit(logging.LogRecord(name, level, path, line, text, (count, like), None))

    def close(self) -> None:
        """Write the numbers of omitted lines, and nothing after that."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell_left_out(float("inf"))
        super().close()


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that end a line somewhere, or steer a terminal."""


@dataclass(frozen=True, slots=True)
class Process:
    """The process that writes a log."""

    role: str
    """One of bookie, proxy, autorecovery, metadata-server, sandbox and dlog."""
    name: str
    """The name of this one."""

    @classmethod
    def here(cls, role: str) -> Process:
        """Return this process, named by its machine and number."""
        return cls(role, f"{socket.gethostname()}:{os.getpid()}")


class PlainLines(logging.Formatter):
    """Writes time, level, logger and message; a traceback below, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a message."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        """Return the lines of a traceback."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """Return the lines of a stack."""
        return _indented(super().formatStack(stack_info))


class JsonLines(logging.Formatter):
    """Writes each message as an object on a line of its own, with ASCII characters only."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the object of a message."""
        time = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "role": self._process.role,
            "name": self._process.name,
            "pid": os.getpid(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def escaped(text: str) -> str:
    r"""Return `text` on one line: control characters are written like ``\n`` or ``\x1b``."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def lines_of(log_format: str, process: Process) -> logging.Formatter:
    """Return what formats the messages of a process in one of `LOG_FORMATS`."""
    return JsonLines(process) if log_format == "json" else PlainLines()


def log_to_stderr(process: Process, *, log_format: str, log_level: str) -> None:
    """Write the log of a server program to standard error."""
    handler = SeldomHandler(sys.stderr)
    handler.setFormatter(lines_of(log_format, process))
    logging.basicConfig(handlers=[handler])
    set_log_level(log_level)


def set_log_level(log_level: str) -> None:
    """Apply the level of the program and those of modules; modules named before lose theirs.

    Raises:
        ConfigurationError: as `log_levels_of`.
    """
    global _levels
    levels = log_levels_of(log_level)
    for name in _levels.keys() - levels.keys():
        logging.getLogger(name).setLevel(logging.NOTSET)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level.upper())
    _levels = {name: level for name, level in levels.items() if name}


_levels: Mapping[str, str] = {}
"""The modules that have a level of their own."""


def _indented(text: str) -> str:
    return "\n".join(f"    {escaped(line)}" for line in text.split("\n"))
