"""Answers for a remote planner of reads: snapshots of logs, their schemas, and places.

The planner's readers use tickets, and never access the ledgers that a snapshot names.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from dlcore.base.errors import LogNotFoundError, LogNotReadyError
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlcore.flight.answers import FoundPlaces, LogPositions, LogSchemas, LogSnapshots
from dlcore.flight.planning import (
    FoundPlace,
    PlacesRequest,
    PositionsRequest,
    SchemasRequest,
    Search,
    SnapshotsRequest,
)
from dlcore.flight.tickets import Latest
from dlcore.log.reading.scan import pack_snapshots
from dlcore.log.reading.schemas import find_targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.scan import LogSnapshot

_LOOKS_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Delays of a proxy's attempts to see records that another proxy knew to be readable."""


class Planning:
    """Answers planners, for one proxy."""

    def __init__(self, namespace: DirectNamespace) -> None:
        self._namespace = namespace

    async def snapshots(self, request: SnapshotsRequest) -> LogSnapshots:
        """Return snapshots of the logs that exist.

        For logs that the planner knows, only later segments are sent.  The cost of repeated
        requests therefore does not grow with a log.

        Raises: InvalidLogNameError, LedgerReadError, MetadataError.
        """
        found = await self._namespace.get_snapshots(request.logs, fresh=True)
        sent = []
        for name, snapshot in found.items():
            known = request.known.get(name)
            if snapshot is not None and known is not None and known.log_id == snapshot.log_id:
                later = tuple(each for each in snapshot.segments if each.lssn >= known.lssn)
                sent.append(replace(snapshot, segments=later))
            elif snapshot is not None:
                sent.append(snapshot)
        return LogSnapshots(pack_snapshots(sent))

    async def schemas(self, request: SchemasRequest) -> LogSchemas:
        """Return by name the schema of each log that exists; for a writer, which are sealed.

        Raises: InvalidLogNameError, MetadataError.
        """
        sealed: list[str] = []
        if request.for_write:
            targets = await find_targets(self._namespace.log_context.logs, request.logs)
            found = {name: target.schema for name, target in targets.items()}
            sealed += (name for name, target in targets.items() if target.sealed)
        else:
            found = await self._namespace.get_schemas(request.logs)
        packed = {
            name: None if schema is None else schema.serialize().to_pybytes()
            for name, schema in found.items()
        }
        return LogSchemas(packed, sealed)

    async def places(self, request: PlacesRequest) -> FoundPlaces:
        """Return the place of the first record of each search.

        Raises:
            LogNotFoundError: a log is gone, or another log has its name.
            LogNotReadyError: this proxy does not see all records before `end` yet.
        """
        ends = [DLSN.parse(search.end) for search in request.searches]
        snapshots = await self._reached(request.searches, ends)
        wanted = [
            (_beginning(snapshots[each.log], each.first), each.at.wanted)
            for each in request.searches
        ]
        places = await self._namespace.find_places(
            [(at, at.end if isinstance(what, Latest) else what) for at, what in wanted]
        )
        # A record behind the client's snapshot is not part of its search: its place is the end.
        beyond = [index for index, place in enumerate(places) if place.dlsn > ends[index]]
        found = await self._namespace.find_places(
            [(wanted[index][0], ends[index]) for index in beyond]
        )
        for index, place in zip(beyond, found, strict=True):
            places[index] = place
        return FoundPlaces([FoundPlace.of(place) for place in places])

    async def positions(self, request: PositionsRequest) -> LogPositions:
        """Return the places of the log's first and last record, of its end, and of each request.

        The place of a record behind the last one is the end.

        Raises: LogNotFoundError, InvalidLogNameError, LedgerReadError, MetadataError.
        """
        log = await self._namespace.open_log(request.log)
        snapshot = await log.get_snapshot()
        wanted = [each.wanted for each in request.at]
        ends = [snapshot.end if isinstance(each, Latest) else each for each in wanted]
        first, end, *found = await self._namespace.find_places(
            [(snapshot, each) for each in (snapshot.first, snapshot.end, *ends)]
        )
        last = None
        if end.sequence_id > first.sequence_id:
            before_end = NotLessThan(RecordField.SEQUENCE_ID, end.sequence_id - 1)
            (last,) = await self._namespace.find_places([(snapshot, before_end)])
        return LogPositions(
            log_id=snapshot.log_id,
            first=None if last is None else FoundPlace.of(first),
            last=None if last is None else FoundPlace.of(last),
            end=FoundPlace.of(end),
            positions=[FoundPlace.of(each) for each in found],
        )

    async def _reached(
        self, searches: Sequence[Search], ends: Sequence[DLSN]
    ) -> dict[str, LogSnapshot]:
        names = sorted({each.log for each in searches})
        for delay_s in _LOOKS_S:
            await asyncio.sleep(delay_s)
            found = await self._namespace.get_snapshots(names, fresh=True)
            known: dict[str, LogSnapshot] = {}
            for each in searches:
                snapshot = found[each.log]
                if snapshot is None or snapshot.log_id != each.log_id:
                    raise LogNotFoundError(
                        f"log {each.log!r} with the id {each.log_id} is gone, or has another name"
                    )
                known[each.log] = snapshot
            late = [
                each.log
                for each, end in zip(searches, ends, strict=True)
                if known[each.log].end < end
            ]
            if not late:
                return known
        raise LogNotReadyError(
            f"log {late[0]!r}: this proxy does not see yet all records that another proxy found "
            "readable: try again"
        )


def _beginning(snapshot: LogSnapshot, first: str | None) -> LogSnapshot:
    return snapshot if first is None else snapshot.starting_at(DLSN.parse(first))
