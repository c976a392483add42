"""Exports the metadata of the namespace now and then, as objects that `dlog restore` finds.

Any number of workers look; the one that holds the lock makes the export that is due, under a new
name, and then deletes the oldest ones.  A worker that dies leaves a whole export or none, because
an export is one object; the next one is due when the time of the last one that was noted is over.

After a restore or an import nothing is exported or deleted until it is accepted.  A restore that is
tried beside the living cluster must not write where that one's exports are, and a second restore
needs the same export.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.clock import steady_s
from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    MetadataConnectionError,
    MetadataError,
    MetadataSessionExpiredError,
    MetadataVersionError,
    NodeExistsError,
    ObjectStoreError,
)
from dlcore.metadata.one_node import persistently
from dlcore.metadata.stored import decode_or_tell, encode
from dlcore.ops.autorecovery.values import LastExport
from dlcore.ops.backup.timetable import age_ms_of, is_due, name_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from dlcore.base.isolating import Troubles
    from dlcore.log.context import LogContext
    from dlcore.metadata.port import Versioned
    from dlcore.ops.autorecovery.metrics import ExportFigures
    from dlcore.ops.upkeep.config import UpkeepConfig

logger = logging.getLogger(__name__)

_LOCK = "export"


class PeriodicExporter:
    """The exports of one worker.

    Args:
        context: the namespace's adapters.
        config: where exports go, how often, and how many stay.
        lock: takes a lock by name, and yields whether it was free.
        figures: those of its work in this process.
    """

    def __init__(
        self,
        context: LogContext,
        config: UpkeepConfig,
        lock: Callable[[str], AbstractAsyncContextManager[bool]],
        figures: ExportFigures,
    ) -> None:
        self._context = context
        self._config = config
        self._lock = lock
        self._figures = figures
        self._begun_s = steady_s()

    async def export(self, troubles: Troubles) -> bool | None:
        """Make the export that is due, unless another worker does; return whether it was made.

        Returns: None if nothing was due.

        Raises:
            MetadataError: the metadata store does not answer.
        """
        place = self._config.export
        if not place:
            self._figures.made_s = None
            return None
        # Most looks find nothing due, and cost this one read.
        _, is_now = await self._look()
        if not is_now:
            return None
        async with self._lock(_LOCK) as is_ours:
            if not is_ours or await self._is_unaccepted():
                return None
            node, is_now = await self._look(fresh=True)
            if not is_now:
                return None
            done = False
            with troubles.isolated(f"export of the metadata to {place}"):
                done = await self._try(place, node, troubles)
        return done

    async def _look(self, *, fresh: bool = False) -> tuple[Versioned | None, bool]:
        """Return the node of the last export, and whether one is due; note its age."""
        context, config = self._context, self._config
        path = context.paths.last_export
        node = await persistently(lambda: context.store.get(path, fresh=fresh))
        tell = partial(logger.warning, "an export is made anew: %s; to do: nothing")
        last = decode_or_tell(LastExport, node, source=path, tell=tell)
        age_ms = age_ms_of(last, config.export, context.clock.now_ms())
        self._figures.every_s = config.export_every_s
        self._figures.made_s = self._begun_s if age_ms is None else steady_s() - age_ms / 1000
        return node, is_due(age_ms, every_s=config.export_every_s)

    async def _is_unaccepted(self) -> bool:
        context = self._context
        return bool(
            await persistently(lambda: context.store.get(context.paths.restored, fresh=True))
        )

    async def _try(self, place: str, node: Versioned | None, troubles: Troubles) -> bool:
        try:
            await self._make(place, node, troubles)
        except (MetadataConnectionError, MetadataSessionExpiredError):
            raise
        except (ConfigurationError, MetadataError, ObjectStoreError) as error:
            logger.warning(
                "no export of the metadata to %s was made: %s: %s; to do: let auto-recovery list, "
                "write and delete objects there; it tries again soon, and until then a restore "
                "goes back to the export before",
                place,
                type(error).__name__,
                error,
            )
            troubles.note(f"export of the metadata to {place}", error)
            return False
        return True

    async def _make(self, place: str, node: Versioned | None, troubles: Troubles) -> None:
        # Imported here: most processes never export.
        from dlcore.ops.backup.exporting import export_namespace
        from dlcore.ops.backup.in_store import drop_old_exports, put_export

        context = self._context
        export, copy = await export_namespace(context.store, context.paths, context.clock)
        url = await put_export(context.cold.objects, place, export)
        made = LastExport(
            url=url, exported_ms=export.header.exported_ms, left_out=len(copy.left_out)
        )
        await self._store(node, made)
        logger.info("exported the metadata to %s: logs=%d ledgers=%d", url, copy.logs, copy.ledgers)
        for each in copy.left_out:
            logger.warning(
                "the export leaves out log %s, whose metadata are damaged: %s; to do: dlog log "
                "inspect and dlog log repair",
                each.log,
                each.reason,
            )
            troubles.note(f"export leaves out log {each.log}", CorruptMetadataError(each.reason))
        name = name_of(url)
        assert name is not None
        await drop_old_exports(context.cold.objects, name, keep=self._config.export_keep)

    async def _store(self, node: Versioned | None, made: LastExport) -> None:
        store, path = self._context.store, self._context.paths.last_export
        try:
            if node is None:
                await store.create(path, encode(made), make_parents=True)
            else:
                await store.put(path, encode(made), version=node.version)
        except (NodeExistsError, MetadataVersionError) as error:
            logger.info("another worker exports, too: %s", error)
        self._figures.made_s = steady_s()
