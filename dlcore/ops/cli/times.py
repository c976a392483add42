"""Times on the command line: written for people, epoch milliseconds in the program."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from click import Context, Parameter

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


class EpochMs(click.ParamType):  # type: ignore[type-arg]
    """A time in ISO 8601 (UTC unless it has a zone), epoch milliseconds, or an age."""

    name = "time"

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

    def convert(self, value: object, param: Parameter | None, ctx: Context | None) -> int:
        """Return the time as epoch milliseconds."""
        text = str(value).strip()
        try:
            return self._epoch_ms(text)
        # Python parses no number of thousands of digits, and has no float so large.
        except (ValueError, OverflowError):
            self.fail(
                f"{text!r} is no time: expected one like 2026-01-31T12:00:00Z, -1h (an hour ago), "
                "or epoch milliseconds",
                param,
                ctx,
            )

    def _epoch_ms(self, text: str) -> int:
        if text.removeprefix("-").isdecimal():
            return int(text)
        if ago := re.fullmatch(r"-(\d+(?:\.\d+)?)([smhd])", text.lower()):
            age_ms = int(float(ago[1]) * _UNITS_S[ago[2]] * 1000)
            return self._now_ms() - age_ms
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return int(moment.timestamp() * 1000)


class Age(click.ParamType):  # type: ignore[type-arg]
    """An age: a number with the unit s, m, h or d, or forever."""

    name = "age"

    def convert(self, value: object, param: Parameter | None, ctx: Context | None) -> float:
        """Return the age in seconds."""
        text = str(value).strip().lower()
        if text == "forever":
            return math.inf
        unit = _UNITS_S.get(text[-1:], 0)
        try:
            age_s = float(text[:-1]) * unit
        except ValueError:
            age_s = 0
        if not 0 < age_s < math.inf:
            self.fail(f"{text!r} is no age: expected one like 7d, 12h, 30m, or forever", param, ctx)
        return age_s


def age_text(age_s: float) -> str:
    """Return an age for people, in the largest unit that gives a whole number."""
    for unit, seconds in reversed(_UNITS_S.items()):
        if age_s % seconds == 0:
            return f"{age_s / seconds:g}{unit}"
    return f"{age_s:g}s"


AGE_S = Age()
