"""Logs with a tier in a run: what becomes old goes to objects, in a store that lies.

The workers of `logs.py` tier beside their other work, under a lock; others do the same without
asking for it, so that two do the same work at once.  Logs change their tier, and lose it,
meanwhile.  Readers, followers, scanners and all that change logs are those of `logs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.config import LogSettings
from dlcore.base.errors import LogNotFoundError
from dlcore.ops.upkeep.strays import delete_strays
from dlcore.ops.upkeep.table_keeper import TableKeeper
from tests.simulation.log_types import TYPED
from tests.simulation.redactions import PRIVATE

if TYPE_CHECKING:
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs

TIERS = ("s3://one/logs", "s3://two/logs")
TIER_ROLES = ("tierer", "keeper-of-tables", "mover", "sweeper")
"""The prefix of the names of processes that tier and keep tables."""
_DELETED_SHARE = 0.1
_AFTER_S = (0.0, 0.5, 2.0)
_SEGMENT_BYTES = (300, 1_200)
_SEGMENT_BYTES_OF_PROXIES = (1_200, 4_000)
"""Each owner of a log leaves a segment, however small, and owners of proxied logs often change."""


class Tiers:
    """The roles."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._world = logs.world
        self._rng = logs.world.rng
        self._checkers = logs.world.log_checkers.tiers
        drawn_s = self._rng.choice(_AFTER_S)
        asked_s = self._world.plan.tier_after_s
        self._after_s = drawn_s if asked_s is None else asked_s
        has_proxies = self._world.plan.has_proxies
        self._segment_bytes = _SEGMENT_BYTES_OF_PROXIES if has_proxies else _SEGMENT_BYTES
        self._checkers.after_ms = int(self._after_s * 1000)

    def settings_of_new(self, settings: LogSettings | None) -> LogSettings:
        """Return what a log is created with, beside other settings."""
        return replace(
            settings or LogSettings(),
            tier=TIERS[0],
            tier_after_s=self._after_s,
            segment_bytes_max=self._rng.choice(self._segment_bytes),
            table="delta" if self._world.plan.has_tables else None,
        )

    async def start(self, setup: LogProcess) -> None:
        """Give the typed log a tier as well, and start all processes."""
        if self._world.plan.has_types:
            log = await setup.namespace.open_log(TYPED)
            # Without a table: no column of a Delta table grows from 16 bits to 64.
            await log.update_settings(
                tier=TIERS[1], tier_after_s=self._after_s, segment_bytes_max=_SEGMENT_BYTES[0]
            )
        for number in range(2):
            self._logs.supervise(f"tierer-{number}", self._tier)
        if self._world.plan.has_tables:  # whose objects are in one place
            for number in range(2):
                self._logs.supervise(f"keeper-of-tables-{number}", self._keep_table)
        else:
            self._logs.supervise("mover", self._move)
        self._logs.supervise("sweeper", self._sweep)

    async def _tier(self, process: LogProcess) -> None:
        """Tier any log, beside all others that do."""
        tierer = process.tierer()
        for _ in range(self._rng.randint(1, 5)):
            log = await process.namespace.open_log(self._rng.choice(self._names()))
            await tierer.tier(log._log)
            await self._logs.sleep(self._rng.uniform(0.0, 1.0))

    def _names(self) -> tuple[str, ...]:
        typed = (TYPED,) if self._world.plan.has_types else ()
        return (*self._logs.names, *typed, *self._private())

    def _private(self) -> tuple[str, ...]:
        """The log whose rows are redacted, so often that its table has many versions."""
        plan = self._world.plan
        return (PRIVATE,) * 2 if plan.has_redactions and plan.has_tables else ()

    async def _keep_table(self, process: LogProcess) -> None:
        """Let the table of any log follow, beside all others that do; rarely delete it."""
        context = process.namespace.log_context
        keeper = TableKeeper(context, process.namespace.staging_owner, compare_every_s=1.0)
        for _ in range(self._rng.randint(1, 5)):
            name = self._rng.choice((*self._logs.names, *self._private()))
            log = await process.namespace.open_log(name)
            if self._rng.random() < _DELETED_SHARE:
                self._delete_table(log.log_id)
            await keeper.follow(log._log)
            await self._logs.sleep(self._rng.uniform(0.0, 1.0))

    def _delete_table(self, log_id: str) -> None:
        store = self._world.cold
        assert store is not None
        assert store.catalog is not None
        for url in [each for each in store.catalog.tables if each.endswith(f"/{log_id}")]:
            del store.catalog.tables[url]
            self._world.faults["table deleted"] += 1

    async def _sweep(self, process: LogProcess) -> None:
        """Delete stray objects of any age, more often than workers do."""
        await self._logs.sleep(self._rng.uniform(0.0, 0.5))
        await delete_strays(process.namespace.log_context, age_s=0.0)

    async def _move(self, process: LogProcess) -> None:
        """Let old segments of a log go somewhere else, or nowhere."""
        await self._logs.sleep(self._rng.uniform(0.5, 3.0))
        try:
            log = await process.namespace.open_log(self._logs.any_log())
            tier = self._rng.choice((*TIERS, *TIERS, None))
            await log.update_settings(tier=tier)
        except LogNotFoundError:
            return
        process.note(f"log {log.name} has the tier {tier}")

    def is_done(self) -> bool:
        """Return whether all that is old is in objects; what is encrypted never is."""
        if self._world.plan.is_encrypted:
            return True
        is_cold = not self._checkers.waiting(self._world.tree.dump())
        return is_cold and self._checkers.tables_follow()
