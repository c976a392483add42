"""Chooses bookies for all callers: one policy, on the current state of the registry.

The callers are new ledgers, writers and recoveries that replace a failed bookie, and auto-recovery.
The choice itself is pure (`placement`), and so is the judgement of health (`health`).  This module
brings them together with the registrations and the clock.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.base.errors import NotEnoughBookiesError
from dlcore.ledger.placing.placement import (
    BookieSite,
    Topology,
    choose_ensemble,
    choose_quorum,
    choose_replacements,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from dlcore.base.config import PlacementConfig, QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.registry import BookieRegistry
    from dlcore.ledger.metadata.values import BookieRegistration
    from dlcore.ledger.placing.health import BookieHealth

logger = logging.getLogger(__name__)


class Placer:
    """The choice of bookies of one client; used on one event loop.

    It remembers the site of each bookie that it saw registered, because a member of an ensemble
    that is away for a moment is still in its rack.
    """

    def __init__(
        self,
        registry: BookieRegistry,
        *,
        config: PlacementConfig,
        health: BookieHealth,
        rng: random.Random,
    ) -> None:
        self.health = health
        self._registry = registry
        self._config = config
        self._rng = rng
        self._sites: dict[BookieId, BookieSite] = {}
        self._sessions: dict[BookieId, str] = {}

    async def list_writable(self) -> list[BookieId]:
        """Read the registrations again and return the bookies that take ordinary writes, by name.

        Raises:
            MetadataError: the store failed.
        """
        return self.take_note(await self._registry.get_bookies())

    def take_note(self, infos: Iterable[BookieRegistration]) -> list[BookieId]:
        """Remember registrations, and return the bookies that take ordinary writes.

        A bookie with a new registration since it was last seen is out of quarantine.
        """
        writable: list[BookieId] = []
        for info in infos:
            bookie = info.bookie
            self._sites[bookie] = BookieSite(info.rack, info.free_bytes, info.total_bytes)
            # A new session is another process: the failures of the old one say nothing about it.
            if self._sessions.get(bookie, info.session) != info.session:
                self.health.release(bookie)
            self._sessions[bookie] = info.session
            if not info.read_only:
                writable.append(bookie)
        return writable

    def topology(self) -> Topology:
        """Return the known sites and the health of the bookies."""
        adds, now = self.health.adds, asyncio.get_running_loop().time()
        return Topology(
            sites=self._sites,
            avoided={
                each
                for each in self._sites
                if adds.is_resting(each, now) or adds.is_quarantined(each, now)
            },
            config=self._config,
        )

    async def choose_ensemble(
        self, quorum: QuorumConfig, *, wait_s: float = 0.0
    ) -> tuple[QuorumConfig, tuple[BookieId, ...]]:
        """Return bookies for a new ensemble, and the quorum that they can make.

        The quorum is smaller than the wanted one if too few bookies are writable; see
        `choose_quorum`.  If even that quorum finds too few, it waits up to `wait_s` for others.

        Raises:
            NotEnoughBookiesError: too few are registered and writable, or in too few racks.
            MetadataError: the store failed.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        is_logged = False
        while True:
            # Watched before the choice, so that a bookie that comes in between is not missed.
            changed = self._registry.watch_changes()
            try:
                return self._choose_ensemble(quorum, await self.list_writable())
            except NotEnoughBookiesError as error:
                try:
                    async with asyncio.timeout_at(deadline):
                        if not is_logged:
                            logger.warning(
                                "a new ledger waits up to %.1f s: %s; to do: start more bookies, "
                                "or free disks; writing fails after this time",
                                wait_s,
                                error,
                            )
                            is_logged = True
                        await changed.wait()
                except TimeoutError:
                    raise error from None

    def _choose_ensemble(
        self, wanted: QuorumConfig, writable: Sequence[BookieId]
    ) -> tuple[QuorumConfig, tuple[BookieId, ...]]:
        quorum = choose_quorum(wanted, len(writable), self._config)
        bookies = choose_ensemble(
            writable,
            size=quorum.ensemble_size,
            write_quorum_size=quorum.write_quorum_size,
            topology=self.topology(),
            rng=self._rng,
        )
        return quorum, bookies

    def choose_replacements(
        self,
        infos: Iterable[BookieRegistration],
        *,
        ensemble: Sequence[BookieId | None],
        positions: Sequence[int],
        quorum: QuorumConfig,
    ) -> dict[int, BookieId]:
        """Return writable bookies of `infos` for positions of an ensemble, as far as there are any.

        None in `ensemble` is a position that no bookie has had yet.
        """
        return choose_replacements(
            self.take_note(infos),
            ensemble=ensemble,
            positions=positions,
            write_quorum_size=quorum.write_quorum_size,
            topology=self.topology(),
            rng=self._rng,
        )
