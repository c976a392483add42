"""The entrances of a proxy: the methods of Flight, and the actions of DoAction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.access.entrances import Entrance
from dlcore.base.access.rights import Right
from dlcore.flight.actions import ACTIONS

if TYPE_CHECKING:
    from dlcore.flight.actions import Action

_CALLERS = "every caller that can connect: a user, a certificate, anonymous"
_COST = "one request of at most `message_bytes_max`, and one lookup of names by id"
_AUDITED = (Right.MANAGE.value, Right.TRUNCATE.value)


def _method(name: str, resource: str, right: str, cost: str = _COST) -> Entrance:
    return Entrance(name=name, resource=resource, right=right, callers=_CALLERS, cost=cost)


METHODS = (
    _method("Handshake", "the caller's token", "none", "one message and one check of a signature"),
    _method("DoGet", "the log of the ticket", "read on the log"),
    _method("GetFlightInfo", "the log of the descriptor", "describe on the log"),
    _method("GetSchema", "the log of the descriptor", "describe on the log"),
    _method("ListFlights", "the namespace", "describe on each log; others are left out"),
    _method(
        "DoPut",
        "the log of the first message, or those of staged batches",
        "append on each log",
        "one message of at most `message_bytes_max`",
    ),
    _method("DoAction", "that of the action", "that of the action"),
    _method("ListActions", "the table of actions", "none"),
)
"""The methods, in the order of the documentation."""


def _row(action: Action[Any, Any]) -> Entrance:
    needs = action.needs.text
    return Entrance(
        name=f"DoAction/{action.name}",
        resource="the logs of the request" if "log" in needs else "this proxy or the namespace",
        right=needs,
        callers=_CALLERS,
        cost=_COST,
        logged="calls and denials" if any(each in needs for each in _AUDITED) else "denials",
    )


ENTRANCES = (*METHODS, *map(_row, ACTIONS))
"""All entrances of a proxy, beside gRPC's health service, which every caller may ask."""
