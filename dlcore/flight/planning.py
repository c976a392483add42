"""The messages of planning: snapshots of logs, searches for records, and their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from dlcore.flight.tickets import Place

if TYPE_CHECKING:
    from dlcore.base.records import RecordPlace

_POSITIONS_MAX = 1000


class SchemasRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Logs by name, and whether the caller writes to them and so asks which are sealed.

    Proxies before 0.3.0 know no `for_write`, and refuse it.
    """

    logs: list[str]
    for_write: bool = False


class KnownLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log whose segments below `lssn` a planner has already, from an earlier snapshot."""

    log_id: str
    lssn: int


class SnapshotsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs by name; for logs in `known`, the answer has only later segments."""

    logs: list[str]
    known: dict[str, KnownLog] = {}


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A search for the first record of a log that is not below `at`, among those before `end`.

    It begins at `first`, as the planner's snapshot does, also if records after it are truncated;
    None: at the first record that is not truncated.
    """

    log: str
    log_id: str
    end: str
    at: Place
    first: str | None = None


class PlacesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several searches."""

    searches: list[Search]


class PositionsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for the ends of a log, and the positions of some of its records."""

    log: str
    at: Annotated[list[Place], msgspec.Meta(max_length=_POSITIONS_MAX)] = []


class FoundPlace(msgspec.Struct, frozen=True):
    """A record's position, the number of records before it, and its time."""

    dlsn: str
    sequence_id: int
    timestamp_ms: int

    @classmethod
    def of(cls, place: RecordPlace) -> FoundPlace:
        """Return the place as an answer."""
        return cls(str(place.dlsn), place.sequence_id, place.timestamp_ms)
