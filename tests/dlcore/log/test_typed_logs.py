"""Typed logs: written and read in batches, while their schema changes under writers and readers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlcore import copy_log
from dlcore.base.config import RECORD_SIZE_BYTES_MAX, LogConfig, QuorumConfig
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    LogNotFoundError,
    LogRecordTooLongError,
    SchemaMismatchError,
    TransactionIdOutOfOrderError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace, NotLessThan, RecordField
from dlcore.log.entries.batches import typed_read_batch
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.ranges import RangeView
from dlcore.log.reading.scan_driver import by_entry, scan_range
from dlcore.log.reading.schemas import KnownSchemas
from dlcore.log.typed.arrow import columns_of, schema_of
from tests.dlcore.ops.upkeep.test_merger import merger_of
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import MemoryCluster, memory_cluster, record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace

TRIPS = pa.schema([("id", pa.int32()), ("fare", pa.float64()), ("tags", pa.list_(pa.string()))])
WIDER = pa.schema(
    [
        ("id", pa.int64()),
        ("fare", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("city", pa.string()),
    ]
)
SMALL = LogConfig(quorum=QuorumConfig(), lock_timeout_s=0, entry_bytes=200)


def on_trips(
    body: Callable[[MemoryCluster, DirectNamespace, DirectLog], Awaitable[None]],
    config: LogConfig = SMALL,
) -> None:
    """Run `body` with a cluster and the typed log "trips"."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a", config=config)
            await namespace.create_log("trips", schema=TRIPS)
            await body(cluster, namespace, await namespace.open_log("trips"))

    run_in_own_time(asyncio.wait_for(run(), 60))


def trips(ids: range, schema: pa.Schema = TRIPS) -> pa.RecordBatch:
    """Return rows that tell their number in each column."""
    rows = [{"id": n, "fare": n / 2, "tags": ["t"] * (n % 3), "city": f"c{n}"} for n in ids]
    return pa.RecordBatch.from_pylist(rows, schema=schema)


async def table_of(log: DirectLog, *columns: str) -> pa.Table:
    """Return all of a log."""
    return await (await log.read(columns=columns or None)).to_arrow()


def test_a_reader_that_is_closed_while_it_learns_a_schema_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The entry that it had taken is not read any more, and its position stays."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write_batch(trips(range(3)))
        reader = await log.open_reader()
        learns, goes_on = asyncio.Event(), asyncio.Event()

        async def slow(self: KnownSchemas, schema_id: int) -> None:
            learns.set()
            await goes_on.wait()

        monkeypatch.setattr(KnownSchemas, "learn", slow)
        reading = asyncio.create_task(reader.take_entries(until_caught_up=True))
        await learns.wait()
        await reader.aclose()
        position = reader.position
        goes_on.set()
        with pytest.raises(AlreadyClosedError):
            await asyncio.wait_for(reading, 30)
        assert reader.position == position

    on_trips(body)


