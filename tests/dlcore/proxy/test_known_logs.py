"""Logs that a proxy knows: it reads nothing of them twice, and takes none for another."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from msgspec.structs import replace

from dlcore.base.errors import (
    AlreadyTruncatedError,
    CorruptMetadataError,
    DLError,
    LogNotFoundError,
)
from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.tickets import Ticket, ticket_of
from dlcore.log.metadata.values import LogHead
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import decode, encode
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.membership import Membership
from dlcore.proxy.reading.serving import ReadPath
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record
from tests.fixtures.recording_store import RecordingStore

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace

VALUES = ["value"]


def path_of(namespace: DirectNamespace) -> ReadPath:
    """Return the read half of a proxy that owns nothing."""
    context = namespace.log_context
    membership = Membership(context.store, context.paths, "grpc://here:1")
    return ReadPath(namespace, membership, ProxyConfig())


async def got(reads: ReadPath, **ticket: object) -> list[bytes]:
    """Return the values that a ticket gets."""
    sent: list[bytes] = []

    async def send(message: bytes) -> None:
        sent.append(message)

    await reads.do_get(Ticket.decode(json.dumps({"columns": VALUES, **ticket}).encode()), send)
    parts = [pb.FlightData.FromString(message) for message in sent]
    assert sent[0]
    schema = pa.schema([("value", pa.binary())])
    return [
        value
        for part in parts[1:]
        for value in pa.ipc.read_record_batch(pa.ipc.read_message(_framed(part)), schema)
        .column(0)
        .to_pylist()
    ]


def _framed(part: pb.FlightData) -> bytes:
    header = part.data_header
    return b"\xff\xff\xff\xff" + len(header).to_bytes(4, "little") + header + part.data_body


async def write(log: DirectLog, *txids: int) -> None:
    """Write a segment."""
    async with await log.open_writer() as writer:
        for txid in txids:
            await writer.write(record(txid, b"%d" % txid))


def test_a_part_of_a_log_that_has_not_changed_costs_one_question() -> None:
    """Whether it has changed; where its entries are was read for those who asked before."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for number in range(5):
            await write(log, 2 * number, 2 * number + 1)
        namespace = await cluster.open("proxy", wrap=RecordingStore)
        store = cast("RecordingStore", namespace.log_context.store)
        reads = path_of(namespace)
        part = {"log": "clicks", "log_id": log.log_id}
        part |= {"start": {"dlsn": "3:0:0"}, "end": {"dlsn": "4:0:0"}}  # type: ignore[dict-item]
        reads.followed.budget.older.resize(0)  # nothing is kept, so that each call reads entries
        for _ in range(3):
            assert await got(reads, **part) == [b"4", b"5"]
            await asyncio.sleep(0.01)  # the watch has made its first report
        with store.record() as requests:
            assert await got(reads, **part) == [b"4", b"5"]
            kinds = dict(requests.kinds)
        watches = kinds.pop("watch", 0)  # the second of this node, for which nothing is sent
        assert (kinds, watches) == ({"sync": 1}, 1)
        await reads.aclose()

    on_log(body)


def test_changes_before_a_request_for_a_part_are_known() -> None:
    """Records that are new are there, and those that are truncated refused."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 0, 1)
        reads = path_of(await cluster.open("proxy"))
        for last in range(2, 8):
            assert await got(reads, log="clicks") == [b"%d" % txid for txid in range(last)]
            await write(log, last)
        part = {"log": "clicks", "log_id": log.log_id, "start": {"dlsn": "1:0:0"}}
        assert len(await got(reads, **part)) == 8
        await log.truncate(DLSN(2, 0, 0))
        with pytest.raises(AlreadyTruncatedError, match="1:0:0"):
            await got(reads, **part)
        await reads.aclose()

    on_log(body)


def test_a_log_is_found_by_its_id() -> None:
    """Under whatever name; another one that has its name is not taken for it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 1)
        namespace = await cluster.open("proxy")
        reads, log_id = path_of(namespace), log.log_id
        assert await got(reads, log="clicks", log_id=log_id) == [b"1"]
        await log.rename("visits")
        owner = cluster.namespaces[0]
        await owner.create_log("clicks")
        for _ in range(3):
            assert await got(reads, log="clicks") == []
            assert await got(reads, log="clicks", log_id=log_id) == [b"1"]
            assert await got(reads, log="/visits") == [b"1"]
        await owner.delete_log("visits")
        with pytest.raises(LogNotFoundError, match="clicks"):
            await got(reads, log="clicks", log_id=log_id)
        with pytest.raises(LogNotFoundError, match="'visits' does not exist"):
            await got(reads, log="visits")
        assert await got(reads, log="clicks") == []
        await reads.aclose()

    on_log(body)


