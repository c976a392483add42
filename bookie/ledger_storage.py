"""A bookie's storage from opening to closing, and its reactions to events of the log."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from bookie.files.damage import DamageLog
from bookie.files.entry_log import EntryLog, EntryLogEvents
from bookie.files.entry_reader import EntryReader
from bookie.files.format import owner_digest
from bookie.files.index import LedgerState, note_sealed
from bookie.files.replay import open_entry_log
from bookie.files.sealed_files import SealedFiles, SealedHandles
from bookie.membership.given_ids import GivenIds
from bookie.storage.reads import Reads
from bookie.storage.status import StorageState, StorageStatus, Timers
from bookie.storage.storage_core import StorageCore
from bookie.storage.writes import Followers, Writes, ledger_for_change
from bookie.upkeep.rounds import Upkeep
from dlcore.base.background import BackgroundTasks, reported_to_callers
from dlcore.base.errors import BookieError

if TYPE_CHECKING:
    from bookie.config import StorageConfig
    from bookie.disks.port import Disk, DiskFile
    from bookie.files.index import FileIndex
    from bookie.files.replay import OpenedLog, WritePosition
    from dlcore.base.clock import Clock

logger = logging.getLogger(__name__)


class LedgerStorage:
    """All entries of this bookie: the objects that work on them, opened and closed together."""

    writes: Writes
    """Adds, LACs, fences and repairs."""
    reads: Reads
    """Reads of entries and LACs."""
    followers: Followers
    """Callbacks for new entries of ledgers."""
    upkeep: Upkeep
    """Garbage collection, compaction and scrubbing."""
    status: StorageStatus
    """State and figures."""
    core: StorageCore
    """Objects that all of these share."""

    @classmethod
    async def open(
        cls,
        disk: Disk,
        config: StorageConfig,
        *,
        clock: Clock,
        owner: str = "",
        given_ids: GivenIds | None = None,
    ) -> LedgerStorage:
        """Replay `disk` and start the writer task.

        `owner` (cluster and incarnation) is bound into every file; files of another owner are
        refused.  `given_ids` knows which new ledgers are accepted, and is closed with the storage;
        None: all ledgers are accepted.

        Raises:
            BookieStorageError: data that was acknowledged may be damaged or missing.
        """
        digest = owner_digest(owner)
        ledgers: dict[int, LedgerState] = {}
        opened = await open_entry_log(
            disk, owner=digest, new_life=clock.new_token, take_sealed=partial(note_sealed, ledgers)
        )
        return cls(disk, config, opened, ledgers, owner=digest, clock=clock, given_ids=given_ids)

    def __init__(
        self,
        disk: Disk,
        config: StorageConfig,
        opened: OpenedLog,
        ledgers: dict[int, LedgerState],
        *,
        owner: bytes,
        clock: Clock,
        given_ids: GivenIds | None,
    ) -> None:
        self._settle_interval_s = config.settle_interval_s
        given_ids = given_ids or GivenIds(None)
        if opened.index.number == 1:  # no file was ever sealed, so none was dropped
            given_ids.begin_new()
        self._timers = Timers()
        damage = DamageLog(entries_max=config.damaged_entries_max)
        events = EntryLogEvents(
            self._on_durable, self._on_sealed, self._on_failed, self._on_stalled
        )
        log = EntryLog(disk, config, opened, owner=owner, new_life=clock.new_token, events=events)
        handles = SealedHandles(
            disk,
            log,
            damage,
            open_files_max=config.open_files_max,
            footer_bytes_max=config.footer_bytes_max,
        )
        reader = EntryReader(log, handles, ledgers, damage)
        files = SealedFiles(disk, log, handles, ledgers, damage, on_forgotten=given_ids.forget)
        core = StorageCore(disk, log, handles, reader, files, ledgers, damage)
        _take_opened(opened, core)
        self.core = core
        self.status = StorageStatus(core, config, self._timers)
        self.followers = Followers()
        self.writes = Writes(
            core,
            config,
            status=self.status,
            followers=self.followers,
            timers=self._timers,
            given_ids=given_ids,
        )
        self.reads = Reads(core, status=self.status, writes=self.writes)
        self.upkeep = Upkeep(core, config, status=self.status, owner=owner, clock=clock)
        self._tasks = BackgroundTasks(reported_to_callers)
        self._writer = self._tasks.start(log.commits.run(), name="bookie entry log")
        self.status.look()
        self._settle_later()

    def __repr__(self) -> str:
        return f"<LedgerStorage {self.status.state.value} ledgers={len(self.core.ledgers)}>"

    async def aclose(self) -> None:
        """Refuse new requests, make accepted records durable, and stop; the disk stays open."""
        if self.status.is_closed:
            await self._tasks.finish()
            return
        # First, because a full disk could hold up each of the waits below without an end.
        self.core.log.commits.end_waiting()
        try:
            await self.status.aclose()
            # Requests that wait may be LACs, which only their timer makes durable.
            await self.writes.end_waiting()
            self._timers.close()
            if self.status.state is not StorageState.FAILED:
                self._settle()
                await self.core.log.commits.flush()
            await self.writes.finish()
        except BookieError as error:
            logger.warning(
                "closing after a failure: %s; to do: nothing more, see the failure logged before",
                error,
            )
        finally:
            self._timers.close()
            await self._tasks.aclose()
            # Their next read fails, so that they go to another bookie.
            self.followers.wake_all()
            self.core.handles.close()
            self.core.log.unsealed.close()
        if not self._writer.cancelled():
            self._writer.result()

    # Events of the log

    def _on_durable(self, ledger_ids: set[int]) -> None:
        for ledger_id in self.followers.ledgers() & ledger_ids:
            self.followers.wake(ledger_id)
        self._settle_later()
        self.status.note_written()

    async def _on_sealed(self, index: FileIndex, file: DiskFile, position: WritePosition) -> None:
        await self.core.files.take_over(
            index, size=file.size, records_end=position.offset, seed=position.header.seed
        )

    def _on_failed(self, error: BookieError) -> None:
        self.status.note_failed(error)
        self.followers.wake_all()

    def _on_stalled(self, is_stalled: bool) -> None:
        self.status.note_stalled(is_stalled)

    def _settle_later(self) -> None:
        if not self.core.log.is_marked:
            self._timers.call_later(self._settle_interval_s, self._settle)

    def _settle(self) -> None:
        """Log a record that proves that the last flush was durable."""
        if self.status.state is not StorageState.FAILED and not self.core.log.is_marked:
            self.core.log.append_mark()


def _take_opened(opened: OpenedLog, core: StorageCore) -> None:
    """Fill the storage with the result of the replay."""
    for sealed in opened.sealed:
        core.files.take(
            sealed.number, size=sealed.size, records_end=sealed.records_end, seed=sealed.seed
        )
        if not sealed.has_footer:
            core.damage.note_footer(sealed.number)
    # A ledger of the newest file may be known from a sealed one already.
    for summary in opened.index.summaries():
        ledger_for_change(core, summary.ledger_id).note_summary(summary)
