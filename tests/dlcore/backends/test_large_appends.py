"""Appends of very many extents, and of many tasks, through proxies: their bounds, and waiting."""

from __future__ import annotations

import asyncio
import base64
import zlib
from itertools import count
from typing import TYPE_CHECKING

import grpc
import msgspec
import pytest
from msgspec.structs import replace

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import TransactionTooLargeError
from dlcore.flight import actions
from dlcore.metadata import port
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Proxies, with_proxies
from tests.fixtures.staged_records import batch

if TYPE_CHECKING:
    from dlcore.backends.flight.namespace import FlightNamespace
    from dlcore.log.metadata.segment import StagedExtent

LOGS = [f"a/log/whose/name/has/some/length/{number:04}" for number in range(100)]
MESSAGE_BYTES = 128 * 1024


async def staged(remote: FlightNamespace, times: int) -> list[StagedExtent]:
    """Return extents of all logs, each so many times, as if of entries that follow each other."""
    writer = await remote.open_staging_writer(identity="job")
    for log in LOGS:
        await writer.write_batch(log, batch("x"))
    numbers = count(1000)
    return [
        replace(each, first_entry_id=number, last_entry_id=number)
        for each in await writer.stage()
        for number in (next(numbers) for _ in range(times))
    ]


def test_more_extents_than_a_message_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a transaction takes are appended; the error for more says what would be right."""

    async def scenario(served: Proxies) -> None:
        await served.start(message_bytes_max=MESSAGE_BYTES)
        async with await open_namespace(served.servers[0].location) as remote:
            fitting = await staged(remote, 30)
            assert len(msgspec.json.encode(fitting)) > 2 * MESSAGE_BYTES
            first = await remote.begin_append("job", 1)
            assert (await first.commit(fitting)).committed
            snapshots = await remote.get_snapshots(LOGS)
            counts = {each.segments[-1].record_count for each in snapshots.values() if each}
            assert counts == {30}
            second = await remote.begin_append("job", 2)
            too_many = await staged(remote, 30)
            monkeypatch.setattr(port, "REQUEST_BYTES_MAX", 20_000)
            with pytest.raises(TransactionTooLargeError, match="let fewer tasks write"):
                await second.commit(too_many)
            await second.abort(too_many)

    with_proxies(*LOGS)(scenario)


def test_wrongly_packed_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what would unpack to more than anybody needs."""
    monkeypatch.setattr(actions, "UNPACKED_BYTES_MAX", 1000)

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        for packed, reason in (
            (b"no", "expected a list of extents, as JSON by zlib"),
            (zlib.compress(b"[7]"), "expected a list of extents, as JSON by zlib"),
            (zlib.compress(b" " * 1001), "expected complete zlib data of at most 1000 bytes"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=reason) as refused:
                await client.act(
                    "commit_append",
                    identity="job",
                    version=1,
                    token="t",
                    packed=base64.b64encode(packed).decode(),
                )
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with_proxies("clicks")(scenario)


def test_more_tasks_than_a_proxy_lets_stage_at_once() -> None:
    """Each gets its turn, in whatever order, and one append takes what all of them staged."""

    async def scenario(served: Proxies) -> None:
        await served.start(staging_max=2)
        async with await open_namespace(served.servers[0].location, patience_s=0.5) as remote:

            async def task(number: int) -> list[StagedExtent]:
                writer = await remote.open_staging_writer(identity="job", shared=bool(number % 2))
                await writer.write_batch("clicks", batch(f"{number}"))
                return await writer.stage()

            parts = await asyncio.gather(*(task(number) for number in range(32)))
            append = await remote.begin_append("job", 1)
            assert (await append.commit([each for part in parts for each in part])).committed
        log = await served.cluster.namespaces[0].open_log("clicks")
        assert [int(each.payload) for each in await read_all(log)] == list(range(32))

    with_proxies("clicks")(scenario)