def test_a_planned_part_is_of_the_log_that_it_was_planned_for() -> None:
    """Nothing is read of another log that has its name by then."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 1)
        reads = path_of(await cluster.open("proxy"))
        descriptor = pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=["clicks"])
        info = await reads.get_flight_info(descriptor, ticket_of(descriptor))
        (ticket,) = [json.loads(each.ticket.ticket) for each in info.endpoint]
        assert await got(reads, **ticket) == [b"1"]
        owner = cluster.namespaces[0]
        await owner.delete_log("clicks")
        await owner.create_log("clicks")
        await write(await owner.open_log("clicks"), 2)
        with pytest.raises(LogNotFoundError):
            await got(reads, **ticket)
        await reads.aclose()

    on_log(body)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (None, LogNotFoundError),
        ({"deleted": True}, LogNotFoundError),
        ({"name": "elsewhere"}, CorruptMetadataError),
    ],
    ids=["gone", "deleted", "another"],
)
def test_a_name_that_leads_to_no_log_is_an_error(
    change: dict[str, Any] | None, error: type[DLError]
) -> None:
    """It is looked at twice, for it may be about to change, and no more."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = await cluster.open("proxy", wrap=RecordingStore)
        store = cast("RecordingStore", namespace.log_context.store)
        reads = path_of(namespace)
        path, admin = cluster.paths.log_of(log.log_id).head, cluster.tree.connect()
        head = await admin.get(path)
        assert head is not None
        if change is None:
            await admin.delete(path)
        else:
            changed = replace(decode(LogHead, head.value, source=path), **change)
            await admin.put(path, encode(changed), version=ANY_VERSION)
        for ticket in ({}, {"log_id": log.log_id}):
            with store.record() as requests, pytest.raises(error):
                await got(reads, log="clicks", **ticket)
            assert requests.count < 20
        await reads.aclose()

    on_log(body)


def test_a_log_is_read_though_that_which_has_its_name_now_is_damaged() -> None:
    """Also by who has followed it since before it was renamed."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 1)
        reads, late = [path_of(await cluster.open(name)) for name in ("proxy", "late")]
        assert await got(reads, log="clicks", log_id=log.log_id) == [b"1"]
        await log.rename("visits")
        owner = cluster.namespaces[0]
        await owner.create_log("clicks")
        path = cluster.paths.log_of((await owner.open_log("clicks")).log_id).head
        await cluster.tree.connect().put(path, b"damaged", version=ANY_VERSION)
        for each in (reads, late):
            for _ in range(3):
                assert await got(each, log="clicks", log_id=log.log_id) == [b"1"]
            with pytest.raises(CorruptMetadataError):
                await got(each, log="clicks")
            await each.aclose()

    on_log(body)


def test_a_damaged_ledger_stops_no_read_of_another() -> None:
    """Though all that is asked for in one turn is read at once."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 1)
        owner = cluster.namespaces[0]
        await owner.create_log("bad")
        bad = await owner.open_log("bad")
        await write(bad, 2)
        ledger_id = (await bad.get_snapshot()).segments[0].extents[0].ledger_id
        path = cluster.paths.ledger(ledger_id)
        await cluster.tree.connect().put(path, b"damaged", version=ANY_VERSION)
        found = await (await cluster.open("b")).survey_logs(["clicks", "bad"])
        assert isinstance(found["bad"], CorruptMetadataError)
        assert not isinstance(found["clicks"], DLError)
        namespace = await cluster.open("c")
        readers = [await (await namespace.open_log(name)).open_reader() for name in found]
        results = await asyncio.gather(
            *(each.read_next() for each in readers), return_exceptions=True
        )
        assert getattr(results[0], "payload", results[0]) == b"1"
        assert isinstance(results[1], CorruptMetadataError)
        for each in readers:
            await each.aclose()

    on_log(body)


def test_where_entries_were_moved_is_learned_once() -> None:
    """A second reader asks no bookie that has lost them."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await write(log, 1)
        reads = path_of(await cluster.open("proxy"))
        assert await got(reads, log="clicks") == [b"1"]
        ledger_id = (await log.get_snapshot()).segments[0].extents[0].ledger_id
        ledgers = cluster.namespaces[0].log_context.ledger_store
        stored = await ledgers.read(ledger_id)
        (ensemble,) = stored.metadata.ensembles
        old = {each.bookie: each for each in cluster.bookies if each.bookie in ensemble.bookies}
        (spare,) = (each for each in cluster.bookies if each.bookie not in old)
        spare._ledgers[ledger_id] = old[ensemble.bookies[0]]._ledgers[ledger_id]
        moved = replace(ensemble, bookies=(spare.bookie, *ensemble.bookies[1:]))
        await ledgers.write(replace(stored.metadata, ensembles=(moved,)), version=stored.version)
        for each in old.values():
            each.stop()
        assert await got(reads, log="clicks") == [b"1"]
        before = [each.requests for each in old.values()]
        assert await got(reads, log="clicks") == [b"1"]
        assert [each.requests for each in old.values()] == before
        await reads.aclose()

    on_log(body)


def test_a_log_that_is_let_go_of_while_it_is_asked_for() -> None:
    """By another call of the same turn, which found that its bookies do not answer."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            namespace = await cluster.open("b")
            for _ in range(3):
                await namespace.get_snapshots(["clicks"], fresh=True)
                await asyncio.sleep(0.01)
            follower = namespace.followers._followers["clicks"]
            assert follower.is_being_written
            asked = asyncio.create_task(namespace.survey_logs(["clicks"]))
            asyncio.get_running_loop().call_soon(namespace.followers._let_go, "clicks", follower)
            assert not isinstance((await asked)["clicks"], DLError | None)

    on_log(body)
