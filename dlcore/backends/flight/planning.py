"""Plans and reads through proxies, with the values of the public API of `dlcore`."""

from __future__ import annotations

import asyncio
import struct
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from dlcore.backends.flight.endpoint import Retries
from dlcore.base.errors import ConfigurationError, EndOfStreamError, LedgerReadError
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import RecordField, RecordPlace
from dlcore.flight import actions
from dlcore.flight.planning import (
    KnownLog,
    PlacesRequest,
    SchemasRequest,
    Search,
    SnapshotsRequest,
)
from dlcore.flight.put import PutMessage
from dlcore.flight.replies import LogInfo
from dlcore.flight.requests import ChangeRequest
from dlcore.flight.sending import Passed
from dlcore.flight.tickets import Place, Ticket
from dlcore.log.entries.batches import numbers_of, read_schema
from dlcore.log.reading.scan import unpack_snapshots
from dlcore.log.reading.scan_run import ScanRun
from dlcore.log.typed.schema import Target

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.base.records import NotLessThan
    from dlcore.flight.actions import Action
    from dlcore.log.metadata.values import LogKey
    from dlcore.log.reading.scan import LogSnapshot, ScanRange

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_MAX_MS = 253_402_300_799_999
"""The latest time that `datetime` can hold, in the year 9999; no record is younger."""
KNOWN_LOGS_MAX = 10_000
"""Most snapshots that are kept, as in `dlcore`; the least recently used one is dropped."""
_Request = TypeVar("_Request", bound=msgspec.Struct)
_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_PREFIX = struct.Struct("<iI")
"""Prefix of an Arrow message: a marker, and the length of its header."""
_POSITIONS = ("dlsn", "txid", "sequence_id", "timestamp")


def arrow_of(message: PutMessage) -> pa.Buffer:
    """Return the Arrow message that a Flight message contains."""
    header = message.data.data_header
    return pa.py_buffer(b"".join((_PREFIX.pack(-1, len(header)), header, message.body)))


class Received(NamedTuple):
    """Rows from a proxy, and the position behind them."""

    batch: pa.RecordBatch
    end: DLSN


async def received(calls: Endpoint, ticket: Ticket) -> AsyncGenerator[Received, None]:
    """Yield the rows of proxies for a ticket; after an outage go on behind the last message.

    Raises: LogNotFoundError, AlreadyTruncatedError, SchemaMismatchError, ProxyUnavailableError.
    """
    schema: pa.Schema | None = None

    def asked() -> pb.Ticket:
        return pb.Ticket(ticket=ticket.encode())

    async with calls.stream("DoGet", asked) as messages:
        async for data in messages:
            message = PutMessage.parse(data)
            arrow = arrow_of(message)
            if not message.data.app_metadata:
                schema = pa.ipc.read_schema(arrow)
                continue
            end = msgspec.json.decode(message.data.app_metadata, type=Passed).next
            ticket = msgspec.structs.replace(ticket, start=Place(dlsn=end))
            batch = pa.ipc.read_record_batch(arrow, schema)
            yield Received(batch, DLSN.parse(end))


async def act(
    calls: Endpoint,
    action: Action[_Request, _Answer],
    request: _Request,
    *,
    extra_s: float = 0.0,
) -> _Answer:
    """Perform an action of a proxy; return its decoded answer.

    An attempt that takes longer than `answer_s` of the action plus `extra_s` is retried.
    """
    message = pb.Action(type=action.name, body=msgspec.json.encode(request))
    within_s = action.answer_s + extra_s
    async with calls.stream("DoAction", lambda: message, within_s=within_s) as results:
        async for data in results:
            return msgspec.json.decode(pb.Result.FromString(data).body, type=action.answer)
    raise AssertionError("a proxy answers each action once")


def asked_by(ticket: Ticket) -> pb.FlightDescriptor:
    """Return the descriptor of a request about the range of a ticket."""
    return pb.FlightDescriptor(type=pb.FlightDescriptor.CMD, cmd=ticket.encode())


