"""Repair: a damaged entry is fetched from another bookie and written again.

The metadata of the ledger names the other bookies that should hold it.  They are read without
fencing, and their frames are verified.  The storage accepts a frame only in place of a copy that is
really damaged.  A failed repair is tried again, with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from dlcore.base.backoff import Backoff
from dlcore.base.errors import BookieStorageError, DLError, LedgerNotFoundError
from dlcore.ledger.metadata.values import LedgerState, write_set
from dlcore.wire.frames import decode_frame

if TYPE_CHECKING:
    from bookie.files.damage import DamageLog
    from bookie.storage.writes import Writes
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.store import LedgerStore
    from dlcore.wire.port import BookieClient

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 1.0
_PAUSE_MAX_S = 600.0
"""Ten minutes: a holder that comes back is asked soon, and one that is gone costs little."""
_AT_ONCE = 8
"""Entries that are fetched at once; the number lets a holder that does not answer delay few others.
"""


class Repairer:
    """Repairs the damaged entries of one storage for as long as `run` runs.

    Args:
        writes: writes of the storage.
        damage: its damaged entries.
        bookie: owner of the storage; it is not asked for its own entries.
        ledgers: metadata of ledgers, which names the other holders; stays the caller's.
        client: reads from the other bookies; stays the caller's.
    """

    def __init__(
        self,
        writes: Writes,
        damage: DamageLog,
        *,
        bookie: BookieId,
        ledgers: LedgerStore,
        client: BookieClient,
    ) -> None:
        self._writes = writes
        self._damage = damage
        self._bookie = bookie
        self._ledgers = ledgers
        self._client = client
        self._retries: dict[tuple[int, int], Backoff] = {}
        self._tried: set[tuple[int, int]] = set()  # entries whose repair is in progress
        self._has_news = asyncio.Event()
        self._damage.on_entry(self._has_news.set)

    async def run(self) -> None:
        """Repair until cancelled; newly found damage is repaired at once."""
        async with asyncio.TaskGroup() as tries:
            while True:
                self._has_news.clear()
                pause_s = self._start_due(tries)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._has_news.wait()

    def _start_due(self, tries: asyncio.TaskGroup) -> float | None:
        """Start repairs that are due; return the seconds until the next one is due."""
        damaged = self._damage.entries()
        known = set(damaged)
        self._retries = {key: each for key, each in self._retries.items() if key in known}
        now_s = asyncio.get_running_loop().time()
        later = {key: each.due_s for key, each in self._retries.items() if each.due_s > now_s}
        for key in damaged:
            if len(self._tried) == _AT_ONCE:
                break  # the end of each of them sets the event
            if key not in later and key not in self._tried:
                self._tried.add(key)
                tries.create_task(self._try(key), name=f"repair-{key[0]}:{key[1]}")
        return min(later.values()) - now_s if later else None

    async def _try(self, key: tuple[int, int]) -> None:
        """Repair an entry, or set the time of the next try."""
        try:
            await self._repair(*key)
        except DLError as error:
            retry = self._retries.setdefault(key, Backoff(_FIRST_PAUSE_S, _PAUSE_MAX_S))
            pause_s = retry.failed(asyncio.get_running_loop().time())
            logger.warning(
                "entry %d:%d is not repaired yet, next try in %.0f s: %s; to do: see that other "
                "bookies of its ledger run (dlog ledger check)",
                *key,
                pause_s,
                error,
            )
        else:
            self._retries.pop(key, None)
        finally:
            self._tried.discard(key)
            self._has_news.set()

    async def _repair(self, ledger_id: int, entry_id: int) -> None:
        """Repair one entry, or find that it is not needed.

        Raises:
            DLError: neither of the two.
        """
        try:
            # Fresh, so that the present members are asked, and no deleted ledger is repaired.
            metadata = (await self._ledgers.read(ledger_id, fresh=True)).metadata
        except LedgerNotFoundError:
            self._damage.forget_entry(ledger_id, entry_id, is_repaired=False)
            return
        if metadata.state is LedgerState.CLOSED and entry_id > metadata.last_entry_id:
            # The entry never became part of the ledger.
            self._damage.forget_entry(ledger_id, entry_id, is_repaired=False)
            return
        bookies = metadata.ensemble_of(entry_id).bookies
        failures = []
        for position in write_set(metadata.quorum, entry_id):
            if bookies[position] == self._bookie:
                continue
            try:
                frame = await self._client.read_entry(
                    bookies[position], ledger_id=ledger_id, entry_id=entry_id, fence=False
                )
                # The ids too, because `repair_entry` takes any intact frame.
                decode_frame(frame, ledger_id=ledger_id, entry_id=entry_id)
                await self._writes.repair_entry(frame)
            except DLError as error:
                failures.append(f"{bookies[position]}: {type(error).__name__}: {error}")
            else:
                return
        raise BookieStorageError(
            f"no other bookie returned it: {'; '.join(failures) or 'there is none'}"
        )
