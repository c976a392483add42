"""The owner of a log and its follower are reported as they are, not as the list of proxies says."""

from __future__ import annotations

import asyncio
import json
import socket
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.backends.direct.log import DirectLog
from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import DLError, LogRenamedError, WriteError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.tickets import Ticket, ticket_of
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.membership import Membership
from dlcore.proxy.rendezvous import preferred_owner
from dlcore.proxy.writing.owner import LogOwner
from tests.fixtures.aio import run, until
from tests.fixtures.memory_namespace import TIME_LIMIT_S, memory_cluster, record
from tests.fixtures.ports import free_ports
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from tests.fixtures.served_proxies import Client


async def owned_by(served: Proxies, index: int, log: str) -> tuple[str | None, list[str]]:
    """Return which owner a proxy tells of, and where the log's tail is to be read."""
    descriptor = pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=[log])
    info = await served.servers[index].reads.get_flight_info(descriptor, ticket_of(descriptor))
    return json.loads(info.app_metadata)["owner"], [x.uri for x in info.endpoint[-1].location]


def test_every_proxy_names_the_owner_of_a_log() -> None:
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
            assert (await client.act("owner", log="a"))["location"] == here
            assert await owned_by(served, index, "a") == (here, [here])
        assert await client.act("owner", log="later") == {
            "location": preferred_owner("later", {each.location for each in served.servers}),
            "log_id": None,
        }
        await first.act("release", log="a")
        assert (await first.act("owner", log="a"))["location"] == there
        assert await owned_by(served, 0, "a") == (there, [there])

    with_proxies("a")(scenario)


def test_a_client_that_cannot_reach_the_right_owner_is_served_here() -> None:
    """No process holds it there; an owner there is still named, for it writes the log."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        listening = socket.create_server(("127.0.0.1", 0))
        gone = f"grpc://127.0.0.1:{listening.getsockname()[1]}"
        here = served.servers[0].location
        member, other, (free, held) = await member_at(gone, served)
        sent_to = partial(where_sent, client, here)
        async with await (await other.open_log(held)).open_writer():
            assert await sent_to(free) == await sent_to(held) == gone
            assert await sent_to(held, unreachable=[gone]) == gone
            assert await sent_to(free, unreachable=[gone, here]) == here
            assert await sent_to(free) == here, "it stays where it is"
        async with await open_namespace(here, patience_s=TIME_LIMIT_S) as namespace:
            log = await namespace.open_log(held)
            async with await log.open_writer() as writer:
                last = await writer.write(record(1))
            assert await client.act("logs") == {"logs": [free, held]}
            await client.act("release", log=held)
            assert await log.append([record(2)], expected=last)
        await member.aclose()
        listening.close()

    with_proxies()(scenario)


async def member_at(
    location: str, served: Proxies
) -> tuple[Membership, DirectNamespace, list[str]]:
    """Let a proxy be live at a location; return two logs that should be owned there."""
    other = await served.cluster.open(location)
    member = Membership(other.log_context.store, other.log_context.paths, location)
    await member.join()
    server = served.servers[0]
    await until(lambda: location in server.reads._membership.live)
    names = (f"log-{number}" for number in count())
    both = {server.location, location}
    logs = list(islice((name for name in names if preferred_owner(name, both) == location), 2))
    for name in logs:
        await other.create_log(name)
    return member, other, logs


async def where_sent(client: Client, here: str, name: str, **options: object) -> str | None:
    """Return where a stream to a log is served: here, or where it is sent."""
    stream = client.put()
    await stream.begin(name, **options)
    if await stream.next_reply() is not None:
        return here
    code, _, metadata = await stream.status()
    assert code == "UNAVAILABLE"
    return metadata.get("dlog-location")


def test_the_logs_of_a_proxy_without_a_listener_are_taken_at_once() -> None:
    """Once a client says that it did not reach it; if it should live, it is fenced."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        here, gone = served.servers[0].location, f"grpc://127.0.0.1:{free_ports(1)}"
        member, other, (free, held) = await member_at(gone, served)
        log = await other.open_log(held)
        writer = await log.open_writer()
        await writer.write(record(1))
        assert await where_sent(client, here, held) == gone
        assert await where_sent(client, here, held, unreachable=["grpc://else:1"]) == gone
        assert await where_sent(client, here, held, unreachable=[gone]) == here
        assert await where_sent(client, here, free, unreachable=[gone]) == here
        with pytest.raises(DLError):
            await writer.write(record(2))
        await writer.abort()
        after = client.put()
        await after.begin(held)
        await after.next_reply()
        await after.send(b"3")
        await after.acked(1)
        assert await log.get_log_record_count() == 2
        await member.aclose()

    with_proxies()(scenario)


