"""Groups of Kafka's consumers at proxies over logs in memory: one reads, the others stand by."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from kio.static.constants import EntityType

from dlcore.base.access.rights import ANONYMOUS
from dlcore.base.clock import steady_s
from dlcore.base.ids import DLSN
from dlcore.proxy.kafka import groups, messages
from dlcore.proxy.kafka.group import Join, Joined, Leave
from dlcore.proxy.kafka.positions import Positions
from dlcore.proxy.kafka.topics import node_of
from tests.dlcore.proxy.kafka.test_server import (
    DENIED,
    issuer,
    opened,
    proven,
    raw,
    started,
    users,
    written,
)
from tests.fixtures.aio import until
from tests.fixtures.kafka import PATIENCE_S, RawClient, class_of, parts_of
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from tests.fixtures.tokens import Issuer

__all__ = ["issuer", "users"]

OUT_OF_RANGE, NO_TOPIC, LOADING, NOT_HERE, BAD_GROUP, UNKNOWN, BAD_SESSION = (
    1,
    3,
    14,
    16,
    24,
    25,
    26,
)
STALE, AGAIN, GROUP_DENIED, BAD_REQUEST, NO_TRANSACTIONS = 22, 27, 30, 42, 53


class Member:
    """A client of librdkafka that subscribes to topics."""

    def __init__(self, address: str, *topics: str, group: str = "g", **settings: Any) -> None:
        self.consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 30000,
                "heartbeat.interval.ms": 200,
                "reconnect.backoff.max.ms": 200,
                "statistics.interval.ms": 100,
                "stats_cb": self._note,
                **settings,
            }
        )
        self.is_joined = False
        """Whether it has its part of the group, which may be none."""
        self.found: list[int] = []
        self.consumer.subscribe(list(topics))

    def _note(self, statistics: str) -> None:
        self.is_joined = json.loads(statistics).get("cgrp", {}).get("join_state") == "steady"

    def poll(self, count: int = 0) -> int:
        """Take what comes, until there are so many records; return how many came."""
        before, until_s = len(self.found), steady_s() + PATIENCE_S
        while True:
            for each in self.consumer.consume(100, 0.1):
                offset = each.offset()
                if each.error() is None and offset is not None:
                    self.found.append(offset)
            if len(self.found) - before >= count:
                return len(self.found) - before
            assert steady_s() < until_s, f"{len(self.found) - before} of {count} records came"

    def reads(self) -> bool:
        """Return whether it is the one that reads, after its next poll."""
        self.poll()
        return bool(self.consumer.assignment())

    def commit(self) -> None:
        """Store its position."""
        self.consumer.commit(asynchronous=False)

    def close(self) -> None:
        """Leave."""
        self.consumer.close()


async def each_of(members: list[Member]) -> list[bool]:
    """Poll all at once; return which of them read."""
    return list(await asyncio.gather(*(asyncio.to_thread(each.reads) for each in members)))


def test_one_member_reads_and_another_takes_over() -> None:
    """From the position that was stored, which is a subscription of the log."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        log = await opened(served, "a")
        await written(log, 10)
        first = await asyncio.to_thread(Member, address, "a")
        assert await asyncio.to_thread(first.poll, 10) == 10
        await asyncio.to_thread(first.commit)
        assert await log.get_subscriptions() == {"g": DLSN(1, 1, 0)}
        second = await asyncio.to_thread(Member, address, "a")
        members = [first, second]
        # Until the second one has joined the first one reads, and then it may not for a moment.
        while (reading := await each_of(members)).count(True) != 1 or not second.is_joined:
            pass
        assert not second.found
        for _ in range(5):
            assert (await each_of(members)).count(True) == 1
        await written(log, 5)
        active, other = (first, second) if reading[0] else (second, first)
        await asyncio.to_thread(active.poll, 5)
        await asyncio.to_thread(active.commit)
        await asyncio.to_thread(active.close)
        await written(log, 7)
        await asyncio.to_thread(other.poll, 7)
        assert sorted(first.found + second.found) == list(range(22))
        assert await asyncio.to_thread(other.consumer.committed, [TopicPartition("a", 0)]) == [
            TopicPartition("a", 0, 15)
        ]
        await asyncio.to_thread(other.close)

    with_proxies("a")(scenario)


