"""Staging: records that are durable in a ledger of their own, and belong to no log yet.

A staged ledger is registered below the identity it is staged under, in the transaction that creates
it. The registration names its owner: the ephemeral node of the process that fills it.  Whoever
commits marks it; whoever finds its owner gone may reap it (see `reaping.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from dlcore.errors import (
    AlreadyClosedError,
    ConfigurationError,
    DLError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    WriteError,
)
from dlcore.log import codec
from dlcore.log.active import encode_group
from dlcore.log.batches import byte_log_batch, check_txids, cut
from dlcore.log.entry import ipc_options
from dlcore.log.metadata import LogMetadata, StagedLedger
from dlcore.log.reaping import StagedNode, drop_staged, read_staged
from dlcore.log.scan import StagedExtent
from dlcore.log.store import UNANSWERED, persistently
from dlcore.log.transmit import Slice, Transmitter
from dlcore.log.truncation import STAGING_IDENTITY
from dlcore.metadata.port import Check, Create, Delete, Op, SessionState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    import pyarrow as pa

    from dlcore.config import LogConfig
    from dlcore.ledger.writer import LedgerWriter
    from dlcore.log.context import LogContext

logger = logging.getLogger(__name__)

_CREATE_ATTEMPTS_MAX = 10


class StagingOwner:
    """The ephemeral node by which others see that this process still stages.

    After the session was lost the node is made again with the same token, so what was staged before
    and was not reaped meanwhile stays alive.
    """

    def __init__(self, context: LogContext) -> None:
        self._context = context
        self._store = context.store
        self.token = context.clock.new_token()
        self.path = context.paths.staging_owner(self.token)
        self._session = ""
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsubscribe = self._store.on_session(self._session_changed)
        self._used = False

    async def ensure(self) -> None:
        """Make sure that the node exists, in this session."""
        self._used = True
        async with self._turn:
            if self._session != self._store.session_token:
                await persistently(self._make)

    async def _make(self) -> None:
        session = self._store.session_token
        try:
            await self._store.create(self.path, session.encode(), ephemeral=True, make_parents=True)
        except NodeExistsError:
            node = await self._store.get(self.path)
            if node is None or node.value != session.encode():
                await self._replace(session)
        self._session = session

    async def _replace(self, session: str) -> None:
        """Replace a node that an earlier session left and that is about to vanish."""
        try:
            await self._store.multi(
                [Delete(self.path), Create(self.path, session.encode(), ephemeral=True)]
            )
        except NoNodeError:
            await self._store.create(self.path, session.encode(), ephemeral=True)

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED and self._used:
            task = asyncio.create_task(self._renew(), name="staging-owner")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _renew(self) -> None:
        try:
            await self.ensure()
        except DLError as error:
            logger.warning("staging owner %s could not be renewed: %s", self.token, error)

    async def aclose(self) -> None:
        """Stop renewing; the node goes with the session."""
        self._unsubscribe()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class StagingWriter:
    """Fills a ledger of its own with entries for one log.

    Each `stage` ends an extent.  The ledger stays open across extents, and a new one is begun when
    it has the size of a segment, so that neither ledgers nor segments grow with the number of
    appends.
    """

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        log: LogMetadata,
        identity: str,
        config: LogConfig,
    ) -> None:
        self._context = context
        self._owner = owner
        self._log = log
        self._identity = identity
        self._config = config
        self._options = ipc_options(config.compression)
        self._transmitter: Transmitter[None] = Transmitter(entry_bytes=config.entry_bytes)
        self._ledger: LedgerWriter | None = None
        self._extent: _ExtentDraft | None = None
        self._timestamp_ms = 0
        self._error: DLError | None = None
        self._closed = False
        self._has_staged = False  # in the present ledger

    def __repr__(self) -> str:
        return f"<StagingWriter {self._log.name!r} identity={self._identity!r} {self._ledger!r}>"

    @property
    def log(self) -> str:
        """The log that the records are for."""
        return self._log.name

    async def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write the rows of `batch`: payload (binary), and txid (int64) where they have their own.

        The records of one extent either all have transaction ids, or none; then they get one when
        the append commits.

        Raises:
            TransactionIdOutOfOrderError, LogRecordTooLongError, ConfigurationError: refused as a
            whole,
                the writer stays usable.
            WriteError: the ledger failed; what was not staged is lost.
        """
        self._require_usable()
        has_txids = batch.schema.get_field_index("txid") >= 0
        batch = byte_log_batch(batch, txid_required=False)
        if batch.num_rows == 0:
            return
        draft = self._extent or _ExtentDraft(has_txids=has_txids)
        if draft.has_txids is not has_txids:
            raise ConfigurationError(
                f"staging for log {self._log.name!r}: one extent mixes batches with and without a "
                "column txid"
            )
        first_txid, last_txid = check_txids(batch, last_txid=draft.last_txid)
        slices = [
            Slice(part, part.column(0)[0].as_py(), part.column(0)[-1].as_py(), size_bytes)
            for part, size_bytes in cut(batch, entry_bytes=self._config.entry_bytes)
        ]
        self._extent = draft
        draft.add(batch.num_rows, first_txid, last_txid)
        self._transmitter.add_slices(slices)
        await self._send_full()

    async def _send_full(self) -> None:
        while self._has_full_group():
            ledger = self._ledger
            if ledger is None or self._is_due_for_another(ledger):
                ledger = await self._next_ledger()
            await self._guarded(ledger.wait_for_capacity)
            if self._has_full_group():
                self._push(ledger)

    def _has_full_group(self) -> bool:
        return self._transmitter.has_sealed

    def _push(self, ledger: LedgerWriter) -> None:
        draft = self._extent
        assert draft is not None
        if draft.first_entry_id is None:
            draft.first_entry_id = ledger.last_add_pushed + 1
        group = self._transmitter.next_group()
        self._timestamp_ms = max(self._timestamp_ms, self._context.clock.now_ms())
        body, size = encode_group(
            group,
            records_before=draft.records_pushed,
            write_time_ms=self._timestamp_ms,
            options=self._options,
        )
        future = ledger.append(body)
        future.add_done_callback(self._answered)
        draft.records_pushed += group.record_count
        draft.size_bytes += size

    def _answered(self, future: asyncio.Future[int]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._transmitter.acknowledged()
        elif self._error is None:
            self._error = error if isinstance(error, DLError) else WriteError(repr(error))

    def _is_due_for_another(self, ledger: LedgerWriter) -> bool:
        is_between_extents = self._extent is None or self._extent.first_entry_id is None
        return is_between_extents and ledger.length_bytes >= self._config.segment_bytes_max

    async def _next_ledger(self) -> LedgerWriter:
        await self._retire()
        for _ in range(_CREATE_ATTEMPTS_MAX):
            await self._owner.ensure()
            await self._make_parent()
            try:
                self._ledger = await self._context.ledgers.create_ledger(
                    self._log.quorum,
                    custom={"log": self._log.name, STAGING_IDENTITY: self._identity},
                    extra_ops=self._registration,
                )
            except (NoNodeError, NodeExistsError, MetadataVersionError):
                continue  # the parent was removed as empty, or the session was lost
            self._has_staged = False
            return self._ledger
        raise WriteError(
            f"staging for log {self._log.name!r}: {_CREATE_ATTEMPTS_MAX} attempts to create a "
            "ledger were overtaken"
        )

    def _registration(self, ledger_id: int) -> tuple[Op, ...]:
        staged = StagedLedger(
            ledger_id=ledger_id,
            log=self._log.name,
            log_id=self._log.log_id,
            owner=self._owner.token,
            created_ms=self._context.clock.now_ms(),
        )
        path = self._context.paths.staged_ledger(self._identity, ledger_id)
        return (Check(self._owner.path, 0), Create(path, codec.encode_staged(staged)))

    async def _make_parent(self) -> None:
        async def make() -> None:
            path = self._context.paths.staging_of(self._identity)
            with contextlib.suppress(NodeExistsError):  # staged under before
                await self._context.store.create(path, make_parents=True)

        await persistently(make)

    async def stage(self) -> StagedExtent | None:
        """Wait until everything written since the last call is durable; None if nothing was.

        Raises:
            WriteError: the ledger failed; what was not staged is lost.
        """
        self._require_usable()
        self._transmitter.seal()
        await self._send_full()
        draft, ledger = self._extent, self._ledger
        if draft is None:
            return None
        assert ledger is not None
        assert draft.first_entry_id is not None
        last_entry_id = ledger.last_add_pushed
        await self._guarded(ledger.flush)
        self._extent = None
        self._has_staged = True
        return StagedExtent(
            log=self._log.name,
            log_id=self._log.log_id,
            identity=self._identity,
            ledger_id=ledger.ledger_id,
            first_entry_id=draft.first_entry_id,
            last_entry_id=last_entry_id,
            record_count=draft.records_pushed,
            size_bytes=draft.size_bytes,
            first_txid=draft.first_txid if draft.has_txids else -1,
            last_txid=draft.last_txid if draft.has_txids else -1,
            last_timestamp_ms=self._timestamp_ms,
        )

    async def discard(self) -> None:
        """Forget what was written since the last `stage`; entries already sent stay unused."""
        self._require_usable()
        self._extent = None
        self._transmitter.drop_queued()

    async def _guarded(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except DLError as error:
            self._error = self._error or error
        self._require_usable()

    def _require_usable(self) -> None:
        if self._error is not None:
            raise WriteError(
                f"staging for log {self._log.name!r} failed: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error
        if self._closed:
            raise AlreadyClosedError(f"the staging writer of log {self._log.name!r} is closed")

    async def aclose(self, *, delete: bool = False) -> None:
        """Close the ledger; what was staged and not committed stays until it is, or is reaped.

        With `delete` the ledger is dropped at once, unless a log holds entries of it.
        """
        if self._closed:
            return
        self._closed = True
        await self._retire(delete=delete)

    async def _retire(self, *, delete: bool = False) -> None:
        """Stop filling the present ledger."""
        ledger, self._ledger = self._ledger, None
        if ledger is None:
            return
        if self._error is not None or (delete or not self._has_staged):
            await ledger.abandon()
        else:
            try:
                await ledger.close()
            except DLError as error:
                # All that was staged is durable; whoever removes the registration recovers the
                # ledger.
                logger.warning("staged ledger=%d does not close: %s", ledger.ledger_id, error)
                await ledger.abandon()
        node = await read_staged(self._context, self._identity, ledger.ledger_id)
        if node is None:
            return
        if delete or not self._has_staged:
            await drop_staged(self._context, node)
        else:
            await self._disown(node)

    async def _disown(self, node: StagedNode) -> None:
        value = codec.encode_staged(node.without_owner())
        while True:
            try:
                await self._context.store.put(node.path, value, version=node.version)
            except NoNodeError:
                return
            except (MetadataVersionError, *UNANSWERED):
                found = await read_staged(self._context, self._identity, node.staged.ledger_id)
                if found is None or not found.staged.owner:
                    return
                node = found
                value = codec.encode_staged(node.without_owner())
                continue
            return

    async def __aenter__(self) -> StagingWriter:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class _ExtentDraft:
    """The extent being staged; `first_entry_id` is known once its first entry is sent."""

    def __init__(self, *, has_txids: bool) -> None:
        self.has_txids = has_txids
        self.first_entry_id: int | None = None
        self.records_pushed = 0
        self.size_bytes = 0
        self.record_count = 0
        self.first_txid = -1
        self.last_txid = -1

    def add(self, record_count: int, first_txid: int, last_txid: int) -> None:
        if self.record_count == 0:
            self.first_txid = first_txid
        self.record_count += record_count
        self.last_txid = last_txid
