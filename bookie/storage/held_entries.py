"""Adds of entries that are held already: equal bytes are accepted, a damaged copy is replaced.

An add with other bytes is refused.  If the held copy is damaged, the entry's content is unknown, so
the bookie contradicts no earlier answer when it accepts the entry again.  If the damaged record
still states its checksum, only bytes with this checksum are accepted.  The new record is the newest
copy, which is the valid one from then on: at lookups, in listings and after replay.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie.space.budget import Claim
from dlcore.base.background import BackgroundTasks, outcome_of, reported_to_callers
from dlcore.base.errors import BadRequestError, BookieStorageError, LedgerFencedError
from dlcore.wire.frames import frame_check

if TYPE_CHECKING:
    from typing import Protocol

    from bookie.files.unsealed import Location
    from bookie.storage.storage_core import StorageCore
    from dlcore.wire.frames import EntryFrame

    class CheckRoom(Protocol):
        """Raises if `size` more bytes may not be written."""

        def __call__(self, size: int, claim: Claim) -> None:
            """Raise BookieReadOnlyError or BookieOverloadedError."""


class HeldEntries:
    """Compares entries that are added with entries that are held."""

    def __init__(self, core: StorageCore, check_room: CheckRoom) -> None:
        self._core = core
        self._check_room = check_room
        self.comparisons = BackgroundTasks(reported_to_callers)
        """Comparisons in progress."""
        self._replacements: dict[tuple[int, int], asyncio.Future[None]] = {}
        """Replacements that are not durable yet; until then the damaged copies are found."""

    def add_again(self, entry: EntryFrame, *, is_recovery: bool) -> asyncio.Future[None]:
        """Compare an entry with the held one; the future is done when it is durable and intact.

        The future may hold BadRequestError (other bytes are held), LedgerFencedError,
        BookieReadOnlyError, BookieOverloadedError or BookieStorageError.
        """
        return self.comparisons.start(self._add_again(entry, is_recovery=is_recovery))

    async def _add_again(self, entry: EntryFrame, *, is_recovery: bool) -> None:
        core = self._core
        while True:
            held = core.reader.find(entry.ledger_id, entry.entry_id)
            if held is None:
                raise BookieStorageError(
                    f"entry {entry.ledger_id}:{entry.entry_id} was dropped as garbage meanwhile"
                )
            if not core.log.unsealed.is_durable(held):
                await core.log.commits.flush()
            frame = await self._read(held)
            if frame is not None:
                break
            checksum = await core.reader.stated_checksum(held)
            # The record is damaged, but its intact header says that other bytes were held.
            if checksum is not None and checksum != frame_check(entry.data):
                break
            replacement = self._replacements.get((entry.ledger_id, entry.entry_id))
            if replacement is not None:
                # Another add replaces it now: then the new copy is compared.
                await asyncio.wait([replacement])
            elif core.reader.find(entry.ledger_id, entry.entry_id) == held:
                await self._replace(entry, is_recovery=is_recovery)
                return
        if frame is not None:
            core.damage.forget_entry(entry.ledger_id, entry.entry_id, is_repaired=False)
        if frame is None or frame != memoryview(entry.data):
            raise BadRequestError(
                f"entry {entry.ledger_id}:{entry.entry_id} is held with other bytes"
            )

    async def _read(self, held: Location) -> memoryview | None:
        """Return the held frame; None if it is damaged, which one failed read does not prove."""
        for _ in range(2):
            try:
                (frame,) = await self._core.reader.read([held])
            except BookieStorageError:
                continue
            return frame
        return None

    async def _replace(self, entry: EntryFrame, *, is_recovery: bool) -> None:
        """Write the entry again; there must be no wait between finding the damage and this call."""
        core = self._core
        core.log.commits.check()
        state = core.ledgers[entry.ledger_id]
        if not state.accepts(is_recovery=is_recovery):
            raise LedgerFencedError(f"ledger {entry.ledger_id} is fenced")
        self._check_room(len(entry.data), Claim.RECOVERY if is_recovery else Claim.ADD)
        key = entry.ledger_id, entry.entry_id
        self._replacements[key] = durable = core.log.append_entry(entry)
        core.ledger_for_change(entry.ledger_id).note_entry(entry.entry_id, entry.last_add_confirmed)

        def on_done(done: asyncio.Future[None]) -> None:
            self._replacements.pop(key, None)
            done.exception()  # retrieve the error, also if the caller was cancelled

        durable.add_done_callback(on_done)
        await outcome_of(durable)
        core.damage.forget_entry(entry.ledger_id, entry.entry_id, is_repaired=True)
