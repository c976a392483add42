"""Staging: records that are durable in ledgers of their own, and belong to no log yet.

A process stages for all its logs in one ledger (one per quorum, if the logs differ in theirs), so
that the number of ledgers grows with neither logs nor appends.  The entries of one log are
contiguous: records for other logs wait in memory meanwhile, up to a bound.  Each run becomes an
extent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace
from typing_extensions import override

from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    MetadataVersionError,
    NoNodeError,
    WriteError,
)
from dlcore.log.entries.batches import byte_log_batch
from dlcore.log.entries.body import Compressor
from dlcore.log.entries.encryption import encryptor_for
from dlcore.log.metadata.changes import SegmentLimits
from dlcore.log.metadata.segment import StagedExtent
from dlcore.log.staging.commit import require_few_logs
from dlcore.log.staging.faces import StagingWriter
from dlcore.log.typed.rows import TypedRows
from dlcore.log.upkeep.staged import create_staged_ledger, drop, read_staged
from dlcore.log.writing.transmit import Run, Transmitter
from dlcore.log.writing.typed import FittingSchema
from dlcore.metadata.port import UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    import pyarrow as pa

    from dlcore.base.config import LogConfig, QuorumConfig
    from dlcore.ledger.writing.writer import LedgerWriter
    from dlcore.log.context import LogContext
    from dlcore.log.entries.encryption import EntryEncryptor
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.store import LogStore
    from dlcore.log.metadata.values import LogMetadata

logger = logging.getLogger(__name__)

NAMES_KEPT_S = 10.0
"""How long a writer uses the ids that it found for names of logs."""
QUEUED_BYTES_MAX = 32 * 1024 * 1024
"""If more bytes than this wait for the turn of their log, the log with the most is sent early."""


class _Part:
    """The records for one log since the last `stage`."""

    def __init__(
        self,
        log: LogMetadata,
        config: LogConfig,
        encryptor: EntryEncryptor | None,
        *,
        has_txids: bool,
    ) -> None:
        self.log = log
        self.encryptor = encryptor
        self.has_txids = has_txids
        self.compressor = Compressor(config.compression)
        self.transmitter: Transmitter[None] = Transmitter(entry_bytes=config.entry_bytes)
        self.run: Run | None = None
        self.extents: list[StagedExtent] = []


class _Lane:
    """The ledger being filled for logs of one quorum."""

    def __init__(self, quorum: QuorumConfig) -> None:
        self.quorum = quorum
        self.ledger: LedgerWriter | None = None
        self.started_ms = 0
        self.timestamp_ms = 0
        self.part: _Part | None = None  # the part whose turn it is


class _KnownLogs:
    """The logs that were named, with their settings and schemas."""

    def __init__(self, store: LogStore, config: LogConfig) -> None:
        self._store = store
        self._config = config
        self.by_name: dict[str, LogMetadata] = {}
        self._found_s = 0.0  # when the first of the names was looked up
        self._configs: dict[str, LogConfig] = {}  # by log id, with the settings of the log
        self._schemas: dict[str, FittingSchema] = {}  # by log id, for typed logs

    async def find(self, names: Collection[str]) -> None:
        """Look up those of the names that are not known."""
        unknown = sorted({*names}.difference(self.by_name))
        if not unknown:
            return
        if not self.by_name:
            self._found_s = asyncio.get_running_loop().time()
        found = await self._store.find_many(unknown)
        await self._read_settings(found)
        schemas = await self._store.read_schemas(found)
        for log, schema in zip(found, schemas, strict=True):
            if schema is not None:
                self._schemas[log.log_id] = FittingSchema(self._store, log, schema)
        self.by_name.update(zip(unknown, found, strict=True))

    async def _read_settings(self, logs: Sequence[LogMetadata]) -> None:
        settings = await self._store.read_settings_of(logs)
        for log, each in zip(logs, settings, strict=True):
            self._configs[log.log_id] = self._config.with_settings(each)

    async def refresh_settings(self) -> None:
        """Read the settings again, which may have changed."""
        await self._read_settings(list(self.by_name.values()))

    def config_of(self, log: LogMetadata) -> LogConfig:
        """Return the configuration of the log's records."""
        return self._configs[log.log_id]

    async def fit(
        self, log: LogMetadata, batch: pa.RecordBatch
    ) -> tuple[pa.RecordBatch | TypedRows, bool]:
        """Return rows as entries of the log hold them, and whether they have transaction ids."""
        if log.typed:
            return await self._schemas[log.log_id].fit_latest(batch)
        has_txids = batch.schema.get_field_index("txid") >= 0
        return byte_log_batch(batch, assigned_txid=0), has_txids

    def forget_names(self) -> None:
        """Forget names that were found long ago, as another log may have them now.

        Call it only between extents.
        """
        if asyncio.get_running_loop().time() - self._found_s >= NAMES_KEPT_S:
            self.by_name.clear()