def test_members_join_again_at_another_coordinator() -> None:
    """When theirs has stopped; they go on from what was stored."""

    async def scenario(served: Proxies) -> None:
        addresses = [await started(served) for _ in range(2)]
        log = await opened(served, "a")
        await written(log, 10)
        member = await asyncio.to_thread(Member, ",".join(addresses), "a")
        await asyncio.to_thread(member.poll, 10)
        await asyncio.to_thread(member.commit)
        async with raw(addresses[0]) as client:
            node = (await Coordinated(client).find()).node_id
        index = [node_of(each.location) for each in served.servers].index(node)
        await served.servers[index].aclose()
        await written(log, 5)
        await asyncio.to_thread(member.poll, 5)
        assert member.found == list(range(15))
        while await log.get_subscriptions() != {"g": DLSN(2, 1, 0)}:
            with suppress(KafkaException):  # until it has joined there, and read again
                await asyncio.to_thread(member.commit)
            await asyncio.to_thread(member.poll)
        assert set(member.found) == set(range(15))
        await asyncio.to_thread(member.close)

    with_proxies("a")(scenario)


class Coordinated:
    """A client by hand that is a member of a group."""

    def __init__(self, client: RawClient, group: str = "g") -> None:
        self.client = client
        self.group = group
        self.member = ""
        self.generation = -1

    async def find(self, *, kind: int = 0, version: int = 3) -> Any:
        """Ask for the coordinator."""
        request = class_of(messages.FIND_COORDINATOR, version, EntityType.request)
        more = {"key_type": kind} if version else {}
        return await self.client.ask(request(key=self.group, **more))

    async def join(self, *, session_s: float = 30, said: bytes = b"x", version: int = 4) -> Any:
        """Join the group; return the answer."""
        kind = class_of(messages.JOIN_GROUP, version, EntityType.request)
        (part,) = parts_of(kind, "protocols")
        times = {"session_timeout": timedelta(seconds=session_s)}
        if version:
            times["rebalance_timeout"] = timedelta(seconds=session_s)
        found = await self.client.ask(
            kind(
                group_id=self.group,
                member_id=self.member,
                protocol_type="consumer",
                protocols=(part(name="range", metadata=said),),
                **times,
            )
        )
        if not found.error_code:
            self.member, self.generation = found.member_id, found.generation_id
        return found

    async def sync(self, *others: str, version: int = 2) -> tuple[int, bytes]:
        """Assign something to itself and others; return code and assignment."""
        kind = class_of(messages.SYNC_GROUP, version, EntityType.request)
        (part,) = parts_of(kind, "assignments")
        found = await self.client.ask(
            kind(
                group_id=self.group,
                generation_id=self.generation,
                member_id=self.member,
                assignments=tuple(part(member_id=each, assignment=b"y") for each in others),
            )
        )
        return int(found.error_code), found.assignment

    async def beat(self, *, version: int = 2) -> int:
        """Send a heartbeat; return the code."""
        kind = class_of(messages.HEARTBEAT, version, EntityType.request)
        found = await self.client.ask(
            kind(group_id=self.group, generation_id=self.generation, member_id=self.member)
        )
        return int(found.error_code)

    async def leave(self, *, version: int = 2) -> int:
        """Leave; return the code."""
        kind = class_of(messages.LEAVE_GROUP, version, EntityType.request)
        found = await self.client.ask(kind(group_id=self.group, member_id=self.member))
        return int(found.error_code)

    async def commit(self, topic: str, offset: int, *, index: int = 0, version: int = 6) -> int:
        """Store an offset; return the code."""
        kind = class_of(messages.OFFSET_COMMIT, version, EntityType.request)
        (part,) = parts_of(kind, "topics")
        (inner,) = parts_of(part, "partitions")
        wanted = inner(partition_index=index, committed_offset=offset, committed_metadata=None)
        more = {} if version > 4 else {"retention_time": timedelta(milliseconds=-1)}
        found = await self.client.ask(
            kind(
                group_id=self.group,
                generation_id_or_member_epoch=self.generation,
                member_id=self.member,
                topics=(part(name=topic, partitions=(wanted,)),),
                **more,
            )
        )
        ((reported,),) = (each.partitions for each in found.topics)
        return int(reported.error_code)

    async def fetch(self, topic: str, *, index: int = 0, version: int = 7) -> tuple[int, int]:
        """Return code and offset of what is stored."""
        return await self.client.stored_offset(
            topic, group=self.group, index=index, version=version
        )


