"""Lines of a log, plain or JSON, and the levels of modules.

A log contains names, addresses and answers of others.  One message is one line: what
would begin another one, or moves the cursor of a terminal, is escaped.  A traceback of a plain log
follows its message, each line of it indented.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dlcore.base.seldom import SeldomHandler
from dlcore.base.settings import log_levels_of

if TYPE_CHECKING:
    from collections.abc import Mapping

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