def test_written_data_is_read() -> None:
    """By batches of a writer, of a reader, and by ranges, with what is known of each row."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        assert await log.get_schema() == TRIPS
        async with await log.open_writer() as writer:
            last = await writer.write_batch(trips(range(20)))
            numbered = trips(range(20, 23)).append_column("_txid", pa.array([2**60] * 3))
            assert await writer.write_batch(numbered) > last
            with pytest.raises(
                TransactionIdOutOfOrderError, match="lower than 1152921504606846976"
            ):
                writer.write_batch(trips(range(1)).append_column("_txid", pa.array([5])))
            await writer.submit_table(pa.table(trips(range(23, 30))))
            await writer.commit()
        table = await table_of(log)
        assert table.schema == TRIPS
        assert table == pa.Table.from_batches([trips(range(30))])
        assert last.entry_id > 2, "rows are divided among entries by their size"
        known = await table_of(log, "id", "_txid", "_sequence_id", "_dlsn", "_timestamp", "_log")
        rows = known.to_pylist()
        assert [row["_sequence_id"] for row in rows] == [row["id"] for row in rows]
        now_ms = cluster.clocks["a"].current_ms
        assert [row["_txid"] for row in rows] == [now_ms] * 20 + [2**60] * 10
        assert {row["_log"] for row in rows} == {"trips"}
        positions = [DLSN(*row["_dlsn"].values()) for row in rows]
        assert positions == sorted(set(positions))
        assert rows[0]["_timestamp"].timestamp() * 1000 == now_ms
        part = await log.read(positions[3], positions[17])
        assert (await part.to_arrow())["id"].to_pylist() == list(range(3, 17))
        assert (await (await log.read(2**60)).to_arrow())["id"].to_pylist() == list(range(20, 30))
        place = await log.find_place(NotLessThan(RecordField.TXID, 2**60))
        assert place.sequence_id == 20
        async with await log.open_reader(txid=2**60) as reader:
            batch = await reader.read_batch()
            assert batch is not None
            assert batch.schema.names == [
                "_dlsn", "_txid", "_sequence_id", "_timestamp", "id", "fare", "tags"
            ]  # fmt: skip
            assert batch.column("_sequence_id")[0].as_py() == 20

    on_trips(body)


def test_one_row_that_looks_like_a_record_of_bytes() -> None:
    """Its Arrow message is the same, which is read without Arrow where it is a record."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        await namespace.create_log("words", schema=pa.schema([("word", pa.binary())]))
        words = await namespace.open_log("words")
        async with await words.open_writer() as writer:
            for word in (b"a", b"b"):
                await writer.write_batch(pa.record_batch({"word": [word]}))
        async with await words.open_reader() as reader:
            with pytest.raises(SchemaMismatchError, match="the log is typed"):
                await reader.read_next()
            found = [batch.column("word").to_pylist() async for batch in reader.batches()]
        assert found == [[b"a"], [b"b"]]

    on_trips(body)


def test_typed_logs_are_truncated() -> None:
    """By transaction id too, for which an entry is looked into."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            batch = trips(range(40)).append_column("_txid", pa.array(range(40)))
            await writer.write_batch(batch)
            assert await writer.truncate(txid=7)
            assert (await table_of(log))["id"].to_pylist() == list(range(7, 40))
        assert await log.truncate(txid=23)
        assert (await table_of(log))["id"].to_pylist() == list(range(23, 40))
        assert await log.get_first_dlsn() == (await log.get_snapshot()).first

    on_trips(body)


def test_columns_and_rows_that_are_wanted() -> None:
    """Others are left out; what makes no sense is refused before anything is read."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write_batch(trips(range(20)))
        some = await log.read(columns=["tags", "id"], where=pc.field("fare") >= 8)
        assert some.schema.names == ["tags", "id"]
        assert (await some.to_arrow())["id"].to_pylist() == [16, 17, 18, 19]
        behind = await log.read(columns=["fare"], where=pc.field("_sequence_id") > 18)
        assert (await behind.to_arrow()).to_pylist() == [{"fare": 9.5}]
        assert (await (await log.read(columns=[])).to_arrow()).num_columns == 0
        for columns in (["fares"], ["id", "id"], ["payload"]):
            with pytest.raises(SchemaMismatchError, match=r"log 'trips': .*expected some of _dlsn"):
                await log.read(columns=columns)
        for where in (
            pc.field("fares") > 3,
            pc.field("fare") == "x",
            pc.field("_log") == "trips",
            5,
        ):
            with pytest.raises(SchemaMismatchError, match=r"expected a pyarrow.compute.Expression"):
                await log.read(where=where)
        await namespace.create_log("plain")
        async with await namespace.open_log("plain") as plain:
            async with await plain.open_writer() as bytes_writer:
                await bytes_writer.write(record(7))
            found = await plain.read(columns=["value", "txid"], where=pc.field("txid") == 7)
            assert (await found.to_arrow()).to_pylist() == [{"value": b"x", "txid": 7}]
            with pytest.raises(ConfigurationError, match=r"expected a list, like \['txid'\]"):
                await plain.read(columns="txid")
            with pytest.raises(SchemaMismatchError, match="'fare' is not one of its columns"):
                await plain.read(columns=["fare"])

    on_trips(body)