class _StagedLedgers:
    """The ledgers of one identity that are not settled."""

    def __init__(self, context: LogContext, owner: StagingOwner, identity: str) -> None:
        self._context = context
        self._owner = owner
        self._identity = identity
        self.entries: dict[int, int] = {}
        """How many entries are in extents, by ledger."""
        self.round = 0

    async def create(self, quorum: QuorumConfig) -> LedgerWriter:
        """Create a ledger."""
        ledger = await create_staged_ledger(
            self._context, self._owner, quorum, identity=self._identity, custom={}
        )
        self.entries[ledger.ledger_id] = 0
        return ledger

    async def settle(self, *, open_ids: Collection[int], are_decided: bool) -> None:
        """Settle the ledgers that are full, and whose entries are all committed, or all decided."""
        filled = [ledger_id for ledger_id in self.entries if ledger_id not in open_ids]
        nodes = await read_staged(self._context, filled)
        for ledger_id in filled:
            node = nodes.get(ledger_id)
            committed = sum(end + 1 - start for start, end in node.staged.committed) if node else 0
            is_due = are_decided or committed >= self.entries[ledger_id]
            if node is None or (is_due and await drop(self._context, node)):
                del self.entries[ledger_id]

    async def leave(self, *, delete: bool) -> None:
        """Settle the ledgers without staged entries, or all of them, and give up the others."""
        nodes = await read_staged(self._context, sorted(self.entries))
        for ledger_id, count in list(self.entries.items()):
            node = nodes.get(ledger_id)
            if node is not None and (delete or count == 0):
                await drop(self._context, node)
            elif node is not None:
                await self._disown(ledger_id)
            del self.entries[ledger_id]  # once it is left: a call that was cancelled is repeated

    async def _disown(self, ledger_id: int) -> None:
        while True:
            node = (await read_staged(self._context, [ledger_id])).get(ledger_id)
            if node is None or not node.staged.owner:
                return
            put = node.put(replace(node.staged, owner=""))
            with contextlib.suppress(NoNodeError, MetadataVersionError, *UNANSWERED):
                await self._context.store.multi([put])
                return


