"""Renaming logs: one step for everybody, and never under a writer.

Goal: a log has exactly one name, which leads to all of it, whatever happens meanwhile; who has it
open under another name goes on or gets an error.  Method: a cluster in memory, faults on demand.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.api.copying import copy_log
from dlcore.base.errors import (
    CorruptMetadataError,
    LogNotFoundError,
    LogRenamedError,
    MetadataConnectionError,
    OwnershipAcquireFailedError,
)
from dlcore.base.records import LogRecord
from dlcore.log.metadata.values import LogKey
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log, read_all

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.staging.append import DirectStagedAppend


async def write(log: DirectLog, txid: int) -> None:
    """Write one record, as a writer of its own."""
    async with await log.open_writer() as writer:
        await writer.write(LogRecord(txid, b"%d" % txid))


def test_a_renamed_log_is_all_there_under_its_new_name() -> None:
    """With its records, settings and truncation; the old name is free, also for another log."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await write(log, 1)
        await log.update_settings(compression="lz4")
        await namespace.rename_log("clicks", "old/clicks")
        assert await namespace.get_logs() == ["old/clicks"]
        with pytest.raises(LogNotFoundError, match="'clicks'"):
            await namespace.open_log("clicks")
        renamed = await namespace.open_log("old/clicks")
        assert (renamed.name, renamed.log_id) == ("old/clicks", log.log_id)
        assert [r.txid for r in await read_all(renamed)] == [1]
        assert (await renamed.get_settings()).compression == "lz4"
        await write(renamed, 2)
        await namespace.create_log("clicks")
        assert await read_all(await namespace.open_log("clicks")) == []
        await namespace.rename_log("old/clicks", "older/clicks")
        await namespace.delete_log("older/clicks")
        assert await namespace.get_logs() == ["clicks"]
        await namespace.log_context.tidier.settled()
        assert await cluster.stores["a"].get(cluster.paths.log_of(log.log_id).head) is None

    on_log(body)


def test_a_writer_refused_for_a_proxy_learns_what_to_do() -> None:
    """It may own the log for minutes after the last record."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        proxy = await (await cluster.open("grpc://proxy:1")).open_log(log.name)
        reason = r"owned by grpc://proxy:1 since \S+Z, a proxy: reach the log through it .* idle"
        async with await proxy.open_writer():
            with pytest.raises(OwnershipAcquireFailedError, match=reason):
                await cluster.namespaces[0].rename_log("clicks", "visits")
            with pytest.raises(OwnershipAcquireFailedError, match=reason):
                await log.open_writer()

    on_log(body)


PAYLOADS = pa.record_batch({"value": [b"a", b"b"]})


def test_a_staging_writer_looks_names_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two stages, once it has known them for some time: another log may be called so."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        writer = await namespace.open_staging_writer(identity="job")
        await writer.write_batch("clicks", PAYLOADS)
        monkeypatch.setattr("dlcore.log.staging.writer.NAMES_KEPT_S", 0.0)
        await writer.stage()
        await log.rename("visits")
        await namespace.create_log("clicks")
        await writer.write_batch("clicks", PAYLOADS)
        (extent,) = await writer.stage()
        assert extent.log_id == (await namespace.open_log("clicks")).log_id != log.log_id
        await namespace.rename_log("clicks", "more")
        with pytest.raises(LogNotFoundError):
            await writer.write_batch("clicks", PAYLOADS)

    on_log(body)


def test_an_append_that_replaces_tidies_the_log_by_its_id() -> None:
    """Not what has its name by then."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        for txid in range(3):
            await write(log, txid)
        append = await namespace.begin_append("job", 1)
        await append.write_batch("clicks", PAYLOADS)
        await log.rename("visits")
        await append.commit(replaces=["visits"])
        await namespace.log_context.tidier.settled()
        head = (await namespace.log_context.logs.read(LogKey(name="", log_id=log.log_id))).head
        assert head.first_lssn == head.max_lssn
        assert [r.payload for r in await read_all(log)] == [b"a", b"b"]

    on_log(body)