def test_rows_that_lie_anywhere_are_filtered_without_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Entries do, in what arrives; Arrow would warn of buffers that it has to take as they are."""
    columns = pa.schema([("id", pa.int64()), ("fare", pa.decimal128(8, 2))])
    rows = pa.table({"id": [1, 2, 3], "fare": [Decimal(n) for n in range(3)]}).cast(columns)
    view = RangeView("trips", schema_of(columns_of(columns)), where=pc.field("id") > 1)
    place = EntryPlace(1, 0, 0, 0, 0)
    message = rows.to_batches()[0].serialize().to_pybytes()
    for gap in range(16):
        moved = pa.py_buffer(b"." * gap + message)[gap:]
        batch = typed_read_batch(
            pa.ipc.read_record_batch(moved, columns).add_column(0, "_txid", pa.array([0, 0, 0])),
            place,
            first_slot=0,
        )
        assert view.of(batch).column("id").to_pylist() == [2, 3]
    assert capfd.readouterr().err == ""


def test_bytes_and_columns_do_not_mix() -> None:
    """Each refusal says what to use instead."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            with pytest.raises(SchemaMismatchError, match="takes no records of bytes: write_batch"):
                writer.write(record(1))
            with pytest.raises(SchemaMismatchError, match=r"no column 'payload'; .* \(id int32, "):
                writer.write_batch(pa.record_batch({"payload": [b"x"]}))
            with pytest.raises(SchemaMismatchError, match="no column 'payload'"):
                await writer.submit_batch(pa.record_batch({"payload": [b"x"]}))
            with pytest.raises(ConfigurationError, match="without rows"):
                writer.write_batch(trips(range(0)))
            await writer.submit_batch(trips(range(0)))
            big = pa.record_batch({"tags": [["x" * RECORD_SIZE_BYTES_MAX]]})
            with pytest.raises(LogRecordTooLongError, match="log 'trips': row 0 of the batch has"):
                writer.write_batch(big)
            await writer.write_batch(trips(range(2)))
        async with await log.open_reader() as reader:
            with pytest.raises(SchemaMismatchError, match="use read_batch"):
                await reader.read_next()
            found = await reader.read_batch()
            assert found is not None
            assert found.num_rows == 2
        for call in (log.open_stream_writer, log.open_stream_reader):
            with pytest.raises(SchemaMismatchError, match="was created with a schema"):
                await call()
        await namespace.create_log("plain")
        plain = await namespace.open_log("plain")
        assert await plain.get_schema() is None
        with pytest.raises(SchemaMismatchError, match="was created without a schema"):
            await plain.update_schema(TRIPS)
        async with await plain.open_writer() as writer:
            with pytest.raises(ConfigurationError, match="other columns is created with a schema"):
                writer.write_batch(trips(range(1)))

    on_trips(body)