def test_a_lock_is_broken_on_the_word_of_a_client_and_ones_own_look() -> None:
    """The one alone is not enough: the log should be owned here, and is served where it is."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        here, gone = served.servers[0].location, f"grpc://127.0.0.1:{free_ports(1)}"
        member, other, _ = await member_at(gone, served)
        names = (f"mine-{number}" for number in count())
        mine = next(name for name in names if preferred_owner(name, {here, gone}) == here)
        await other.create_log(mine)
        writer = await (await other.open_log(mine)).open_writer()
        assert await where_sent(client, here, mine) == gone
        assert await where_sent(client, here, mine, unreachable=["grpc://else:1"]) == gone
        assert await where_sent(client, here, mine, unreachable=[gone]) == here
        await writer.abort()
        await member.aclose()

    with_proxies()(scenario)


def test_a_lock_of_a_proxy_itself_is_never_taken_for_one_that_was_left() -> None:
    """An action that holds it, as rename does, is waited for."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(lock_timeout_s=30.0)
        server: Any = served.servers[0]
        namespace = server.reads._namespace
        await namespace.create_log("a")
        log = await namespace.open_log("a")
        async with await log.open_writer() as writer:
            sending = asyncio.create_task(where_sent(client, server.location, "a"))
            await asyncio.sleep(0.2)
            await writer.write(record(1))
            assert not sending.done()
        assert await sending == server.location

    with_proxies()(scenario)


def test_a_proxy_takes_back_what_it_held_before_it_was_killed() -> None:
    """At the same location, before its old session is over."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        here = served.servers[0].location
        before = await served.cluster.open(here)
        await before.create_log("a")
        await (await before.open_log("a")).open_writer()
        assert await where_sent(client, here, "a") == here

    with_proxies()(scenario)


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
            assert await owned_by(served, other, "a") == (owner, [owner])

            async def send(_: bytes) -> None:
                pass

            server: Any = served.servers[other]
            ticket = Ticket(log="a", follow=True)
            reading = asyncio.create_task(server.reads.do_get(ticket, send))
            await until(lambda: len(server.reads.followed) == 1)
            assert await owned_by(served, other, "a") == (owner, [server.location])
            await clients[other].act("drain")
            assert await owned_by(served, other, "a") == (owner, [owner])
            reading.cancel()
            await asyncio.wait({reading})

    with_proxies("a")(scenario)


def test_a_log_that_is_renamed_while_it_is_acquired_is_not_written_by_its_old_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name may be another log's by then, whose records it would get."""
    open_writer = DirectLog.open_writer
    is_renamed = False

    async def scenario(served: Proxies) -> None:
        await served.start()
        server: Any = served.servers[0]
        namespace = server.reads._namespace

        async def late(self: DirectLog, **more: Any) -> Any:
            nonlocal is_renamed
            if not is_renamed:
                is_renamed = True
                await namespace.rename_log("a", "b")
                await namespace.create_log("a")
            return await open_writer(self, **more)

        monkeypatch.setattr(DirectLog, "open_writer", late)
        async with await open_namespace(server.location, patience_s=TIME_LIMIT_S) as remote:
            with pytest.raises(LogRenamedError):
                await (await remote.open_log("a")).open_writer()
            log = await remote.open_log("a")
            async with await log.open_writer() as writer:
                await writer.write(record(1))
            assert await log.get_log_record_count() == 1
            assert await (await remote.open_log("b")).get_log_record_count() == 0

    with_proxies("a")(scenario)


@pytest.mark.parametrize("what", ["lost", "wanted", "changed"])
def test_a_late_notice_of_an_earlier_life_of_a_log_ends_no_later_one(what: str) -> None:
    """A proxy that has released a log and takes it again learns its earlier state."""

    async def body() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a")
            await namespace.create_log("clicks")
            context = namespace.log_context
            membership = Membership(context.store, context.paths, "grpc://here:1")
            await membership.join()
            owner = LogOwner(namespace, membership, ProxyConfig())
            before = await owner.get("clicks")
            await owner.release("clicks")
            acquiring = asyncio.create_task(owner.get("clicks"))
            if what == "changed":
                await asyncio.sleep(0)
                assert "clicks" in owner.changes._running
                owner.changes.ended("clicks", asyncio.get_running_loop().create_future())
            elif what == "wanted":
                await acquiring
                owner._wanted("clicks", before, "another")
            else:
                await acquiring
                owner.lost("clicks", before, WriteError("late"))
            log = await owner.get("clicks")
            assert log is await acquiring is not before
            assert (owner.owned(), log.ending) == (["clicks"], None)
            await owner.aclose()
            await membership.aclose()

    run(body())
