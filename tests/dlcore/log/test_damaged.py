"""Logs whose metadata is damaged: reported, kept from hiding others, and deleted when that is said.

Method: logs over a metadata store in memory, in which nodes are removed or overwritten by hand.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    DLError,
    LogNotFoundError,
    NodeExistsError,
    OwnershipAcquireFailedError,
)
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.metadata.port import ANY_VERSION
from dlcore.ops.inspection import audit_ledgers, delete_orphan
from dlcore.ops.upkeep.expiry import expire_log, expire_logs
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import memory_cluster, read_all, record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.context import LogContext
    from dlcore.metadata.paths import LogPaths
    from dlcore.ops.inspection import LedgerAudit
    from tests.fixtures.memory_namespace import MemoryCluster

TIME_LIMIT_S = 30
LONG = "orders/" + "x" * 300


async def fill(namespace: DirectNamespace, log: str, *, segments: int = 3) -> LogPaths:
    """Create a log of some segments of one record each."""
    await namespace.create_log(log)
    manager = await namespace.open_log(log)
    for txid in range(segments):
        async with await manager.open_writer() as writer:
            await writer.write(record(txid))
    return namespace.log_context.paths.log_of(manager.log_id)


def on_namespace(body: Callable[[MemoryCluster, DirectNamespace], Awaitable[None]]) -> None:
    """Run `body` on a namespace with the whole log "other"."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a")
            await fill(namespace, "other")
            await body(cluster, namespace)
            # Whatever was done to others, this one is whole.
            assert len(await read_all(await namespace.open_log("other"))) == 3

    run_in_own_time(asyncio.wait_for(run(), TIME_LIMIT_S))


async def overwrite(context: LogContext, path: str) -> None:
    """Damage a node."""
    await context.store.put(path, b"no value", version=ANY_VERSION)


async def damage_segment(context: LogContext, name: str, paths: LogPaths) -> None:
    """Remove a node that the head counts on."""
    await context.store.delete(paths.segment(2))


async def damage_head(context: LogContext, name: str, paths: LogPaths) -> None:
    """Nothing is known of the log."""
    await overwrite(context, paths.head)


async def damage_end(context: LogContext, name: str, paths: LogPaths) -> None:
    """The ledger of the last segment is unknown."""
    await overwrite(context, paths.segment(3))


async def damage_settings(context: LogContext, name: str, paths: LogPaths) -> None:
    """It is unknown how to write it."""
    try:
        await context.store.create(paths.settings, b"no value")
    except NodeExistsError:
        await overwrite(context, paths.settings)


async def damage_name(context: LogContext, name: str, paths: LogPaths) -> None:
    """Its id can still be known."""
    path = context.paths.log(name)
    node = await context.store.get(path)
    assert node is not None
    await context.store.put(path, node.value.replace(b'"layout":2', b'"layout":9'), version=-1)


async def audit(context: LogContext) -> LedgerAudit:
    """Compare ledgers with logs."""
    return await audit_ledgers(context, report=lambda *_: None)


DAMAGES = [damage_segment, damage_head, damage_end, damage_settings, damage_name]


