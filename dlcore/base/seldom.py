"""Logs with a limited rate: of many lines of one kind some are written, and the rest is counted.

A client that is refused causes a line in the log, and may come again at once, thousands of times a
second.  Therefore a server writes only some lines of one kind in a minute, and then the number of
the others.  Lines from the same place of the program are of the same kind, whatever their text is.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlcore.base.clock import steady_s

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
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
