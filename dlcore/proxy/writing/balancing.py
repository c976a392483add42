"""The driver of `balance`: it hands over logs of one proxy to others, slowly."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import BackgroundTasks, all_of
from dlcore.base.errors import AlreadyClosedError, DLError
from dlcore.proxy.rendezvous import preferred_owner
from dlcore.proxy.writing.balance import (
    AskLoads,
    Balancer,
    Effect,
    HandOver,
    LoadsRead,
    Looked,
    OwnedState,
    PublishLoad,
)

if TYPE_CHECKING:
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.writing.owner import LogOwner

logger = logging.getLogger(__name__)

_STAYS_S = 600.0
"""Time for which a log stays if its first client did not reach its home, which may be cut off."""
_FOUND_AT_ONCE = 500
"""Number of logs whose homes are computed before the event loop runs other tasks."""
_MOVED_AT_ONCE = 8
"""Most logs that are handed over at once: more of them would delay each other, as in a drain."""


class Balancing:
    """The balance of one proxy, from `start` to `aclose`.

    If it is off, the proxy hands over no logs.  It gets none either, because it publishes no load.
    """

    def __init__(self, owner: LogOwner, membership: Membership, config: ProxyConfig) -> None:
        self._owner = owner
        self._membership = membership
        self._is_on = config.rebalance
        self._loop = asyncio.get_running_loop()
        self._machine = Balancer(
            membership.location,
            after_s=config.rebalance_after_s,
            pause_s=config.rebalance_pause_s,
            tolerance=config.rebalance_tolerance,
        )
        self._homes: dict[str, str] = {}  # log -> its home among `_homes_among`
        self._homes_among: frozenset[str] = frozenset()
        self._tasks = BackgroundTasks()

    def report(self) -> dict[str, object]:
        """Return the facts about the balance for the action `health`."""
        if not self._is_on:
            return {"state": "off"}
        machine = self._machine
        return {
            "state": machine.state.name.lower(),
            "misplaced": machine.misplaced,
            "handed_over": machine.handed_over,
        }

    def handed_over(self) -> int:
        """Return the number of logs that were handed over."""
        return self._machine.handed_over

    def start(self) -> None:
        """Begin; the proxy must have joined the live ones."""
        if self._is_on:
            self._tasks.start(self._run(), name="balancing logs over proxies")

    async def aclose(self) -> None:
        """Stop handing over logs.  Idempotent."""
        await self._tasks.aclose()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except AlreadyClosedError:
                return  # the namespace was closed before
            except DLError as error:
                # The next round repeats all of this.
                logger.info("cannot balance logs over proxies now: %s", error)
                self._machine.forget_published_load()
            await asyncio.sleep(self._machine.wait_s)

    async def _look(self) -> None:
        membership = self._membership
        if membership.outages.reason is not None:
            return  # the live proxies and their loads are unknown during an outage
        live = membership.live
        logs = await self._states(live)
        looked = Looked(
            now_s=self._loop.time(),
            live=live,
            logs=logs,
            room=self._owner.room,
            changes=membership.changes,
        )
        await self._perform(self._machine.handle(looked))

    async def _states(self, live: frozenset[str]) -> list[OwnedState]:
        if live != self._homes_among:
            self._homes, self._homes_among = {}, live
        found = []
        for count, (name, log) in enumerate(list(self._owner.logs.items()), 1):
            home = self._home_of(name)
            is_new = self._loop.time() - log.acquired_at_s < _STAYS_S
            found.append(
                OwnedState(
                    name=name,
                    home=home,
                    accepted_bytes=log.room.accepted_bytes,
                    is_open=bool(log.streams),
                    stays=is_new and home in log.unreached,
                )
            )
            if count % _FOUND_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._homes = {each.name: each.home for each in found}
        return found

    def _home_of(self, name: str) -> str:
        known = self._homes.get(name)
        return known or preferred_owner(name, self._homes_among) or self._membership.location

    async def _perform(self, effects: list[Effect]) -> None:
        going: list[HandOver] = []
        for effect in effects:
            match effect:
                case PublishLoad():
                    await self._membership.presence.publish_load(effect.load)
                case AskLoads():
                    loads = await self._membership.loads_of(effect.locations)
                    event = LoadsRead(now_s=self._loop.time(), loads=loads)
                    await self._perform(self._machine.handle(event))
                case HandOver():
                    logger.info("log=%s goes to %s, its load is lower", effect.name, effect.home)
                    going.append(effect)
                case _:
                    assert_never(effect)
        for first in range(0, len(going), _MOVED_AT_ONCE):
            some = going[first : first + _MOVED_AT_ONCE]
            await all_of(*(self._owner.hand_over(each.name, each.home) for each in some))