class DirectStagingWriter(StagingWriter):
    """Stages records for any number of logs, under one identity.

    Each `stage` ends the extents.  A log that is renamed meanwhile still gets its records, by its
    id, for up to `NAMES_KEPT_S`; then its old name leads nowhere, or to another log.  A ledger
    stays open over several `stage` calls; a new one is begun when it has the size or age of a
    segment.
    """

    def __init__(
        self, context: LogContext, owner: StagingOwner, identity: str, config: LogConfig
    ) -> None:
        super().__init__(identity)
        self._context = context
        self._limits = SegmentLimits.of(config)
        self._logs = _KnownLogs(context.logs, config)
        self._parts: dict[str, _Part] = {}
        self._queued_bytes = 0
        self._lanes: dict[QuorumConfig, _Lane] = {}
        self._staged = _StagedLedgers(context, owner, identity)
        self._error: DLError | None = None

    def __repr__(self) -> str:
        return f"<StagingWriter identity={self._identity!r} logs={len(self._logs.by_name)}>"

    @override
    async def _write_batches(self, parts: Sequence[tuple[str, pa.RecordBatch]]) -> None:
        self._require_usable()
        require_few_logs(self._parts.keys() | {log for log, batch in parts if batch.num_rows})
        await self._logs.find([log for log, _ in parts])
        for log, batch in parts:
            await self._write_batch(log, batch)

    @override
    async def _write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        self._require_usable()
        await self._logs.find([log])
        metadata = self._logs.by_name[log]
        rows, has_txids = await self._logs.fit(metadata, batch)
        if batch.num_rows == 0:
            return
        part = self._parts.get(log)
        if part is None:
            require_few_logs({*self._parts, log})
            part = self._new_part(metadata, has_txids=has_txids)
        if part.has_txids is not has_txids:
            raise ConfigurationError(
                f"staging for log {log!r}: one extent mixes batches with and without a column txid"
                "; expected the column in each batch of an extent, or in none"
            )
        before = part.transmitter.queued_bytes
        if isinstance(rows, TypedRows):
            part.transmitter.add_rows(rows)
        else:
            part.transmitter.add_batch(rows)
        self._queued_bytes += part.transmitter.queued_bytes - before
        self._parts[log] = part
        lane = self._lane_of(metadata)
        if lane.part is None:
            lane.part = part
        if lane.part is part:
            await self._send_full(lane, part)
        await self._spill()

    def _new_part(self, log: LogMetadata, *, has_txids: bool) -> _Part:
        config, keys = self._logs.config_of(log), self._context.encryption_keys
        encryptor = encryptor_for(keys, log.name, log.log_id, encrypted=config.encrypted)
        return _Part(log, config, encryptor, has_txids=has_txids)

    def _lane_of(self, log: LogMetadata) -> _Lane:
        return self._lanes.setdefault(log.quorum, _Lane(log.quorum))

    async def _spill(self) -> None:
        """While too many bytes wait, send the records of the log with the most."""
        while self._queued_bytes > QUEUED_BYTES_MAX:
            part = max(self._parts.values(), key=lambda part: part.transmitter.queued_bytes)
            await self._send_all(part)

    async def _send_all(self, part: _Part) -> None:
        lane = self._lane_of(part.log)
        self._take_turn(lane, part)
        part.transmitter.seal()
        await self._send_full(lane, part)

    def _take_turn(self, lane: _Lane, part: _Part | None) -> None:
        if lane.part is not None and lane.part is not part:
            self._end_run(lane.part)
        lane.part = part

    async def _send_full(self, lane: _Lane, part: _Part) -> None:
        while part.transmitter.has_sealed:
            ledger = lane.ledger
            if ledger is None or self._is_due_for_another(lane, ledger):
                self._end_run(part)
                ledger = await self._next_ledger(lane)
            await self._guarded(ledger.wait_for_capacity)
            self._push(lane, part, ledger)

    def _push(self, lane: _Lane, part: _Part, ledger: LedgerWriter) -> None:
        run = part.run
        if run is None:
            first_entry_id = ledger.last_add_pushed + 1
            run = part.run = Run(first_entry_id=first_entry_id, timestamp_ms=lane.timestamp_ms)
        group = part.transmitter.next_group()
        self._queued_bytes -= group.size_bytes
        body = run.encode(
            group,
            now_ms=self._context.clock.now_ms(),
            compressor=part.compressor,
            encryptor=part.encryptor,
        )
        lane.timestamp_ms = run.timestamp_ms
        ledger.append(body).add_done_callback(partial(self._answered, part))

    def _answered(self, part: _Part, future: asyncio.Future[int]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            part.transmitter.acknowledged()
        elif self._error is None:
            self._error = error if isinstance(error, DLError) else WriteError(repr(error))

    def _end_run(self, part: _Part) -> None:
        run, part.run = part.run, None
        if run is None:
            return
        ledger = self._lane_of(part.log).ledger
        assert ledger is not None  # the run's ledger: the next one is begun after the run's end
        self._staged.entries[ledger.ledger_id] += run.entry_count
        log, extent = part.log, run.extent(ledger.ledger_id)
        if not part.has_txids:
            extent = replace(extent, first_txid=-1, last_txid=-1)
        part.extents.append(
            StagedExtent(**asdict(extent), log=log.name, log_id=log.log_id, identity=self._identity)
        )

    # Ledgers

    def _is_due_for_another(self, lane: _Lane, ledger: LedgerWriter) -> bool:
        return self._limits.is_reached(
            size_bytes=ledger.length_bytes,
            age_ms=self._context.clock.now_ms() - lane.started_ms,
        )

    async def _next_ledger(self, lane: _Lane) -> LedgerWriter:
        if lane.ledger is not None:
            await self._guarded(lane.ledger.flush)
            await self._finish(lane)
            await self._settle_filled()
        lane.ledger = ledger = await self._staged.create(lane.quorum)
        # With each ledger, so that a changed setting takes effect without a read for each batch.
        await self._logs.refresh_settings()
        lane.started_ms = self._context.clock.now_ms()
        return ledger

    @override
    async def _begin_round(self, number: int) -> None:
        self._require_usable()
        if number > self._staged.round:
            await self._settle_filled(are_decided=True)
            self._staged.round = number

    async def _settle_filled(self, *, are_decided: bool = False) -> None:
        open_ids = {lane.ledger.ledger_id for lane in self._lanes.values() if lane.ledger}
        await self._staged.settle(open_ids=open_ids, are_decided=are_decided)

    # Staging

    @override
    async def _stage(self) -> list[StagedExtent]:
        self._require_usable()
        # A part with a run in progress goes first: another one would end that run, and the rest of
        # the part would need an extent more.
        for part in sorted(self._parts.values(), key=lambda part: part.run is None):
            await self._send_all(part)
        for lane in self._lanes.values():
            self._take_turn(lane, None)
            if lane.ledger is not None:
                await self._guarded(lane.ledger.flush)
        parts, self._parts = self._parts, {}
        self._logs.forget_names()
        extents = [extent for log in sorted(parts) for extent in parts[log].extents]
        return extents

    @override
    async def _discard(self) -> None:
        self._require_usable()
        for part in self._parts.values():
            for extent in part.extents:
                self._staged.entries[extent.ledger_id] -= (
                    extent.last_entry_id + 1 - extent.first_entry_id
                )
        self._parts = {}
        self._logs.forget_names()
        self._queued_bytes = 0
        for lane in self._lanes.values():
            lane.part = None

    async def _guarded(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except DLError as error:
            self._error = self._error or error
        self._require_usable()

    def _require_usable(self) -> None:
        self._context.lifetime.require_open()
        if self._error is not None:
            raise WriteError(
                f"staging for {self._identity!r} failed: {type(self._error).__name__}: "
                f"{self._error}"
            ) from self._error
        self._require_open()

    @override
    async def _aclose(self, *, delete: bool) -> None:
        if self._context.lifetime.has_ended:
            return  # its ledgers were abandoned, and are settled like those of a dead process
        for lane in self._lanes.values():
            await self._finish(lane)
        await self._staged.leave(delete=delete)

    async def _finish(self, lane: _Lane) -> None:
        """Stop filling the lane's ledger."""
        ledger, lane.ledger = lane.ledger, None
        if ledger is None:
            return
        if self._error is not None:
            await ledger.abandon()
            return
        try:
            await ledger.close()
        except DLError as error:
            # The staged entries are durable; settling the ledger recovers it.
            logger.warning(
                "staged ledger=%d does not close: %s; to do: nothing, recovery closes it; see that "
                "its bookies run if it comes again",
                ledger.ledger_id,
                error,
            )
            await ledger.abandon()