def test_rows_get_their_transaction_ids_when_they_are_written() -> None:
    """Not when they are submitted: others write while the schema is read again."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await log.update_schema(WIDER)
            submitting = asyncio.create_task(writer.submit_batch(trips(range(1), WIDER)))
            await asyncio.sleep(0)  # it asks for the schema
            later = pa.array([2**60], pa.int64())
            writer.write_batch(trips(range(1, 2)).add_column(0, "_txid", later))
            await submitting
            await writer.commit()
            assert writer.last_txid == 2**60
        assert await log.get_log_record_count() == 2

    on_trips(body)


def test_a_schema_changes_under_writers_and_readers() -> None:
    """Older records show nulls and wider types; open readers and writers learn it from the log."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_reader() as reader, await log.open_writer() as writer:
            await writer.write_batch(trips(range(3)))
            await writer.commit()
            first = await reader.read_batch()
            assert first is not None
            assert first.schema.field("id").type == pa.int32()
            before = await log.read()
            other = await (await cluster.open("b", config=SMALL)).open_log("trips")
            assert await other.update_schema(WIDER) == WIDER
            assert (
                await other.update_schema(pa.schema([("fare", pa.float32())]), merge=True) == WIDER
            )
            await writer.write_batch(trips(range(3, 4)))  # by the schema that it knows
            with pytest.raises(SchemaMismatchError, match="no column 'city'"):
                writer.write_batch(trips(range(4, 6), WIDER))
            await writer.submit_batch(trips(range(4, 6), WIDER))
            await writer.write_batch(trips(range(6, 7)))
            await writer.commit()
            found = [batch async for batch in reader.batches()]
            assert found[-1].schema.field("id").type == pa.int64()
            assert [n for each in found for n in each.column("id").to_pylist()] == [3, 4, 5, 6]
            assert (await before.to_arrow()).schema == TRIPS
        table = await table_of(log)
        assert table.schema == WIDER
        assert table["id"].to_pylist() == list(range(7))
        assert table["city"].to_pylist() == [None] * 4 + ["c4", "c5", None]
        with pytest.raises(SchemaMismatchError, match="would hold less than id int64") as raised:
            await log.update_schema(TRIPS)
        assert "(id int32, fare double, tags list<string>)" in str(raised.value)

    on_trips(body)


def test_changes_of_a_schema_at_once() -> None:
    """Each is made from the one before: none is lost."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        def with_column(n: int) -> pa.Schema:
            return pa.schema([(f"c{n}", pa.int8())])

        await asyncio.gather(*(log.update_schema(with_column(n), merge=True) for n in range(5)))
        schema = await log.get_schema()
        assert schema is not None
        assert sorted(schema.names[3:]) == [f"c{n}" for n in range(5)]

    on_trips(body)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("seed", range(4))
def test_staged_rows_and_scans(seed: int, compression: str) -> None:
    """Appends of many logs, typed and not, with and without transaction ids, then merged."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        rng = random.Random(seed)
        await namespace.create_log("plain")
        written = 0
        for version in range(40):
            if version == 20:
                await log.update_schema(WIDER)
            async with await namespace.begin_append("job", version) as append:
                for _ in range(rng.randint(1, 3)):
                    schema = WIDER if version >= 20 and rng.random() < 0.5 else TRIPS
                    batch = trips(range(written, written + rng.randint(1, 9)), schema)
                    await append.write_batch("trips", batch)
                    written += batch.num_rows
                await append.write_batch("plain", pa.record_batch({"value": [b"x"]}))
                if version == 0:
                    with pytest.raises(SchemaMismatchError, match="no column 'city'"):
                        await append.write_batch("trips", trips(range(1), WIDER))
                assert (await append.commit()).committed
        expected = list(range(written))
        assert (await table_of(log))["id"].to_pylist() == expected
        assert await merger_of(namespace).merge(LogKey(name="trips", log_id=log.log_id))
        assert (await table_of(log))["id"].to_pylist() == expected
        snapshot = await log.get_snapshot()
        ids: list[int] = []
        sequence_ids: list[int] = []
        few: list[int] = []
        for part in snapshot.scans(snapshot.first, snapshot.end):
            async for scanned in by_entry(scan_range(part, namespace.ports.ledgers)):
                assert scanned.batch.schema == pa.schema([("_txid", pa.int64()), *WIDER])
                ids += scanned.batch.column("id").to_pylist()
                sequence_ids += range(
                    scanned.sequence_id, scanned.sequence_id + scanned.batch.num_rows
                )
            wanted = replace(part, columns=frozenset({"city", "id", "fares"}))
            async for scanned in by_entry(scan_range(wanted, namespace.ports.ledgers)):
                assert scanned.batch.schema.names == ["_txid", "id", "city"]
                few += scanned.batch.column("id").to_pylist()
        assert ids == sequence_ids == few == expected

    on_trips(body, replace(SMALL, compression=compression))


