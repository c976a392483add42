"""Messages from a proxy beside Flight's own: replies to a stream of DoPut, and facts about ranges.

Each is a JSON object in the `app_metadata` of Flight's message.
"""

from __future__ import annotations

import msgspec

from dlcore.base.html_tables import ShownFields
from dlcore.log.entries.stamp import Claim
from dlcore.log.metadata.segment import StagedExtent


class Ready(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The proxy accepts the stream, and the limits of the stream.

    `window_records` and `window_bytes` are the most that may be accepted and not durable.  With a
    producer the reply has the incarnation, and the sequence of its last record, -1 before the
    first.
    """

    log: str
    window_records: int
    window_bytes: int
    message_bytes_max: int
    producer: Claim | None = None
    sequence: int | None = None


class End(msgspec.Struct, frozen=True, array_like=True):
    """The end of a message: its last record is number `records` of the stream, at `dlsn`.

    The last `together` records of the message are consecutive in one entry.
    """

    records: int
    dlsn: str | None
    together: int


class Draining(msgspec.Struct, frozen=True):
    """The proxy releases the log; `location` is the next owner, if that is known."""

    location: str | None = None


class PutReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reply to a stream of records: `ready`, `acked` or `draining`.

    `acked` records of the stream are durable, and `dlsn` is the position of the last of them, null
    if it is not known any more.  `ends` are there on request.  Since the reply before, batches
    waited for `throttled_ms` because of limits of rates.
    """

    ready: Ready | None = None
    acked: int | None = None
    dlsn: str | msgspec.UnsetType | None = msgspec.UNSET
    ends: list[End] = []
    throttled_ms: int = 0
    draining: Draining | None = None


class StagingReady(msgspec.Struct, frozen=True):
    """The proxy accepts a stream to stage under this identity."""

    staging: str
    message_bytes_max: int


class StagingReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reply to a stream that stages: `ready`, then `staged` or `refused` before the status."""

    ready: StagingReady | None = None
    staged: list[StagedExtent] | None = None
    throttled_ms: int = 0
    refused: bool = False


class LogInfo(ShownFields, msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a range of a log, in the metadata of a FlightInfo.

    Attributes:
        log_id: the log's identity.
        first: the position of the first record; None without records.
        last: the position of the last record; None without records.
        end: the position after the last record; later records begin there.
        records: the number of records.
        size_bytes: an estimate of the bytes that they take in their entries.
        sealed: whether no record can follow in the log.
        owner: the location of the proxy that owns the log, or, if none does, should.
        name: the log's present name, which may differ from that of the request; proxies before
            0.3.0 do not say it.
    """

    log_id: str
    first: str | None = None
    last: str | None = None
    end: str
    records: int
    size_bytes: int
    sealed: bool
    owner: str | None = None
    name: str | None = None


class PartInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a part, in the metadata of a FlightEndpoint; `tail`: the part may grow.

    The numbers are estimates.
    """

    start: str
    end: str
    records: int
    size_bytes: int
    tail: bool
