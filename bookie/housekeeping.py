"""The background work of a running bookie: garbage, damage, erasures, and trials of its disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, NamedTuple

from bookie.disks.port import DiskFullError, try_disk
from bookie.storage.status import StorageState
from bookie.upkeep.erasing import Eraser
from bookie.upkeep.garbage_collector import GarbageCollector
from bookie.upkeep.repair import Repairer
from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import BookieStorageError, DLError
from dlcore.ledger.metadata.registry import BookieRegistry
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.wire.client import WireBookieClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AsyncExitStack

    from bookie.ledger_storage import LedgerStorage
    from bookie.server_config import BookieConfig
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.clock import Clock
    from dlcore.base.ids import BookieId
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore

logger = logging.getLogger(__name__)

_TRIAL_CHECKS = 6
"""Intervals of checks of the space after which an idle bookie tries its disk."""
_TRIAL_FILE = "idle-trial"
"""Not the file of the health check, which may be tried at the same time."""
_REPAIR_RETRY_S = 1.0
"""Pause after a repairer that ended with an error; it runs without an end otherwise."""
_ERASE_INTERVAL_S = 2.0
"""How often the bookie looks for requests to erase."""
_ERASE_RETRY_S = 30.0


class Place(NamedTuple):
    """The place of a bookie: its cluster, and how it reaches the others there."""

    store: MetadataStore
    paths: NamespacePaths
    clock: Clock
    tls: TlsInUse | None
    cluster_id: str = ""
    """Empty before the bookie has asked the metadata store."""


class Housekeeping:
    """Repeats the work that a bookie does beside requests, each with its pause.

    Args:
        running: closed by the owner when the bookie stops; it ends all this.
    """

    def __init__(
        self,
        storage: LedgerStorage,
        config: BookieConfig,
        place: Place,
        *,
        bookie: BookieId,
        running: AsyncExitStack,
    ) -> None:
        self._storage = storage
        self._config = config
        self._place = place
        self._bookie = bookie
        self._running = running
        self._configured = asyncio.Event()
        self._seen_end = storage.core.log.commits.queue.durable_end

    def configure(self, config: BookieConfig) -> None:
        """Continue with another configuration."""
        self._config = config
        self._storage.upkeep.configure(config.storage)
        self._configured.set()  # pauses calculate their rest again
        self._configured.clear()

    def start(self) -> None:
        """Start the background work of a running bookie."""
        self.repeat(
            "trying the disk",
            self.try_idle_disk,
            lambda: _TRIAL_CHECKS * self._config.storage.space.check_interval_s,
        )
        self.repeat(
            "garbage collection", self.collect_once, lambda: self._config.garbage_interval_s
        )
        self.repeat("compaction", self._compact_once, lambda: self._config.compact_interval_s)
        self.repeat("scrubbing", self._scrub_once, lambda: self._config.scrub_interval_s)
        self._erase()
        self._repair()

    def repeat(
        self, what: str, once: Callable[[], Awaitable[None]], interval_s: Callable[[], float]
    ) -> None:
        """Repeat a pause and a call of `once`, whether the call fails or not."""

        async def repeat() -> None:
            while True:
                await self._pause(interval_s)
                try:
                    await once()
                except DLError as error:
                    logger.warning(
                        "%s failed bookie=%s: %s; to do: nothing, it runs again after its pause; "
                        "see to the reason if it comes again",
                        what,
                        self._bookie,
                        error,
                    )
                except Exception:
                    # A bug.  If the loop ended, the disk would fill up unnoticed.
                    logger.exception(
                        "%s failed bookie=%s; to do: report this as a defect; it runs again after "
                        "its pause",
                        what,
                        self._bookie,
                    )

        tasks = BackgroundTasks()
        tasks.start(repeat(), name=f"bookie {what}")
        self._running.push_async_callback(tasks.aclose)

    async def try_idle_disk(self) -> None:
        """See whether the disk still takes writes, if nothing became durable since the last call.

        The file that is written is no record, so the log does not grow.  It can fail where an add
        does not, such as for want of a descriptor.  After a failure a record of the log is
        therefore written: it ends the bookie as a failed add does.

        Raises:
            BookieError: the record cannot be written either.
        """
        storage = self._storage
        log, status = storage.core.log, storage.status
        end = log.commits.queue.durable_end
        is_idle, self._seen_end = end == self._seen_end, end
        if not is_idle or status.state is StorageState.FAILED:
            return
        status.look()
        try:
            await try_disk(storage.core.disk, _TRIAL_FILE, self._place.clock.new_token)
        except DiskFullError:
            return  # the free space, which was just looked at, decides whether adds are accepted
        except BookieStorageError as error:
            logger.warning(
                "the idle disk does not take a file bookie=%s: %s; to do: see to the disk; the "
                "bookie writes a record now, and ends if that fails too",
                self._bookie,
                error,
            )
            log.append_mark()
            await log.commits.flush()

    def _erase(self) -> None:
        eraser = Eraser(
            self._storage.upkeep,
            self._collector(),
            bookie=self._bookie,
            store=self._place.store,
            paths=self._place.paths,
            retry_s=min(_ERASE_RETRY_S, self._config.garbage_interval_s),
        )

        async def erase() -> None:
            await eraser.run()

        self.repeat("erasing", erase, lambda: _ERASE_INTERVAL_S)

    def _repair(self) -> None:
        registry = BookieRegistry(self._place.store, self._place.paths)
        self._running.push_async_callback(registry.aclose)
        client = WireBookieClient(
            registry.resolve,
            cluster_id=self._place.cluster_id,
            config=self._config.ledger_client,
            tls=self._place.tls,
        )
        self._running.push_async_callback(client.aclose)
        repairer = Repairer(
            self._storage.writes,
            self._storage.core.damage,
            bookie=self._bookie,
            ledgers=LedgerStore(self._place.store, self._place.paths),
            client=client,
        )
        self.repeat("repair", repairer.run, lambda: _REPAIR_RETRY_S)

    async def _pause(self, interval_s: Callable[[], float]) -> None:
        """Pause for an interval, which a new configuration may change meanwhile."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while (left_s := begun + interval_s() - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._configured.wait()

    async def _compact_once(self) -> None:
        report = await self._storage.upkeep.compact()
        if report.files_compacted or report.files_left_alone or report.files_without_room:
            logger.info(
                "compacted bookie=%s files=%d copied=%d freed=%d left_alone=%s without_room=%d",
                self._bookie,
                report.files_compacted,
                report.bytes_copied,
                report.bytes_freed,
                report.files_left_alone,
                report.files_without_room,
            )

    async def _scrub_once(self) -> None:
        report = await self._storage.upkeep.scrub()
        logger.info(
            "scrubbed bookie=%s files=%d bytes=%d damaged_records=%d damaged_files=%s "
            "footers_made_again=%d",
            self._bookie,
            report.files_scrubbed,
            report.bytes_read,
            report.damaged_records,
            report.damaged_files,
            report.footers_made_again,
        )

    def _collector(self) -> GarbageCollector:
        return GarbageCollector(
            self._storage.upkeep,
            bookie=self._bookie,
            store=self._place.store,
            paths=self._place.paths,
            cluster_id=self._place.cluster_id,
        )

    async def collect_once(self) -> None:
        """Collect garbage, and log how much."""
        report = await self._collector().collect()
        if report.ledgers_deleted:
            logger.info(
                "garbage collected bookie=%s ledgers=%d files=%d bytes=%d",
                self._bookie,
                report.ledgers_deleted,
                report.files_deleted,
                report.bytes_freed,
            )