def test_rows_that_do_not_mix_in_one_append() -> None:
    """Rows with transaction ids of their own and rows without, as in a log of bytes."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await namespace.begin_append("job", 1) as append:
            await append.write_batch("trips", trips(range(1)))
            with pytest.raises(ConfigurationError, match="mixes batches with and without"):
                await append.write_batch(
                    "trips", trips(range(1)).append_column("_txid", pa.array([5]))
                )

    on_trips(body)


def test_a_typed_log_is_copied() -> None:
    """With its transaction ids, to a log whose schema holds what its own does, and to no other."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write_batch(
                trips(range(30)).append_column("_txid", pa.array(range(5, 35)))
            )
        await namespace.create_log("rides", schema=WIDER)
        assert await copy_log(log, namespace, "rides") == 30
        rides = await namespace.open_log("rides")
        table = await table_of(rides, "id", "city", "_txid")
        assert table["_txid"].to_pylist() == list(range(5, 35))
        assert table["city"].null_count == 30
        await namespace.create_log("plain")
        with pytest.raises(ConfigurationError, match="created with a schema"):
            await copy_log(log, namespace, "plain")

    on_trips(body)


def test_a_typed_log_is_deleted_and_renamed() -> None:
    """Its schema goes along, or goes away."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        await namespace.rename_log("trips", "rides")
        rides = await namespace.open_log("rides")
        async with await rides.open_writer() as writer:
            await writer.write_batch(trips(range(3)))
        assert (await table_of(rides))["id"].to_pylist() == [0, 1, 2]
        path = cluster.paths.log_of(rides.log_id)
        store = cluster.stores["a"]
        assert await store.get(path.schema) is not None
        await namespace.delete_log("rides")
        assert await store.get(path.schema) is None
        assert await store.get(path.head) is None
        with pytest.raises(LogNotFoundError):
            await rides.get_schema()
        with pytest.raises(LogNotFoundError):
            await rides.update_schema(WIDER)
        await namespace.create_log("rides")
        assert await (await namespace.open_log("rides")).get_schema() is None

    on_trips(body)


def test_snapshots_have_the_schema_as_it_is_now() -> None:
    """It changes without the log's head, also of a log that is known and watched."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write_batch(trips(range(1)))
        for _ in range(4):
            snapshots = await namespace.get_snapshots(["trips"], fresh=True)
            await asyncio.sleep(0.01)  # the watches have made their first reports
        before = await log.get_snapshot()
        assert snapshots["trips"] == before
        other = await (await cluster.open("b")).open_log("trips")
        await other.update_schema(WIDER)
        after = await log.get_snapshot()
        assert after.schema is not None
        assert [column.name for column in after.schema.latest] == WIDER.names
        assert after != before
        assert await namespace.get_snapshots(["trips"], fresh=True) == {"trips": after}
        found = await (await log.read(columns=["city"])).to_arrow()
        assert found["city"].to_pylist() == [None]

    on_trips(body)


def test_small_rows_after_a_wide_schema_make_an_entry_of_their_own() -> None:
    """An entry has one version of the schema."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            first = writer.write_batch(trips(range(1)))
            await log.update_schema(WIDER)
            await writer.submit_batch(trips(range(1, 2), WIDER))
            await writer.flush()
            assert (await first).entry_id == 0
            assert writer.last_dlsn == DLSN(1, 1, 0)
        assert (await table_of(log))["city"].to_pylist() == [None, "c1"]

    on_trips(body, with_entries_of(entry_bytes=10_000))


def with_entries_of(*, entry_bytes: int) -> LogConfig:
    """Return a configuration with entries of this size."""
    return LogConfig(quorum=QuorumConfig(), lock_timeout_s=0, entry_bytes=entry_bytes)
