"""Atomic appends to logs that live writers of proxies hold: each side's records once, in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    CorruptMetadataError,
    EndOfStreamError,
    LogModeError,
    LogNotReadyError,
    OwnershipAcquireFailedError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.log.entries.body import batch_of
from dlcore.log.entries.stamp import Mark
from dlcore.log.proxied import turns as giving
from dlcore.log.proxied.extension import ProxyExtension
from dlcore.log.proxied.producers import Producers
from dlcore.log.staging import commit as asking
from dlcore.log.writing.lock import LockNode
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.dlcore.ops.upkeep.test_merger import check_ledgers, stored_ledgers
from tests.fixtures.durable import durable_of
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record
from tests.fixtures.staged_records import batch, payloads_of, stage

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import Turn
    from dlcore.log.staging.commit import HeldLog
    from dlcore.log.writing.writer import DirectWriter


async def proxied(cluster: MemoryCluster, name: str = "proxy", log: str = "clicks") -> DirectWriter:
    """Open the writer of a proxy."""
    namespace = await cluster.open(name)
    return await (await namespace.open_log(log)).open_writer(extension=ProxyExtension(Producers()))


def context_of(cluster: MemoryCluster) -> LogContext:
    """Return what the first client sees the logs by."""
    return cluster.namespaces[0].log_context


async def held_log(cluster: MemoryCluster) -> HeldLog:
    """Return the holder of the log now."""
    context = context_of(cluster)
    key = await context.logs.find("clicks")
    held = asking.held_log(
        context.paths, key, await context.store.get(context.logs.paths_of(key).lock, fresh=True)
    )
    assert held is not None
    return held


async def append(
    namespace: DirectNamespace, version: int, *payloads: str, log: str = "clicks"
) -> None:
    """Append records atomically; the first of them names the identity."""
    appending = await namespace.begin_append("job", version)
    await appending.write_batch(log, batch(*payloads))
    assert (await appending.commit()).committed


def test_an_append_enters_a_log_that_a_proxy_is_writing() -> None:
    """Records that the proxy accepted before lie before it, later ones behind, in its segment."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await proxied(cluster)
        before = [writer.write(record(n)) for n in range(1, 4)]
        driver = await cluster.open("driver")
        cluster.clocks["driver"].current_ms += 60_000  # ahead of the proxy's
        await append(driver, 1, "staged")
        assert [str(await each) for each in before] == ["1:0:0", "1:0:1", "1:0:2"]
        await writer.wait_for_capacity()
        assert writer.last_txid == 1_700_000_060_000
        await writer.write(record(writer.last_txid))
        await writer.aclose()
        records = await read_all(log)
        assert [each.payload for each in records[3:4]] == [b"staged"]
        assert [each.sequence_id for each in records] == list(range(5))
        txids = [each.txid for each in records]
        assert txids == sorted(txids)

    on_log(body)


