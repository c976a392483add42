"""Admission of writes by disk space and by bytes in flight, and the space that is held back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bookie.files.compaction_choice import LEDGER_BYTES_MAX
from bookie.files.format import RECORD_HEADER_BYTES
from bookie.files.index import ENTRY_FOOTER_BYTES, LEDGER_FOOTER_BYTES
from bookie.space.budget import Claim, SpaceGuard
from dlcore.base.background import BackgroundTasks
from dlcore.base.config import MIB
from dlcore.base.errors import BookieOverloadedError, BookieReadOnlyError, BookieStorageError

if TYPE_CHECKING:
    from bookie.config import StorageConfig
    from bookie.disks.port import Disk
    from bookie.files.entry_log import EntryLog
    from dlcore.wire.frames import FrameRun

logger = logging.getLogger(__name__)

_EXTRA_BYTES = LEDGER_BYTES_MAX + RECORD_HEADER_BYTES + ENTRY_FOOTER_BYTES + LEDGER_FOOTER_BYTES
"""Bytes that a request may take on the disk beside its frame: headers, its part of a footer, and
the records of a ledger that is in use again."""
LOOK_DELAY_S = 0.1
"""The disk is checked at the latest this long after a write: other programs may have filled it."""
_LOOK_BYTES = MIB
"""The disk is checked again after this many written bytes, and earlier if it is nearly full."""
_FENCES_SHARE = 8
"""Fences may exceed the limit of bytes in flight by this fraction (one part in 8)."""


class Room:
    """Admission of writes to one storage.

    Between two checks of the disk, written bytes count as used.  Therefore the result is as strict
    as a check after each write, which would cost as much as a small write.
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
        self._seen_bytes = log.commits.queue.durable_bytes
        self._due_bytes = 0
        self.overloaded_count = 0
        """Writes refused because too many bytes were in flight."""
        self.full_count = 0
        """Writes refused for want of space."""

    @property
    def is_due(self) -> bool:
        """Whether enough bytes were written since the last check of the disk for another one."""
        return self._log.commits.queue.durable_bytes >= self._due_bytes

    @property
    def is_read_only(self) -> bool:
        """Whether ordinary adds are refused."""
        return self._guard.is_read_only

    @property
    def shortage(self) -> str:
        """Where space lacks, how much there is, and how much ends this."""
        wanted_bytes = self._config.space.writable_above_bytes
        return (
            f"{self._disk.place} has {self._guard.free_bytes} free bytes, and takes ordinary adds "
            f"again from {wanted_bytes} on (space_writable_above_bytes)"
        )

    def check(self, size: int, claim: Claim) -> None:
        """Refuse a write of `size` bytes (0 for a LAC or a fence) if there is no space for it.

        Raises:
            BookieReadOnlyError, BookieOverloadedError: there is no space, or too many bytes are in
                flight.
        """
        log = self._log
        pending = log.commits.queue.pending_bytes
        claimed = log.claimed_bytes + log.commits.queue.durable_bytes - self._seen_bytes
        if not self._guard.allows(size + _EXTRA_BYTES, claimed_bytes=claimed, claim=claim):
            self.full_count += 1
            raise BookieReadOnlyError(f"the bookie's disk is full: no space for {claim.value}")
        limit = self._config.in_flight_bytes_max
        if claim is Claim.FENCE:
            limit += limit // _FENCES_SHARE  # many adds must not prevent fences
        # A write larger than the limit is accepted when nothing else is in flight.
        if pending and pending + size > limit:
            self.overloaded_count += 1
            raise BookieOverloadedError(
                f"{pending} bytes are not durable yet, the limit is {limit}"
            )

    def note_stalled(self, *, is_stalled: bool) -> None:
        """Note that a write waits for space, or that the log continues."""
        if is_stalled:
            logger.error(
                "the disk of %s is full: accepted entries wait for space; to do: free space, or "
                "add bookies; writers wait until then",
                self._disk.place,
            )
        self._guard.is_stalled = is_stalled

    def look(self) -> None:
        """Check the disk's free space, and complete the held-back space if there is enough."""
        held, claimed = self._disk.held_bytes, self._log.claimed_bytes
        self._guard.observe(self._disk.space().free_bytes, claimed_bytes=claimed)
        self._seen_bytes = self._log.commits.queue.durable_bytes
        writable_bytes = self._guard.writable_bytes(claimed_bytes=claimed)
        self._due_bytes = self._seen_bytes + min(_LOOK_BYTES, writable_bytes // 2)
        is_missing = self._guard.missing_reserve(held_bytes=held, claimed_bytes=claimed)
        if is_missing and not self._holding:
            self._holding.start(self._hold(), name="holding back space")

    async def aclose(self) -> None:
        """Return when no hold is in progress; `look` must not be called any more."""
        await self._holding.finish()

    async def _hold(self) -> None:
        try:
            await self._disk.hold(self._config.space.held_bytes)
        except BookieStorageError as error:
            logger.warning(
                "cannot reserve space: %s; to do: see to the disk; the bookie keeps less in "
                "reserve until then",
                error,
            )


def run_room_bytes(run: FrameRun) -> int:
    """Return the bytes of frames that are added together, for one check of the room."""
    return len(run.payload) + (len(run) - 1) * _EXTRA_BYTES
