"""Writers over an endpoint, to proxies on this loop: each record is in the log once, in order."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.backends.flight import producer_driver
from dlcore.backends.flight.log import FlightLog
from dlcore.backends.flight.namespace import open_namespace
from dlcore.backends.flight.streams import Attempts
from dlcore.base.errors import (
    AlreadyClosedError,
    ConditionFailedError,
    ConfigurationError,
    LogNotFoundError,
    OverCapacityError,
    ProxyUnavailableError,
    TransactionIdOutOfOrderError,
    WriteCancelledError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.flight import producer_client
from dlcore.flight.calls import send_reply
from dlcore.log.metadata.values import LogKey
from dlcore.proxy.writing import producer_driver as server_driver
from tests.dlcore.proxy.test_put import records
from tests.fixtures.aio import cancel_after
from tests.fixtures.ports import free_ports
from tests.fixtures.served_proxies import Proxies, with_proxies
from tests.fixtures.simulated_store import SimulatedStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlcore.backends.flight.writing import FlightWriter
    from dlcore.flight.replies import PutReply


async def remote(served: Proxies, name: str = "clicks", *, patience_s: float = 60.0) -> FlightLog:
    """Return a log over all proxies that were started."""
    hosts = [each.location.removeprefix("grpc://") for each in served.servers]
    namespace = await open_namespace(f"grpc://{','.join(hosts)}", patience_s=patience_s)
    served.steps.push_async_callback(namespace.aclose)
    return await namespace.open_log(name)


def numbered(first: int, count: int) -> list[LogRecord]:
    """Return records whose payloads and transaction ids are their numbers."""
    return [LogRecord(number, b"%d" % number) for number in range(first, first + count)]


async def payloads(served: Proxies) -> list[bytes]:
    """Return what is in the log."""
    return [each.payload for each in await records(served)]


def test_positions_are_those_of_the_records() -> None:
    """One by one, in bulk, as batches, and as a table; with columns that change."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        async with await log.open_writer() as writer:
            assert await writer.flush() is None
            futures = writer.write_bulk(numbered(0, 50))
            await writer.flush()
            futures.append(writer.write_batch(pa.record_batch({"value": [b"50", b"51"]})))
            futures += writer.write_bulk([LogRecord(2**60, b"52")])
            await writer.submit_table(pa.table({"value": ["53"]}))
            await writer.submit_batch(pa.record_batch({"value": pa.array([], pa.string())}))
            last = await writer.commit()
            found = await records(served)
            assert [each.payload for each in found] == [b"%d" % number for number in range(54)]
            dlsns = [each.dlsn for each in found]
            assert [await each for each in futures] == [*dlsns[:50], dlsns[51], dlsns[52]]
            assert last == dlsns[53] == writer.last_dlsn
            assert writer.next_sequence == 54
            assert "'clicks' <Outbox 0 records, 0 messages" in repr(writer)
        await writer.aclose()
        with pytest.raises(AlreadyClosedError):
            writer.write(LogRecord(2**60, b""))

    with_proxies("clicks")(scenario)


