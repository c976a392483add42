"""A running proxy takes over the budgets of its cluster, and gives them up again."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from dlcore.base.proto import flight_pb2 as pb
from dlcore.metadata.cluster_settings import ClusterSettingsStore
from dlcore.ops.live_settings import require_allowed
from dlcore.proxy import server as server_module
from dlcore.proxy.writing.put import PutService
from tests.fixtures.aio import until, until_async
from tests.fixtures.served_proxies import PAYLOADS, Proxies, data_of, with_proxies

if TYPE_CHECKING:
    import pytest

    from tests.fixtures.served_proxies import Client, Stream


async def change(served: Proxies, **settings: int | None) -> None:
    """Store settings of proxies, as `dlog cluster settings` does."""
    ports = served.namespaces[0].ports
    store = ClusterSettingsStore(ports.store, ports.paths)
    await store.change({("proxy", key): each for key, each in settings.items()}, require_allowed)


def test_windows_are_those_of_streams_that_open_later() -> None:
    """A stream that is open keeps what it was promised."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()

        async def has(records: int, size_bytes: int) -> bool:
            stream, ready = await client.opened_with("a")
            await stream.last_reply()
            return (ready["window_records"], ready["window_bytes"]) == (records, size_bytes)

        assert await has(65_536, 8 << 20)
        await change(served, window_records=7, window_bytes=1000)
        await until_async(lambda: has(7, 1000))
        await change(served, window_records=None, window_bytes=None)
        await until_async(lambda: has(65_536, 8 << 20))

    with_proxies("a")(scenario)


async def staging(client: Client, identity: str) -> Stream:
    """Begin to stage."""
    stream = client.put()
    first = data_of(PAYLOADS.serialize())
    first.flight_descriptor.type = pb.FlightDescriptor.CMD
    first.flight_descriptor.cmd = json.dumps({"staging": identity}).encode()
    await stream.call.write(first)
    return stream


def test_streams_that_wait_to_stage_are_let_in() -> None:
    """As soon as more may stage."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(staging_max=1)
        first, second = await staging(client, "first"), await staging(client, "second")
        reply = await first.next_reply()
        assert reply is not None
        assert reply["ready"]["staging"] == "first"
        begins: asyncio.Task[dict[str, Any] | None] = asyncio.create_task(second.next_reply())
        await change(served, staging_max=2)
        reply = await begins
        assert reply is not None
        assert reply["ready"]["staging"] == "second"
        for stream in (first, second):
            await stream.last_reply()

    with_proxies("a")(scenario)


def test_messages_that_wait_are_bounded_anew() -> None:
    """Messages that wait for a rate count: a stream that sends too much is ended."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(log_bytes_per_s=1.0, throttle_max_s=1e6)
        waiting = await client.opened("a")
        for _ in range(2):
            await waiting.send(b"x" * 100)
        await waiting.acked(1)

        async def is_ended() -> bool:
            stream = await client.opened("b")
            for _ in range(2):
                await stream.send(b"x" * 100)
            try:
                async with asyncio.timeout(0.5):
                    while await stream.next_reply() is not None:
                        pass
            except TimeoutError:
                stream.call.cancel()
                return False
            return "too many bytes wait" in (await stream.status())[1]

        assert not await is_ended()
        await change(served, received_bytes_max=1)
        await until_async(is_ended)
        waiting.call.cancel()

    with_proxies("a", "b")(scenario)


def test_memory_for_readers_and_bytes_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget has the new size, and afterwards the one that the proxy was started with."""
    made: list[PutService] = []

    def recorded(*arguments: Any) -> PutService:
        made.append(PutService(*arguments))
        return made[-1]

    monkeypatch.setattr(server_module, "PutService", recorded)

    async def scenario(served: Proxies) -> None:
        await served.start(pending_bytes_max=900, principal_pending_bytes_max=300)
        (server,) = served.servers
        reads, budget = server.reads, made[0]._budget

        def sizes() -> tuple[int, ...]:
            return (
                reads.followed.budget.bytes_max,
                reads.outgoing.bytes_max,
                reads.deliveries._turns._count,
                budget._bytes_max,
                budget._log_bytes_max,
                budget._principal_bytes_max,
            )

        given = (64 << 20, 64 << 20, 8, 900, 900, 300)
        assert sizes() == given
        changed = {
            "ring_bytes_max": 1,
            "sending_bytes_max": 2,
            "catching_up_max": 3,
            "pending_bytes_max": 4,
            "log_pending_bytes_max": 5,
            "principal_pending_bytes_max": 6,
        }
        await change(served, **changed)
        await until(lambda: sizes() == (1, 2, 3, 4, 5, 6))
        await change(served, **dict.fromkeys(changed))
        await until(lambda: sizes() == given)

    with_proxies()(scenario)
