"""Streams of records through a proxy on this loop: acknowledged, refused, moved, lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.errors import WriteError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import LogRecord
from dlcore.log.writing.writer import Pump
from dlcore.proxy.service import FLIGHT
from dlcore.proxy.writing.owned_log import OwnedLog
from tests.fixtures.aio import until_async
from tests.fixtures.memory_namespace import CONFIG, read_all
from tests.fixtures.served_proxies import (
    PAYLOADS,
    Client,
    Proxies,
    Stream,
    data_of,
    with_proxies,
)

if TYPE_CHECKING:
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.entries.stamp import Mark
    from dlcore.proxy.writing.owned_log import Accepted


async def records(served: Proxies, log: str = "clicks") -> list[LogRecordWithDLSN]:
    """Return what a direct reader finds in a log."""
    return await read_all(await served.cluster.namespaces[0].open_log(log))


async def until_owned(client: Client, *logs: str) -> None:
    """Wait until a proxy owns these logs and no others."""

    async def owns_them() -> bool:
        return bool((await client.act("logs"))["logs"] == list(logs))

    await until_async(owns_them)


def test_acknowledged_records_are_in_the_log_in_order() -> None:
    """The acknowledgement says where the last record is."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        for number in range(50):
            await stream.send(b"%d" % number, b"%d'" % number)
        last = await stream.last_reply()
        assert (await stream.status())[0] == "OK"
        found = await records(served)
        assert last == {"acked": 100, "dlsn": str(found[-1].dlsn)}
        assert [each.payload for each in found[:4]] == [b"0", b"0'", b"1", b"1'"]
        assert len(found) == 100
        assert [each.txid for each in found] == sorted(each.txid for each in found)

    with_proxies("clicks")(scenario)


def test_records_of_many_streams_share_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting records of all streams go in the next entry; each stream keeps its order."""
    append, accept = Pump._append, OwnedLog.accept

    async def scenario(served: Proxies) -> None:
        accepted = asyncio.Semaphore(0)

        async def accept_one(owned: OwnedLog, *given: Any) -> Any:
            answer = await accept(owned, *given)
            accepted.release()
            return answer

        async def append_some(pump: Pump) -> None:
            for _ in range(2):  # however slowly they come
                await accepted.acquire()
            monkeypatch.setattr(Pump, "_append", append)
            await append(pump)

        monkeypatch.setattr(OwnedLog, "accept", accept_one)
        monkeypatch.setattr(Pump, "_append", append_some)
        client = await served.start()
        streams = [await client.opened("clicks") for _ in range(8)]

        async def write(number: int) -> None:
            for turn in range(20):
                await streams[number].send(b"%d/%d" % (number, turn))
            assert (await streams[number].last_reply() or {})["acked"] == 20

        await asyncio.gather(*map(write, range(8)))
        found = await records(served)
        entries = {(each.dlsn.lssn, each.dlsn.entry_id) for each in found}
        assert len(found) == 160
        assert len(entries) < 160
        for number in range(8):
            mine = [each.payload for each in found if each.payload.startswith(b"%d/" % number)]
            assert mine == [b"%d/%d" % (number, turn) for turn in range(20)]

    with_proxies("clicks")(scenario)


def test_transaction_ids_are_the_time_and_never_fall() -> None:
    """Where the log has a higher one already, that; a client may give its own."""

    async def scenario(served: Proxies) -> None:
        log = await served.cluster.namespaces[0].open_log("clicks")
        client = await served.start()
        clock = served.cluster.clocks[served.servers[0].location]
        ahead = clock.current_ms + 5000
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(ahead, b"direct"))
        stream = await client.opened("clicks")
        await stream.send(b"a")
        await stream.acked(1)
        clock.current_ms += 10_000
        await stream.send(b"b")
        await stream.last_reply()
        schema = pa.schema([("value", pa.string()), ("txid", pa.int32())])
        low = await client.opened("clicks", schema)
        await low.send_batch(pa.record_batch([["c"], pa.array([7], pa.int32())], schema=schema))
        assert await low.next_reply() is None
        code, message, metadata = await low.status()
        assert (code, metadata["dlog-error"]) == ("FAILED_PRECONDITION", "513")
        assert "transaction id 7 is lower" in message
        assert [each.txid for each in await records(served)] == [ahead, ahead, ahead + 5000]

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ([("key", pa.binary())], "expected one column value"),
        ([("payload", pa.binary())], "expected one column value"),
        ([("value", pa.binary()), ("value", pa.binary())], "expected one column value"),
        ([("value", pa.binary()), ("key", pa.binary())], "expected one column value"),
        ([("value", pa.int64())], "column value has type int64, expected binary"),
        ([("value", pa.binary()), ("txid", pa.string())], "txid has type string"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused_first(
    columns: list[tuple[str, pa.DataType]], problem: str
) -> None:
    """Before anything is written, and without a word of being ready."""

    async def scenario(served: Proxies) -> None:
        stream = (await served.start()).put()
        await stream.begin("clicks", pa.schema(columns))
        assert await stream.next_reply() is None
        code, message, _ = await stream.status()
        assert code == "INVALID_ARGUMENT"
        assert problem in message

    with_proxies("clicks")(scenario)


def test_batches_before_a_bad_one_are_acknowledged() -> None:
    """Nulls are no payload; empty batches are nothing."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        await stream.send()
        await stream.send(b"good")
        await stream.send_batch(pa.record_batch([pa.array([None], pa.binary())], schema=PAYLOADS))
        assert (await stream.next_reply() or {})["acked"] == 1
        assert await stream.next_reply() is None
        code, message, _ = await stream.status()
        assert (code, "holds 1 nulls" in message) == ("INVALID_ARGUMENT", True)
        assert [each.payload for each in await records(served)] == [b"good"]

    with_proxies("clicks")(scenario)


