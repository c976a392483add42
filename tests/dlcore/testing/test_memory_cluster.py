"""A cluster in memory for the tests of users: writers, readers, lost bookies, and its end."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from dlcore import LogConfig, LogRecord
from dlcore.base.errors import AlreadyClosedError, OwnershipAcquireFailedError
from dlcore.log.reading.status import LogStatus
from dlcore.testing import MemoryCluster, sync


def test_each_namespace_is_a_client_of_its_own() -> None:
    """One writer excludes that of another client, whose readers see the records."""

    async def scenario() -> None:
        async with MemoryCluster() as cluster:
            one = await cluster.open_namespace()
            other = await cluster.open_namespace(config=LogConfig(lock_timeout_s=0))
            await one.create_log("clicks")
            log = await one.open_log("clicks")
            async with await log.open_writer() as writer:
                await writer.write(LogRecord(1, b"hello"))
                seen = await other.open_log("clicks")
                assert (await seen.get_first_record()).payload == b"hello"
                with pytest.raises(OwnershipAcquireFailedError):
                    await seen.open_writer()
            status = await log.status()
            assert (status.record_count, status.ledger_count) == (1, 1)
            assert status.created is not None
            assert "writer" in status._repr_html_()

    asyncio.run(scenario())


def test_a_bookie_may_be_lost() -> None:
    """Entries of two of three bookies stay readable, and writing goes on."""

    async def scenario() -> None:
        async with MemoryCluster(bookies=3) as cluster:
            assert repr(cluster) == "<MemoryCluster of 3 bookies>"
            namespace = await cluster.open_namespace()
            await namespace.create_log("clicks")
            log = await namespace.open_log("clicks")
            async with await log.open_writer() as writer:
                await writer.write(LogRecord(1, b"one"))
                cluster.bookies[0].is_running = False
                await writer.write(LogRecord(2, b"two"))
            async with await log.open_reader() as reader:
                assert [each.payload async for each in reader] == [b"one", b"two"]

    asyncio.run(scenario())


def test_a_closed_cluster_opens_nothing() -> None:
    """Its namespaces are closed with it."""

    async def scenario() -> None:
        async with MemoryCluster() as cluster:
            namespace = await cluster.open_namespace()
        with pytest.raises(AlreadyClosedError):
            await namespace.get_logs()
        with pytest.raises(AlreadyClosedError, match="memory cluster is closed"):
            await cluster.open_namespace()

    asyncio.run(scenario())


def test_the_blocking_cluster() -> None:
    """The same names; a typed log has batches."""
    with sync.MemoryCluster() as cluster:
        namespace = cluster.open_namespace()
        namespace.create_log("trips", schema=pa.schema({"km": pa.int64()}))
        with namespace.open_log("trips") as log:
            with log.open_writer() as writer:
                writer.write_table(pa.table({"km": [7]}))
            with log.open_reader() as reader:
                assert reader.is_typed
                batch = reader.read_batch()
            assert batch is not None
            assert batch["km"].to_pylist() == [7]
        assert len(cluster.bookies) == 3
        assert repr(cluster) == "<MemoryCluster of 3 bookies>"
    with pytest.raises(AlreadyClosedError):
        namespace.get_logs()


def test_facts_that_only_the_metadata_store_has_are_left_out() -> None:
    """Over proxies a status has none of them, and shows none."""
    status = LogStatus(
        name="clicks",
        log_id="1",
        first=None,
        last=None,
        last_txid=None,
        record_count=0,
        size_bytes=0,
        segment_count=0,
        sealed=False,
        last_timestamp_ms=0,
        now_ms=5,
    )
    assert (status.created, status.age_s, status.writer) == (None, None, None)
    assert "writer" not in status._repr_html_()
