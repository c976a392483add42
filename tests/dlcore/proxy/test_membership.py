"""The list of live proxies, as one of them sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlcore.base.access.rights import ANONYMOUS, Caller
from dlcore.base.errors import AlreadyClosedError, MetadataConnectionError
from dlcore.flight.forwards import Forwarder
from dlcore.metadata.stored import decode, encode
from dlcore.proxy import membership
from dlcore.proxy.load import LiveProxy, ProxyLoad
from dlcore.proxy.membership import Membership
from tests.fixtures.aio import run, until
from tests.fixtures.interrupted_store import InterruptedStore
from tests.fixtures.memory_namespace import memory_cluster


async def broken() -> None:
    """Be a store that does not answer."""
    raise MetadataConnectionError("no answer")


async def closed() -> None:
    """Be the store of a session that was closed."""
    raise AlreadyClosedError("the session is closed")


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_proxy_that_leaves_without_an_answer_still_vanishes(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes itself for gone, whatever it reads: else the others and it send clients around."""
    monkeypatch.setattr(membership, "_LEAVE_S", 0.01)

    async def body() -> None:
        async with memory_cluster() as cluster:
            await cluster.open("a")
            await cluster.open("b")
            store: Any = InterruptedStore(cluster.stores["a"])
            leaving = Membership(store, cluster.paths, "grpc://here:1")
            await leaving.join()
            answers = asyncio.Event()
            store.before_each("delete", answers.wait if is_silent else broken)
            await leaving.leave()
            other = Membership(cluster.stores["b"], cluster.paths, "grpc://there:1")
            await other.join()
            await until(lambda: leaving.live == {"grpc://there:1"})
            assert other.live == {"grpc://here:1", "grpc://there:1"}
            store.disarm()
            answers.set()
            await until(lambda: other.live == {"grpc://there:1"})
            await leaving.leave()
            for each in (leaving, other):
                await each.aclose()

    run(body())