def test_a_copy_does_not_go_on_to_another_log_of_the_name() -> None:
    """Its position is that of the log that was called so; by its new name it goes on."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await write(log, 1)
        await namespace.create_log("copy")
        begin = namespace.begin_append

        async def rename_first(*arguments: Any, **options: Any) -> DirectStagedAppend:
            namespace.begin_append = begin  # type: ignore[method-assign]
            await namespace.rename_log("copy", "old")
            await namespace.create_log("copy")
            return await begin(*arguments, **options)

        namespace.begin_append = rename_first  # type: ignore[method-assign]
        with pytest.raises(LogRenamedError, match="another log has that name"):
            await copy_log(log, namespace, "copy")
        assert await copy_log(log, namespace, "old") == 1
        assert await copy_log(log, namespace, "old") == 0
        assert await read_all(await namespace.open_log("copy")) == []

    on_log(body)


def test_a_writer_without_a_lock_goes_on_over_a_rename() -> None:
    """It is fenced by nothing but another writer: the log is the same."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        config = replace(CONFIG, lock_enabled=False, segment_bytes_max=1)
        other = await (await cluster.open("b", config=config)).open_log("clicks")
        async with await other.open_writer() as writer:
            await writer.write(LogRecord(1, b"a"))
            await log.rename("visits")
            await writer.write(LogRecord(2, b"b"))
        assert [r.txid for r in await read_all(log)] == [1, 2]

    on_log(body)


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_reply_of_a_rename(*, applied: bool) -> None:
    """The node of the name tells: it is done once, in any case."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        store = cluster.stores["a"]
        multi = store.multi

        async def lose(ops: object) -> None:
            if len(ops) == 3:  # type: ignore[arg-type]
                store.multi = multi  # type: ignore[method-assign]
                store.lose_next_reply(applied=applied)
            await multi(ops)  # type: ignore[arg-type]

        store.multi = lose  # type: ignore[method-assign]
        await log.rename("visits")
        assert await cluster.namespaces[0].get_logs() == ["visits"]
        await log.rename("clicks")
        assert await cluster.namespaces[0].get_logs() == ["clicks"]

    on_log(body)


def test_one_of_two_renames_at_once_is_done() -> None:
    """The other is refused: by the lock, or by the name that is not the log's any more."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async def rename(namespace: DirectNamespace, name: str) -> str:
            try:
                await namespace.rename_log("clicks", name)
            except (OwnershipAcquireFailedError, LogNotFoundError, MetadataConnectionError):
                return ""
            return name

        others = [await cluster.open(name) for name in ("b", "c", "d")]
        names = await asyncio.gather(*(rename(each, f"by-{i}") for i, each in enumerate(others)))
        done = [name for name in names if name]
        assert len(done) == 1
        assert await cluster.namespaces[0].get_logs() == done

    on_log(body)


def test_a_log_is_found_by_any_name_that_it_had() -> None:
    """By its id; one whose name's node is gone or leads elsewhere is damaged, and named."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        logs, old = namespace.log_context.logs, LogKey(name="clicks", log_id=log.log_id)
        assert (await logs.find_again(old)).name == "clicks"
        await log.rename("visits")
        assert (await logs.find_again(old)).name == "visits"
        store, path = cluster.stores["a"], cluster.paths.log("visits")
        node = await store.get(path)
        assert node is not None
        await store.delete(path)
        with pytest.raises(CorruptMetadataError, match=r"'visits' .* of its name is missing"):
            await logs.find_again(old)
        await store.create(path, node.value)
        await log.delete()
        with pytest.raises(LogNotFoundError):
            await logs.find_again(old)

    on_log(body)


def test_a_change_under_a_rename_is_not_undone_by_it() -> None:
    """A truncation between reading and renaming is kept: the rename is planned again."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 1)
        await write(log, 2)
        store, other = cluster.stores["a"], await (await cluster.open("b")).open_log("clicks")
        last = await log.get_last_dlsn()
        multi = store.multi

        async def truncate_first(ops: object) -> None:
            if len(ops) == 3:  # type: ignore[arg-type]
                store.multi = multi  # type: ignore[method-assign]
                await other.truncate(last)
            await multi(ops)  # type: ignore[arg-type]

        store.multi = truncate_first  # type: ignore[method-assign]
        await log.rename("visits")
        assert [r.txid for r in await read_all(log)] == [2]

    on_log(body)
