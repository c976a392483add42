"""The entrances of the port for Kafka clients: its calls."""

from __future__ import annotations

from dlcore.base.access.entrances import Entrance

_CALLERS = "every caller that can connect: a user, a certificate, anonymous"


def _call(name: str, resource: str, right: str, cost: str) -> Entrance:
    return Entrance(name=name, resource=resource, right=right, callers=_CALLERS, cost=cost)


_ASKED = "one request of at most 256 KiB"
API_VERSIONS = _call(
    "ApiVersions", "the versions of calls", "none", "one request of at most 64 KiB"
)
SASL = _call(
    "SaslHandshake and SaslAuthenticate",
    "the caller's token",
    "none",
    "two requests of at most 64 KiB and one check of a signature; a connection without a proof "
    "lasts 10 s",
)
METADATA = _call(
    "Metadata", "the logs of the request, or of the namespace", "describe on each log", _ASKED
)
LIST_OFFSETS = _call("ListOffsets", "the logs of the request", "describe on each log", _ASKED)
FETCH = _call("Fetch", "the logs of the request", "read on each log", _ASKED)
INIT_PRODUCER_ID = _call("InitProducerId", "a number that no other producer has", "none", _ASKED)
PRODUCE = _call(
    "Produce",
    "the logs of the request",
    "append on each log",
    "one request of at most `message_bytes_max`, within `received_bytes_max`; each batch has at "
    "most as much when it is unpacked; the rates and limits of a stream of `DoPut`",
)
FIND_COORDINATOR = _call("FindCoordinator", "the proxy for a group", "none", _ASKED)
GROUP = _call(
    "JoinGroup, SyncGroup, Heartbeat and LeaveGroup",
    "a group, of the principal of its first member",
    "none",
    "one request of at most 256 KiB; a member is kept for its session, with 32 KiB of its own",
)
OFFSETS = _call(
    "OffsetCommit and OffsetFetch", "the logs of the request", "read on each log", _ASKED
)
ENTRANCES = (
    API_VERSIONS,
    SASL,
    METADATA,
    LIST_OFFSETS,
    FETCH,
    INIT_PRODUCER_ID,
    PRODUCE,
    FIND_COORDINATOR,
    GROUP,
    OFFSETS,
)
"""The calls, in the order of the documentation."""