def test_positions_without_a_group() -> None:
    """The last one stays, for clients that are no members."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        log = await opened(served, "a")
        await written(log, 10, 10)
        async with raw(address) as client:
            one = Coordinated(client)
            assert await one.fetch("a") == (0, -1)
            for offset, version in ((20, 6), (0, 2), (13, 5), (12, 4)):
                assert await one.commit("a", offset, version=version) == 0
                assert await one.fetch("a") == (0, offset)
            assert await log.get_subscriptions() == {"g": DLSN(1, 1, 2)}
            assert await one.commit("a", 21) == OUT_OF_RANGE
            assert await one.commit("a", -1) == OUT_OF_RANGE
            assert await one.commit("a", 1, index=1) == NO_TOPIC
            assert await one.commit("b", 1) == NO_TOPIC
            assert await one.fetch("b") == (NO_TOPIC, -1)
            await log.truncate(DLSN(1, 1, 5))
            assert await one.fetch("a", version=1) == (0, 15)
            one.member, one.generation = "m", 1
            assert await one.commit("a", 1) == UNKNOWN
            kind = class_of(messages.OFFSET_FETCH, 7, EntityType.request)
            reply = await client.ask(kind(group_id="g", topics=None))
            assert reply.error_code == BAD_REQUEST
            reader = await log.open_reader(dlsn=DLSN(1, 1, 5), subscriber="g")
            one.member, one.generation = "", -1
            assert await one.commit("a", 16) == LOADING
            await reader.aclose()

    with_proxies("a")(scenario)


def test_a_member_by_hand() -> None:
    """Each call in its lowest and its highest version, and what is refused."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        log = await opened(served, "a")
        await written(log, 10)
        for version in (0, 2, 4):
            async with raw(address) as client:
                one = Coordinated(client, f"g{version}")
                assert await one.beat(version=min(version, 2)) == UNKNOWN
                low = min(version, 2)
                found = await one.join(version=version)
                assert (found.error_code, found.leader) == (0, one.member)
                assert [(each.member_id, each.metadata) for each in found.members] == [
                    (one.member, b"x")
                ]
                assert await one.sync(one.member, version=low) == (0, b"y")
                assert await one.beat(version=low) == 0
                assert await one.fetch("a") == (0, -1)
                assert await one.commit("a", 4) == 0
                assert await one.fetch("a") == (0, 4)
                assert await one.commit("a", 5) == 0
                one.generation += 1
                assert await one.commit("a", 6) == STALE
                assert await one.leave(version=low) == 0
                assert await one.leave() == UNKNOWN
        async with raw(address) as client:
            one = Coordinated(client)
            assert (await one.join(session_s=0.5)).error_code == BAD_SESSION
            assert (await one.join(said=bytes(groups.SAID_BYTES_MAX + 1))).error_code == BAD_REQUEST
            one.group = ""
            assert (await one.join()).error_code == BAD_GROUP
            assert (await one.find(kind=1)).error_code == NO_TRANSACTIONS
            assert (await one.find(version=0)).error_code == 0

    with_proxies("a")(scenario)


def test_an_earlier_coordinator_stores_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once another one has given a member its beginning; the members join anew."""

    async def scenario(served: Proxies) -> None:
        addresses = [await started(served) for _ in range(2)]
        log = await opened(served, "a")
        await written(log, 10)
        async with raw(addresses[0]) as here, raw(addresses[1]) as there:
            one, other = Coordinated(here), Coordinated(there)
            found = await one.find()
            if found.node_id != node_of(served.servers[0].location):
                one, other = other, one
            assert (await other.join()).error_code == NOT_HERE
            assert await other.beat() == NOT_HERE
            assert await other.commit("a", 1) == NOT_HERE
            assert await other.fetch("a") == (NOT_HERE, -1)
            await one.join()
            await one.sync(one.member)
            assert await one.commit("a", 3) == 0

            async def here_too(self: Any, _: str) -> tuple[str, tuple[str, int]]:
                return self._membership.location, ("127.0.0.1", 1)

            monkeypatch.setattr(groups.Groups, "_coordinator", here_too)
            await other.join()
            await other.sync(other.member)
            assert await other.fetch("a") == (0, 3)
            assert await one.commit("a", 4) == UNKNOWN
            assert await one.beat() == UNKNOWN
            assert await other.commit("a", 5) == 0
            await log.move_subscription("g", dlsn=DLSN(1, 0, 1))
            assert await other.commit("a", 6) == UNKNOWN
            assert await other.fetch("a") == (0, 1)

    with_proxies("a")(scenario)


def test_a_group_is_of_one_principal(users: dict[str, Any], issuer: Issuer) -> None:
    """A user without the right to read stores no position, and joins no group of another user."""

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        await direct.change_access_rules(add=["allow user:alice read log a"])
        await written(await opened(served, "a"), 3)
        address = await started(served, **users)
        alice = Coordinated(await proven(address, issuer.token("alice")))
        bob = Coordinated(await proven(address, issuer.token("bob")))
        assert (await alice.join()).error_code == 0
        assert (await bob.join()).error_code == GROUP_DENIED
        bob.member, bob.generation = alice.member, alice.generation
        assert await bob.beat() == GROUP_DENIED
        assert await bob.leave() == GROUP_DENIED
        assert await bob.commit("a", 1) == DENIED
        assert await bob.fetch("a") == (DENIED, -1)
        await alice.sync(alice.member)
        assert await alice.commit("a", 1) == 0
        for each in (alice, bob):
            each.client.close()

    with_proxies("a")(scenario)


def test_groups_are_bounded_and_end_with_their_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is gone while it waits does not keep a round from its end."""
    monkeypatch.setattr(groups, "GROUPS_MAX", 1)

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        kafka = served.servers[0].kafka
        assert kafka is not None
        assert kafka._serving is not None
        led = kafka._serving[0].groups._led
        async with raw(address) as client, raw(address) as second:
            one, other = Coordinated(client), Coordinated(second, "h")
            await one.join(session_s=1)
            assert (await other.join()).error_code == LOADING
            third = Coordinated(await RawClient.connect(address))
            joining = asyncio.create_task(third.join(session_s=1))
            await until(lambda: len(led["g"].machine) == 2)
            third.client.close()
            with pytest.raises(asyncio.IncompleteReadError):
                await joining
            await until(lambda: not led)
            assert (await other.join()).error_code == 0

    with_proxies("a")(scenario)


