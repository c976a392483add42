"""Records of Kafka's producers at a proxy over logs in memory: each once, or refused by a code."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from kio.static.constants import EntityType

from dlcore.base.errors import DLError
from dlcore.proxy.kafka import messages, producing
from dlcore.proxy.kafka.positions import BATCHES_KEPT
from dlcore.proxy.kafka.session import REQUEST_BYTES_MAX
from tests.dlcore.proxy.kafka.test_server import opened, raw, started
from tests.fixtures.aio import until
from tests.fixtures.kafka import RawClient, class_of, consumed, consumer, produce_request
from tests.fixtures.kafka_batches import Record, batch, body_of
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Proxies, with_proxies
from tests.fixtures.staged_records import batch as staged

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog

CORRUPT, NO_TOPIC, ELSEWHERE, TIMED_OUT, TOO_LARGE, UNKNOWN_OUTCOME = 2, 3, 6, 7, 10, 20
NO_ACKS, DENIED, POLICY, GAP, DUPLICATE, STALE_EPOCH, NO_TRANSACTION = 21, 29, 44, 45, 46, 47, 48
NO_TRANSACTIONS, UNKNOWN_PRODUCER, INVALID = 53, 59, 87


def records(
    *values: bytes, producer: int = -1, sequence: int = 0, epoch: int = 0, **more: Any
) -> bytes:
    """Return a batch of these values."""
    body = body_of([(None, each, []) for each in values])
    return batch(body, len(values), producer=producer, sequence=sequence, epoch=epoch, **more)


def numbered(producer: int, first: int, count: int, *, epoch: int = 0) -> bytes:
    """Return a batch whose values are the numbers that its producer gives them."""
    values = [f"{epoch}:{number}".encode() for number in range(first, first + count)]
    return records(*values, producer=producer, sequence=first, epoch=epoch)


async def values_of(log: DirectLog) -> list[bytes]:
    """Return what is in a log."""
    return [each.payload for each in await read_all(log)]


def sent(address: str, topic: str, values: list[bytes], **settings: Any) -> list[Any]:
    """Write by librdkafka; return what it tells of each record."""
    reported: list[Any] = []
    producer = Producer(
        {"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 5, **settings}
    )
    for each in values:
        producer.produce(topic, each, on_delivery=lambda *one: reported.append(one))
        producer.poll(0)
    assert producer.flush(60) == 0
    return reported


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_librdkafka_writes(codec: str) -> None:
    """Each record once and in its order, with the offset that it is read at."""
    values = [f"{number}:".encode().ljust(20 + number % 90, b"x") for number in range(3000)]

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        options = {"compression.type": codec, "batch.num.messages": 700}
        found = await asyncio.to_thread(sent, address, "team.clicks", values, **options)
        assert [error for error, _ in found if error is not None] == []
        assert [each.offset() for _, each in found] == list(range(len(values)))
        assert await values_of(await opened(served, "team/clicks")) == values

    with_proxies("team/clicks")(scenario)


def test_a_topic_that_no_log_can_have_is_refused_at_once() -> None:
    """And not as an outage, after which a client asks again and again, for its other topics too."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        hurried = {"topic.metadata.propagation.max.ms": 0}
        for topic in ("a..b", "nothing"):
            found = await asyncio.to_thread(sent, address, topic, [b"lost"], **hurried)
            assert [error.code() for error, _ in found] == [NO_TOPIC]

    with_proxies("a")(scenario)


def test_the_proxy_logs_why_it_refused_records(caplog: pytest.LogCaptureFixture) -> None:
    """The client's own log has only a code, such as INVALID_RECORD."""

    async def scenario(served: Proxies) -> None:
        async with raw(await started(served)) as client:
            keyed = batch(body_of([(b"key", b"value", [])]), 1)
            assert await client.produce("a", keyed) == (INVALID, -1)
            assert await client.produce("a", records(b"value")) == (0, 0)
            assert await client.produce("nothing", records(b"value")) == (NO_TOPIC, -1)

    with caplog.at_level(logging.INFO, producing.logger.name):
        with_proxies("a")(scenario)
    (line,) = [each for each in caplog.messages if "are refused" in each]
    assert "topic 'a' are refused with INVALID_RECORD: log 'a' is a log of bytes" in line