async def look(calls: Endpoint, ticket: Ticket) -> tuple[LogInfo, pa.Schema | None]:
    """Return facts about the range of a ticket now, and the columns of a typed log."""
    info = await calls.ask("GetFlightInfo", asked_by(ticket), pb.FlightInfo)
    facts = msgspec.json.decode(info.app_metadata, type=LogInfo)
    return facts, own_columns(info.schema)


def own_columns(message: bytes) -> pa.Schema | None:
    """Return the columns of a typed log, of an Arrow message with those of a log's rows.

    None for a byte log.
    """
    rows = pa.ipc.read_schema(pa.py_buffer(message))
    return None if rows.equals(read_schema()) else rows


async def get_info(calls: Endpoint, log: str, log_id: str | None = None) -> LogInfo:
    """Return facts about a log now."""
    return (await look(calls, Ticket(log=log, log_id=log_id)))[0]


async def seal(calls: Endpoint, log: LogKey, *, again: bool = False) -> None:
    """Seal a log that is not sealed; with `again` an earlier attempt may have sealed it.

    The proxy recognizes a retried request by the log's id, and answers it as the first one.
    """
    if not again and (await get_info(calls, log.name, log.log_id)).sealed:
        raise EndOfStreamError(f"log {log.name!r} is sealed: no record can follow")
    await act(calls, actions.SEAL, ChangeRequest(log=log.name, log_id=log.log_id))


class FlightSnapshots:
    """Takes snapshots; for a log with a kept snapshot it requests only the newer segments."""

    def __init__(self, calls: Endpoint) -> None:
        self._calls = calls
        self._known: dict[str, LogSnapshot] = {}

    async def take(self, names: Sequence[str]) -> dict[str, LogSnapshot | None]:
        """Return a snapshot of each log; None for those that do not exist."""
        names = list(dict.fromkeys(names))
        known = {name: self._known[name] for name in names if name in self._known}
        request = SnapshotsRequest(
            names,
            {
                name: KnownLog(each.log_id, each.segments[-1].lssn)
                for name, each in known.items()
                if each.segments
            },
        )
        answer = await act(self._calls, actions.SNAPSHOTS, request)
        found = {each.log: each for each in unpack_snapshots(answer.snapshots)}
        for name in names:
            before, now = known.get(name), found.get(name)
            self._known.pop(name, None)  # keeps the least recently used one first
            if now is None:
                continue
            if before is not None and before.log_id == now.log_id and before.segments:
                self._known[name] = found[name] = _continued(before, now)
            else:
                self._known[name] = now
        while len(self._known) > max(KNOWN_LOGS_MAX, len(names)):
            del self._known[next(iter(self._known))]
        return {name: found.get(name) for name in names}


def _continued(before: LogSnapshot, now: LogSnapshot) -> LogSnapshot:
    """Return `now`, which begins at the last segment of `before`, with the segments before it.

    Segments that were truncated meanwhile are left out.
    """
    last = before.segments[-1].lssn
    kept = (each for each in before.segments if now.first.lssn <= each.lssn < last)
    return replace(now, segments=(*kept, *now.segments))


async def get_targets(
    calls: Endpoint, names: Sequence[str], *, for_write: bool
) -> dict[str, Target]:
    """Return the columns of each existing log; for a writer also whether it is sealed."""
    request = SchemasRequest(list(names), for_write=for_write)
    try:
        answer = await act(calls, actions.SCHEMAS, request)
    except ConfigurationError:
        if not for_write:
            raise
        # A proxy of 0.2.0 refuses the field, and tells of no seal: the commit refuses the records.
        answer = await act(calls, actions.SCHEMAS, SchemasRequest(list(names)))
    return {
        name: Target(
            None if schema is None else pa.ipc.read_schema(pa.py_buffer(schema)),
            name in answer.sealed,
        )
        for name, schema in answer.schemas.items()
    }


