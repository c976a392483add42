"""Carries out a plan of faults on a cluster, and undoes each of them."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from typing import TYPE_CHECKING

from dlcore import DLError
from tests.chaos import disks
from tests.chaos.cluster import (
    FULL_DISK_BYTES,
    PROXIES,
    READ_ONLY_DISK_BYTES,
    persistently,
)
from tests.chaos.links import Rule
from tests.chaos.plan import KINDS, LINK_KINDS, Fault
from tests.chaos.services import Deadline
from tests.chaos.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.chaos.cluster import Cluster
    from tests.chaos.services import BookieService, Service

_DELETE_COOKIE = re.compile(r"dlog bookie cookie delete (\S+)")
_REPLAY_S_MAX = 1.5
_PATIENCE_S = 120.0
_COPY_PATIENCE_S = 30.0
"""A disk that is not made good for by then is the only one that is lost for now."""
_SYNC_DELAY_S_MAX = 1.5
_LINK_DELAY_S_MAX = 0.8
_FULL_SHARE = 0.5
"""Of the fills, those that leave nothing at all."""


class NemesisError(Exception):
    """The system did something that it must refuse to do; the message says what."""


class Nemesis:
    """Carries out faults, several at a time.

    Disks are lost one at a time: the next one only when all that the last one held was copied.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.counts: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self._cluster = cluster
        self.lost: set[str] = set()
        """Incarnations whose disk was lost in this run."""
        self._wiping = asyncio.Lock()
        self._handlers: dict[str, Callable[[Fault], Awaitable[bool | None]]] = {
            "kill bookie": self._kill_bookie,
            "pause bookie": lambda fault: self._pause(cluster.bookies[fault.target], fault),
            "kill client": lambda fault: self._kill(cluster.clients[fault.target], fault),
            "pause client": lambda fault: self._pause(cluster.clients[fault.target], fault),
            "fill disk": self._fill_disk,
            "fail syncs": self._fail_syncs,
            "slow disk": self._slow_disk,
            "restart ZooKeeper": self._restart_zookeeper,
            "pause ZooKeeper": self._pause_zookeeper,
            "wipe bookie": self._wipe,
            "kill owner": lambda fault: self._to_owner(self._kill, fault),
            "pause owner": lambda fault: self._to_owner(self._pause, fault),
            "restart proxies": self._restart_proxies,
            **dict.fromkeys(LINK_KINDS, self._break_links),
        }
        assert self._handlers.keys() == set(KINDS)

    async def run(self, plan: Sequence[Fault], *, note: Callable[[str], None]) -> None:
        """Carry out the plan; return when everything is undone.

        Raises:
            NemesisError: see there; and whatever else went wrong.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(max(0.0, started_s + fault.at_s - loop.time()))
                note(str(fault))
                group.create_task(self._carry_out(fault))

    async def _carry_out(self, fault: Fault) -> None:
        if await self._handlers[fault.kind](fault) is False:
            self.left_out[fault.kind] += 1
        else:
            self.counts[fault.kind] += 1

    # Processes

    async def _kill(self, service: Service, fault: Fault) -> None:
        async with service.turn:
            await service.kill()
            await asyncio.sleep(fault.lasts_s)
            service.start()

    async def _kill_bookie(self, fault: Fault) -> None:
        bookie = self._cluster.bookies[fault.target]
        async with bookie.turn:
            await bookie.kill()
            await asyncio.sleep(fault.lasts_s)
            bookie.start()
            if fault.strength > 0.5:  # again, perhaps while it replays
                await asyncio.sleep(_REPLAY_S_MAX * fault.strength)
                await bookie.kill()
                bookie.start()

    async def _pause(self, service: Service, fault: Fault) -> None:
        async with service.turn:
            await service.pause()
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                service.resume()

    async def _to_owner(
        self, strike: Callable[[Service, Fault], Awaitable[None]], fault: Fault
    ) -> bool:
        """Do something to the proxy that owns the producers' log; False if none comes to."""
        owner: str | None = None

        async def is_owned() -> bool:
            nonlocal owner
            owner = await self._cluster.find_owner()
            return owner is not None

        if not await Deadline(_PATIENCE_S).wait(is_owned) or owner is None:
            return False
        await strike(self._cluster.clients[owner], fault)
        return True

    async def _restart_proxies(self, fault: Fault) -> None:
        """One after the other, in good order, as for an upgrade."""
        for name in PROXIES:
            proxy = self._cluster.clients[name]
            async with proxy.turn:
                await proxy.stop()
                proxy.start()
            await asyncio.sleep(fault.lasts_s)

    async def _restart_zookeeper(self, fault: Fault) -> None:
        zookeeper = self._cluster.zookeeper
        async with self._cluster.zookeeper_turn:
            await in_thread(zookeeper.kill)
            await asyncio.sleep(fault.lasts_s)
            await in_thread(zookeeper.start)

    async def _pause_zookeeper(self, fault: Fault) -> None:
        zookeeper = self._cluster.zookeeper
        async with self._cluster.zookeeper_turn:
            await in_thread(zookeeper.pause)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                zookeeper.resume()

    # Links

    async def _break_links(self, fault: Fault) -> None:
        network = self._cluster.network
        rule = Rule(
            frozenset(fault.sources),
            frozenset(fault.endpoints),
            cut=fault.kind == "cut links",
            holds_requests=fault.kind == "half-open links"
            or (fault.kind == "one-way links" and fault.strength < 0.5),
            holds_answers=fault.kind == "half-open links"
            or (fault.kind == "one-way links" and fault.strength >= 0.5),
            delay_s=_LINK_DELAY_S_MAX * fault.strength if fault.kind == "slow links" else 0.0,
        )
        if fault.kind == "reset links":
            network.reset(rule)
            return
        network.add_rule(rule)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            network.remove_rule(rule)

    # Disks

    async def _fill_disk(self, fault: Fault) -> None:
        bookie = self._cluster.bookies[fault.target]
        leave_bytes = FULL_DISK_BYTES if fault.strength < _FULL_SHARE else READ_ONLY_DISK_BYTES
        async with bookie.turn:
            try:
                await in_thread(disks.fill_disk, bookie.folder, leave_bytes=leave_bytes)
                await asyncio.sleep(fault.lasts_s)
            finally:
                await in_thread(disks.free_disk, bookie.folder)

    async def _fail_syncs(self, fault: Fault) -> bool:
        """Return False if the bookie did not come to run."""
        bookie = self._cluster.bookies[fault.target]
        async with bookie.turn:
            await _wait_serving(bookie)
            pid = bookie.pid
            if pid is None:
                return False
            try:
                self._cluster.syncs.fail(bookie.name, pid)
                await asyncio.sleep(fault.lasts_s)
            finally:
                await self._cluster.syncs.end(bookie.name)
        return True

    async def _slow_disk(self, fault: Fault) -> bool:
        """Return False if the bookie did not come to run."""
        bookie = self._cluster.bookies[fault.target]
        async with bookie.turn:
            await _wait_serving(bookie)
            pid = bookie.pid
            if pid is None:
                return False
            delay_s = _SYNC_DELAY_S_MAX * fault.strength
            try:
                self._cluster.syncs.slow_down(bookie.name, pid, delay_s=delay_s)
                await asyncio.sleep(fault.lasts_s)
            finally:
                await self._cluster.syncs.end(bookie.name)
        return True

    async def _wipe(self, fault: Fault) -> bool:
        """Lose a disk for good, and bring the bookie back as its error message says."""
        async with self._wiping:
            if not await self.wait_copied(_COPY_PATIENCE_S):
                return False
            bookie = self._cluster.bookies[fault.target]
            async with bookie.turn:
                if not await _wait_serving(bookie) or bookie.incarnation is None:
                    return False
                self.lost.add(bookie.incarnation)
                await bookie.kill()
                await in_thread(_empty, bookie)
                await asyncio.sleep(fault.lasts_s)
                await self._start_anew(bookie)
        return True

    async def wait_copied(self, timeout_s: float) -> bool:
        """Return whether no ledger came to rely on a lost disk any more in time."""

        async def nothing_is_missing() -> bool:
            try:
                return not await self._cluster.find_missing(self.lost)
            except DLError:
                return False  # the metadata store is away

        return await Deadline(timeout_s).wait(nothing_is_missing)

    async def _start_anew(self, bookie: BookieService) -> None:
        """Do what an operator does: read why it refuses to start, delete its cookie, start it."""
        lost = self.lost.copy()
        await _start_until(bookie, lambda: bool(_DELETE_COOKIE.search(bookie.output)))
        refusal = _DELETE_COOKIE.search(bookie.output)
        if refusal is None:
            raise NemesisError(
                f"{bookie.name} started on an emptied folder, or did not say what to do: "
                f"{bookie.output[-1000:]}"
            )
        name = refusal[1]
        await persistently(lambda: self._cluster.forget_cookie(name), timeout_s=_PATIENCE_S)
        await _start_until(bookie, lambda: bookie.serves)
        if bookie.incarnation is None or bookie.incarnation in lost:
            raise NemesisError(
                f"{bookie.name} did not start as a new bookie: {bookie.output[-1000:]}"
            )
        bookie.is_wanted = True


async def _wait_serving(bookie: BookieService) -> bool:
    """Return whether the bookie, which an earlier fault may have ended, came to serve in time."""

    async def serves() -> bool:
        return bookie.serves

    return await Deadline(_PATIENCE_S).wait(serves)


async def _start_until(bookie: BookieService, condition: Callable[[], bool]) -> None:
    """Start the bookie, again if it ends, until `condition` holds or it serves."""

    async def holds() -> bool:
        if condition() or bookie.serves:
            return True
        if not bookie.is_running:
            bookie.start()
            bookie.is_wanted = False  # its end is looked at here
        return False

    await Deadline(_PATIENCE_S).wait(holds)


def _empty(bookie: BookieService) -> None:
    for path in bookie.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