def test_a_batch_that_comes_again_is_not_written_again() -> None:
    """It gets the offset that it has, while that is known; later it is only known to be there."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        async with raw(address) as client:
            code, producer = await client.begin()
            assert code == 0
            for number in range(BATCHES_KEPT + 1):
                data = numbered(producer, 10 * number, 10)
                assert await client.produce("a", data) == (0, 10 * number)
            async with raw(address) as other:
                for number in range(1, BATCHES_KEPT + 1):
                    data = numbered(producer, 10 * number, 10)
                    assert await other.produce("a", data) == (0, 10 * number)
                assert await other.produce("a", numbered(producer, 0, 10)) == (DUPLICATE, -1)
            end = 10 * BATCHES_KEPT + 10
            assert await client.produce("a", numbered(producer, end, 1)) == (0, end)
        log = await opened(served, "a")
        assert await values_of(log) == [f"0:{number}".encode() for number in range(end + 1)]

    with_proxies("a")(scenario)


def test_numbers_that_do_not_follow_are_refused() -> None:
    """Records are missing, the epoch is over, or nothing is known of the producer."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        async with raw(address) as client:
            _, producer = await client.begin()
            reply = await client.produced("a", numbered(producer, 5, 1))
            assert (reply.error_code, reply.log_start_offset) == (UNKNOWN_PRODUCER, 0)
            assert str(producer) in reply.error_message
            assert await client.produce("a", numbered(producer, 0, 3)) == (0, 0)
            assert await client.produce("a", numbered(producer, 4, 1)) == (GAP, -1)
            assert await client.produce("a", numbered(producer, 1, 1, epoch=1)) == (GAP, -1)
            assert await client.produce("a", numbered(producer, 0, 2, epoch=1)) == (0, 3)
            assert await client.produce("a", numbered(producer, 3, 1)) == (STALE_EPOCH, -1)
            assert await client.produce("a", numbered(producer, 0, 3)) == (STALE_EPOCH, -1)
            assert await client.produce("a", numbered(producer, 0, 2, epoch=1)) == (0, 3)
            assert await client.produce("a", numbered(producer, 2, 1, epoch=1)) == (0, 5)
        assert await values_of(await opened(served, "a")) == [
            b"0:0", b"0:1", b"0:2", b"1:0", b"1:1", b"1:2",
        ]  # fmt: skip

    with_proxies("a")(scenario)


def test_another_proxy_knows_what_was_written() -> None:
    """The log has moved, and what is sent again is found in it, with its offset."""

    async def scenario(served: Proxies) -> None:
        first, second = await started(served), await started(served)
        here, there = await RawClient.connect(first), await RawClient.connect(second)
        _, producer = await here.begin()
        codes = {}
        for name, client in (("here", here), ("there", there)):
            codes[name] = (await client.produce("a", numbered(producer, 0, 4)))[0]
        assert sorted(codes.values()) == [0, ELSEWHERE]
        owner, other = (here, there) if codes["here"] == 0 else (there, here)
        index = 0 if owner is here else 1
        assert await owner.produce("a", numbered(producer, 4, 4)) == (0, 4)
        await served.servers[index].aclose()
        assert await other.produce("a", numbered(producer, 4, 4)) == (0, 4)
        assert await other.produce("a", numbered(producer, 0, 4)) == (DUPLICATE, -1)
        assert await other.produce("a", numbered(producer, 8, 1)) == (0, 8)
        for client in (here, there):
            client.close()
        assert len(await values_of(await opened(served, "a"))) == 9

    with_proxies("a")(scenario)


def test_a_proxy_without_such_clients_is_passed_over() -> None:
    """Its logs are written at those that serve them, unless it owns them."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        for _ in range(3):
            await served.start()
        async with raw(address) as client:
            for name in ("a", "b", "c", "d"):
                assert await client.produce(name, records(b"x")) == (0, 0)

    with_proxies("a", "b", "c", "d")(scenario)


def test_a_producer_that_does_not_number_its_records() -> None:
    """Records that it sends again are written again."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        async with raw(address) as client:
            assert await client.produce("a", records(b"x", b"y")) == (0, 0)
            assert await client.produce("a", records(b"x", b"y"), version=3) == (0, 2)
        assert await values_of(await opened(served, "a")) == [b"x", b"y"] * 2

    with_proxies("a")(scenario)


def read_back(address: str, topic: str, count: int) -> list[tuple[Any, ...]]:
    """Return keys, values and headers of the first records of a topic."""
    reader = consumer(address, topic)
    try:
        return [(each.key(), each.value(), each.headers()) for each in consumed(reader, count)]
    finally:
        reader.close()


