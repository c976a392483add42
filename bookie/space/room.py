"""Room on the disk and on the way to it: who may write how much now, and what is held back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bookie.files.compaction_choice import LEDGER_BYTES_MAX
from bookie.files.format import RECORD_HEADER_BYTES
from bookie.files.index import ENTRY_FOOTER_BYTES, LEDGER_FOOTER_BYTES
from bookie.space.budget import Claim, SpaceGuard
from dlcore.background import BackgroundTasks
from dlcore.config import MIB
from dlcore.errors import BookieOverloadedError, BookieReadOnlyError, BookieStorageError

if TYPE_CHECKING:
    from bookie.config import StorageConfig
    from bookie.disks.port import Disk
    from bookie.files.entry_log import EntryLog
    from dlcore.wire.frames import FrameRun

logger = logging.getLogger(__name__)

_EXTRA_BYTES = LEDGER_BYTES_MAX + RECORD_HEADER_BYTES + ENTRY_FOOTER_BYTES + LEDGER_FOOTER_BYTES
"""What a request may take of the disk beside its frame: headers, its part of a footer, and the
records of a ledger that is in use again."""
LOOK_DELAY_S = 0.1
"""So much after a write the disk is looked at, at the latest: others may have filled it."""
_LOOK_BYTES = MIB
"""After so many bytes were written the disk is looked at again, earlier if it is nearly full."""
_FENCES_SHARE = 8
"""Fences may exceed the limit of bytes in flight by one part in so many."""


class Room:
    """The room of one storage.

    Between two looks at the disk, what was written counts as taken; so no more is accepted than if
    it was looked at after each write, which costs as much as a small one.
    """

    def __init__(self, disk: Disk, log: EntryLog, config: StorageConfig) -> None:
        self._disk = disk
        self._log = log
        self._config = config
        self._guard = SpaceGuard(
            config.space,
            free_bytes=disk.space().free_bytes,
            claimed_bytes=log.claimed_bytes,
        )
        self._holding = BackgroundTasks()
        self._seen_bytes = log.commits.durable_bytes
        self._due_bytes = 0

    @property
    def is_due(self) -> bool:
        """Whether so much was written since the last look that the disk should be looked at."""
        return self._log.commits.durable_bytes >= self._due_bytes

    @property
    def is_read_only(self) -> bool:
        """Whether ordinary adds are refused."""
        return self._guard.is_read_only

    def check(self, size: int, claim: Claim) -> None:
        """Refuse what a frame of `size` bytes, a LAC or a fence (0) would take, if it is too much.

        Raises:
            BookieReadOnlyError, BookieOverloadedError: it is.
        """
        pending = self._log.commits.pending_bytes
        claimed = self._log.claimed_bytes + self._log.commits.durable_bytes - self._seen_bytes
        if not self._guard.allows(size + _EXTRA_BYTES, claimed_bytes=claimed, claim=claim):
            raise BookieReadOnlyError(f"the bookie's disk is full: no room for {claim.value}")
        limit = self._config.in_flight_bytes_max
        if claim is Claim.FENCE:
            limit += limit // _FENCES_SHARE  # a flood of adds must not keep fences out
        if pending and pending + size > limit:
            raise BookieOverloadedError(
                f"{pending} bytes are not durable yet, the limit is {limit}"
            )

    def note_stalled(self, *, is_stalled: bool) -> None:
        """Take note that a write waits for room, or that the log goes on."""
        if is_stalled:
            logger.error("the disk is full: what was accepted waits for room")
        self._guard.is_stalled = is_stalled

    def look(self) -> None:
        """Look at the disk, and hold back what is missing of the reserve if there is plenty."""
        held, claimed = self._disk.held_bytes, self._log.claimed_bytes
        self._guard.observe(self._disk.space().free_bytes, claimed_bytes=claimed)
        self._seen_bytes = self._log.commits.durable_bytes
        writable_bytes = self._guard.writable_bytes(claimed_bytes=claimed)
        self._due_bytes = self._seen_bytes + min(_LOOK_BYTES, writable_bytes // 2)
        is_missing = self._guard.missing_reserve(held_bytes=held, claimed_bytes=claimed)
        if is_missing and not self._holding:
            self._holding.start(self._hold(), name="holding back space")

    async def aclose(self) -> None:
        """Return when nothing is under way; `look` is not called any more."""
        await self._holding.finish()

    async def _hold(self) -> None:
        try:
            await self._disk.hold(self._config.space.held_bytes)
        except BookieStorageError as error:
            logger.warning("no space is held back: %s", error)


def run_room_bytes(run: FrameRun) -> int:
    """Return what frames that are added together count as, to one check of the room."""
    return len(run.payload) + (len(run) - 1) * _EXTRA_BYTES
