"""The metrics and the port for operators of a proxy, beside what its clients did."""

from __future__ import annotations

import asyncio

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from dlcore.flight.tickets import Place, Ticket
from tests.fixtures.aio import until
from tests.fixtures.served_proxies import Proxies, with_proxies


async def _scraped(port: int) -> dict[str, float]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        families = text_string_to_metric_families(await answer.text())
        return {each.name: each.value for family in families for each in family.samples}


def test_calls_of_clients_are_counted() -> None:
    """Streams, records that are new and repeated, messages to followers and to others."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(http_address="127.0.0.1:0")
        server = served.servers[0]
        received: list[bytes] = []

        async def take(message: bytes) -> None:
            received.append(message)

        ticket = Ticket(log="a", follow=True)
        reading = asyncio.create_task(server.reads.do_get(ticket, take))
        await until(lambda: bool(received))  # the schema
        first, ready = await client.opened_with("a", producer="p")
        await first.send(b"1", b"2")
        await first.last_reply()
        stream, _ = await client.opened_with("a", producer=ready["producer"])
        await stream.send(b"1", b"2", b"3", sequence=0)
        await until(lambda: server.reads.deliveries.times.count > 0)
        assert server.http_port is not None
        found = await _scraped(server.http_port)
        assert found["dlog_proxy_streams"] == 1
        assert found["dlog_proxy_owned_logs"] == found["dlog_proxy_acquired_logs_total"] == 1
        assert found["dlog_proxy_append_seconds_count"] > 0
        assert found["dlog_proxy_delivery_seconds_count"] > 0
        assert found["dlog_proxy_delivery_bytes_total"] > 0
        assert found["dlog_proxy_followed_logs"] == 1
        assert found["dlog_client_append_seconds_count"] > 0
        await stream.last_reply()
        reading.cancel()
        await asyncio.wait({reading})
        found = await _scraped(server.http_port)
        assert found["dlog_proxy_streams"] == 0
        assert found["dlog_proxy_append_records_total"] == 3
        assert found["dlog_proxy_duplicate_records_total"] == 2
        assert found["dlog_proxy_catch_up_messages_total"] == 0
        older = Ticket(log="a", start=Place(dlsn="1:0:0"))
        await server.reads.do_get(older, take)
        found = await _scraped(server.http_port)
        assert found["dlog_proxy_catch_up_messages_total"] > 0
        assert found["dlog_proxy_catching_up_readers"] == 0

    with_proxies("a")(scenario)


def test_a_proxy_stays_live_while_it_drains() -> None:
    """Its port for operators closes after the logs are released."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(http_address="127.0.0.1:0")
        server = served.servers[0]
        async with aiohttp.ClientSession() as session:
            await client.act("drain")
            url = f"http://127.0.0.1:{server.http_port}/health/ready"
            async with session.get(url) as answer:
                checks = (await answer.json())["checks"]
                assert answer.status == 503
                assert not checks["takes_logs"]["ok"]
                assert not checks["registered"]["ok"]
            assert not (await client.act("health"))["serves"]
            await client.act("undrain")
            async with session.get(url) as answer:
                assert answer.status == 200

    with_proxies("a")(scenario)
