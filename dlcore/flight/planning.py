"""The messages of planning: snapshots of logs, searches for records, and their answers."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from dlcore.flight.tickets import Place
from dlcore.log.reading.scan import LogSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.records import RecordPlace

_POSITIONS_MAX = 1000


class LogsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs by name."""

    logs: list[str]


class KnownLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log of which a planner has a snapshot: the segments below `lssn` are as he knows them."""

    log_id: str
    lssn: int


class SnapshotsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs by name; of those in `known` only later segments are asked for."""

    logs: list[str]
    known: dict[str, KnownLog] = {}


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first record of a log that is not below `at`, of those before `end`."""

    log: str
    log_id: str
    end: str
    at: Place


class PlacesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several searches."""

    searches: list[Search]


class PositionsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a log begins and ends, and where some of its records are."""

    log: str
    at: Annotated[list[Place], msgspec.Meta(max_length=_POSITIONS_MAX)] = []


class FoundPlace(msgspec.Struct, frozen=True):
    """Where a record is, how many are before it, and when it was written."""

    dlsn: str
    sequence_id: int
    timestamp_ms: int

    @classmethod
    def of(cls, place: RecordPlace) -> FoundPlace:
        """Tell of a place."""
        return cls(str(place.dlsn), place.sequence_id, place.timestamp_ms)


def pack_snapshots(snapshots: Sequence[LogSnapshot]) -> bytes:
    """Return snapshots as bytes for a client of this release."""
    return zlib.compress(msgspec.msgpack.encode(snapshots), level=1)


def unpack_snapshots(packed: bytes) -> list[LogSnapshot]:
    """Return what `pack_snapshots` packed."""
    return msgspec.msgpack.decode(zlib.decompress(packed), type=list[LogSnapshot])