def test_bytes_that_are_no_message_are_refused() -> None:
    """First, or after what is acknowledged."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        method: Any = client.channel.stream_stream(
            f"/{FLIGHT}/DoPut", response_deserializer=pb.PutResult.FromString
        )
        first = data_of(PAYLOADS.serialize())
        first.flight_descriptor.CopyFrom(
            pb.FlightDescriptor(type=pb.FlightDescriptor.PATH, path=["clicks"])
        )
        rows = data_of(
            pa.record_batch([pa.array([b"a"], pa.binary())], schema=PAYLOADS).serialize()
        )
        for before in ([], [first.SerializeToString(), rows.SerializeToString()]):
            stream = Stream(method())
            for message in [*before, b"\xff" * 100]:
                await stream.call.write(message)
            reply = await stream.last_reply()
            assert (reply or {}).get("acked") == (1 if before else None)
            code, details, _ = await stream.status()
            assert (code, "is no FlightData" in details) == ("INVALID_ARGUMENT", True)
        assert [each.payload for each in await records(served)] == [b"a"]

    with_proxies("clicks")(scenario)


def test_an_unknown_log_and_a_sealed_one_are_refused() -> None:
    """Each in its own words; a stream that says nothing ends in order."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        unknown = client.put()
        await unknown.begin("nowhere")
        assert (await unknown.status())[:1] == ("NOT_FOUND",)
        await client.act("seal", log="clicks")
        sealed = client.put()
        await sealed.begin("clicks")
        code, message, _ = await sealed.status()
        assert (code, message.split(":")[0]) == ("FAILED_PRECONDITION", "EndOfStreamError")
        silent = client.put()
        assert await silent.last_reply() is None
        assert (await silent.status())[0] == "OK"

    with_proxies("clicks")(scenario)


