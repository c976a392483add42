"""Every stored value, damaged in every way, in the hands of everything that goes over many of them.

Goal: one log, ledger or bookie whose metadata is damaged ends no process that serves others, and
keeps none of the others from its turn.

Method: a namespace in memory that has a value of every kind.  One value at a time is damaged; then
each sweep runs once, and what it should have done for the others is looked for.  Whatever a sweep
raises or does not come back from fails the test.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from bookie.upkeep.garbage_collector import GarbageCollector
from dlcore.base.config import LogSettings
from dlcore.base.errors import CorruptMetadataError
from dlcore.base.ids import DLSN
from dlcore.ledger.metadata.values import BookieCookie
from dlcore.log.metadata.commit_records import list_commits
from dlcore.log.upkeep.requests import ask_for_upkeep
from dlcore.log.upkeep.staged import list_all_staged
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import encode
from dlcore.ops.autorecovery.auditor import Auditor
from dlcore.ops.autorecovery.config import AutoRecoveryConfig
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.maintenance import Maintenance
from dlcore.ops.autorecovery.service import Election
from dlcore.ops.autorecovery.values import ElectedAuditor
from dlcore.ops.autorecovery.worker import Worker
from dlcore.ops.inspection import audit_ledgers, find_nameless, inspect_log
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.worker import LogUpkeep
from dlcore.proxy.membership import Membership
from tests.fixtures.lengths import sample
from tests.fixtures.memory_namespace import memory_cluster, record
from tests.fixtures.staged_records import stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.metadata.tree import Tree
    from tests.fixtures.memory_namespace import MemoryCluster

TIME_LIMIT_S = 30.0
FORMS = 4
DAY_MS = 24 * 3600 * 1000
EXTREMES = [2**63 - 1, 2**64 - 1, -(2**63), 2**53, 0, 1e308, 1e30]
WRONG: list[Any] = [None, "", "\x00", [], {}, True, -1.5]


def decoded(value: bytes) -> tuple[Any, Callable[[Any], bytes]] | None:
    """Return what a stored value holds, and how it is made of that; None if it is no such value."""
    for module in (msgspec.json, msgspec.msgpack):
        try:
            found = module.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(found, dict | list):
            return found, module.encode
    return None


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where something stands in a value, and in what that is made of."""
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in places:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from leaves(each, (*path, key))


