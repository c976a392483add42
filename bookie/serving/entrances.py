"""The entrances of a bookie's control service."""

from __future__ import annotations

from dlcore.base.access.entrances import Entrance

_COST = "one small request"


def _call(name: str, resource: str) -> Entrance:
    return Entrance(
        name=name,
        resource=resource,
        right="none",
        callers="a machine's certificate; without TLS every caller that can connect",
        cost=_COST,
        logged="nothing",
    )


ENTRANCES = (
    _call("ListEntries", "the ranges of entries held of a ledger"),
    _call("GetInfo", "the bookie's name, space, counts and clock"),
)
