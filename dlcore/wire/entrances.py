"""The entrances of a bookie: the framed messages that a client may send.

`BookieEnd` refuses a kind that is not among them, and `reach_of` says exactly what a capability
must give for each request.
"""

from __future__ import annotations

from dlcore.base.access.entrances import Entrance
from dlcore.wire.messages import Kind

_CALLERS = "a machine's certificate; a capability; without TLS every caller that can connect"
_REFUSED = "one frame of at most 5 MiB within the budget of the bookie, and an answer"


def _request(kind: Kind, right: str, resource: str = "entries of one ledger") -> Entrance:
    return Entrance(name=kind.name, resource=resource, right=right, callers=_CALLERS, cost=_REFUSED)


def _connection(kind: Kind, cost: str) -> Entrance:
    return Entrance(
        name=kind.name,
        resource="the connection itself",
        right="none",
        callers="every caller that can connect",
        cost=cost,
        logged="refusals, at a limited rate",
    )


ENTRANCES = (
    _connection(Kind.HELLO, "a connection for 10 s at most; the answer names cluster and bookie"),
    _connection(Kind.AUTHORIZE, "one check of a signature; the eighth refusal ends the connection"),
    _request(Kind.ADD, "ADD; with RECOVER for a recovery's add"),
    _request(Kind.WRITE_LAC, "ADD"),
    _request(Kind.READ_LAC, "READ; with FENCE if it fences"),
    _request(Kind.READ_HELD, "READ"),
    _request(Kind.READ_ENTRY, "READ of this entry; with FENCE if it fences"),
    _request(Kind.READ_ENTRIES, "READ of all its entries"),
    _request(Kind.FOLLOW, "READ of all entries from its first one on"),
    _connection(Kind.CREDIT, "one frame of 28 bytes"),
    _connection(Kind.CANCEL, "one frame of 24 bytes"),
    _connection(Kind.PING, "one frame and its answer"),
    _connection(Kind.PONG, "one frame of 24 bytes"),
)
"""In the order in which a connection uses them."""