@pytest.mark.parametrize("name", ["clicks", LONG], ids=["short", "long"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_log_is_deleted_when_that_is_said(
    damage: Callable[[LogContext, str, LogPaths], Awaitable[None]], name: str
) -> None:
    """Only then; its name is free, no node of it is left, and an audit finds its ledgers."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        context = namespace.log_context
        before = {path for path in cluster.tree.dump() if "/ledgers/" not in path}
        paths = await fill(namespace, name)
        ledgers = (await audit(context)).ledgers
        await damage(context, name, paths)
        if damage is not damage_settings:
            with pytest.raises(DLError):
                await read_all(await namespace.open_log(name))
        await namespace.delete_log(name, damaged=True)
        assert await namespace.get_logs() == ["other"]
        assert {path for path in cluster.tree.dump() if "/ledgers/" not in path} == before
        found = await audit(context)
        assert (found.missing, found.damaged) == ({}, {})
        for ledger_id in found.orphans:
            await delete_orphan(context, ledger_id)
        assert (await audit(context)).ledgers == ledgers - 3 == 3
        await fill(namespace, name)
        assert len(await read_all(await namespace.open_log(name))) == 3
        await namespace.delete_log(name)

    on_namespace(body)


def test_a_log_that_is_whole_is_not_taken_for_a_damaged_one() -> None:
    """And a missing one is missing."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        with pytest.raises(ConfigurationError, match="'other' is not damaged"):
            await namespace.delete_log("other", damaged=True)
        with pytest.raises(LogNotFoundError):
            await namespace.delete_log("clicks", damaged=True)

    on_namespace(body)


def test_the_writer_of_a_damaged_log_keeps_it() -> None:
    """Until it is closed."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        paths = await fill(namespace, "clicks")
        writer = await (await namespace.open_log("clicks")).open_writer()
        await overwrite(namespace.log_context, paths.segment(2))
        with pytest.raises(OwnershipAcquireFailedError):
            await (await cluster.open("b")).delete_log("clicks", damaged=True)
        await writer.aclose()
        await namespace.delete_log("clicks", damaged=True)
        assert await namespace.get_logs() == ["other"]

    on_namespace(body)


@pytest.mark.parametrize(
    "value", [b"no value", b"[1]", b'{"log_id": ""}', b'{"log_id": "\\u0000"}', b"\xff"]
)
def test_a_name_that_tells_no_id(value: bytes) -> None:
    """Only the name goes; what it led to is not guessed."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        context = namespace.log_context
        paths = await fill(namespace, "clicks")
        await context.store.put(context.paths.log("clicks"), value, version=ANY_VERSION)
        with pytest.raises(CorruptMetadataError, match="LogMetadata at /dlog/logs/"):
            await namespace.delete_log("clicks")
        await namespace.delete_log("clicks", damaged=True)
        assert not await namespace.log_exists("clicks")
        assert paths.head in cluster.tree.dump()
        assert (await audit(context)).orphans == ()

    on_namespace(body)


@pytest.mark.parametrize("leads_to", ["nothing", "other"])
def test_a_name_that_leads_elsewhere(leads_to: str) -> None:
    """Only the name goes: the log that has its id lives under another name, or is gone."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        context = namespace.log_context
        await namespace.rename_log("other", "passing")
        await namespace.rename_log("passing", "other")  # now the head says its name
        await fill(namespace, "clicks")
        node = await context.store.get(context.paths.log("clicks"))
        log_id = (await context.logs.find("clicks")).log_id
        to_id = (await context.logs.find("other")).log_id if leads_to == "other" else "unknown"
        assert node is not None
        value = node.value.replace(log_id.encode(), to_id.encode())
        await context.store.put(context.paths.log("clicks"), value, version=ANY_VERSION)
        await namespace.delete_log("clicks", damaged=True)
        assert await namespace.get_logs() == ["other"]

    on_namespace(body)


def test_a_damaged_log_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """In lists, watches, snapshots and audits; a long name that is unknown is reported by path."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        context = namespace.log_context
        await damage_segment(context, "clicks", await fill(namespace, "clicks"))
        with pytest.raises(CorruptMetadataError):
            await namespace.get_snapshots(["other", "clicks"])
        for _ in range(2):
            found = await namespace.survey_logs(["clicks", "missing", "other"])
            assert list(found) == ["clicks", "other"]
            assert isinstance(found["clicks"], CorruptMetadataError)
            assert not isinstance(found["other"], DLError)
        paths = await fill(namespace, LONG)
        async with namespace.watch_logs() as watch:
            while set(watch.names) != {"clicks", "other", LONG}:
                await watch.take(timeout_s=30)
            await overwrite(context, paths.head)
            await namespace.rename_log("clicks", "clocks")
            (change,) = await watch.take(timeout_s=30)
            assert (change.old_name, change.name) == ("clicks", "clocks")
        await overwrite(context, context.paths.log(LONG))
        assert await namespace.get_logs() == ["clocks", "other"]
        assert isinstance((await namespace.survey_logs([LONG]))[LONG], CorruptMetadataError)
        log_id = paths.head.rpartition("/")[2]
        audited = await audit(context)
        assert audited.damaged.keys() == {log_id}
        assert audited.orphans == ()

    with caplog.at_level(logging.WARNING):
        on_namespace(body)
    assert "a log is not listed: LogMetadata at /dlog/logs/" in caplog.text


def test_the_loops_of_upkeep_end_on_damaged_logs(caplog: pytest.LogCaptureFixture) -> None:
    """They waited for the log to move on, and it does not; others have their turn."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        context = namespace.log_context
        for name in ("clicks", "old"):
            await fill(namespace, name)
            await (await namespace.open_log(name)).update_settings(retention_s=60)
        log = await context.logs.find("clicks")
        await damage_segment(context, "clicks", context.paths.log_of(log.log_id))
        cluster.clocks["a"].current_ms += 100_000
        with pytest.raises(CorruptMetadataError, match="'clicks': a segment is missing"):
            await expire_log(context, log)
        await overwrite(
            context, context.paths.retained_log((await context.logs.find("old")).log_id)
        )
        assert await expire_logs(context) == 1  # the other one
        assert await read_all(await namespace.open_log("old")) == []

        await (await namespace.open_log("clicks")).update_settings(retention_s=None)
        at = await context.logs.read(log)
        manager = await namespace.open_log("clicks")
        with pytest.raises(CorruptMetadataError, match="segment 2 is not as its head says"):
            await manager.truncate(at.head.end_dlsn)
        with pytest.raises(CorruptMetadataError, match="segment 2 is not as its head says"):
            await remove_truncated(context, await context.logs.read(log))

    with caplog.at_level(logging.WARNING):
        on_namespace(body)
    assert "is listed without its name" in caplog.text


def test_a_sweep_removes_what_a_damaged_deleted_log_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was deleted and not removed; its listing, its segments and a record are damaged."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        context = namespace.log_context
        log_id = (await fill(namespace, "clicks")).head.rpartition("/")[2]
        paths = context.paths.log_of(log_id)
        manager = await namespace.open_log("clicks")
        await damage_segment(context, "clicks", paths)
        await overwrite(context, paths.segment(3))
        await context.store.create(context.paths.commit("unknown"), b"no value")
        await manager.delete()
        assert not [path for path in cluster.tree.dump() if log_id in path]
        assert len((await audit(context)).orphans) == 2
        await context.store.create(context.paths.deleted_log(log_id), b"no value")
        await context.store.create(paths.head, b"no value")
        await context.store.create(paths.segment(1), b"no value")
        await LogUpkeep.of(namespace).sweep()
        assert not [path for path in cluster.tree.dump() if log_id in path]
        assert await namespace.list_commits() == []

    with caplog.at_level(logging.WARNING):
        on_namespace(body)
    assert "ledgers of it may stay until `dlog ledger audit`" in caplog.text
    assert "a record of commits is left out" in caplog.text
