"""Times on the command line: as people write them, as epoch milliseconds inside."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click import Context, Parameter


class EpochMs(click.ParamType):  # type: ignore[type-arg]
    """A time in ISO 8601, in UTC unless it says otherwise, or a number of epoch milliseconds."""

    name = "time"

    def convert(self, value: object, param: Parameter | None, ctx: Context | None) -> int:
        """Return the time as epoch milliseconds."""
        text = str(value).strip()
        if text.removeprefix("-").isdecimal():
            return int(text)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(
                f"{text!r} is no time: expected one like 2026-01-31T12:00:00Z, or epoch "
                "milliseconds",
                param,
                ctx,
            )
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return int(moment.timestamp() * 1000)


EPOCH_MS = EpochMs()