def test_keys_and_headers_are_kept_by_a_typed_log() -> None:
    """A log of bytes has no room for them, and says so."""
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("headers", headers)])
    rows: list[Record] = [(b"k", b"v", [(b"h", b"1"), (b"n", None)]), (None, None, [])]

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        direct = await served.cluster.open("maker")
        await direct.create_log("typed", schema=schema)
        await direct.create_log(
            "pairs", schema=pa.schema([schema.field("key"), schema.field("value")])
        )
        await direct.create_log("other", schema=pa.schema([("value", pa.int64())]))
        async with raw(address) as client:
            _, producer = await client.begin()
            data = batch(body_of(rows), 2, producer=producer)
            assert await client.produce("typed", data) == (0, 0)
            assert await client.produce("typed", data) == (0, 0)
            assert await client.produce("typed", records(b"only")) == (0, 2)
            pair = batch(body_of([(b"k", b"v", [])]), 1, producer=-1)
            assert await client.produce("pairs", pair) == (0, 0)
            for value in rows:
                reply = await client.produced("a", batch(body_of([value]), 1, producer=-1))
                assert reply.error_code == INVALID
                assert "a log of bytes" in reply.error_message
            reply = await client.produced("other", records(b"x"))
            assert (reply.error_code, "int64" in reply.error_message) == (INVALID, True)
        log = await direct.open_log("typed")
        table = await (await log.read()).to_arrow()
        found = table.select(["key", "value", "headers"]).to_pylist()
        assert found == [
            {"key": b"k", "value": b"v",
             "headers": [{"key": "h", "value": b"1"}, {"key": "n", "value": None}]},
            {"key": None, "value": None, "headers": []},
            {"key": None, "value": b"only", "headers": None},
        ]  # fmt: skip
        read = await asyncio.to_thread(read_back, address, "typed", 3)
        assert read == [
            (b"k", b"v", [("h", b"1"), ("n", None)]), (None, None, None), (None, b"only", None),
        ]  # fmt: skip
        assert await asyncio.to_thread(read_back, address, "pairs", 1) == [(b"k", b"v", None)]

    with_proxies("a")(scenario)


def test_records_that_cannot_be_written_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """By the code that Kafka has for it; the connection goes on.

    A client that wants no answer gets none; therefore the operator gets one.
    """

    async def scenario(served: Proxies) -> None:
        address = await started(served, message_bytes_max=REQUEST_BYTES_MAX)
        log = await opened(served, "sealed")
        async with await log.open_writer() as writer:
            await writer.mark_end_of_stream()
        good = records(b"x")
        async with raw(address) as client:
            for wrong, code in (
                ({"acks": 1}, NO_ACKS),
                ({"acks": 2}, NO_ACKS),
                ({"index": 1}, NO_TOPIC),
                ({"data": None}, CORRUPT),
                ({"data": good[:-1]}, CORRUPT),
                ({"data": good[:-1] + b"\1"}, CORRUPT),
                ({"data": good * 2}, INVALID),
                ({"data": records(b"x", attributes=0x10)}, NO_TRANSACTION),
                ({"topic": "sealed"}, POLICY),
                ({"topic": "none"}, NO_TOPIC),
                ({"topic": "._"}, NO_TOPIC),
            ):
                asked: dict[str, Any] = {"topic": "a", "data": good, **wrong}
                found = await client.produce(**asked)
                assert found == (code, -1), wrong
            large = body_of([(None, bytes(REQUEST_BYTES_MAX), [])])
            packed = bytes(pa.Codec("snappy").compress(large, True))
            data = batch(packed, 1, producer=-1, attributes=2)
            assert await client.produce("a", data) == (TOO_LARGE, -1)
            assert await client.begin(transactional="mine") == (NO_TRANSACTIONS, -1)
            assert await client.produce("a", good) == (0, 0)
            client.tell(produce_request("a", good, acks=0))
            assert await client.is_closed()
        (logged,) = [each for each in caplog.messages if "acks=0" in each and "to do" in each]
        assert "set acks=all in the client" in logged
        producer = Producer({"bootstrap.servers": address, "transactional.id": "mine"})
        with pytest.raises(KafkaException):
            await asyncio.to_thread(producer.init_transactions, 20)
        reported = await asyncio.to_thread(
            sent, address, "a", [b"x"], **{"enable.idempotence": False, "acks": 1}
        )
        assert [error.code() for error, _ in reported] == [KafkaError.INVALID_REQUIRED_ACKS]

    with_proxies("a", "sealed")(scenario)


def test_requests_are_taken_ahead_and_answered_in_order() -> None:
    """Also what is asked behind them."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        async with raw(address) as client:
            _, producer = await client.begin()
            for number in range(20):
                client.tell(produce_request("a", numbered(producer, number, 1)))
            client.tell(class_of(messages.API_VERSIONS, 0, EntityType.request)())
            for number in range(20):
                reply = await client.answer(messages.PRODUCE, 9, number=number + 2)
                ((part,),) = (each.partition_responses for each in reply.responses)
                assert (part.error_code, part.base_offset) == (0, number)
            await client.answer(messages.API_VERSIONS, 0)
        assert len(await values_of(await opened(served, "a"))) == 20

    with_proxies("a")(scenario)


def test_records_not_durable_in_time_are_written_later() -> None:
    """The client learns of it, and gets the offset when it sends the records again."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        async with raw(address) as client:
            _, producer = await client.begin()
            assert await client.produce("a", numbered(producer, 0, 1)) == (0, 0)
            for bookie in served.cluster.bookies:
                bookie.is_silent = True
            found = await client.produce("a", numbered(producer, 1, 2), wait_s=0.01)
            assert found == (TIMED_OUT, -1)
            for bookie in served.cluster.bookies:
                bookie.is_silent = False
                bookie.wake()
            assert await client.produce("a", numbered(producer, 1, 2)) == (0, 1)

    with_proxies("a")(scenario)


