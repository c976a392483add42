"""Who owns a log, and where it is followed: told as it is, not as the list of proxies has it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from dlcore.proto import flight_pb2 as pb
from dlcore.proxy.reading.tickets import Ticket
from dlcore.proxy.rendezvous import preferred_owner
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import record
from tests.fixtures.served_proxies import Proxies, with_proxies


async def told(served: Proxies, index: int, log: str) -> tuple[str | None, list[str]]:
    """Return which owner a proxy tells of, and where the log's tail is to be read."""
    descriptor = pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=[log])
    info = await served.servers[index].reads.get_flight_info(descriptor)
    return json.loads(info.app_metadata)["owner"], [x.uri for x in info.endpoint[-1].location]


def test_what_is_owned_is_told_by_every_proxy() -> None:
    """A proxy that comes should own the log, and does not: it stays where it is until released."""

    async def scenario(served: Proxies) -> None:
        first = await served.start()
        here = served.servers[0].location
        stream = await first.opened("a")
        await stream.send(b"x")
        await stream.acked(1)
        clients = [first]
        while preferred_owner("a", {each.location for each in served.servers}) == here:
            clients.append(await served.start())
        there = preferred_owner("a", {each.location for each in served.servers})
        assert there is not None
        await until(lambda: all(there in each.reads._membership.live for each in served.servers))
        for index, client in enumerate(clients):
            assert await client.act("owner", log="a") == {"location": here}
            assert await told(served, index, "a") == (here, [here])
        assert await client.act("owner", log="later") == {
            "location": preferred_owner("later", {each.location for each in served.servers})
        }
        await first.act("release", log="a")
        assert await first.act("owner", log="a") == {"location": there}
        assert await told(served, 0, "a") == (there, [there])

    with_proxies("a")(scenario)


def test_a_tail_is_read_where_it_is_followed() -> None:
    """The proxy that is asked names itself if it follows the log, unless it is about to leave."""

    async def scenario(served: Proxies) -> None:
        clients = [await served.start(), await served.start()]
        locations = {each.location for each in served.servers}
        await until(
            lambda: all(each.reads._membership.live == locations for each in served.servers)
        )
        log = await served.cluster.namespaces[0].open_log("a")
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            owner = preferred_owner("a", locations)
            other = next(n for n, each in enumerate(served.servers) if each.location != owner)
            assert await told(served, other, "a") == (owner, [owner])

            async def send(_: bytes) -> None:
                pass

            server: Any = served.servers[other]
            ticket = Ticket(log="a", follow=True).encode()
            reading = asyncio.create_task(server.reads.do_get(ticket, send))
            await until(lambda: len(server.reads.followed) == 1)
            assert await told(served, other, "a") == (owner, [server.location])
            await clients[other].act("drain")
            assert await told(served, other, "a") == (owner, [owner])
            reading.cancel()
            await asyncio.wait({reading})

    with_proxies("a")(scenario)
