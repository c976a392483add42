"""Proxies that hand over logs to others which have fewer, and what keeps them from it."""

from __future__ import annotations

import asyncio
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import MetadataSessionExpiredError
from dlcore.proxy.load import ProxyLoad
from dlcore.proxy.rendezvous import preferred_owner
from tests.dlcore.backends.test_writing import numbered, remote
from tests.dlcore.proxy.test_owners import member_at, where_sent
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.ports import free_ports
from tests.fixtures.served_proxies import Client, Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.flight.writing import FlightWriter
    from dlcore.proxy.membership import Membership

SOON: dict[str, Any] = {"rebalance_after_s": 0.2, "rebalance_pause_s": 0.02}
LATE: dict[str, Any] = {"rebalance_after_s": 1000.0}
LOGS = 12


async def at_home_at(location: str, served: Proxies, many: int, *others: str) -> list[str]:
    """Create logs that this proxy should own, if these others are alive, too."""
    names = (f"ours-{number}" for number in count())
    live = {location, *others}
    found = list(islice((each for each in names if preferred_owner(each, live) == location), many))
    for name in found:
        await served.cluster.namespaces[0].create_log(name)
    return found


async def owned_by(client: Client) -> list[str]:
    """Return which logs a proxy owns."""
    return list((await client.act("logs"))["logs"])


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds."""
    while True:
        if await holds():
            return
        await asyncio.sleep(0.01)


async def until_state(client: Client, state: str) -> dict[str, Any]:
    """Wait until the balance of a proxy is so; return what it tells of it."""
    reply: dict[str, Any] = {}

    async def is_so() -> bool:
        reply.update((await client.act("health"))["balance"])
        return bool(reply["state"] == state)

    await eventually(is_so)
    return reply


def test_logs_go_to_a_proxy_that_joins_and_their_writers_with_them() -> None:
    """As many as make it even; each writer goes on where its log is, and nothing is lost."""

    async def scenario(served: Proxies) -> None:
        port = free_ports(1)
        there = f"grpc://127.0.0.1:{port}"
        first = await served.start(**SOON)
        here = served.servers[0].location
        names = await at_home_at(there, served, LOGS, here)
        writers = [await (await remote(served, name)).open_writer() for name in names]
        await write(writers, 0)
        assert sorted(await owned_by(first)) == sorted(names)
        second = await served.start(port=port, **SOON)
        done = 1
        while (await until_moved(first)) > LOGS * 0.6:  # the mean, and a fifth of it
            await write(writers, done)
            done += 1
        kept = await kept_when_even(first)
        # Old news of its peer's load may make it hand over more; `test_balance` counts exactly.
        assert 0 < len(kept) <= LOGS * 0.6
        await write(writers, done)
        assert sorted([*kept, *await owned_by(second)]) == sorted(names)
        assert (await until_state(second, "even"))["handed_over"] == 0
        for name, writer in zip(names, writers, strict=True):
            await writer.aclose()
            found = await read_all(await served.cluster.namespaces[0].open_log(name))
            assert [each.txid for each in found] == list(range(done + 1))

    with_proxies()(scenario)


async def kept_when_even(client: Client) -> list[str]:
    """Wait until a proxy says that it is even and of how many logs; return these logs."""
    kept: list[str] = []

    async def is_so() -> bool:
        reply = (await client.act("health"))["balance"]
        kept[:] = await owned_by(client)
        even = {"state": "even", "misplaced": len(kept), "handed_over": LOGS - len(kept)}
        return bool(reply == even)

    await eventually(is_so)
    return kept


async def write(writers: list[FlightWriter], number: int) -> None:
    """Write one record to each log."""
    await asyncio.gather(*(each.write(numbered(number, 1)[0]) for each in writers))


async def until_moved(client: Client) -> int:
    """Return how many logs a proxy owns, a moment later."""
    await asyncio.sleep(0.01)
    return len(await owned_by(client))


def test_nothing_goes_where_that_is_off_or_the_other_tells_no_load() -> None:
    """An older release publishes none; a proxy that shall not hand over does not."""

    async def scenario(served: Proxies) -> None:
        gone = f"grpc://127.0.0.1:{free_ports(1)}"
        off = await served.start(rebalance=False)
        here = served.servers[0].location
        for name in await at_home_at(gone, served, 4, here):
            await (await off.opened(name)).last_reply()
        on = await served.start(**SOON)
        await on.act("drain")
        member, _, _ = await member_at(gone, served)
        assert (await off.act("health"))["balance"] == {"state": "off"}
        await on.act("undrain")
        await until_state(on, "even")
        assert len(await owned_by(off)) == 4
        loads = await member.loads_of([gone, *(each.location for each in served.servers)])
        assert [load is None for load in loads.values()] == [True, True, False]
        await member.aclose()

    with_proxies()(scenario)


def test_a_log_stays_whose_client_does_not_reach_its_home() -> None:
    """Else it would be handed over, and come back, for ever."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**SOON)
        here, gone = served.servers[0].location, f"grpc://127.0.0.1:{free_ports(1)}"
        member, _, (first, second) = await member_at(gone, served)
        await member.presence.publish_load(ProxyLoad(logs=0, room=100, bytes_per_s=0))
        for name in (first, second):
            assert await where_sent(client, here, name, unreachable=[gone]) == here
        reply = await until_state(client, "even")
        assert reply == {"state": "even", "misplaced": 0, "handed_over": 0}
        await member.aclose()

    with_proxies()(scenario)


def test_without_the_metadata_store_nothing_is_handed_over() -> None:
    """Nor published; once it is back that goes on."""

    async def scenario(served: Proxies) -> None:
        port = free_ports(1)
        there = f"grpc://127.0.0.1:{port}"
        first = await served.start(**SOON)
        here = served.servers[0].location
        for name in await at_home_at(there, served, 4, here):
            await (await first.opened(name)).last_reply()
        store = served.cluster.stores[here]
        store.disconnect()
        await served.start(port=port, **LATE)
        await until(lambda: bool(served.servers[0].reads._membership.outages.reason))
        assert len(await owned_by(first)) == 4
        store.reconnect()

        async def is_even() -> bool:
            return len(await owned_by(first)) == 2

        await eventually(is_even)

    with_proxies()(scenario)


def test_a_load_is_published_again_after_a_drain_and_after_a_lost_session() -> None:
    """The node is another one then."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**SOON)
        here = served.servers[0].location
        membership: Membership = served.servers[0].reads._membership

        async def is_published() -> bool:
            try:
                return (await membership.loads_of([here]))[here] == ProxyLoad(
                    logs=0, room=10_000, bytes_per_s=0
                )
            except MetadataSessionExpiredError:
                return False

        await eventually(is_published)
        await client.act("drain")
        await client.act("undrain")
        await eventually(is_published)
        served.cluster.stores[here].expire()
        await eventually(is_published)

    with_proxies()(scenario)


def test_written_bytes_are_published_as_a_rate() -> None:
    """Bytes that a proxy accepted, of all its logs."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**SOON)
        here = served.servers[0].location
        membership = served.servers[0].reads._membership
        stream = await client.opened("clicks")

        async def is_published() -> bool:
            await stream.send(*[bytes(900_000)] * 3)
            await stream.next_reply()
            load = (await membership.loads_of([here]))[here]
            return load is not None and load.bytes_per_s > 0

        await eventually(is_published)
        await stream.last_reply()

    with_proxies("clicks")(scenario)
