"""The port for Kafka's clients, over logs in memory, with librdkafka and by hand."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer, TopicPartition
from kio.static.constants import EntityType

from dlcore.base.access.rights import Right
from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.proxy.kafka import messages, server as servers
from dlcore.proxy.kafka.entrances import ENTRANCES
from dlcore.proxy.kafka.session import UNKNOWN_BYTES_MAX
from tests.fixtures.aio import until
from tests.fixtures.certificates import Authority
from tests.fixtures.kafka import RawClient, class_of, consumed, consumer, ends_of, offsets_in
from tests.fixtures.kafka_batches import batch, body_of
from tests.fixtures.served_proxies import Proxies, with_proxies
from tests.fixtures.tokens import Issuer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dlcore.backends.direct.log import DirectLog

LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
NO_TOPIC, OUT_OF_RANGE, DENIED = 3, 1, 29


async def started(served: Proxies, **settings: Any) -> str:
    """Start a proxy; return its address for Kafka's clients."""
    await served.start(kafka_address="127.0.0.1:0", **settings)
    kafka = served.servers[-1].kafka
    assert kafka is not None
    return kafka.address


@asynccontextmanager
async def raw(address: str) -> AsyncIterator[RawClient]:
    """Connect by hand."""
    client = await RawClient.connect(address)
    try:
        yield client
    finally:
        client.close()


async def opened(served: Proxies, name: str) -> DirectLog:
    """Open a log without a proxy."""
    direct = await served.cluster.open("writer")
    return await direct.open_log(name)


async def written(log: DirectLog, *sizes: int, size: int = 10) -> None:
    """Write entries of so many records; the value of each is its number."""
    snapshot = await log.get_snapshot()
    number = snapshot.next_sequence_id
    async with await log.open_writer() as writer:
        for count in sizes:
            for _ in range(count):
                writer.write(LogRecord(number * 10, f"{number}".encode().ljust(size)))
                number += 1
            await writer.commit()


def numbers(records: list[Any]) -> list[int]:
    """Return the numbers that are their values, which are their offsets too."""
    found = [int(each.value()) for each in records]
    assert found == [each.offset() for each in records]
    return found


def test_librdkafka_reads_and_follows_a_log() -> None:
    """Each record once, with its offset, time and headers, also those that come later."""

    async def scenario(served: Proxies) -> None:
        address = await started(served, kafka_headers=True)
        log = await opened(served, "team/clicks")
        await written(log, 1)
        served.cluster.clocks["writer"].current_ms += 1007
        await written(log, 300, 5)
        reader = await asyncio.to_thread(consumer, address, "team.clicks")
        try:
            found = await asyncio.to_thread(consumed, reader, 306)
            await written(log, 4)
            found += await asyncio.to_thread(consumed, reader, 4)
            assert numbers(found) == list(range(310))
            assert found[0].timestamp() == (1, 1_700_000_000_000)
            assert found[302].timestamp() == (1, 1_700_000_001_007)
            assert found[302].headers() == [("dlsn", b"2:1:1"), ("txid", b"3020")]
            assert found[309].headers()[0] == ("dlsn", b"3:0:3")
            ends = await asyncio.to_thread(
                reader.get_watermark_offsets, TopicPartition("team.clicks", 0)
            )
            assert ends == (0, 310)
            known = await asyncio.to_thread(reader.list_topics)
            assert {name: len(each.partitions) for name, each in known.topics.items()} == {
                "team.clicks": 1
            }
        finally:
            await asyncio.to_thread(reader.close)

    with_proxies("team/clicks")(scenario)


