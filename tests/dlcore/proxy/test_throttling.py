"""Streams above their rates: delayed with a notice, refused where the delay would be too long."""

from __future__ import annotations

import asyncio

from dlcore.metadata.cluster_settings import ClusterSettingsStore
from dlcore.ops.live_settings import require_allowed
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Proxies, with_proxies


def test_delays_are_reported_and_nothing_is_lost() -> None:
    """The log's rate is shared by its streams; another log's are not touched."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(log_records_per_s=100.0)
        streams = [await client.opened("a") for _ in range(2)]
        free = await client.opened("b")
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        for stream in streams:
            await stream.send(*[b"x"] * 100)
            await stream.send(*[b"y"] * 10)
        await free.send(*[b"z"] * 100)
        reply = await free.next_reply()
        assert reply is not None
        assert "throttled_ms" not in reply
        throttled = 0
        for stream in streams:
            acked = 0
            while acked < 110:
                message = await stream.next_reply()
                assert message is not None
                acked = message["acked"]
                throttled += message.get("throttled_ms", 0)
            assert await stream.last_reply() is None
        # 220 records of which 100 passed at once, and the last batch waited for those before it;
        # what comes late anyway is delayed by that much less.
        assert clock() - begun_s >= 1.0
        assert 0 < throttled <= 2 * 1000 * (clock() - begun_s)
        assert len(await read_all(await served.cluster.namespaces[0].open_log("a"))) == 220
        await free.last_reply()

    with_proxies("a", "b")(scenario)


def test_a_stream_that_would_wait_too_long_ends_after_its_accepted_records() -> None:
    """With the time after which it goes on."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(stream_bytes_per_s=1.0, throttle_max_s=3.0)
        stream = await client.opened("a")
        await stream.send(b"x")
        await stream.send(b"y")
        last = await stream.last_reply()
        assert last is not None
        assert last["acked"] == 1
        code, message, metadata = await stream.status()
        assert code == "RESOURCE_EXHAUSTED"
        assert "the rate of this stream is used up" in message
        assert int(metadata["dlog-retry-after-ms"]) > 3000
        assert len(await read_all(await served.cluster.namespaces[0].open_log("a"))) == 1

    with_proxies("a")(scenario)


def test_a_delayed_stream_does_not_hold_up_a_release() -> None:
    """Its next records are dropped, and the answer says that the log is released."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(log_records_per_s=1.0, throttle_max_s=1000.0)
        stream = await client.opened("a")
        await stream.send(*[b"x"] * 100)
        await stream.acked(100)
        await stream.send(b"y")
        assert (await client.act("release", log="a"))["released"]
        message = await stream.next_reply()
        assert message is not None
        assert "draining" in message
        assert await stream.last_reply() is None
        assert (await stream.status())[0] == "UNAVAILABLE"

    with_proxies("a")(scenario)


def test_a_client_has_one_rate_however_many_streams_it_opens() -> None:
    """One without a certificate is known by its host; a rate of each stream bounds none of them."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(
            principal_records_per_s=1.0, stream_records_per_s=100.0, throttle_max_s=3.0
        )
        streams = [await client.opened(log) for log in ("a", "b") * 4]
        ends = []
        for stream in streams:
            await stream.send(*[b"x"] * 100)
            await stream.last_reply()
            ends.append(await stream.status())
        assert [code for code, _, _ in ends] == ["OK"] + ["RESOURCE_EXHAUSTED"] * 7
        _, message, metadata = ends[-1]
        assert "the rate of host '127.0.0.1' is used up" in message
        assert int(metadata["dlog-retry-after-ms"]) > 3000
        assert len(await read_all(await served.cluster.namespaces[0].open_log("a"))) == 100

    with_proxies("a", "b")(scenario)


def test_a_running_proxy_takes_over_the_rates_of_its_cluster() -> None:
    """Also for a stream that is open; those of the cluster gone, its own hold again."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(throttle_max_s=3.0)
        stream = await client.opened("a")
        await stream.send(b"x")
        await stream.acked(1)
        store, paths = served.namespaces[0].ports.store, served.namespaces[0].ports.paths
        settings = ClusterSettingsStore(store, paths)
        await settings.change({("proxy", "bytes_per_s"): 1.0}, require_allowed)
        code = ""
        while code != "RESOURCE_EXHAUSTED":  # once it is known there
            stream = await client.opened("a")
            await stream.send(*[b"y"] * 10)
            await stream.send(b"z")
            assert await stream.last_reply() is not None
            code, message, _ = await stream.status()
        assert "the rate of this proxy is used up" in message
        await settings.change({("proxy", "bytes_per_s"): None}, require_allowed)
        while code != "OK":
            stream = await client.opened("a")
            await stream.send(*[b"y"] * 100)
            await stream.last_reply()
            code, _, _ = await stream.status()

    with_proxies("a")(scenario)
