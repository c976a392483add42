"""Logs that a proxy knows: it reads nothing of them twice, and takes none for another."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from dlcore.errors import AlreadyTruncatedError, LogNotFoundError
from dlcore.ids import DLSN
from dlcore.proto import flight_pb2 as pb
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.reading.serving import ReadPath
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record
from tests.fixtures.recording_store import RecordingStore

if TYPE_CHECKING:
    from dlcore.log.manager import DistributedLogManager
    from dlcore.namespace import Namespace

VALUES = ["value"]


def path_of(namespace: Namespace) -> ReadPath:
    """Return the read half of a proxy that owns nothing."""
    return ReadPath(namespace, cast("Any", None), ProxyConfig())


async def got(reads: ReadPath, **ticket: object) -> list[bytes]:
    """Return the values that a ticket gets."""
    sent: list[bytes] = []

    async def send(message: bytes) -> None:
        sent.append(message)

    await reads.do_get(json.dumps({"columns": VALUES, **ticket}).encode(), send)
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


async def write(log: DistributedLogManager, *txids: int) -> None:
    """Write a segment."""
    async with await log.open_writer() as writer:
        for txid in txids:
            await writer.write(record(txid, b"%d" % txid))


def test_a_part_of_a_log_that_has_not_changed_costs_one_question() -> None:
    """Whether it has changed; where its entries are was read for those who asked before."""

    async def body(cluster: MemoryCluster, log: DistributedLogManager) -> None:
        for number in range(5):
            await write(log, 2 * number, 2 * number + 1)
        namespace = await cluster.open("proxy", wrap=RecordingStore)
        store = cast("RecordingStore", namespace.log_context.store)
        reads = path_of(namespace)
        part = {"log": "clicks", "log_id": log.log_id}
        part |= {"start": {"dlsn": "3:0:0"}, "end": {"dlsn": "4:0:0"}}  # type: ignore[dict-item]
        for _ in range(3):
            assert await got(reads, **part) == [b"4", b"5"]
            await asyncio.sleep(0.01)  # the watch has told what it tells at first
        with store.record() as requests:
            assert await got(reads, **part) == [b"4", b"5"]
            kinds = dict(requests.kinds)
        watches = kinds.pop("watch", 0)  # the second of this node, for which nothing is sent
        assert (kinds, watches) == ({"sync": 1}, 1)
        await reads.aclose()

    on_log(body)


def test_what_changed_before_a_part_is_asked_for_is_known() -> None:
    """Records that are new are there, and those that are truncated refused."""

    async def body(cluster: MemoryCluster, log: DistributedLogManager) -> None:
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

    async def body(cluster: MemoryCluster, log: DistributedLogManager) -> None:
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
