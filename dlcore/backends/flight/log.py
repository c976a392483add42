"""One log over proxies."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from typing_extensions import override

from dlcore.api.log import DistributedLogManager
from dlcore.backends.flight import planning, subscriptions
from dlcore.backends.flight.planning import place_of
from dlcore.backends.flight.reader import FlightReader, open_part, place_of_start
from dlcore.backends.flight.subscriptions import FlightHold
from dlcore.backends.flight.writing import FlightWriter, append_if, append_once as append_claimed
from dlcore.base.clock import SystemClock
from dlcore.base.config import LogConfig, require_kind
from dlcore.base.errors import (
    ConfigurationError,
    LogNotFoundError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN, require_identity, validate_log_name
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import NotLessThan, RecordField
from dlcore.flight import actions
from dlcore.flight.producer_client import MESSAGE_BYTES
from dlcore.flight.requests import (
    ChangeRequest,
    RenameRequest,
    SchemaRequest,
    SettingsRequest,
    StreamRequest,
    TruncateRequest,
)
from dlcore.flight.tickets import Place, Ticket
from dlcore.log.entries.body import batch_of
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.log_range import LogRange
from dlcore.log.reading.ranges import RangeExtent, RangeView, require_columns
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.reading.status import LogStatus
from dlcore.log.typed.arrow import schema_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow.compute as pc

    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.base.config import LogSettings
    from dlcore.base.records import LogRecord, RecordPlace
    from dlcore.flight.replies import LogInfo
    from dlcore.log.entries.stamp import Claim
    from dlcore.log.reading.ranges import Bound
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.typed.schema import Column

_STREAM_PRODUCER = "dlog-byte-stream"
"""The producer of all writers of bytes: a new incarnation fences the earlier writer."""
_CLIENT_FIELDS = ("buffer_bytes", "flush_interval_s")
"""The fields of `LogConfig` that the client itself uses, in a blocking writer."""


def client_config(config: LogConfig | None) -> LogConfig:
    """Return the configuration of a client of proxies.

    Raises: UnsupportedError: a field is set that only the writers of the proxies have.
    """
    if config is None:
        return LogConfig(buffer_bytes=MESSAGE_BYTES)
    require_kind("config", config, LogConfig)
    default = LogConfig()
    for name in (each.name for each in fields(LogConfig) if each.name not in _CLIENT_FIELDS):
        value = getattr(config, name)
        if value != getattr(default, name):
            raise UnsupportedError(
                f"{name}={value!r}: proxies have a configuration of their own; a client of proxies "
                f"sets {' and '.join(_CLIENT_FIELDS)}"
            )
    return config


class FlightLog(DistributedLogManager):
    """One log; use `FlightNamespace.open_log`."""

    def __init__(self, endpoint: Endpoint, log: LogKey, config: LogConfig | None = None) -> None:
        self._endpoint = endpoint
        self._log = log
        self._config = client_config(config)

    @property
    def _calls(self) -> Endpoint:
        self._require_open()
        return self._endpoint

    async def _info(self) -> LogInfo:
        """Return facts about the log now.  Raises: LogNotFoundError, ProxyUnavailableError."""
        return await planning.get_info(self._calls, self.name, self.log_id)

    @override
    async def get_schema(self) -> pa.Schema | None:
        asked = planning.asked_by(Ticket(log=self.name, log_id=self.log_id))
        answer = await self._calls.ask("GetSchema", asked, pb.SchemaResult)
        return planning.own_columns(answer.schema)

    @override
    async def _update_schema(self, columns: tuple[Column, ...], *, merge: bool) -> pa.Schema:
        if not merge:
            self._unsupported("update_schema(merge=False)")
        request = SchemaRequest(self.name, schema_of(columns).serialize().to_pybytes(), self.log_id)
        await planning.act(self._calls, actions.MERGE_SCHEMA, request)
        merged = await self.get_schema()
        assert merged is not None, "a proxy merges columns of typed logs only"
        return merged

    @override
    async def get_snapshot(self) -> LogSnapshot:
        name = self.name
        while True:
            found = (await planning.FlightSnapshots(self._calls).take([name]))[name]
            if found is not None and found.log_id == self.log_id:
                return found
            # It may have been renamed: proxies find it by its id, and say its present name.
            present = (await self._info()).name
            if present in (None, name):
                raise LogNotFoundError(
                    f"log {name!r} with the id {self.log_id} is gone, or has another name"
                )
            name = present

    @override
    async def _places(
        self, snapshot: LogSnapshot, *wanted: DLSN | NotLessThan
    ) -> list[RecordPlace]:
        return await planning.find_places(self._calls, [(snapshot, each) for each in wanted])

    @override
    async def get_last_dlsn(self) -> DLSN:
        last = (await self._info()).last
        if last is None:
            raise self._no_record()
        return DLSN.parse(last)

    @override
    async def is_end_of_stream_marked(self) -> bool:
        return (await self._info()).sealed

    @override
    async def status(self) -> LogStatus:
        snapshot, info = await self.get_snapshot(), await self._info()
        extents = [each for segment in snapshot.segments for each in segment.extents]
        return LogStatus(
            name=self.name,
            log_id=self.log_id,
            first=None if info.first is None else DLSN.parse(info.first),
            last=None if info.last is None else DLSN.parse(info.last),
            last_txid=extents[-1].last_txid if extents and info.records else None,
            record_count=info.records,
            size_bytes=info.size_bytes,
            segment_count=len(snapshot.segments),
            sealed=info.sealed,
            last_timestamp_ms=extents[-1].last_timestamp_ms if extents else 0,
            now_ms=SystemClock().now_ms(),
        )

    @override
    async def _truncate(self, start: ReadStart) -> bool:
        request = TruncateRequest(
            log=self.name,
            log_id=self.log_id,
            dlsn=None if start.dlsn is None else str(start.dlsn),
            txid=start.txid,
            timestamp_ms=start.timestamp_ms,
        )
        return (await planning.act(self._calls, actions.TRUNCATE, request)).truncated

    @override
    async def _update_settings(self, changes: Mapping[str, object]) -> LogSettings:
        request = SettingsRequest(log=self.name, log_id=self.log_id, changes=dict(changes))
        return (await planning.act(self._calls, actions.SETTINGS, request)).settings

    @override
    async def delete(self) -> None:
        request = ChangeRequest(log=self.name, log_id=self.log_id)
        await planning.act(self._calls, actions.DELETE, request)

    @override
    async def rename(self, name: str) -> None:
        name = validate_log_name(name)
        request = RenameRequest(log=self.name, log_id=self.log_id, new_name=name)
        await planning.act(self._calls, actions.RENAME, request)
        self._log = LogKey(name=name, log_id=self.log_id)

    @override
    async def mark_end_of_stream(self) -> None:
        await planning.seal(self._calls, self._log)

    @override
    async def _open_range(
        self,
        start: Bound | None,
        end: Bound | None,
        columns: Sequence[str] | None,
        where: pc.Expression | None,
    ) -> LogRange:
        first = None if start == DLSN.INITIAL else _place_of(start)
        asked = Ticket(log=self.name, log_id=self.log_id, start=first, end=_place_of(end))
        info, own = await planning.look(self._calls, asked)
        last = DLSN.parse(info.end)
        extent = RangeExtent(
            log=self.name,
            start=last if info.first is None else DLSN.parse(info.first),
            end=last,
            record_count_estimate=info.records,
            size_bytes_estimate=info.size_bytes,
        )
        view = RangeView(self.name, own, columns, where, narrows=True)
        return LogRange(extent, partial(open_part, self._calls, self._log, extent, view), view)

    @override
    async def open_writer(
        self, *, producer: str | None = None, ledger_metadata: Mapping[str, str] | None = None
    ) -> FlightWriter:
        if ledger_metadata is not None:
            self._unsupported("open_writer(ledger_metadata=…)")
        writer = FlightWriter(
            self._calls, self._log, producer, self._calls.patience_s, self._config
        )
        await writer._open()
        return writer

    @override
    async def append(
        self, records: Sequence[LogRecord] | pa.RecordBatch, *, expected: DLSN | None
    ) -> DLSN | None:
        if not isinstance(records, pa.RecordBatch):
            txids, payloads = [each.txid for each in records], [each.payload for each in records]
            records = batch_of(txids, payloads)
        if not records.num_rows:
            raise ConfigurationError("an append has no records: expected one at least")
        return await append_if(self._calls, self._log, records, expected, self._calls.patience_s)

    @override
    async def open_reader(
        self,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        subscriber: str | None = None,
        columns: Sequence[str] | None = None,
        skip_broken_entries: bool = False,
        ignore_truncation: bool = False,
    ) -> FlightReader:
        if skip_broken_entries or ignore_truncation:
            self._unsupported("open_reader(skip_broken_entries=…, ignore_truncation=…)")
        require_columns(columns)
        start, hold = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms), None
        if subscriber is not None:
            hold = FlightHold(self._calls, self._log, require_identity("subscriber", subscriber))
            await hold.take(waits=True)
            dlsn = hold.position if start == ReadStart() else dlsn
        reader = FlightReader(self._calls, self._log, columns, hold)
        await reader.seek(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        return reader

    @override
    async def get_subscriptions(self) -> dict[str, DLSN]:
        found = await subscriptions.show(self._calls, self._log)
        return {subscriber: DLSN.parse(seen.dlsn) for subscriber, seen in found.items()}

    @override
    async def _move_subscription(self, subscriber: str, start: ReadStart) -> DLSN:
        position = start.dlsn or DLSN.INITIAL
        if start.txid is not None or start.timestamp_ms is not None:
            asked = Ticket(log=self.name, log_id=self.log_id, start=place_of_start(start))
            # It refuses a transaction id that was truncated.
            info, _ = await planning.look(self._calls, asked)
            position = DLSN.parse(info.first or info.end)
        await FlightHold(self._calls, self._log, subscriber).take(position, waits=False)
        return position

    @override
    async def _delete_subscription(self, subscriber: str) -> bool:
        return await subscriptions.forget(self._calls, self._log, subscriber)

    @override
    async def _begin_stream(self) -> tuple[FlightWriter, int]:
        # The writer first: it fences the earlier one, whose bytes would move the end otherwise.
        writer = await self.open_writer(producer=_STREAM_PRODUCER)
        try:
            return writer, (await self._stream_end(flush=True))[0]
        except BaseException:
            await writer.abort()
            raise

    @override
    async def _open_bytes_reader(self) -> FlightReader:
        reader = FlightReader(self._calls, self._log, ["dlsn", "txid", "value"])
        await reader.seek()
        if reader.is_typed:
            await reader.aclose()
            raise self._of_another_kind(typed=True)
        return reader

    @override
    async def _stream_end(self, *, flush: bool = False) -> tuple[int, bool]:
        request = StreamRequest(log=self.name, log_id=self.log_id, flush=flush)
        answer = await planning.act(self._calls, actions.STREAM_END, request)
        return answer.position, answer.sealed


async def append_once(log: FlightLog, batch: pa.RecordBatch, claim: Claim) -> DLSN | None:
    """Append a batch with rows, unless the log holds it under this claim, whose base is 0.

    Returns: the position of its last row, also if it was appended before; None if the log does not
    know it any more.

    Raises: ProducerFencedError: the log knows the claim's producer by another claim; else as
    `DistributedLogManager.append`.
    """
    calls = log._calls
    return await append_claimed(calls, log._log, batch, claim, calls.patience_s)


def _place_of(bound: Bound | None) -> Place | None:
    if bound is None:
        return None
    if isinstance(bound, datetime):
        return Place(time=bound)
    return place_of(bound if isinstance(bound, DLSN) else NotLessThan(RecordField.TXID, bound))