def test_records_of_a_busy_proxy_and_of_appends_are_there_once_and_in_order() -> None:
    """Neither stops the other, and no call is refused for more than a moment."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await proxied(cluster)
        driver = await cluster.open("driver")
        written: list[str] = []
        stop = asyncio.Event()

        async def write() -> None:
            while not stop.is_set():
                await writer.wait_for_capacity()
                cluster.clocks["proxy"].current_ms += 1
                txid = max(cluster.clocks["proxy"].current_ms, writer.last_txid)
                try:
                    future = writer.write(record(txid, f"p{len(written)}".encode()))
                except LogNotReadyError:
                    continue
                written.append(f"p{len(written)}")
                await future

        writing = asyncio.create_task(write())
        for version in range(20):
            await append(driver, version, f"s{version}a", f"s{version}b")
        stop.set()
        await writing
        await writer.aclose()
        found = await payloads_of(log)
        staged = [f"s{version}{part}" for version in range(20) for part in "ab"]
        assert [each for each in found if each.startswith("s")] == staged
        assert [each for each in found if each.startswith("p")] == written
        assert len(written) > 20

    on_log(body)


def test_appends_beside_a_proxy_are_merged_with_what_it_writes() -> None:
    """One segment for all, few nodes, the same records; the next owner knows the producers."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        upkeep = LogUpkeep.of(cluster.namespaces[0], UpkeepConfig(merged_grace_s=0))
        producers: Producers[Any] = Producers()
        namespace = await cluster.open("proxy")
        writer = await (await namespace.open_log("clicks")).open_writer(
            extension=ProxyExtension(producers)
        )
        driver = await cluster.open("driver")
        claim = producers.grant("meter", bytes(8), now_ms=0)

        async def write(writer: DirectWriter, table: Producers[Any], number: int) -> DLSN:
            rows = batch_of([max(writer.last_txid, 0)], [b"p%d" % number])
            future = writer.write_fitted(rows, mark=Mark(claim, number))
            table.accepted(Mark(claim, number), 1, future, now_ms=0)
            table.durable(Mark(claim, number), 1, await future)
            return future.result()

        for number in range(40):
            await writer.wait_for_capacity()
            await write(writer, producers, number)
            await append(driver, number, f"s{number}")
        await writer.wait_for_capacity()
        before = await read_all(log)
        dlsns = [each.dlsn for each in before]
        assert dlsns == [DLSN(1, entry_id, 0) for entry_id in range(80)]
        assert [each.sequence_id for each in before] == list(range(80))
        await driver.log_context.tidier.settled()
        ledger_count = len(stored_ledgers(cluster))
        assert ledger_count >= 80
        assert await upkeep.serve() > 0
        await upkeep.sweep()
        check_ledgers(cluster)
        assert len(stored_ledgers(cluster)) <= ledger_count // 3
        assert await read_all(log) == before
        for known, place in ((39, DLSN(1, 80, 0)), (40, DLSN(2, 0, 0))):
            await writer.abort()  # the second one leaves an extent open
            table: Producers[Any] = Producers()
            writer = await log.open_writer(extension=ProxyExtension(table))
            assert durable_of(table, "meter") == known
            assert await write(writer, table, known + 1) == place
        await writer.aclose()
        assert [each.sequence_id for each in await read_all(log)] == list(range(82))

    on_log(body)


def test_an_append_to_logs_of_several_proxies_is_atomic() -> None:
    """All of them pause for one transaction; two appends at once follow each other."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        home = cluster.namespaces[0]
        names = ["clicks", "orders", "views"]
        for name in names[1:]:
            await home.create_log(name)
        writers = [await proxied(cluster, f"proxy-{name}", name) for name in names]
        for writer in writers:
            await writer.write(record(1))

        async def append_to_all(job: str) -> None:
            driver = await cluster.open(job)
            appending = await driver.begin_append(job, 1)
            for name in names:
                await appending.write_batch(name, batch(job))
            assert (await appending.commit()).committed

        await asyncio.gather(append_to_all("a"), append_to_all("b"))
        orders = []
        for name, writer in zip(names, writers, strict=True):
            await writer.aclose()
            orders.append(tuple((await payloads_of(await home.open_log(name)))[1:]))
        assert len(set(orders)) == 1
        assert sorted(orders[0]) == ["a", "b"]

    on_log(body)


def test_an_append_that_dies_in_its_turn_stops_no_writer_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asked, and never committed; the writer goes on, and gives the next one its turn."""
    monkeypatch.setattr(giving, "TURN_S", 0.2)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await proxied(cluster)
        await writer.write(record(1))
        held = await held_log(cluster)
        await cluster.stores["proxy"].multi([held.turned("asked")])

        async def write_on() -> None:
            while True:
                writer.write(record(2))
                await asyncio.sleep(0)

        with pytest.raises(LogNotReadyError, match="atomic append"):
            await write_on()
        await writer.wait_for_capacity()
        await writer.write(record(3))
        await append(await cluster.open("driver"), 1, "staged")
        await writer.aclose()
        assert (await payloads_of(log))[-1] == "staged"

    on_log(body)


