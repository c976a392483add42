"""Logs with a tier in a run: what becomes old goes to objects, in a store that lies.

The workers of `logs.py` tier beside their other work, under a lock; others do the same without
asking for it, so that two do the same work at once.  Logs change their tier, and lose it,
meanwhile.  Readers, followers, scanners and all who change logs are those of `logs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.config import LogSettings
from dlcore.base.errors import LogNotFoundError
from dlcore.ops.upkeep.strays import delete_strays
from tests.simulation.log_types import TYPED

if TYPE_CHECKING:
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs

TIERS = ("s3://one/logs", "s3://two/logs")
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
        self._after_s = self._rng.choice(_AFTER_S)
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
        )

    async def start(self, setup: LogProcess) -> None:
        """Give the typed log a tier as well, and start all processes."""
        if self._world.plan.has_types:
            log = await setup.namespace.open_log(TYPED)
            await log.update_settings(
                tier=TIERS[1], tier_after_s=self._after_s, segment_bytes_max=_SEGMENT_BYTES[0]
            )
        for number in range(2):
            self._logs.supervise(f"tierer-{number}", self._tier)
        self._logs.supervise("mover", self._move)
        self._logs.supervise("sweeper", self._sweep)

    async def _tier(self, process: LogProcess) -> None:
        """Tier any log, whoever else does."""
        tierer = process.tierer()
        for _ in range(self._rng.randint(1, 5)):
            names = (*self._logs.names, TYPED) if self._world.plan.has_types else self._logs.names
            log = await process.namespace.open_log(self._rng.choice(names))
            await tierer.tier(log._log)
            await self._logs.sleep(self._rng.uniform(0.0, 1.0))

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
        return self._world.plan.is_encrypted or not self._checkers.waiting(self._world.tree.dump())