def with_changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a value with something else in one place."""
    changed = copy.deepcopy(value)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = new
    return changed


def damaged_forms(value: bytes) -> Iterator[bytes]:
    """Yield a value in every form that damage, a hand or a hostile client may give it."""
    yield from (b"", b"\x00", b"no value", b"\xff" * 64, b"{}", b"[]", b"null", b"\x90", b"9" * 400)
    yield b"[" * 5_000
    yield b"\x91" * 5_000
    yield from (value[: len(value) // 2], value[:-1], value + b"\x00")
    found = decoded(value)
    if found is None:
        return
    content, made = found
    for path in leaves(content):
        for new in (*EXTREMES, *WRONG):
            yield made(with_changed(content, path, new))


async def fill(namespace: DirectNamespace, log: str, *, segments: int = 3, **settings: Any) -> None:
    """Create a log of some segments of one record each."""
    await namespace.create_log(log, settings=LogSettings(**settings))
    manager = await namespace.open_log(log)
    for txid in range(segments):
        async with await manager.open_writer() as writer:
            await writer.write(record(txid))


class Scene:
    """A namespace with a value of every kind, and the sweeps over it."""

    def __init__(self, cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.recovery = namespace.ports
        self.logs = namespace.log_context
        self.repairs = RepairList(self.logs.store, self.logs.paths, self.logs.clock)
        self.pristine: Tree
        self.other_ledgers: set[int] = set()
        self.other_id = ""

    async def set_up(self) -> None:
        """Make all of it."""
        namespace, paths, store = self.namespace, self.logs.paths, self.logs.store
        await fill(namespace, "damaged", retention_s=60.0)
        await fill(namespace, "deleted")
        await (await namespace.open_log("damaged")).move_subscription("reader", dlsn=DLSN(1, 0, 0))
        extent = await stage(namespace, "a", "b", log="damaged")
        append = await namespace.begin_append("job", 7)
        await append.commit([extent])
        await stage(namespace, "c", log="damaged")
        log = await self.logs.logs.find("damaged")
        await ask_for_upkeep(self.logs, {log: 1})
        await fill(namespace, "long/" + "x" * 300)
        for bookie in self.cluster.bookies:
            cookie = BookieCookie(
                name=bookie.bookie.name,
                incarnation=bookie.bookie.incarnation,
                cluster_id=self.cluster.cluster_id,
                created_ms=1,
            )
            await store.create(paths.cookie(cookie.name), encode(cookie))
        others = self.ledgers()
        await fill(namespace, "other", retention_s=60.0)
        self.other_id = (await self.logs.logs.find("other")).log_id
        self.other_ledgers = self.ledgers() - others
        for ledger_id in others:
            await self.repairs.publish(ledger_id, missing=[self.cluster.bookies[0].bookie])
        for stray in (
            f"{paths.ledgers}/stray",
            f"{paths.ledgers}/0/stray",
            f"{paths.ledgers}/0/0000/stray",
            f"{paths.under_replicated}/0/0000/stray",
            f"{paths.merged}/stray",
            f"{paths.staging_of('job')}/stray",
            f"{paths.log_of(log.log_id).head}/stray",
        ):
            await store.create(stray, make_parents=True)
        self.pristine = self.cluster.tree._leader.copy()

    def ledgers(self) -> set[int]:
        """Return the ids of all ledgers."""
        below = self.logs.paths.ledgers + "/"
        parts = [
            path.removeprefix(below).split("/")
            for path in self.cluster.tree.dump()
            if path.startswith(below) and path.count("/") == 5 and not path.endswith("stray")
        ]
        return {self.logs.paths.ledger_id_of(*part) for part in parts}

    def values(self) -> dict[str, bytes]:
        """Return the values to damage, by path."""
        root = self.logs.paths.root
        return {
            path: node.value
            for path, node in self.pristine.dump().items()
            if node.value
            and path.startswith(f"{root}/")
            # Those of the log that is looked at afterwards stay whole.
            and self.other_id not in path
            and path != self.logs.paths.log("other")
        }

    async def damage(self, path: str, value: bytes) -> None:
        """Let everything be as it was, but for one value."""
        self.cluster.tree._leader._nodes = self.pristine.copy()._nodes
        await self.logs.store.put(path, value, version=ANY_VERSION)
        self.cluster.clocks["a"].current_ms += DAY_MS

    async def audit(self) -> None:
        """Auto-recovery looks at bookies and ledgers, and finds what is lost."""
        await self.logs.store.delete(self.logs.paths.bookie_available("bookie-2"))
        config = AutoRecoveryConfig(lost_bookie_delay_s=0, check_ledgers_per_s=1e6)
        auditor = Auditor(self.recovery, self.repairs, config, on_publish=lambda: None)
        await auditor._audit_once()
        await auditor._check_due_s()
        await auditor._check_all()
        listed = {each async for each in self.repairs.ledger_ids()}
        assert self.other_ledgers & self.ledgers() <= listed

    async def elect(self) -> None:
        """A process becomes auditor."""
        election = Election(self.logs.store, self.logs.paths, ElectedAuditor(owner="a", token="a"))
        assert not await election._is_ours()

    async def repair(self) -> None:
        """Auto-recovery works on what is listed."""
        worker = Worker(self.recovery, self.repairs, AutoRecoveryConfig(), token="a")
        for ledger_id in await worker._list_due(()):
            await worker._repair_one(ledger_id)

    async def keep_up(self) -> None:
        """Logs are merged, and what is old goes."""
        upkeep = LogUpkeep.of(self.namespace, UpkeepConfig())
        await upkeep.serve()
        await upkeep.sweep()
        log = await self.namespace.open_log("other")
        assert await log.get_log_record_count() == 0  # all of it was too old

    async def collect_garbage(self) -> None:
        """A bookie asks which of its ledgers are unneeded: none of them."""
        bookie = self.cluster.bookies[0].bookie
        collector = GarbageCollector(
            None,  # type: ignore[arg-type]  # only asked, nothing dropped
            bookie=bookie,
            store=self.logs.store,
            paths=self.logs.paths,
            cluster_id=self.cluster.cluster_id,
        )
        for ledger_id in self.ledgers():
            await collector._is_unneeded(ledger_id)

    async def list_all(self) -> None:
        """Clients, operators and proxies list what there is."""
        assert "other" in await self.namespace.get_logs()
        await list_all_staged(self.logs)
        await list_commits(self.logs.store, self.logs.paths)
        await find_nameless(self.logs)
        await audit_ledgers(self.logs, report=lambda *_: None)
        for log in ("damaged", "other"):
            await inspect_log(self.logs, log)

    async def look(self) -> None:
        """Operators ask what auto-recovery is at, and which ledgers a bookie has."""
        maintenance = Maintenance(self.recovery)
        await maintenance.read_status()
        await maintenance.ledgers_of("bookie-1")
        await self.recovery.registry.get_bookies()

    async def follow(self) -> None:
        """Proxies and Spark follow logs; a damaged one is an error of its own."""
        membership = Membership(self.logs.store, self.logs.paths, "grpc://a:1")
        await membership._look()
        snapshots = await self.namespace.get_snapshots(["other"], fresh=True)
        assert snapshots["other"] is not None


SWEEPS = [
    Scene.audit,
    Scene.elect,
    Scene.repair,
    Scene.keep_up,
    Scene.collect_garbage,
    Scene.list_all,
    Scene.look,
    Scene.follow,
]


def one_of_each(values: dict[str, bytes]) -> dict[str, bytes]:
    """Return the values, of those at like places the first."""
    kinds = {re.sub("[0-9a-f]*[0-9][0-9a-f]*", "0", path): path for path in reversed(values)}
    return {path: values[path] for path in kinds.values()}


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.__name__)
def test_no_damaged_value_keeps_a_sweep_from_the_others(
    sweep: Callable[[Scene], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """It comes to its end, and has done what it should for the others."""
    caplog.set_level(logging.CRITICAL)
    failures: list[str] = []

    async def run() -> None:
        async with memory_cluster(bookie_count=3) as cluster:
            scene = Scene(cluster, await cluster.open("a"))
            await scene.set_up()
            for path, value in one_of_each(scene.values()).items():
                for form in sample(damaged_forms(value), FORMS):
                    await scene.damage(path, form)
                    try:
                        async with asyncio.timeout(TIME_LIMIT_S):
                            await sweep(scene)
                    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported
                        failures.append(
                            f"{path} {form[:60]!r}: {type(error).__name__}: {error!s:.150}"
                        )

    asyncio.run(run())
    print("\n".join(failures))
    assert not failures


def test_damaged_settings_are_replaced_when_they_are_changed() -> None:
    """By the defaults and the change: an operator has a way back, whatever was stored."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a")
            await fill(namespace, "clicks", retention_s=60.0)
            log = await namespace.open_log("clicks")
            paths = namespace.log_context.paths
            settings = paths.log_of(log.log_id).settings
            endless = b'{"layout":2,"settings":{"retention_s":1e308}}'
            await namespace.log_context.store.put(settings, endless, version=ANY_VERSION)
            with pytest.raises(CorruptMetadataError, match="retention_s=1e"):
                await log.get_settings()
            assert await log.update_settings(retention_s=60.0) == LogSettings(retention_s=60.0)
            assert await log.get_settings() == LogSettings(retention_s=60.0)
            await namespace.log_context.store.put(settings, b"no value", version=ANY_VERSION)
            assert await log.update_settings(retention_s=None) == LogSettings()
            assert paths.retained_log(log.log_id) not in cluster.tree.dump()
            assert settings not in cluster.tree.dump()

    asyncio.run(run())


