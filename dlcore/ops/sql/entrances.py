"""The entrances of `dlog sql`: three methods of Flight with the commands of Flight SQL."""

from __future__ import annotations

from dlcore.base.access.entrances import Entrance

_CALLERS = "a user whom the proxies know by a token; where they check none, every caller"


def _method(name: str, right: str, cost: str) -> Entrance:
    return Entrance(
        name=name,
        resource="the logs of the statement, or the names of logs",
        right=right,
        callers=_CALLERS,
        cost=cost,
        logged="as the proxies do",
    )


ENTRANCES = (
    _method("GetFlightInfo", "none: it only repeats the statement", "one request"),
    _method(
        "DoGet",
        "read on each log of a statement; describe on each that is listed",
        "one process for a statement, which ends when a proxy has refused its token",
    ),
    _method(
        "DoAction",
        "to prepare: read on each log of the statement; to close: none",
        "one process for a statement that is prepared, which ends with the answer",
    ),
)
"""All of them; the server has no other method."""
