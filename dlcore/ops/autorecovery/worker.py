"""The worker: takes ledgers from the list, locks each of them, and repairs it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from dlcore.base.background import side_tasks
from dlcore.base.backoff import Backoff
from dlcore.base.clock import steady_s
from dlcore.base.errors import CorruptMetadataError, DLError
from dlcore.base.isolating import report_defect
from dlcore.ops.autorecovery.metrics import RecoveryFigures
from dlcore.ops.autorecovery.repair import LedgerRepairer, Outcome

if TYPE_CHECKING:
    from collections.abc import Collection

    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.ops.autorecovery.config import AutoRecoveryConfig
    from dlcore.ops.autorecovery.listing import RepairList
    from dlcore.ops.autorecovery.repair import Mend

logger = logging.getLogger(__name__)

_LOOK_S_MIN = 0.05
"""Shortest pause: the rest of a pause may be too short for the clock to move."""


class Worker:
    """One worker; `token` marks its locks."""

    def __init__(
        self,
        context: NamespacePorts,
        repairs: RepairList,
        config: AutoRecoveryConfig,
        *,
        token: str,
        figures: RecoveryFigures | None = None,
        mend: Mend | None = None,
    ) -> None:
        self._context = context
        self._repairs = repairs
        self._config = config
        self._token = token
        self._figures = figures or RecoveryFigures()
        self._loop = asyncio.get_running_loop()
        self._repairer = LedgerRepairer(context, config, mend)
        self._retries: dict[int, Backoff] = {}
        self._wake = asyncio.Event()

    def look_now(self) -> None:
        """Read the list at once, and retry failed ledgers, because the bookies have changed."""
        for retry in self._retries.values():
            retry.due_s = self._loop.time()
        self._wake.set()

    async def run(self) -> None:
        """Repair until cancelled; locks are released at the end.

        Raises:
            MetadataError: the store failed.
        """
        active: dict[asyncio.Task[None], int] = {}
        queue: deque[int] = deque()
        self._repairer.forget_graces()
        look_at = self._loop.time()
        unsubscribe = self._context.store.watch(
            self._context.paths.bookies_available, self.look_now
        )
        async with side_tasks() as tasks:
            try:
                while True:
                    # The list may be long: it is not read again for every completed ledger.
                    if self._wake.is_set() or self._loop.time() >= look_at:
                        self._wake.clear()
                        queue = deque(await self._list_due(active.values()))
                        look_at = self._loop.time() + self._config.poll_interval_s
                    while queue and len(active) < self._config.ledgers_at_once:
                        ledger_id = queue.popleft()
                        active[tasks.start(self._repair_one(ledger_id))] = ledger_id
                    await self._wait(active, until=look_at)
                    for task in [each for each in active if each.done()]:
                        del active[task]
                        task.result()
            finally:
                unsubscribe()

    async def _wait(self, active: Collection[asyncio.Task[None]], *, until: float) -> None:
        """Wait until a repair has ended, `look_now` is called, or the next look is due."""
        async with side_tasks() as tasks:
            await asyncio.wait(
                [*active, tasks.start(self._wake.wait())],
                timeout=max(until - self._loop.time(), _LOOK_S_MIN),
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _list_due(self, active: Collection[int]) -> list[int]:
        listed = [each async for each in self._repairs.ledger_ids()]
        self._figures.repairs.listed = len(listed)
        now = self._loop.time()
        known = {*listed, *active}
        self._retries = {each: retry for each, retry in self._retries.items() if each in known}
        self._repairer.keep_only(known)
        self._figures.cold.holes &= known
        due = [
            each
            for each in listed
            if each not in active
            and (each not in self._retries or self._retries[each].due_s <= now)
        ]
        self._context.rng.shuffle(due)  # several workers begin with different ledgers
        return due

    async def _repair_one(self, ledger_id: int) -> None:
        try:
            if not await self._repairs.lock(ledger_id, owner=self._token):
                retry = self._retry_of(ledger_id)
                retry.due_s = self._loop.time() + self._config.poll_interval_s
                return
            try:
                await self._repair_locked(ledger_id)
            finally:
                await self._repairs.unlock(ledger_id, owner=self._token)
        except DLError as error:
            # The store failed, or metadata is damaged: other ledgers continue.
            logger.warning(
                "repair ledger=%d failed: %s; to do: dlog ledger check for which replicas are "
                "there; it is tried again",
                ledger_id,
                error,
            )
            self._back_off(ledger_id, Outcome(reason=str(error)))
        except Exception as error:  # noqa: BLE001  # reported with its traceback
            report_defect(f"repair of ledger {ledger_id}", error)
            self._back_off(ledger_id, Outcome(reason=f"{type(error).__name__}: {error}"))

    async def _repair_locked(self, ledger_id: int) -> None:
        listed = await self._repairs.read(ledger_id)
        if listed is None:
            return
        begun_s = steady_s()
        try:
            lock = self._context.paths.repair_lock(ledger_id)
            outcome = await self._repairer.repair(listed, lock=lock)
        except CorruptMetadataError as error:
            outcome = Outcome(reason=str(error))
        if not outcome.is_done:
            logger.info("not repaired ledger=%d: %s", ledger_id, outcome.reason)
            self._back_off(ledger_id, outcome)
            await self._repairs.note_failure(listed, outcome.reason, missing=outcome.missing)
        elif await self._repairs.remove(listed):
            self._retries.pop(ledger_id, None)
            self._figures.repairs.done += 1
            self._figures.repairs.times.note(steady_s() - begun_s)
            logger.info("repaired ledger=%d", ledger_id)

    def _back_off(self, ledger_id: int, outcome: Outcome) -> None:
        self._figures.repairs.failed += 1
        retry = self._retry_of(ledger_id)
        if outcome.retry_s is None:
            retry.failed(self._loop.time())
        else:
            # A wait of a known length is no failure: the pauses must not grow by it.
            retry.succeeded()
            retry.due_s = self._loop.time() + outcome.retry_s

    def _retry_of(self, ledger_id: int) -> Backoff:
        config = self._config
        return self._retries.setdefault(
            ledger_id, Backoff(config.retry_pause_s, config.retry_pause_s_max)
        )
