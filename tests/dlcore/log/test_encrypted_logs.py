"""Encrypted logs: each writer encrypts, each reader decrypts, and upkeep needs no key."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.api.copying import copy_log
from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.base.errors import EncryptionKeyError, InvalidEntryError, WriteError
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlcore.log.entries.body import decode_entry_header
from dlcore.log.reading.scan_driver import scan_range
from dlcore.log.recovery import recover_log
from dlcore.ops.inspection import inspect_log
from dlcore.wire.frames import decode_frame, encode_frame
from tests.dlcore.ops.upkeep.test_merger import merger_of
from tests.fixtures.aio import until
from tests.fixtures.encrypted import fixed_keys, master_keys
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import MemoryCluster, memory_cluster, read_all, record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.scan import ScanRange
    from dlcore.log.writing.writer import DirectWriter

WORD = b"a secret word"
SCHEMA = pa.schema([("id", pa.int64()), ("word", pa.string())])
SMALL = LogConfig(quorum=QuorumConfig(), lock_timeout_s=0, entry_bytes=200)
ENCRYPTED = LogSettings(encrypted=True)


def on_logs(body: Callable[[MemoryCluster, DirectNamespace, DirectLog], Awaitable[None]]) -> None:
    """Run `body` with a cluster, a client that has keys, and an encrypted log."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a", config=SMALL, encryption_keys=fixed_keys("k"))
            await namespace.create_log("clicks", settings=ENCRYPTED)
            await body(cluster, namespace, await namespace.open_log("clicks"))

    run_in_own_time(asyncio.wait_for(run(), 60))


def bodies(cluster: MemoryCluster) -> list[bytes]:
    """Return the entries of all ledgers, in order."""
    found = {
        (ledger_id, entry_id): bytes(decode_frame(frame).body)
        for bookie in cluster.bookies
        for ledger_id, ledger in bookie._ledgers.items()
        for entry_id, frame in ledger.entries.items()
    }
    assert found
    return [body for _, body in sorted(found.items())]


def seen(cluster: MemoryCluster) -> set[bool]:
    """Return whether the word is in entries: of some, of others not."""
    return {WORD in body for body in bodies(cluster)}


async def write(log: DirectLog, *txids: int) -> None:
    """Write a record of the word for each, in an entry of its own."""
    async with await log.open_writer() as writer:
        for txid in txids:
            await writer.write(record(txid, WORD))


async def append(namespace: DirectNamespace, version: int, batch: pa.RecordBatch) -> None:
    """Append a batch to "clicks" as a task of a job."""
    async with await namespace.begin_append("job", version) as staged:
        await staged.write_batch("clicks", batch)
        await staged.commit()


async def parts_of(log: DirectLog) -> list[ScanRange]:
    """Return the parts of all that is readable, as Spark plans them."""
    snapshot = await log.get_snapshot()
    return snapshot.scans(snapshot.first, snapshot.end)


def is_encrypting(writer: DirectWriter, wanted: bool) -> bool:
    """Return whether a writer has learned of the setting."""
    return (writer.machine._maker.encryptor is not None) is wanted


def test_each_way_to_read_returns_what_each_way_to_write_wrote() -> None:
    """Records, batches, a staged append with ids and one without; bookies have nothing of it."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            for txid in (1, 2):
                await writer.write(record(txid, WORD))
            await writer.write_batch(pa.record_batch({"txid": [3, 4], "value": [WORD] * 2}))
        await append(namespace, 1, pa.record_batch({"txid": [5, 6], "value": [WORD] * 2}))
        await append(namespace, 2, pa.record_batch({"value": [WORD] * 2}))
        now_ms = cluster.clocks["a"].current_ms
        txids = [1, 2, 3, 4, 5, 6, now_ms, now_ms]
        assert seen(cluster) == {False}
        assert all(decode_entry_header(each).encrypted for each in bodies(cluster))
        other = await cluster.open("b", config=SMALL, encryption_keys=fixed_keys("k"))
        reading = await other.open_log("clicks")
        assert [(r.txid, r.payload) for r in await read_all(reading)] == [(t, WORD) for t in txids]
        async with await reading.open_reader(txid=4) as reader:
            batches = [batch async for batch in reader.batches()]
        assert pa.Table.from_batches(batches)["txid"].to_pylist() == txids[3:]
        table = await (await reading.read(4, columns=["txid", "value"])).to_arrow()
        assert table["txid"].to_pylist() == txids[3:]
        place = await reading.find_place(NotLessThan(RecordField.TXID, 4))
        assert place.sequence_id == 3
        assert (await reading.get_last_record()).payload == WORD
        found = []
        for part in await parts_of(reading):
            async for scanned in other.scan(part):
                found += scanned.batch["txid"].to_pylist()
        assert found == txids

    on_logs(body)


def test_typed_logs_are_encrypted_after_compression() -> None:
    """Only wanted columns are decompressed, as of clear ones."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        settings = LogSettings(encrypted=True, compression="zstd", entry_bytes=100_000)
        await namespace.create_log("typed", settings=settings, schema=SCHEMA)
        typed = await namespace.open_log("typed")
        rows = pa.record_batch({"id": range(1000), "word": [WORD.decode()] * 1000}, schema=SCHEMA)
        async with await typed.open_writer() as writer:
            await writer.write_batch(rows)
        headers = [decode_entry_header(each) for each in bodies(cluster)]
        assert {(each.encrypted, each.compressed) for each in headers} == {(True, True)}
        assert max(map(len, bodies(cluster))) < 6000
        table = await (await typed.read(columns=["id"])).to_arrow()
        assert table["id"].to_pylist() == list(range(1000))
        (part,) = await parts_of(typed)
        async with aclosing(scan_range(part, namespace.ports.ledgers, fixed_keys("k"))) as batches:
            assert [each.batch.num_rows async for each in batches] == [1000]

    on_logs(body)