def test_a_cancelled_call_leaves_its_member_to_its_session() -> None:
    """It is the driver that says so: a member whose call is gone must not count as joined."""

    async def scenario(served: Proxies) -> None:
        await started(served)
        kafka = served.servers[-1].kafka
        assert kafka is not None
        assert kafka._serving is not None
        led_here = kafka._serving[0].groups
        led = led_here._led["g"] = groups._Led(ANONYMOUS, "token")

        async def join(member: str, new: str, session_s: float) -> Joined:
            found = await led_here._asked(
                "g",
                led,
                lambda call, now_s: Join(
                    call=call,
                    member=member,
                    new=new,
                    kind="consumer",
                    protocols={"range": b"x"},
                    session_s=session_s,
                    rebalance_s=30.0,
                    now_s=now_s,
                ),
            )
            assert isinstance(found, Joined)
            return found

        assert (await join("", "one", 30.0)).leader == "one"
        joining = asyncio.create_task(join("", "two", 0.2))
        await until(lambda: len(led.machine) == 2)
        joining.cancel()
        await asyncio.wait([joining])
        found = await join("one", "", 30.0)
        assert [name for name, _ in found.members] == ["one"]
        joining = asyncio.create_task(join("", "three", 0.2))
        await until(lambda: len(led.machine) == 2)
        joining.cancel()  # the round ends before its task takes notice
        led_here._handle("g", led, Leave(call=-1, member="one", now_s=steady_s()))
        await asyncio.wait([joining])
        await until(lambda: "g" not in led_here._led)

    with_proxies("a")(scenario)


def test_a_late_commit_ends_no_group_that_has_formed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the position moved, as the one before it did, after which its group joined again."""
    store, gates = Positions.store, [asyncio.Event(), asyncio.Event()]
    waiting: list[asyncio.Event] = []

    async def stored(self: Any, *arguments: Any, **named: Any) -> Any:
        waiting.append(gate := gates[len(waiting)])
        await gate.wait()
        return await store(self, *arguments, **named)

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        kafka = served.servers[-1].kafka
        assert kafka is not None
        assert kafka._serving is not None
        log = await opened(served, "a")
        await written(log, 10)
        async with raw(address) as client, raw(address) as second:
            one, late = Coordinated(client), Coordinated(second)
            await one.join()
            await one.sync(one.member)
            assert await one.commit("a", 3) == 0
            await log.move_subscription("g", dlsn=DLSN(1, 0, 1))
            monkeypatch.setattr(Positions, "store", stored)
            late.member, late.generation = one.member, one.generation
            committing = asyncio.create_task(one.commit("a", 4))
            await until(lambda: len(waiting) == 1)
            committing_late = asyncio.create_task(late.commit("a", 5))
            turn = kafka._serving[0].groups._led["g"].turn
            await until(lambda: bool(turn._waiters))
            gates[0].set()
            assert await committing == UNKNOWN
            await until(lambda: len(waiting) == 2)
            one.member = ""
            await one.join()
            await one.sync(one.member)
            gates[1].set()
            assert await committing_late == UNKNOWN
            assert await one.beat() == 0

    with_proxies("a")(scenario)