def test_a_released_log_has_all_that_was_accepted() -> None:
    """Its streams get the message to drain, and end; the same proxy takes it again when asked."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        await stream.send(b"a")
        await stream.acked(1)
        assert await client.act("logs") == {"logs": ["clicks"]}
        assert await client.act("release", log="clicks") == {"released": True}
        assert await client.act("release", log="clicks") == {"released": False}
        assert await client.act("logs") == {"logs": []}
        assert await stream.next_reply() == {"draining": {"location": None}}
        assert await stream.next_reply() is None
        code, message, _ = await stream.status()
        assert (code, "was released: try again" in message) == ("UNAVAILABLE", True)
        again = await client.opened("clicks")
        await again.send(b"b")
        await again.last_reply()
        assert [each.payload for each in await records(served)] == [b"a", b"b"]

    with_proxies("clicks")(scenario)


def test_messages_taken_while_a_stream_ends_are_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch that was on its way to a log at its release, and came a second time."""
    accept, arrived, may_go_on = OwnedLog.accept, asyncio.Event(), asyncio.Event()

    async def late(log: OwnedLog, batch: pa.RecordBatch, mark: Mark | None = None) -> Accepted:
        arrived.set()
        await may_go_on.wait()
        return await accept(log, batch, mark)

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, ready = await client.opened_with("clicks", producer="meter")
        await stream.send(b"a")
        await stream.acked(1)
        again, _ = await client.opened_with("clicks", producer=ready["producer"])
        monkeypatch.setattr(OwnedLog, "accept", late)
        await again.send(b"a", sequence=0)
        await arrived.wait()
        await client.act("release", log="clicks")
        assert await again.next_reply() == {"draining": {"location": None}}
        may_go_on.set()
        last = await again.last_reply()
        assert last is not None
        assert (last["acked"], (await again.status())[0]) == (1, "OK")

    with_proxies("clicks")(scenario)


def test_a_log_moves_to_the_proxy_that_takes_over() -> None:
    """Drained, a proxy sends all to the other; until then it keeps what it owns."""

    async def scenario(served: Proxies) -> None:
        first = await served.start()
        logs = [f"log-{number}" for number in range(6)]
        streams = [await first.opened(log) for log in logs]
        second = await served.start()
        location = served.servers[1].location
        for log in logs:  # wherever they should be, they are served where they are
            elsewhere = second.put()
            await elsewhere.begin(log)
            code, _, metadata = await elsewhere.status()
            assert (code, metadata["dlog-location"]) == ("UNAVAILABLE", served.servers[0].location)
        await first.act("drain")
        for log, stream in zip(logs, streams, strict=True):
            assert await stream.next_reply() == {"draining": {"location": location}}
            assert await stream.next_reply() is None
            code, _, metadata = await stream.status()
            assert (code, metadata["dlog-location"]) == ("UNAVAILABLE", location)
            refused = first.put()
            await refused.begin(log)
            assert (await refused.status())[2]["dlog-location"] == location
            moved = await second.opened(log)
            await moved.send(b"x")
            assert (await moved.last_reply() or {})["acked"] == 1
        assert await second.act("logs") == {"logs": logs}

    with_proxies(*(f"log-{number}" for number in range(6)))(scenario)


def test_a_proxy_alone_that_drains_takes_nothing() -> None:
    """It says that no proxy does."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        await client.act("drain")
        stream = client.put()
        await stream.begin("clicks")
        code, message, _ = await stream.status()
        assert (code, "no live proxy takes logs" in message) == ("UNAVAILABLE", True)

    with_proxies("clicks")(scenario)


def test_a_proxy_that_is_undrained_takes_logs_again() -> None:
    """As often as it is asked to, and also where it was not drained; its own node shows it."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        await client.act("undrain")
        for _ in range(2):
            await client.act("drain")
            await client.act("drain")
            below = f"{served.cluster.paths.proxies}/"
            assert not [path for path in served.cluster.tree.dump() if path.startswith(below)]
            await asyncio.gather(client.act("undrain"), client.act("undrain"))
            stream = await client.opened("clicks")
            await stream.send(b"a")
            await stream.acked(1)
            await client.act("release", log="clicks")

    with_proxies("clicks")(scenario)


def test_a_fenced_proxy_acknowledges_nothing_more() -> None:
    """Another recovers the log behind its back; it drops it, and can own it again later."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        await stream.send(b"a")
        await stream.acked(1)
        unlocked = replace(CONFIG, lock_enabled=False)
        log = await served.cluster.namespaces[0].open_log("clicks", config=unlocked)
        async with await log.open_writer():
            await stream.send(b"b")
        assert await stream.next_reply() is None
        code, message, _ = await stream.status()
        assert (code, "is lost to this proxy" in message) == ("UNAVAILABLE", True)
        again = await client.opened("clicks")
        await again.send(b"c")
        await again.last_reply()
        assert [each.payload for each in await records(served)] == [b"a", b"c"]

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize("call", ["begin", "accept", "accept_if"])
def test_a_writer_that_is_found_failed_loses_its_log(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whatever a stream wants of it; the next stream finds another writer."""

    async def scenario(served: Proxies) -> None:
        async def fail(*_: object) -> None:
            raise WriteError("it failed")

        client = await served.start()
        options: dict[str, object] = {"expected": None} if call == "accept_if" else {}
        if call == "begin":
            options["producer"] = "meter"
        with monkeypatch.context() as patched:
            patched.setattr(OwnedLog, call, fail)
            stream = client.put()
            await stream.begin("clicks", **options)
            if call != "begin":  # then the stream is refused, maybe before something can be sent
                await stream.send(b"a")
            assert set(await stream.last_reply() or {"ready"}) == {"ready"}
            code, message, _ = await stream.status()
            assert (code, "is lost to this proxy" in message) == ("UNAVAILABLE", True)
            assert "it failed" in message
        again = await client.opened("clicks")
        await again.send(b"b")
        await again.last_reply()
        assert [each.payload for each in await records(served)] == [b"b"]

    with_proxies("clicks")(scenario)


