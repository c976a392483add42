"""Carries out a plan of faults on a cluster, and undoes each of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from dlcore import DLError
from dlcore.base.ids import BookieId
from dlcore.flight import actions
from dlcore.ops.upgrade_report import Role
from tests.chaos import disks
from tests.chaos.cluster import (
    FULL_DISK_BYTES,
    PROXIES,
    READ_ONLY_DISK_BYTES,
    persistently,
)
from tests.chaos.forger import Forger
from tests.chaos.links import Rule
from tests.chaos.plan import (
    ABRUPT,
    ALL_LOSE_POWER,
    CHANGE_RELEASE,
    FINALIZE,
    LINK_KINDS,
    MIXED_KINDS,
    Fault,
)
from tests.chaos.services import Deadline
from tests.chaos.threads import in_thread
from tests.fixtures.power import take_power

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.chaos.cluster import Cluster
    from tests.chaos.services import BookieService, Service

_DELETE_COOKIE = re.compile(r"dlog bookie cookie delete (\S+)")
_OLDER_COPY = re.compile(r"bookie refuses to start: the data folder is an older copy")
_HELD_S = 0.5
"""How long writes hang before power is lost."""
_REPLAY_S_MAX = 1.5
_POLL_S = 0.1
_PATIENCE_S = 120.0
_COPY_PATIENCE_S = 30.0
"""A disk that is not made good for by then is the only one that is lost for now."""
_SYNC_DELAY_S_MAX = 1.5
_LINK_DELAY_S_MAX = 0.8
_FULL_SHARE = 0.5
"""The share of the fills that leave nothing at all."""


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
        self.taken_back = 0
        """Sectors, ends of files and names that losses of power took back."""
        self.releases: Counter[str] = Counter()
        """The most members of each release at once, seen before each change."""
        self._wiping = asyncio.Lock()
        self._is_finalizing = False
        self._handlers: dict[str, Callable[[Fault], Awaitable[bool | None]]] = {
            "kill bookie": self._kill_bookie,
            "lose power": self._lose_power,
            "pause bookie": lambda fault: self._pause(cluster.bookies[fault.target], fault),
            "kill client": lambda fault: self._kill(cluster.clients[fault.target], fault),
            "pause client": lambda fault: self._pause(cluster.clients[fault.target], fault),
            "fill disk": self._fill_disk,
            "fail syncs": self._fail_syncs,
            "slow disk": self._slow_disk,
            "restart ZooKeeper": self._restart_zookeeper,
            "pause ZooKeeper": self._pause_zookeeper,
            "wipe bookie": self._wipe,
            "stale folder": self._bring_an_older_folder,
            "forge frames": self._forge,
            "kill owner": lambda fault: self._to_owner(self._kill, fault),
            "pause owner": lambda fault: self._to_owner(self._pause_owner, fault),
            "drain proxies": lambda fault: self._to_owner(self._drain, fault),
            "restart proxies": self._restart_proxies,
            "restart bookies": self._restart_bookies,
            CHANGE_RELEASE: self._change_release,
            FINALIZE: self._finalize,
            **dict.fromkeys(LINK_KINDS, self._break_links),
        }
        assert self._handlers.keys() == set(MIXED_KINDS)

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

    async def _lose_power(self, fault: Fault) -> None:
        """Kill one bookie or all at once, and take back what they have not synced."""
        is_one = fault.strength < ALL_LOSE_POWER
        bookies = self._cluster.bookies
        struck = [bookies[fault.target]] if is_one else [bookies[name] for name in sorted(bookies)]
        async with AsyncExitStack() as turns:
            for bookie in struck:
                await turns.enter_async_context(bookie.turn)
            for bookie in struck:  # so that each is in the middle of a write
                if bookie.pid is not None:
                    self._cluster.syncs.hold(bookie.name, bookie.pid)
            await asyncio.sleep(_HELD_S)
            await asyncio.gather(*(bookie.kill() for bookie in struck))
            for bookie in struck:
                await self._cluster.syncs.end(bookie.name)
                rng = random.Random(f"{self._cluster.seed} {fault.at_s} {bookie.name}")
                journal = self._cluster.syncs.journal(bookie.name)
                loss = await in_thread(take_power, bookie.folder, journal, rng)
                self.taken_back += len(loss.contents) + len(loss.ends) + len(loss.names)
            await asyncio.sleep(fault.lasts_s)
            for bookie in struck:
                bookie.start()

    async def _pause(self, service: Service, fault: Fault) -> None:
        async with service.turn:
            await service.pause()
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                service.resume()

    async def _to_owner(
        self, strike: Callable[[Service, Fault], Awaitable[bool | None]], fault: Fault
    ) -> bool:
        """Do something to the proxy that owns the producers' log; False if none comes to."""
        owner: str | None = None

        async def is_owned() -> bool:
            nonlocal owner
            owner = await self._cluster.find_owner()
            return owner is not None

        if not await Deadline(_PATIENCE_S).wait(is_owned) or owner is None:
            return False
        return await strike(self._cluster.clients[owner], fault) is not False

    async def _pause_owner(self, owner: Service, fault: Fault) -> bool:
        """Let it stand still until another one owns the log, which must not take for ever.

        False: it had ended.
        """
        async with owner.turn:
            if not owner.is_running:
                return False
            await owner.pause()
            try:
                await asyncio.sleep(fault.lasts_s)
                await self._expect_another_owner(owner.name, "stands still")
            finally:
                owner.resume()
        return True

    async def _drain(self, owner: Service, fault: Fault) -> bool:
        """Have it give all its logs up, and take logs again later; False if it is not reached."""
        async with owner.turn:
            try:
                await self._cluster.act_on_proxy(owner.name, actions.DRAIN)
            except DLError:
                return False
            await self._expect_another_owner(owner.name, "drains")
            await asyncio.sleep(fault.lasts_s)
            if await self._cluster.find_owner() == owner.name:
                raise NemesisError(f"{owner.name} drains, and owns the log of the producers again")
            await persistently(
                lambda: self._cluster.act_on_proxy(owner.name, actions.UNDRAIN),
                timeout_s=_PATIENCE_S,
            )
        return True

    async def _expect_another_owner(self, name: str, why: str) -> None:
        async def is_another() -> bool:
            return await self._cluster.find_owner() not in (None, name)

        if not await Deadline(_PATIENCE_S).wait(is_another):
            raise NemesisError(
                f"{name} {why}, and no other proxy owns its log {_PATIENCE_S:g} s later"
            )

    async def _restart_proxies(self, fault: Fault) -> None:
        """One after the other, in good order, as for an upgrade."""
        for name in PROXIES:
            proxy = self._cluster.clients[name]
            async with proxy.turn:
                await proxy.stop()
                proxy.start()
            await asyncio.sleep(fault.lasts_s)

    async def _restart_bookies(self, fault: Fault) -> None:
        """One after the other, each only when the one before serves again."""
        for bookie in self._cluster.bookies.values():
            async with bookie.turn:
                await bookie.stop()
                bookie.start()
                await _wait_serving(bookie)
            await asyncio.sleep(fault.lasts_s)

    async def _change_release(self, fault: Fault) -> bool:
        """Restart a process as the other release; False if there is no way back any more."""
        service = self._cluster.services[fault.target]
        async with service.turn:
            if self._is_finalizing:
                return False
            await self._bookies_tell_their_releases()
            await (service.kill() if fault.strength > ABRUPT else service.stop())
            await asyncio.sleep(fault.lasts_s)
            service.installed = self._cluster.last if service.installed is None else None
            service.start()
        return True

    async def _finalize(self, _fault: Fault) -> None:
        """Let all processes run this release, and finalize its features."""
        self._is_finalizing = True
        await self._require_reported_releases()
        for service in self._cluster.services.values():
            async with service.turn:
                if service.installed is not None:
                    await service.stop()
                    service.installed = None
                    service.start()
        await self._require_reported_releases()
        await persistently(self._cluster.finalize, timeout_s=_PATIENCE_S)

    async def _require_reported_releases(self) -> None:
        if not await Deadline(_PATIENCE_S).wait(self._bookies_tell_their_releases):
            raise NemesisError(f"bookies run other releases than they announce: {self.releases}")

    async def _bookies_tell_their_releases(self) -> bool:
        """Return whether each that is registered runs what it was started as; note all members."""
        try:
            members = (await self._cluster.look_at_releases()).members
        except DLError:
            return False  # the metadata store is away
        self.releases |= Counter(f"{each.role} {each.version}" for each in members)
        versions = {each.name: each.version for each in members if each.role is Role.BOOKIE}
        return bool(versions) and all(
            versions.get(name, each.version) == each.version
            for name, each in self._cluster.bookies.items()
        )

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
                self._cluster.syncs.journal(bookie.name).unlink(missing_ok=True)
                await asyncio.sleep(fault.lasts_s)
                await self._start_anew(bookie)
        return True

    async def _bring_an_older_folder(self, fault: Fault) -> bool:
        """Start the bookie on a copy of its folder from before its last start: it must refuse.

        False if it did not come to run.
        """
        bookie = self._cluster.bookies[fault.target]
        journal = self._cluster.syncs.journal(bookie.name)
        older, newest = bookie.folder.with_suffix(".older"), bookie.folder.with_suffix(".newest")
        async with bookie.turn:
            await bookie.kill()
            await in_thread(shutil.copytree, bookie.folder, older)
            bookie.start()
            has_lived = await _wait_serving(bookie)
            await asyncio.sleep(fault.lasts_s if has_lived else 0)
            await bookie.kill()
            output = ""
            if has_lived:
                bookie.folder.rename(newest)
                older.rename(bookie.folder)
                unsynced = journal.rename(journal.with_suffix(".aside"))
                await _start_until(bookie, lambda: bool(_OLDER_COPY.search(bookie.output)))
                output = bookie.output
                await bookie.kill()
                bookie.folder.rename(older)
                newest.rename(bookie.folder)
                unsynced.rename(journal)
            await in_thread(shutil.rmtree, older)
            bookie.start()
        if has_lived and not _OLDER_COPY.search(output):
            raise NemesisError(f"{bookie.name} started on an older folder: {output[-1000:]}")
        return has_lived

    async def _forge(self, fault: Fault) -> bool:
        """Let a stranger lie to one bookie about the ledgers that are open there."""
        bookie = self._cluster.bookies[fault.target]
        if not await _wait_serving(bookie) or bookie.incarnation is None:
            return False
        tls = self._cluster.tls
        forger = Forger(
            bookie.port,
            BookieId(bookie.name, bookie.incarnation),
            self._cluster.cluster_id,
            random.Random(f"forger {self._cluster.seed} {fault.at_s}"),
            None if tls is None else tls.client_context(),
        )
        until_s = time.monotonic() + fault.lasts_s
        while time.monotonic() < until_s:
            with contextlib.suppress(DLError):  # the metadata store is away
                await forger.forge(await self._cluster.find_open_ledgers(bookie.incarnation))
            await asyncio.sleep(_POLL_S)
        return forger.sent > 0

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