def test_a_lost_log_may_have_the_records() -> None:
    """They are not refused; the same numbers find out."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        async with raw(address) as client:
            _, producer = await client.begin()
            assert await client.produce("a", numbered(producer, 0, 1)) == (0, 0)
            for bookie in served.cluster.bookies:
                bookie.is_silent = True
            waiting = asyncio.create_task(client.produce("a", numbered(producer, 1, 2)))
            kafka = served.servers[0].kafka
            assert kafka is not None
            assert kafka._serving is not None
            figures = kafka._serving[0].puts.figures
            await until(lambda: figures.records == 3)
            served.cluster.stores[served.servers[0].location].expire()
            assert (await waiting)[0] == UNKNOWN_OUTCOME
            for bookie in served.cluster.bookies:
                bookie.is_silent = False
                bookie.wake()
            code = -1
            while code:
                code, offset = await client.produce("a", numbered(producer, 1, 2))
                assert code in (0, ELSEWHERE, UNKNOWN_OUTCOME), code
            assert offset == 1
        assert await values_of(await opened(served, "a")) == [b"0:0", b"0:1", b"0:2"]

    with_proxies("a")(scenario)


def test_an_offset_that_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are durable nevertheless."""

    async def fails(*_: object) -> None:
        raise DLError("no bookie answers")

    async def scenario(served: Proxies) -> None:
        await started(served)
        second = await started(served)
        first = served.servers[0].kafka
        assert first is not None
        here, there = await RawClient.connect(first.address), await RawClient.connect(second)
        _, producer = await here.begin()
        if (await here.produce("a", numbered(producer, 0, 2)))[0]:
            here, there = there, here
            assert await here.produce("a", numbered(producer, 0, 2)) == (0, 0)
            await served.servers[1].aclose()
        else:
            await served.servers[0].aclose()
        monkeypatch.setattr(producing, "place_of", fails)
        assert await there.produce("a", numbered(producer, 0, 2)) == (DUPLICATE, -1)
        for client in (here, there):
            client.close()

    with_proxies("a")(scenario)


def test_records_that_wait_are_bounded() -> None:
    """A connection beyond the bound is closed, and the client sends them again."""

    async def scenario(served: Proxies) -> None:
        address = await started(served, received_bytes_max=10_000)
        data = records(bytes(9_000))
        async with raw(address) as one, raw(address) as two:
            size = len(data) + 200
            one.writer.write(size.to_bytes(4) + bytes(2))  # the rest does not come
            await one.writer.drain()
            while True:
                try:
                    assert (await two.produce("a", data))[0] == 0
                    await asyncio.sleep(0.01)
                except (asyncio.IncompleteReadError, ConnectionError):
                    break

    with_proxies("a")(scenario)


def test_offsets_count_what_others_append() -> None:
    """Also when the log has changed its segments, and another client has appended meanwhile."""

    async def scenario(served: Proxies) -> None:
        address = await started(served)
        driver = await served.cluster.open("driver")
        end = 0
        async with raw(address) as client:
            _, producer = await client.begin()
            for turn in range(3):
                for _ in range(2):
                    data = records(b"x", b"y", producer=producer, sequence=end - turn)
                    assert await client.produce("a", data) == (0, end)
                    end += 2
                appending = await driver.begin_append("job", turn)
                await appending.write_batch("a", staged(f"s{turn}"))
                assert (await appending.commit()).committed
                end += 1
        found = await read_all(await opened(served, "a"))
        assert [each.sequence_id for each in found] == list(range(end))

    with_proxies("a")(scenario)


def test_limits_hold_as_for_other_streams() -> None:
    """A rate that is used up refuses for a while, and so does the number of streams."""

    async def scenario(served: Proxies) -> None:
        address = await started(served, log_records_per_s=10.0, throttle_max_s=0.0)
        async with raw(address) as client:
            assert await client.produce("a", records(*[b"x"] * 50)) == (0, 0)
            assert (await client.produce("a", records(b"x")))[0] == 19

    with_proxies("a")(scenario)
