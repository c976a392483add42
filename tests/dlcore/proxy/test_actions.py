"""Actions of a proxy, beside the log that another proxy or writer may hold."""

from __future__ import annotations

from typing import Any

import grpc
import pyarrow as pa
import pytest

from dlcore.base.errors import LogNotFoundError
from dlcore.base.proto import health_pb2
from dlcore.proxy.service import FLIGHT
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Client, Proxies, with_proxies


def test_logs_come_and_go() -> None:
    """Created, written, sealed while they are owned, and deleted."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        direct = served.cluster.namespaces[0]
        assert await client.act("create", log="new") == {}
        stream = await client.opened("new")
        await stream.send(b"a")
        await stream.acked(1)
        assert await client.act("seal", log="new") == {}
        log = await direct.open_log("new")
        assert await log.is_end_of_stream_marked()
        assert len(await read_all(log)) == 1
        assert await client.act("delete", log="new") == {}
        with pytest.raises(LogNotFoundError):
            await direct.open_log("new")

    with_proxies()(scenario)


def test_a_log_is_truncated_beside_its_owner() -> None:
    """By one of three ways to say where it begins; the stream goes on."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        for payload in (b"a", b"b", b"c"):
            await stream.send(payload)
            message = await stream.next_reply()
        assert message is not None
        assert await client.act("truncate", log="clicks", dlsn=message["dlsn"]) == {
            "truncated": True
        }
        assert await client.act("truncate", log="clicks", txid=0) == {"truncated": False}
        await stream.send(b"d")
        await stream.last_reply()
        found = await read_all(await served.cluster.namespaces[0].open_log("clicks"))
        assert [each.payload for each in found] == [b"c", b"d"]
        code, text = await refused(client, "truncate", log="clicks", dlsn="later")
        assert (code, "expected a DLSN like 3:17:0" in text) == ("INVALID_ARGUMENT", True)

    with_proxies("clicks")(scenario)


async def refused(client: Client, action: str, **body: object) -> tuple[str, str]:
    """Return the status and message of an action that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.act(action, **body)
    return error.value.code().name, error.value.details() or ""


def test_a_log_that_another_proxy_owns_is_sealed_and_deleted_there() -> None:
    """Asked here, it learns which proxy has it."""

    async def scenario(served: Proxies) -> None:
        first = await served.start(lock_timeout_s=0.05)
        await first.opened("clicks")
        second = await served.start(lock_timeout_s=0.05)
        for action in ("seal", "delete"):
            code, text = await refused(second, action, log="clicks")
            assert (code, served.servers[0].location in text) == ("UNAVAILABLE", True)
        log = await served.cluster.namespaces[0].open_log("other")
        async with await log.open_writer():
            for action in ("seal", "delete"):
                code, text = await refused(second, action, log="other")
                assert (code, "is owned by direct" in text) == ("UNAVAILABLE", True)

    with_proxies("clicks", "other")(scenario)


def test_a_typed_log_takes_its_own_columns() -> None:
    """With a schema that grows while a stream is open; others are refused."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        direct = served.cluster.namespaces[0]
        await direct.create_log("typed", schema=pa.schema([("key", pa.string())]))
        log = await direct.open_log("typed")
        wide = pa.schema([("key", pa.string()), ("count", pa.int64())])
        stream = await client.opened("typed", wide)
        await log.update_schema(wide)
        await stream.send_batch(pa.record_batch([["a"], [1]], schema=wide))
        await stream.acked(1)
        await stream.last_reply()
        assert await log.get_log_record_count() == 1
        unknown = pa.schema([("speed", pa.int64())])
        wrong = await client.opened("typed", unknown)
        await wrong.send_batch(pa.record_batch([[1]], schema=unknown))
        code, text, _ = await wrong.status()
        assert (code, "has no column 'speed'" in text) == ("INVALID_ARGUMENT", True)

    with_proxies()(scenario)


def status_of(message: Any) -> int:
    """Return the status of an answer."""
    return int(message.status)


def test_health_follows_the_proxy() -> None:
    """Watchers get a message when it drains."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        request = health_pb2.HealthCheckRequest(service=FLIGHT)
        codec: dict[str, Any] = {
            "request_serializer": health_pb2.HealthCheckRequest.SerializeToString,
            "response_deserializer": health_pb2.HealthCheckResponse.FromString,
        }
        check = client.channel.unary_unary("/grpc.health.v1.Health/Check", **codec)
        watch = client.channel.unary_stream("/grpc.health.v1.Health/Watch", **codec)
        assert status_of(await check(request)) == health_pb2.HealthCheckResponse.SERVING
        watching = watch(request)
        assert status_of(await watching.read()) == health_pb2.HealthCheckResponse.SERVING
        here = served.servers[0].location

        async def health() -> dict[str, object]:
            answer: dict[str, object] = await client.act("health")
            clock_ms = answer.pop("clock_ms")
            assert isinstance(clock_ms, int)
            assert clock_ms > 0
            return answer

        reply = {
            "location": here,
            "serves": True,
            "logs": 0,
            "balance": {"state": "alone", "misplaced": 0, "handed_over": 0},
        }
        assert await health() == reply
        await client.act("drain")
        assert await health() == reply | {"serves": False}
        assert status_of(await watching.read()) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert status_of(await check(request)) == health_pb2.HealthCheckResponse.NOT_SERVING
        await client.act("undrain")
        assert await health() == reply
        assert status_of(await watching.read()) == health_pb2.HealthCheckResponse.SERVING
        assert status_of(await check(request)) == health_pb2.HealthCheckResponse.SERVING
        other = health_pb2.HealthCheckRequest(service="other")
        unknown = watch(other)
        assert status_of(await unknown.read()) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError):
            await check(other)
        for each in (watching, unknown):
            each.cancel()

    with_proxies()(scenario)