def test_truncated_records_are_out_of_range() -> None:
    """The client learns where the log begins; a position behind the end is out of range too."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        log = await opened(served, "a")
        await written(log, 10, 10)
        async with raw(address) as client:
            assert offsets_in(await client.fetch("a", 0)) == (0, 20)
            await log.truncate(DLSN(1, 1, 3))
            for offset, code in ((12, OUT_OF_RANGE), (13, 0), (19, 0), (21, OUT_OF_RANGE)):
                assert (await client.fetch("a", offset, wait_s=0)).error_code == code
            assert offsets_in(await client.fetch("a", 13)) == (13, 20)
            assert await client.offset("a", EARLIEST) == (0, 13, -1)
            assert await client.offset("a", LATEST) == (0, 20, -1)
            reply = await client.fetch("a", 20, wait_s=0)
            assert (reply.records, reply.high_watermark, reply.log_start_offset) == (b"", 20, 13)
            await log.truncate(DLSN(1, 2, 0))
            assert await client.offset("a", EARLIEST) == (0, 20, -1)
            assert await client.offset("a", LATEST) == (0, 20, -1)
            await written(log, 5, 5)
            for position, first in ((DLSN(2, 0, 0), 20), (DLSN(2, 0, 1), 21), (DLSN(2, 1, 0), 25)):
                await log.truncate(position)
                assert await client.offset("a", EARLIEST) == (0, first, -1)
        reader = await asyncio.to_thread(consumer, address, "a", 3)
        try:
            with pytest.raises(AssertionError, match=r"OFFSET_OUT_OF_RANGE|_AUTO_OFFSET_RESET"):
                await asyncio.to_thread(consumed, reader, 1)
        finally:
            await asyncio.to_thread(reader.close)

    with_proxies("a")(scenario)


def test_a_fetch_waits_without_polling() -> None:
    """It is answered when enough has come, or its time is over."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        log = await opened(served, "a")
        async with raw(address) as client:
            waiting = asyncio.create_task(client.fetch("a", 0))
            await until(lambda: len(served.servers[0].reads.followed) == 1)
            assert not waiting.done()
            await written(log, 3)
            assert offsets_in(await waiting) == (0, 3)
            waiting = asyncio.create_task(client.fetch("a", 3, bytes_min=1000))
            await written(log, 1, size=300)
            await written(log, 1, size=300)
            assert not waiting.done()
            await written(log, 1, size=300)
            assert offsets_in(await waiting) == (3, 6)
            reply = await client.fetch("a", 6, wait_s=0.01)
            assert (reply.records, reply.high_watermark) == (b"", 6)

    with_proxies("a")(scenario)


def test_a_fetch_takes_no_more_than_it_may() -> None:
    """Whole batches, one at least; a client may go back and forth."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        log = await opened(served, "a")
        await written(log, *([600] * 4), size=1000)
        async with raw(address) as client:
            offset, count = 0, 0
            while offset < 2400:
                reply = await client.fetch("a", offset, bytes_max=700_000)
                first, end = offsets_in(reply)
                assert first == offset
                assert len(reply.records) <= 700_000 or len(list(ends_of(reply.records))) == 1
                offset, count = end, count + 1
            assert count > 3
            for version in (4, 7, 8, 12):
                reply = await client.fetch("a", 1001, bytes_max=1, version=version)
                assert offsets_in(reply)[0] == 1001
                assert len(list(ends_of(reply.records))) == 1

    with_proxies("a")(scenario)


def test_offsets_of_times() -> None:
    """The first record of a time or after it, the last time that there is, and nothing later."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        log = await opened(served, "a")
        clock = served.cluster.clocks["writer"]
        async with raw(address) as client:
            assert await client.offset("a", MAX_TIMESTAMP) == (0, -1, -1)
            begin_ms = clock.now_ms()
            for _ in range(3):
                await written(log, 10)
                clock.current_ms += 1000
            for time_ms, expected in (
                (0, (0, 0, begin_ms)),
                (begin_ms + 1, (0, 10, begin_ms + 1000)),
                (begin_ms + 2000, (0, 20, begin_ms + 2000)),
                (begin_ms + 2001, (0, -1, -1)),
                (MAX_TIMESTAMP, (0, 20, begin_ms + 2000)),
                (-5, (0, -1, -1)),
            ):
                assert await client.offset("a", time_ms) == expected, time_ms

    with_proxies("a")(scenario)


