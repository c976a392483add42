"""A log copied to another: each record once, from call to call, and with several at work."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

from dlcore import copy_log
from dlcore.api import copying
from dlcore.base.errors import AlreadyTruncatedError, AppendMismatchError, ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.metadata.commits import Verdict, decide
from tests.dlcore.log.test_reader import fill
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog


async def content(log: DirectLog) -> list[tuple[int, bytes]]:
    """Return transaction ids and payloads."""
    return [(each.txid, each.payload) for each in await read_all(log)]


@pytest.mark.parametrize("commit_bytes", [1, 500, 10**6])
def test_each_record_is_copied_once(commit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several at once that die at any time, while the source grows."""
    monkeypatch.setattr("dlcore.api.copying._COMMIT_BYTES", commit_bytes)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        rng = random.Random(commit_bytes)
        namespaces = [cluster.namespaces[0], await cluster.open("b"), await cluster.open("c")]
        await namespaces[0].create_log("copy")
        target = await namespaces[0].open_log("copy")
        for seed in range(3):
            await fill(cluster, log, seed=seed)
            copying = [asyncio.create_task(copy_log(log, each, "copy")) for each in namespaces]
            for _ in range(rng.randrange(200)):
                await asyncio.sleep(0)
            copying[0].cancel()
            results = await asyncio.gather(*copying, return_exceptions=True)
            assert isinstance(results[1], int), results
            assert isinstance(results[2], int), results
            assert await content(target) == await content(log)
        assert await copy_log(log, namespaces[0], "copy") == 0

    on_log(body)


def test_a_copier_that_others_overtook_goes_on_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it comes further than they did, and equal transaction ids would let all of it in."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("copy")
        async with await log.open_writer() as writer:
            for number in range(5):
                await writer.write(LogRecord(1, b"%d" % number))
                await writer.flush()
        next_batches, is_overtaken = copying._next_batches, False

        async def read_and_wait(source: DirectLog, done: int) -> Any:
            nonlocal is_overtaken
            found = await next_batches(source, done)
            if not is_overtaken:
                is_overtaken = True
                monkeypatch.setattr(copying, "_COMMIT_BYTES", 1)
                (_, first) = await next_batches(source, done)
                assert len(first) == 1
                count = await copying._copy_some(
                    source, namespace, "copy", target.log_id, identity, done
                )
                assert count == 1
            return found

        target = await namespace.open_log("copy")
        identity = f"copy/{log.log_id}/{target.log_id}"
        monkeypatch.setattr(copying, "_next_batches", read_and_wait)
        assert await copy_log(log, namespace, "copy") == 4
        assert await content(target) == await content(log)

    on_log(body)


def test_the_reader_of_a_part_is_closed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that ends before the source does."""
    monkeypatch.setattr("dlcore.api.copying._COMMIT_BYTES", 1)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        (namespace,) = cluster.namespaces
        await namespace.create_log("copy")
        await fill(cluster, log, seed=1)
        left: list[str] = []
        sys.set_asyncgen_hooks(finalizer=lambda each: left.append(repr(each)))
        await copy_log(log, namespace, "copy")
        assert not left

    on_log(body)


def test_logs_that_cannot_be_copied() -> None:
    """Records truncated before, and a log to itself."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        with pytest.raises(ConfigurationError, match="to itself"):
            await copy_log(log, namespace, "clicks")
        await namespace.create_log("copy")
        async with await log.open_writer() as writer:
            for txid in range(5):
                await writer.write(record(txid))
        assert await copy_log(log, namespace, "copy") == 5
        async with await log.open_writer() as writer:
            for txid in range(5, 9):
                await writer.write(record(txid))
        await log.truncate(DLSN(2, 2, 0))
        with pytest.raises(AlreadyTruncatedError, match="the records 5 to 6 were truncated"):
            await copy_log(log, namespace, "copy")

    on_log(body)


def test_a_log_whose_beginning_is_truncated_is_copied_from_there_on() -> None:
    """The first time, also by several at once; later losses without a copy are reported."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("copy")
        async with await log.open_writer() as writer:
            for txid in range(5):
                await writer.write(record(txid))
        await log.truncate(DLSN(1, 3, 0))
        counts = await asyncio.gather(*(copy_log(log, namespace, "copy") for _ in range(3)))
        assert sum(counts) == 2
        target = await namespace.open_log("copy")
        assert [txid for txid, _ in await content(target)] == [3, 4]
        assert await copy_log(log, namespace, "copy") == 0
        async with await log.open_writer() as writer:
            for txid in range(5, 9):
                await writer.write(record(txid))
        assert await copy_log(log, namespace, "copy") == 4
        assert [txid for txid, _ in await content(target)] == list(range(3, 9))
        async with await log.open_writer() as writer:
            for txid in range(9, 12):
                await writer.write(record(txid))
        await log.truncate(DLSN(3, 1, 0))
        with pytest.raises(AlreadyTruncatedError, match="the records 9 to 9 were truncated"):
            await copy_log(log, namespace, "copy")

    on_log(body)


def test_an_append_that_follows_another_version_is_refused() -> None:
    """A copier that went on from an older commit appends nothing."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        assert await namespace.last_version("me") == -1
        for version, after, wanted in ((4, -1, True), (9, 4, True), (12, 4, False), (9, 4, False)):
            append = await namespace.begin_append("me", version, after=after)
            if version == 12:
                with pytest.raises(AppendMismatchError, match="the last committed one is 9"):
                    await append.commit()
            else:
                assert (await append.commit()).committed is wanted
        assert await namespace.last_version("me") == 9

    on_log(body)
    first = decide(None, version=1, token="t", run=None, now_ns=0, after=3)
    assert first.verdict is Verdict.AHEAD