def test_one_that_cannot_vanish_goes_with_its_session(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is logged; a node that is gone already is no error, nor is a session that is closed."""

    async def body() -> None:
        async with memory_cluster() as cluster:
            await cluster.open("a")
            store: Any = InterruptedStore(cluster.stores["a"])
            leaving = Membership(store, cluster.paths, "grpc://here:1")
            await leaving.join()
            store.before_each("delete", broken)
            await leaving.presence._vanish()
            store.disarm()
            await leaving.leave()
            await leaving.presence._vanish()
            store.before_each("delete", closed)
            await leaving.presence._vanish()
            await leaving.aclose()
        (logged,) = caplog.messages[-1:]
        assert "goes with the session: no answer; " in logged

    monkeypatch.setattr("dlcore.metadata.one_node.RETRY_DELAYS_S", ())
    run(body())


def test_a_proxy_that_restarts_is_seen_as_a_change() -> None:
    """Its location is live before and after; the balancer waits anew."""

    async def body() -> None:
        async with memory_cluster() as cluster:
            for name in ("a", "b"):
                await cluster.open(name)
            here = Membership(cluster.stores["a"], cluster.paths, "grpc://here:1")
            await here.join()
            there = Membership(cluster.stores["b"], cluster.paths, "grpc://there:1")
            for is_live in (True, False, True):
                before = here.changes
                await (there.join() if is_live else there.leave())
                await until(lambda: here.changes == before + 1)  # noqa: B023
                assert ("grpc://there:1" in here.live) == is_live
                await there.aclose()
                there = Membership(cluster.stores["b"], cluster.paths, "grpc://there:1")
            await here.aclose()

    run(body())


def test_whether_a_proxy_is_gone_is_looked_at_each_time() -> None:
    """It may have come back where it was."""
    answers = [True, False]

    async def probe(_: str) -> bool:
        return answers.pop(0)

    async def body() -> None:
        async with memory_cluster() as cluster:
            await cluster.open("a")
            here = Membership(cluster.stores["a"], cluster.paths, "grpc://here:1", probe=probe)
            here.live = frozenset({"grpc://here:1", "grpc://there:1"})
            assert [await here.is_gone("grpc://there:1") for _ in range(2)] == [True, False]
            await here.aclose()

    run(body())


def test_a_proxy_takes_over_the_node_that_an_earlier_process_left() -> None:
    """Which would vanish with the session of that one, while this proxy lives."""

    async def body() -> None:
        async with memory_cluster() as cluster:
            for name in ("before", "now"):
                await cluster.open(name)
            before = Membership(cluster.stores["before"], cluster.paths, "grpc://here:1")
            await before.join()
            now = Membership(cluster.stores["now"], cluster.paths, "grpc://here:1")
            await now.join()
            cluster.stores["before"].expire()
            await before.aclose()
            path = cluster.paths.proxy("grpc://here:1")
            node = await cluster.stores["now"].get(path)
            assert node is not None
            assert node.session == cluster.stores["now"].session_token
            await now.aclose()

    run(body())


def test_a_call_is_known_by_the_secret_of_the_process_that_lives() -> None:
    """Not by that of another proxy, of an earlier process, or of one that has left."""

    async def body() -> None:
        async with memory_cluster() as cluster:
            for name in ("a", "b"):
                await cluster.open(name)
            store: Any = InterruptedStore(cluster.stores["a"])
            here = Membership(store, cluster.paths, "grpc://here:1")
            await here.join()
            there = Membership(cluster.stores["b"], cluster.paths, "grpc://there:1")
            assert not await here.proves(there.location, there.presence.secret), (
                "it is not live yet"
            )
            await there.join()
            await until(lambda: there.location in here.live)
            for secret in ("", "x", "é", here.presence.secret, there.presence.secret[:-1]):
                assert not await here.proves(there.location, secret)
            assert await here.proves(there.location, there.presence.secret)
            store.before_each("get_many", broken)
            assert await here.proves(there.location, there.presence.secret), "it was read before"
            with pytest.raises(MetadataConnectionError):
                await here.proves(there.location, "x")
            store.disarm()
            await there.presence.publish_load(ProxyLoad(logs=1, room=2, bytes_per_s=3))
            assert await here.proves(there.location, there.presence.secret)
            await there.leave()
            await until(lambda: there.location not in here.live)
            assert not await here.proves(there.location, there.presence.secret)
            again = Membership(cluster.stores["b"], cluster.paths, there.location)
            await again.join()
            await until(lambda: there.location in here.live)
            assert not await here.proves(there.location, there.presence.secret)
            assert await here.proves(there.location, again.presence.secret)
            for each in (here, there, again):
                await each.aclose()

    run(body())


def test_no_text_shows_a_secret_by_accident() -> None:
    """A value with a secret is shown without it."""
    secret = "a secret"
    forwarder = Forwarder("grpc://here:1", secret, Caller(ANONYMOUS, "x"))
    live = LiveProxy(secret=secret, load=ProxyLoad(logs=1, room=2, bytes_per_s=3))
    assert secret not in f"{forwarder!r} {live!r} {live}"


def test_addresses_for_clients_of_kafka() -> None:
    """Those of live proxies that have one; one that drains and is alone tells its own."""

    async def body() -> None:
        async with memory_cluster() as cluster:
            for name in ("a", "b"):
                await cluster.open(name)
            here = Membership(
                cluster.stores["a"], cluster.paths, "grpc://here:1", kafka="[::1]:9092"
            )
            there = Membership(cluster.stores["b"], cluster.paths, "grpc://there:1")
            for each in (here, there):
                await each.join()
            await until(lambda: here.live == there.live and len(here.live) == 2)
            expected = {"grpc://here:1": ("::1", 9092)}
            await here.presence.publish_load(ProxyLoad(logs=1, room=1, bytes_per_s=1))
            assert await here.kafka_addresses() == await there.kafka_addresses() == expected
            await here.leave()
            assert await here.kafka_addresses() == expected
            await until(lambda: len(there.live) == 1)
            assert await there.kafka_addresses() == {}
            for each in (here, there):
                await each.aclose()

    run(body())


def test_a_node_of_a_later_proxy_is_read_by_this_one() -> None:
    """It may have fields that are not known here, as those of version 0.2 do not know `kafka`."""
    later = encode(LiveProxy(secret="s", kafka="a:1")).replace(b'"kafka"', b'"later"')
    assert decode(LiveProxy, later, source="a node") == LiveProxy(secret="s")