def test_a_reader_waits_for_the_tail_and_for_its_key() -> None:
    """A key that it does not have ends no record: once it is there, the same reader goes on."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        keys = fixed_keys("other")
        other = await cluster.open("b", config=SMALL, encryption_keys=keys)
        async with (
            await log.open_writer() as writer,
            await (await other.open_log("clicks")).open_reader() as reader,
        ):
            await writer.write(record(1, WORD))
            await writer.commit()
            for _ in range(2):
                with pytest.raises(EncryptionKeyError, match=r"'clicks': .* key 'k', and the keys"):
                    await reader.read_next()
            keys.known = master_keys("other", "k")
            found = [await reader.read_next()]
            waiting = asyncio.ensure_future(reader.read_next())
            await writer.write(record(2, WORD))
            await writer.commit()
            found.append(await waiting)
        assert [each and each.txid for each in found] == [1, 2]

    on_logs(body)


def test_without_keys_nothing_is_written_and_nothing_read() -> None:
    """By any way; the setting and positions are no secret."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        await write(log, 1, 2)
        bare = await cluster.open("b", config=SMALL)
        reading = await bare.open_log("clicks")
        assert await reading.get_settings() == ENCRYPTED
        with pytest.raises(EncryptionKeyError, match="has the setting encrypted"):
            await reading.open_writer()
        with pytest.raises(EncryptionKeyError, match="has the setting encrypted"):
            await append(bare, 1, pa.record_batch({"value": [WORD]}))
        with pytest.raises(EncryptionKeyError, match="there are no keys"):
            await read_all(reading)
        with pytest.raises(EncryptionKeyError, match="there are no keys"):
            await (await reading.read()).to_arrow()
        with pytest.raises(EncryptionKeyError, match="there are no keys"):
            await reading.get_dlsn_not_less_than_txid(2)
        (part,) = await parts_of(reading)
        with pytest.raises(EncryptionKeyError, match="there are no keys"):
            _ = [each async for each in bare.scan(part)]
        assert await reading.get_last_txid() == 2
        assert await reading.get_log_record_count() == 2
        await write(log, 3)

    on_logs(body)


def test_a_running_writer_encrypts_from_the_change_on() -> None:
    """And in the clear again after the next; one without keys ends. All of it can be read."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, _: DirectLog) -> None:
        await namespace.create_log("changed")
        log = await namespace.open_log("changed")
        bare = await (await cluster.open("b", config=SMALL)).open_log("changed")
        async with await log.open_writer() as writer:
            for txid, encrypted in enumerate((None, True, False, True)):
                await log.update_settings(encrypted=encrypted)
                await until(partial(is_encrypting, writer, bool(encrypted)))
                await writer.write(record(txid, WORD))
        assert [WORD not in each for each in bodies(cluster)] == [False, True, False, True]
        assert [each.txid for each in await read_all(log)] == [0, 1, 2, 3]
        await log.update_settings(encrypted=False)
        writer = await bare.open_writer()
        await writer.write(record(4, WORD))
        await log.update_settings(encrypted=True)
        await until(lambda: writer.machine.error is not None)
        with pytest.raises(WriteError, match="EncryptionKeyError: log 'changed' has the setting"):
            await writer.write(record(5, WORD))
        await writer.abort()
        await write(log, 6)
        assert [each.txid for each in await read_all(log)] == [0, 1, 2, 3, 4, 6]

    on_logs(body)


def test_a_new_key_encrypts_while_others_write_and_read() -> None:
    """The writer goes on in the same segment, and a reader that has both keys sees no change."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        keys = namespace.log_context.encryption_keys
        assert keys is not None
        async with await log.open_writer() as writer, await log.open_reader() as reader:
            for txid, names in enumerate((("k",), ("k", "new"), ("new", "k"), ("new",))):
                keys.known = master_keys(*names)
                await writer.write(record(txid, WORD))
                await writer.commit()
                found = await reader.read_next()
                assert found is not None
                assert (found.txid, found.dlsn) == (txid, DLSN(1, txid, 0))
        with pytest.raises(EncryptionKeyError, match="the key 'k', and the keys are new: expected"):
            await read_all(log)
        assert [b"\x01k" in each[48:50] for each in bodies(cluster)] == [True, True, False, False]

    on_logs(body)