DEFECTS = [
    (Scene.audit, "dlcore.ops.autorecovery.auditor.lost_members"),
    (Scene.audit, "dlcore.ops.autorecovery.auditor.check_ledger"),
    (Scene.repair, "dlcore.ops.autorecovery.repair.plan_repair"),
    (Scene.keep_up, "dlcore.ops.upkeep.expiry.expire_log"),
    (Scene.keep_up, "dlcore.ops.upkeep.worker.drop_merged"),
    (Scene.keep_up, "dlcore.ops.upkeep.worker.remove_truncated"),
]


@pytest.mark.parametrize(("sweep", "what"), DEFECTS, ids=[what for _, what in DEFECTS])
def test_a_defect_that_one_brings_to_light_keeps_no_other_from_its_turn(
    sweep: Callable[[Scene], Awaitable[None]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported as a defect, and operators see what was left out."""
    module, _, name = what.rpartition(".")
    whole = getattr(importlib.import_module(module), name)
    reported: list[object] = []
    calls = 0

    def breaks_once(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        if any(getattr(each, "name", "") == "other" for each in arguments):
            return whole(*arguments, **more)
        calls += 1
        if calls == 1:
            raise OverflowError("cannot convert float infinity to integer")
        return whole(*arguments, **more)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: reported.append(each))
        async with memory_cluster(bookie_count=3) as cluster:
            scene = Scene(cluster, await cluster.open("a"))
            await scene.set_up()
            await scene.damage(scene.logs.paths.ledger_idgen, b"64")
            monkeypatch.setattr(what, breaks_once)
            await sweep(scene)

    asyncio.run(run())
    assert calls
    assert len(reported) == 1