def test_topics_that_are_no_logs() -> None:
    """And partitions that no log has; a log that is deleted while it is read."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        async with raw(address) as client:
            assert await client.metadata("a", "b", "a/b") == {
                "a": 0,
                "b": NO_TOPIC,
                "a/b": NO_TOPIC,
            }
            assert await client.metadata() == {"a": 0}
            for topic, index in (("b", 0), ("a/b", 0), ("a", 1)):
                assert (await client.fetch(topic, 0, index=index)).error_code == NO_TOPIC
                assert (await client.offset(topic, LATEST, index=index))[0] == NO_TOPIC
            waiting = asyncio.create_task(client.fetch("a", 0))
            await until(lambda: len(served.servers[0].reads.followed) == 1)
            await (await opened(served, "a")).delete()
            assert (await waiting).error_code == NO_TOPIC
            assert (await client.fetch("a", 0)).error_code == NO_TOPIC

    with_proxies("a")(scenario)


@pytest.mark.parametrize("form", ["json", "arrow"])
def test_rows_of_typed_logs(form: str) -> None:
    """Each row is a record, by a setting an object of JSON or a stream of Arrow."""
    rows = [{"id": 1, "name": "Ä"}, {"id": 2, "name": None}]
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])

    async def scenario(served: Proxies) -> None:
        address = await started(served, kafka_typed=form)
        direct = await served.cluster.open("writer")
        await direct.create_log("typed", schema=schema)
        log = await direct.open_log("typed")
        async with await log.open_writer() as writer:
            batch = pa.RecordBatch.from_pylist(rows, schema)
            txids = pa.array([5, 6], pa.int64())
            columns = [txids, *batch.columns]
            names = ["_txid", *schema.names]
            await writer.write_batch(pa.RecordBatch.from_arrays(columns, names=names))
        reader = await asyncio.to_thread(consumer, address, "typed")
        try:
            values = [each.value() for each in await asyncio.to_thread(consumed, reader, 2)]
        finally:
            await asyncio.to_thread(reader.close)
        if form == "json":
            assert [json.loads(each) for each in values] == rows
        else:
            assert [pa.ipc.open_stream(each).read_all().to_pylist() for each in values] == [
                [each] for each in rows
            ]

    with_proxies()(scenario)


@pytest.fixture
def issuer() -> Issuer:
    """The signer of the tokens of all users."""
    return Issuer()


@pytest.fixture
def users(tmp_path: Path, issuer: Issuer) -> dict[str, Any]:
    """The settings of a proxy with users."""
    return {
        **issuer.trusted_in(tmp_path),
        "anonymous": "refused",
        "audit_file": str(tmp_path / "audit.jsonl"),
    }


async def proven(address: str, token: str) -> RawClient:
    """Connect, and prove who it is."""
    from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
    from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest

    client = await RawClient.connect(address)
    await client.ask(SaslHandshakeRequest(mechanism="PLAIN"))
    reply = await client.ask(SaslAuthenticateRequest(auth_bytes=b"\0x\0" + token.encode()))
    assert reply.error_code in (0, 58), reply
    return client


def test_each_call_lets_in_those_with_its_right(
    users: dict[str, Any], issuer: Issuer, tmp_path: Path
) -> None:
    """And no one else, as over Flight; a change of the rules is felt by the next call."""
    assert [each.name for each in ENTRANCES if each.right != "none"] == [
        "Metadata", "ListOffsets", "Fetch", "Produce", "OffsetCommit and OffsetFetch",
    ]  # fmt: skip

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        rules = [f"allow user:{right.value} {right.value} log a" for right in Right]
        await direct.change_access_rules(add=rules)
        address = await started(served, **users)
        one = batch(body_of([(None, b"x", [])]), 1, producer=-1)
        for who in [*(right.value for right in Right), "nothing"]:
            client = await proven(address, issuer.token(who))
            may_describe = 0 if who != "nothing" else DENIED
            assert await client.metadata("a") == {"a": may_describe}, who
            assert await client.metadata() == ({"a": 0} if who != "nothing" else {})
            assert (await client.offset("a", LATEST))[0] == may_describe
            may_append = 0 if who == "append" else DENIED
            assert (await client.produce("a", one))[0] == may_append, who
            may_read = 0 if who == "read" else DENIED
            assert await client.stored_offset("a", group="g") == (may_read, -1), who
            assert (await client.fetch("a", 0, wait_s=0)).error_code == may_read, who
            if who == "read":
                await direct.change_access_rules(remove=["allow user:read read log a"])
                while (await client.fetch("a", 0, wait_s=0.01)).error_code == 0:
                    pass
            client.close()

    with_proxies("a", "secret")(scenario)
    reply = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    denial = {"principal": "user:append", "entrance": "Fetch", "resource": "read log 'a'"}
    assert any(denial.items() <= each.items() for each in reply)


def test_librdkafka_proves_who_it_is(users: dict[str, Any], issuer: Issuer) -> None:
    """By a token as password; the client learns of a wrong one; without one there is no access."""
    login: dict[str, Any] = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}

    async def scenario(served: Proxies) -> None:
        address = await started(served, **users)
        await written(await opened(served, "a"), 3)
        good = {**login, "sasl.username": "alice", "sasl.password": issuer.token()}
        reader = await asyncio.to_thread(consumer, address, "a", **good)
        found = await asyncio.to_thread(consumed, reader, 3)
        assert numbers(found) == [0, 1, 2]
        await asyncio.to_thread(reader.close)
        bad = {**login, "sasl.username": "alice", "sasl.password": "no.token.this"}
        errors: list[Any] = []
        reader = await asyncio.to_thread(
            lambda: consumer(address, "a", error_cb=errors.append, **bad)
        )
        await asyncio.to_thread(reader.poll, 0.1)
        while not any(each.code() == KafkaError._AUTHENTICATION for each in errors):
            await asyncio.to_thread(reader.poll, 0.1)
        await asyncio.to_thread(reader.close)
        async with raw(address) as client:
            client.send(messages.METADATA.to_bytes(2) + bytes(2) + bytes(4) + b"\0\0" + bytes(4))
            assert await client.is_closed()

    with_proxies("a")(scenario)


def test_a_token_that_ends_ends_its_connection(
    users: dict[str, Any], issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one of the same user makes it go on; one of another user ends it."""
    from kio.schema.sasl_authenticate.v2.request import SaslAuthenticateRequest
    from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest

    async def prove(client: RawClient, token: str) -> int:
        await client.ask(SaslHandshakeRequest(mechanism="PLAIN"))
        reply = await client.ask(SaslAuthenticateRequest(auth_bytes=b"\0x\0" + token.encode()))
        return int(reply.error_code)

    async def scenario(served: Proxies) -> None:
        address = await started(served, **users)
        lasting, ending, other = [await proven(address, issuer.token()) for _ in range(3)]
        assert await prove(lasting, issuer.token(lasts_s=3600)) == 0
        assert await prove(other, issuer.token("bob")) == 58
        assert await other.is_closed()
        for client in (lasting, ending):
            assert await client.metadata("a") == {"a": 0}
        monkeypatch.setattr(servers, "wall_s", lambda: time.time() + 1000)
        assert await lasting.metadata("a") == {"a": 0}
        with pytest.raises(asyncio.IncompleteReadError):
            await ending.metadata("a")
        for client in (lasting, ending, other):
            client.close()

    with_proxies("a")(scenario)