def test_a_record_that_cannot_follow_is_refused_at_once() -> None:
    """The writer stays usable; a bulk is cancelled from there on."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        async with await log.open_writer() as writer:
            futures = writer.write_bulk([*numbered(7, 1), *numbered(3, 2)])
            assert await futures[0] == DLSN.INITIAL
            with pytest.raises(TransactionIdOutOfOrderError):
                await futures[1]
            with pytest.raises(WriteCancelledError):
                await futures[2]
            (wrong,) = writer.write_bulk(["9"])  # type: ignore[list-item]
            with pytest.raises(ConfigurationError, match="'9': expected a LogRecord"):
                await wrong
            with pytest.raises(ConfigurationError, match="no position"):
                writer.write_batch(pa.record_batch({"value": pa.array([], pa.binary())}))
            large = pa.record_batch({"value": [bytes(1000 * 1000)] * 40})
            writer.write_batch(large).cancel()
            with pytest.raises(OverCapacityError, match="bytes in 40 records are pending"):
                writer.write(LogRecord(8, b""))
            await writer.wait_for_capacity()
            writer.write_batch(large.slice(0, 1))
        assert len(await records(served)) == 42

    with_proxies("clicks")(scenario)


def test_a_refusal_of_the_proxy_ends_the_writer() -> None:
    """Every waiting call gets the error, and later calls do, too."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        writer = await log.open_writer()
        waiting = writer.write_batch(pa.record_batch({"speed": [1]}))
        with pytest.raises(ConfigurationError, match="is a byte log"):
            await waiting
        with pytest.raises(WriteError, match="failed and takes no more records: Configuration"):
            await writer.flush()
        await writer.wait_for_capacity()
        await writer.aclose()
        failed = await log.open_writer()
        await failed.submit_batch(pa.record_batch({"speed": [1]}))
        await failed.wait_for_capacity()
        await asyncio.wait([failed._task])
        with pytest.raises(WriteError, match="is a byte log"):
            await failed.aclose()
        gone = FlightLog(log._calls, LogKey(name="none", log_id="1"))
        with pytest.raises(LogNotFoundError):
            await gone.open_writer()
        with pytest.raises(ConfigurationError, match="expected a name of 1 to 100 bytes"):
            await log.open_writer(producer="")

    with_proxies("clicks")(scenario)


async def _written(writer: FlightWriter, count: int) -> AsyncIterator[int]:
    """Write records one after the other, a few at once; yield how many are acknowledged."""
    waiting: list[asyncio.Future[DLSN | None]] = []
    for record in numbered(0, count):
        waiting.append(writer.write(record))
        if len(waiting) == 5:
            await waiting.pop(0)
            yield record.txid
    await writer.flush()


def test_a_log_moves_under_its_writer() -> None:
    """It is released, and released again, and its proxies leave: the writer follows."""

    async def scenario(served: Proxies) -> None:
        clients = [await served.start() for _ in range(3)]
        log = await remote(served)
        async with await log.open_writer() as writer:
            async for done in _written(writer, 300):
                if done % 50 == 20:
                    for client in clients:
                        await client.act("release", log="clicks")
                if done in (100, 200):
                    await clients.pop(0).act("drain")
        assert await payloads(served) == [b"%d" % number for number in range(300)]

    with_proxies("clicks")(scenario)


def test_a_session_is_lost_under_a_writer() -> None:
    """Records in flight are sent again, and written once."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        await served.start()
        log = await remote(served)
        async with await log.open_writer(producer="meter") as writer:
            async for done in _written(writer, 200):
                if done % 40 == 10:
                    for namespace in served.namespaces:
                        store = namespace.log_context.store
                        assert isinstance(store, SimulatedStore)
                        store.expire()
        assert await payloads(served) == [b"%d" % number for number in range(200)]

    with_proxies("clicks")(scenario)


def test_a_silent_proxy_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it was sent is sent again."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)

        async def silent(*_: object) -> None:
            await asyncio.sleep(3600)

        async def acknowledge_nothing(context: Any, reply: PutReply) -> None:
            await (silent() if reply.acked is not None else send_reply(context, reply))

        async with await log.open_writer() as writer:
            with monkeypatch.context() as patched:
                patched.setattr(producer_client, "SILENCE_S", 0.1)
                patched.setattr(server_driver, "send_reply", acknowledge_nothing)
                assert await writer.write(LogRecord(0, b"0")) is None  # it is there, and where ...
            assert await writer.write(LogRecord(1, b"1")) is not None
        assert await payloads(served) == [b"0", b"1"]
        log._calls.patience_s = 0.5
        monkeypatch.setattr(producer_client, "SILENCE_S", 0.1)
        monkeypatch.setattr(producer_driver, "read", silent)
        with pytest.raises(ProxyUnavailableError, match="said nothing for"):
            await log.open_writer()
        with pytest.raises(ProxyUnavailableError, match="said nothing for"):
            await log.append(numbered(2, 1), expected=None)

    with_proxies("clicks")(scenario)


def test_no_server_answers() -> None:
    """That is reported after the time that one is willing to wait."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served, patience_s=0.3)
        log._endpoint = (await open_namespace(f"grpc://127.0.0.1:{free_ports(1)}"))._calls
        log._endpoint.patience_s = 0.3
        served.steps.push_async_callback(log._calls.aclose)
        with pytest.raises(ProxyUnavailableError, match="no proxy answers"):
            await log.open_writer()

    with_proxies("clicks")(scenario)