async def find_places(
    calls: Endpoint, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
) -> list[RecordPlace]:
    """Return the place of the first record of each search, in its snapshot."""
    searches = [
        Search(at.log, at.log_id, str(at.end), place_of(what), str(at.first)) for at, what in wanted
    ]
    answer = await act(calls, actions.PLACES, PlacesRequest(searches))
    return [
        RecordPlace(DLSN.parse(each.dlsn), each.sequence_id, each.timestamp_ms)
        for each in answer.places
    ]


def place_of(what: DLSN | NotLessThan) -> Place:
    """Return the place that names a record in a ticket."""
    if isinstance(what, DLSN):
        return Place(dlsn=str(what))
    value = max(0, what.value)
    if what.field is RecordField.TIMESTAMP_MS:
        return Place(time=_EPOCH + timedelta(milliseconds=min(value, _TIME_MAX_MS)))
    if value > TXID_MAX:  # no record has it, so that its place is the end
        return Place(latest=True)
    return Place(txid=value) if what.field is RecordField.TXID else Place(sequence_id=value)


async def scan(
    calls: Endpoint, part: ScanRange, *, patience_s: float
) -> AsyncGenerator[ScanRun, None]:
    """Yield the records of a range, message by message.

    They were readable when the range was planned.  A proxy that does not know this yet is asked
    again.

    Raises:
        AlreadyTruncatedError: records were truncated after the range was planned.
        LogNotFoundError: the log was deleted meanwhile.
        LedgerReadError: no proxy returned all of them within `patience_s`.
        ProxyUnavailableError: no proxy answered for as long as the namespace waits.
    """
    position, retries = part.start, Retries(patience_s)
    columns = _columns_of(part)

    while position < part.end:
        before = position
        ticket = Ticket(
            log=part.log,
            log_id=part.log_id,
            start=Place(dlsn=str(position)),
            end=Place(dlsn=str(part.end)),
            columns=columns,
        )
        async with aclosing(received(calls, ticket)) as messages:
            async for message in messages:
                position = message.end
                yield _run_of(message.batch)
        if position > before:
            retries.succeeded()
        else:
            error = LedgerReadError(
                f"log {part.log!r}: records up to {part.end} were readable when the read was "
                f"planned, but proxies returned none after {position} for {patience_s:g} s"
            )
            await asyncio.sleep(retries.failed(error, None, again=True))


def _columns_of(part: ScanRange) -> list[str]:
    """Return the columns to request: the positions of records, and the wanted columns."""
    if part.schema is None:
        wanted = part.columns is None or "value" in part.columns
        return [*_POSITIONS, *(["value"] if wanted else [])]
    names = [column.name for column in part.schema.latest]
    wanted_names = [name for name in names if part.columns is None or name in part.columns]
    return [*(f"_{name}" for name in _POSITIONS), *wanted_names]


def _run_of(batch: pa.RecordBatch) -> ScanRun:
    """Return the rows of a message, which are of one segment, without copies."""
    dlsns, txids, sequence_ids, timestamps = batch.columns[: len(_POSITIONS)]
    lssns, entries, slots = (numbers_of(each) for each in dlsns.flatten())
    times = timestamps.cast(pa.timestamp("ms", "UTC"))
    sequence, times_ms = numbers_of(sequence_ids), numbers_of(times)
    names = batch.schema.names
    rows = pa.RecordBatch.from_arrays(
        [txids, *batch.columns[len(_POSITIONS) :]], [names[1], *names[len(_POSITIONS) :]]
    )
    starts = np.flatnonzero(np.diff(entries, prepend=-1))
    return ScanRun(
        batch=rows,
        lssn=int(lssns[0]),
        entry_ids=entries[starts],
        records=np.diff(starts, append=batch.num_rows),
        first_slots=slots[starts],
        sequence_ids=sequence[starts],
        timestamps_ms=times_ms[starts],
    )