def test_clients_are_bounded(
    users: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In number, in the size of a request, and in the time without one or without a proof."""

    caplog.set_level("INFO", "dlcore.proxy.kafka")

    async def scenario(served: Proxies) -> None:
        address = await started(served, kafka_connections_max=2, **users)
        kafka = served.servers[0].kafka
        assert kafka is not None
        async with raw(address) as first, raw(address) as second, raw(address) as third:
            assert await third.is_closed()
            await until(lambda: len(kafka._connections) == 2)
            first.writer.write((UNKNOWN_BYTES_MAX + 1).to_bytes(4) + bytes(2))
            assert await first.is_closed()
            await until(lambda: len(kafka._connections) == 1)
            assert "a request of 65,537 bytes: expected 2 to 65,536" in caplog.text
            monkeypatch.setattr(servers, "_PROOF_S", 0.05)
            async with raw(address) as silent:
                assert await silent.is_closed()
            second.writer.write(bytes(6))
            assert await second.is_closed()

    with_proxies("a")(scenario)


@pytest.mark.parametrize(
    ("limit", "begun"), [("_IDLE_S", b""), ("_REQUEST_S", bytes(3) + b"\7\0\1")]
)
def test_a_client_that_is_silent_for_too_long_is_cut_off(
    limit: str, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two requests, and within one."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        monkeypatch.setattr(servers, limit, 0.01)
        async with raw(address) as client:
            client.writer.write(begun)
            assert await client.is_closed()

    with_proxies("a")(scenario)


def test_a_client_that_takes_no_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are answered until its connection is full."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        monkeypatch.setattr(servers, "_SEND_S", 0.01)
        kafka = served.servers[0].kafka
        assert kafka is not None
        async with raw(address) as client:
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            frame = messages.API_VERSIONS.to_bytes(2) + bytes(8)
            client.writer.write((len(frame).to_bytes(4) + frame) * 200_000)
            await until(lambda: len(kafka._connections) == 1)
            await until(lambda: not kafka._connections)

    with_proxies("a")(scenario)


def test_logs_that_are_fetched_are_bounded() -> None:
    """Further ones are refused, and asked for again by their clients."""

    async def scenario(served: Proxies) -> None:
        address = await started(served, calls_max=1)
        async with raw(address) as client:
            assert (await client.fetch("a", 0, wait_s=0)).error_code == 0
            assert (await client.fetch("b", 0, wait_s=0)).error_code == 56
            assert (await client.fetch("a", 0, wait_s=0)).error_code == 0

    with_proxies("a", "b")(scenario)


def test_the_port_is_off_by_default_and_free() -> None:
    """And sent to other proxies when it is on."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        assert served.servers[0].kafka is None
        addresses = [await started(served), await started(served)]
        with pytest.raises(ConfigurationError, match=r"kafka_address='127\.0\.0\.1:"):
            await served.start(kafka_address=addresses[0])
        reader = await asyncio.to_thread(consumer, addresses[0], "a")
        try:
            known = await asyncio.to_thread(reader.list_topics)
            found = [f"{each.host}:{each.port}" for each in known.brokers.values()]
            assert sorted(found) == sorted(addresses)
        finally:
            await asyncio.to_thread(reader.close)

    with_proxies("a")(scenario)


@pytest.mark.parametrize("by", ["PLAIN", "OAUTHBEARER", "certificate"])
def test_clients_come_by_tls(
    users: dict[str, Any], issuer: Issuer, tmp_path: Path, by: str
) -> None:
    """A user by a token, with either mechanism; a certificate names its client without one."""
    authority = Authority(tmp_path / "authority")
    own, other = authority.issue("proxy"), authority.issue("carol", host="DNS:carol")
    files = {"tls_ca": own.ca, "tls_cert": own.cert, "tls_key": own.key}
    token = issuer.token()
    logins: dict[str, dict[str, Any]] = {
        "PLAIN": {"sasl.username": "any", "sasl.password": token},
        "OAUTHBEARER": {"oauth_cb": lambda _: (token, time.time() + 60)},
        "certificate": {"ssl.certificate.location": other.cert, "ssl.key.location": other.key},
    }
    login = {"ssl.ca.location": own.ca, **logins[by]}
    if by == "certificate":
        login |= {"security.protocol": "SSL"}
    else:
        login |= {"security.protocol": "SASL_SSL", "sasl.mechanism": by}
        files["tls_client_auth"] = "none"

    async def scenario(served: Proxies) -> None:
        direct = await served.cluster.open("operator")
        await direct.change_access_rules(
            add=[
                f"allow {who} {right} log a"
                for who in ("user:alice", "certificate:carol")
                for right in ("read", "append")
            ]
        )
        await written(await opened(served, "a"), 3)
        address = await started(served, **files, **users)
        reader = await asyncio.to_thread(partial(consumer, address, "a", **login))
        assert numbers(await asyncio.to_thread(consumed, reader, 3)) == [0, 1, 2]
        producer = Producer({"bootstrap.servers": address, "enable.idempotence": True, **login})
        reported: list[Any] = []
        producer.produce("a", b"3", on_delivery=lambda *each: reported.append(each))
        assert await asyncio.to_thread(producer.flush, 60) == 0
        assert [(error, each.offset()) for error, each in reported] == [(None, 3)]
        assert numbers(await asyncio.to_thread(consumed, reader, 1)) == [3]
        await asyncio.to_thread(reader.close)

    with_proxies("a")(scenario)


def test_requests_that_come_together_are_answered_over_tls(tmp_path: Path) -> None:
    """Each of them, though the client sends nothing more."""
    own = Authority(tmp_path / "authority").issue("proxy")
    files = {"tls_ca": own.ca, "tls_cert": own.cert, "tls_key": own.key}

    async def scenario(served: Proxies) -> None:
        address = await started(served, **files, tls_client_auth="none")
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cafile=own.ca)
        client = RawClient(*await asyncio.open_connection(host, int(port), ssl=context))
        request = class_of(messages.FIND_COORDINATOR, 2, EntityType.request)(key="g")
        for _ in range(3):
            client.tell(request)
        for number in range(3):
            await client.answer(messages.FIND_COORDINATOR, 2, number=number + 1)
        client.close()

    with_proxies("a")(scenario)


@pytest.mark.parametrize("comes", ["before it", "after it"])
def test_a_client_that_comes_while_the_proxy_ends_is_sent_away(
    comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task may be cancelled before the first step, or asyncio reports it after the end."""
    connected = servers.KafkaServer._connected
    reported: list[Callable[[], None]] = []

    def report(self: servers.KafkaServer, *streams: Any) -> None:
        if comes == "before it":
            connected(self, *streams)
            self._tasks.cancel()
        reported.append(partial(connected, self, *streams))

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        monkeypatch.setattr(servers.KafkaServer, "_connected", report)
        async with raw(address) as client:
            await until(lambda: bool(reported))
            kafka = served.servers[-1].kafka
            assert kafka is not None
            await kafka.aclose()
            if comes == "after it":
                reported[0]()
            with suppress(ConnectionResetError):
                assert await client.reader.read() == b""

    with_proxies("a")(scenario)