def test_a_writer_that_is_not_closed_says_what_is_not_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As that of the core does."""
    caplog.set_level(logging.WARNING)  # programs that ran in this process may have set another

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        writer = await log.open_writer()
        writer.report_unwritten("nothing is")
        assert not caplog.records
        lost = writer.write(LogRecord(0, b"0"))
        writer.report_unwritten("the process ended")
        assert "not written: 1 record: the writer was not closed, and the" in caplog.text
        await writer.abort()
        with pytest.raises(WriteCancelledError, match="was aborted"):
            await lost

    with_proxies("clicks")(scenario)


def test_a_rate_is_kept_to() -> None:
    """A refused writer comes again after the time that the refusal names."""

    async def scenario(served: Proxies) -> None:
        await served.start(log_records_per_s=200.0, throttle_max_s=0.05)
        log = await remote(served)
        async with await log.open_writer() as writer:
            for first in range(0, 400, 40):
                writer.write_batch(pa.record_batch({"value": [str(first + n) for n in range(40)]}))
        assert await payloads(served) == [b"%d" % number for number in range(400)]

    with_proxies("clicks")(scenario)


def test_two_streams_of_one_producer_write_once() -> None:
    """As of a client that comes again while its old stream is not known to be gone."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, ready = await client.opened_with("clicks", producer="meter")
        other, _ = await client.opened_with("clicks", producer=ready["producer"], positions=True)
        for number in range(100):
            await stream.send(b"%d" % number, sequence=number)
            await other.send(b"%d" % number, sequence=number)
        await asyncio.gather(stream.acked(100), other.acked(100))
        assert await payloads(served) == [b"%d" % number for number in range(100)]

    with_proxies("clicks")(scenario)


def test_appends_on_a_condition_that_race() -> None:
    """One of each round comes first; all that are refused write nothing."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        expected: DLSN | None = None
        for number in range(10):
            answers = await asyncio.gather(
                *(
                    log.append(pa.record_batch({"value": [f"{number}"] * 2}), expected=expected)
                    for _ in range(4)
                ),
                return_exceptions=True,
            )
            (expected,) = [each for each in answers if isinstance(each, DLSN)]
            assert sum(isinstance(each, ConditionFailedError) for each in answers) == 3
        found = await payloads(served)
        assert found == [b"%d" % number for number in range(10) for _ in range(2)]

    with_proxies("clicks")(scenario)


def test_a_cancelled_abort_still_ends_the_waits() -> None:
    """The outcome of its record is unknown."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await remote(served)
        for turns in range(3):
            writer = await log.open_writer()
            future = writer.write(LogRecord(1, b"x"))
            await cancel_after(asyncio.create_task(writer.abort()), turns)
            assert future.done() is (turns > 0)  # one that had not begun ended nothing
            await writer.abort()

    with_proxies("clicks")(scenario)


def test_a_writer_that_was_idle_for_long_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The silence of a proxy that has nothing to tell is none; it counts from the next record."""
    begun: list[Attempts] = []
    begin = Attempts.begin

    def counted(self: Attempts) -> Any:
        begun.append(self)
        return begin(self)

    monkeypatch.setattr(Attempts, "begin", counted)
    monkeypatch.setattr(producer_client, "SILENCE_S", 5.0)

    async def scenario(served: Proxies) -> None:
        await served.start()
        loop = asyncio.get_running_loop()
        time, passed_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: time() + passed_s)
        async with await (await remote(served)).open_writer() as writer:
            for number in range(3):
                await writer.write(LogRecord(0, b"%d" % number))
                passed_s += 2 * producer_client.SILENCE_S
            assert len(begun) == 1

    with_proxies("clicks")(scenario)