def test_a_lost_session_loses_the_logs() -> None:
    """The proxy appears among the live ones again, and acquires them anew."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        await stream.send(b"a")
        await stream.acked(1)
        served.cluster.stores[served.servers[0].location].expire()
        assert await stream.next_reply() is None
        code, message, _ = await stream.status()
        assert (code, "session expired" in message) == ("UNAVAILABLE", True)
        again = await client.opened("clicks")
        await again.send(b"b")
        await again.last_reply()
        assert [each.payload for each in await records(served)] == [b"a", b"b"]

    with_proxies("clicks")(scenario)


def test_a_log_that_a_direct_writer_holds_is_refused() -> None:
    """Its owner is named, and is no proxy to be sent to."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(lock_timeout_s=0.05)
        log = await served.cluster.namespaces[0].open_log("clicks")
        async with await log.open_writer():
            stream = client.put()
            await stream.begin("clicks")
            code, message, metadata = await stream.status()
            assert (code, "is owned by direct" in message) == ("UNAVAILABLE", True)
            assert "dlog-location" not in metadata
            assert await client.act("logs") == {"logs": []}
        await client.opened("clicks")

    with_proxies("clicks")(scenario)


def test_idle_logs_are_let_go_of() -> None:
    """One that a stream is open to is not idle."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(idle_release_s=0.05)
        busy, idle = await client.opened("busy"), await client.opened("idle")
        await idle.send(b"a")
        await idle.last_reply()
        await until_owned(client, "busy")
        await busy.send(b"b")
        await busy.acked(1)

    with_proxies("busy", "idle")(scenario)


def test_more_logs_and_calls_than_allowed_are_refused() -> None:
    """Those that are served go on."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(logs_max=1, calls_max=2)
        stream = await client.opened("a")
        refused = client.put()
        await refused.begin("b")
        code, message, found = await refused.status()
        assert (code, "the limit logs_max" in message) == ("RESOURCE_EXHAUSTED", True)
        assert found["dlog-retry-after-ms"] == "1000"
        another = await client.opened("a")
        above = client.put()
        assert (await above.status())[0] == "RESOURCE_EXHAUSTED"
        for each in (stream, another):
            await each.send(b"x")
            await each.acked(1)

    with_proxies("a", "b")(scenario)


@pytest.mark.parametrize("limit", [{"window_records": 2}, {"pending_bytes_max": 64}])
def test_a_stream_goes_on_through_its_window(limit: dict[str, int]) -> None:
    """It takes no more than the window allows, and a client that reads nothing harms no other."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(**limit)
        streams = [await client.opened("clicks") for _ in range(4)]

        async def write(number: int) -> None:
            for _ in range(30):
                await streams[number].send(bytes(40))

        await asyncio.gather(*map(write, range(4)))
        for stream in streams:
            assert (await stream.last_reply() or {})["acked"] == 30
        assert len(await records(served)) == 120

    with_proxies("clicks")(scenario)


def test_a_client_that_goes_leaves_nothing_behind() -> None:
    """Accepted records are written; the log has no owner then."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(idle_release_s=0.05)
        stream = await client.opened("clicks")
        await stream.send(b"a")
        await stream.acked(1)
        stream.call.cancel()
        await until_owned(client)
        assert [each.payload for each in await records(served)] == [b"a"]

    with_proxies("clicks")(scenario)