@pytest.mark.parametrize(
    "error", [CorruptMetadataError("a newer layout"), RuntimeError("a defect")], ids=repr
)
def test_a_writer_that_cannot_give_the_turn_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused for the turn; its callers learn it, and the append has the log afterwards."""
    is_refused = asyncio.Event()

    async def refuse(node: LockNode, before: Turn, turn: Turn) -> bool:
        is_refused.set()
        raise error

    monkeypatch.setattr(LockNode, "set_turn", refuse)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await proxied(cluster)
        await writer.write(record(1))
        driver = await cluster.open("driver")
        committing = asyncio.create_task(append(driver, 1, "staged"))
        await is_refused.wait()
        await writer.wait_for_capacity()
        with pytest.raises(WriteError, match=str(error)):
            writer.write(record(2))
        await writer.abort()
        await committing
        assert await payloads_of(log) == ["x", "staged"]

    on_log(body)


def test_a_turn_is_not_taken_while_the_owner_writes() -> None:
    """A lock that says so beside an open segment is of a turn that is over: it is asked anew."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await proxied(cluster)
        await writer.write(record(1))
        held = await held_log(cluster)
        await cluster.stores["proxy"].multi([held.turned("given")])
        await append(await cluster.open("driver"), 1, "staged")
        assert (await payloads_of(log))[-1] == "staged"
        await writer.wait_for_capacity()
        await writer.write(record(writer.last_txid))
        await writer.aclose()
        assert len(await read_all(log)) == 3

    on_log(body)


def test_a_writer_that_is_sealed_closed_or_aborted_while_an_append_waits() -> None:
    """The append gets the seal as its error, and needs no turn of a writer that is gone."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for ending in ("aclose", "abort", "mark_end_of_stream"):
            writer = await proxied(cluster, f"proxy-{ending}")
            await writer.write(record(writer.last_txid + 1))
            driver = await cluster.open(f"driver-{ending}")
            appending = await driver.begin_append(f"job-{ending}", 1)
            await appending.write_batch("clicks", batch(ending))
            committing = asyncio.create_task(appending.commit())
            await asyncio.sleep(0)
            await getattr(writer, ending)()
            if ending == "mark_end_of_stream":
                # It may have had its turn before.
                await asyncio.wait([committing])
                if committing.exception() is not None:
                    assert isinstance(committing.exception(), EndOfStreamError)
                await writer.aclose()
            else:
                assert (await committing).committed
        found = await payloads_of(log)
        assert {"aclose", "abort"} <= set(found)

    on_log(body)


def test_a_direct_writer_gives_no_turn() -> None:
    """Its transaction ids are its own: an append waits for its lock, as ever."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            driver = await cluster.open("driver")
            extent = await stage(driver, "staged")
            appending = await driver.begin_append("job", 1)
            with pytest.raises(OwnershipAcquireFailedError, match="owned by the writer"):
                await appending.commit([extent])
        assert (await appending.commit([extent])).committed

    on_log(body)


def test_a_mode_says_who_opens_writers() -> None:
    """Appends are for all; a mode that is changed holds for the next writer."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(mode="proxied")
        with pytest.raises(LogModeError, match="written through proxies"):
            await log.open_writer()
        writer = await proxied(cluster)
        await writer.write(record(1))
        with pytest.raises(LogModeError, match="written through proxies"):
            await log.open_writer()
        await append(await cluster.open("driver"), 1, "staged")
        await writer.aclose()
        await log.update_settings(mode="direct")
        with pytest.raises(LogModeError, match="not written through proxies"):
            await proxied(cluster, "another")
        async with await log.open_writer() as direct:
            await direct.write(record(direct.last_txid))
        assert len(await read_all(log)) == 3

    on_log(body)
    with pytest.raises(Exception, match="expected direct, proxied or any"):
        LogSettings(mode="all")