def test_merges_recovery_checks_and_truncation_need_no_key() -> None:
    """A client without keys does them, and the records are the same."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        for version in range(1, 13):
            await append(namespace, version, pa.record_batch({"value": [WORD, b"%d" % version]}))
        before = await read_all(log)
        bare = await cluster.open("b", config=SMALL)
        assert await merger_of(bare).merge((await bare.open_log("clicks"))._log) > 0
        assert await read_all(log) == before
        lost = await cluster.open("c", config=SMALL, encryption_keys=fixed_keys("k"))
        writer = await (await lost.open_log("clicks")).open_writer()
        await writer.write(record(2**50, WORD))
        await writer.abort()
        context = bare.log_context
        at = await context.logs.read((await bare.open_log("clicks"))._log)
        assert at.head.open_extent is not None
        recovered = await recover_log(context, at)
        assert recovered.head.open_extent is None
        assert await read_all(log) == [*before, *(await read_all(log))[-1:]]
        assert (await log.get_last_record()).payload == WORD
        assert await inspect_log(context, "clicks", reads_entries=True) == []
        assert await (await bare.open_log("clicks")).truncate(DLSN(1, 4, 0))
        assert await read_all(log) == [each for each in before if each.dlsn >= DLSN(1, 4, 0)] + [
            await log.get_last_record()
        ]
        assert seen(cluster) == {False}

    on_logs(body)


def test_a_copy_is_encrypted_for_the_other_log() -> None:
    """It is read and written like any records: with the keys of both, and to a clear log clear."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        await write(log, 1, 2)
        for name, settings in (("copy", ENCRYPTED), ("clear", LogSettings())):
            await namespace.create_log(name, settings=settings)
            assert await copy_log(log, namespace, name) == 2
            copied = await read_all(await namespace.open_log(name))
            assert [(each.txid, each.payload) for each in copied] == [(1, WORD), (2, WORD)]
            assert seen(cluster) == {False} | ({True} if name == "clear" else set())

    on_logs(body)


@pytest.mark.parametrize("kind", ["altered", "swapped"])
def test_a_forged_entry_is_refused_or_left_out(kind: str) -> None:
    """Its checksums hold, for the owner of a bookie can make them."""

    async def body(cluster: MemoryCluster, namespace: DirectNamespace, log: DirectLog) -> None:
        await namespace.create_log("other", settings=ENCRYPTED)
        await write(await namespace.open_log("other"), 7, 8, 9)
        await write(log, 1, 2, 3)
        other, own = [
            (await (await namespace.open_log(name)).get_log_segments())[0].extents[0].ledger_id
            for name in ("other", "clicks")
        ]
        for bookie in cluster.bookies:
            entries = bookie.entries(own)
            if 1 not in entries:
                continue
            old = decode_frame(entries[1])
            forged = bytearray(old.body)
            forged[-20] ^= 1
            if kind == "swapped":
                (found,) = {
                    bytes(decode_frame(each.entries(other)[1]).body)
                    for each in cluster.bookies
                    if 1 in each.entries(other)
                }
                forged = bytearray(found)
            entries[1] = encode_frame(
                ledger_id=own,
                entry_id=1,
                last_add_confirmed=0,
                ledger_bytes=old.ledger_bytes,
                body=[bytes(forged)],
            )
        with pytest.raises(InvalidEntryError, match="log 'clicks': an entry does not fit the key"):
            await read_all(log)
        (part,) = await parts_of(log)
        with pytest.raises(InvalidEntryError, match="log 'clicks': an entry does not fit the key"):
            _ = [each async for each in namespace.scan(part)]
        async with await log.open_reader(skip_broken_entries=True) as reader:
            assert [each.txid async for each in reader] == [1, 3]
            assert reader.broken_entries == 1

    on_logs(body)
