"""Producers that number their records, and appends on a condition, through proxies on this loop."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from tests.dlcore.proxy.test_put import records
from tests.fixtures.memory_namespace import CONFIG
from tests.fixtures.served_proxies import Proxies, Stream, with_proxies

if TYPE_CHECKING:
    from typing import Any


async def payloads(served: Proxies) -> list[bytes]:
    """Return what is in the log."""
    return [each.payload for each in await records(served)]


async def refusal(stream: Stream) -> tuple[str, dict[str, str]]:
    """Return what a refused stream gets: the message, and the metadata."""
    while await stream.next_reply() is not None:
        pass
    code, message, metadata = await stream.status()
    assert code == "FAILED_PRECONDITION"
    return message, metadata


def test_a_batch_sent_again_is_written_once() -> None:
    """On the same stream's successor: wholly, in part; the position of the last one is sent."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, ready = await client.opened_with("clicks", producer="meter")
        assert ready["sequence"] == -1
        await stream.send(b"0", b"1", b"2")
        last = await stream.last_reply()
        assert last is not None
        again, ready = await client.opened_with("clicks", producer=ready["producer"])
        assert ready["sequence"] == 2
        await again.send(b"0", b"1", sequence=0)
        assert await again.next_reply() == {"acked": 2, "dlsn": None}
        await again.send(b"2", sequence=2)
        assert await again.next_reply() == {"acked": 3, "dlsn": last["dlsn"]}
        await again.last_reply()
        part, _ = await client.opened_with("clicks", producer=ready["producer"], positions=True)
        await part.send(b"1", b"2", b"3", b"4", sequence=1)
        reply = await part.next_reply()
        assert reply is not None
        assert reply["ends"] == [[4, reply["dlsn"], 2]]
        assert await payloads(served) == [b"0", b"1", b"2", b"3", b"4"]

    with_proxies("clicks")(scenario)


def test_without_a_sequence_records_follow_the_last_one() -> None:
    """A client that never sends anything twice need not count."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        for number in range(3):
            stream, ready = await client.opened_with("clicks", producer="meter")
            assert ready["sequence"] == 2 * number - 1
            assert ready["producer"]["epoch"] == number + 1
            await stream.send(b"a")
            await stream.send(b"b")
            await stream.acked(2)
        assert len(await payloads(served)) == 6

    with_proxies("clicks")(scenario)


def test_an_incarnation_that_counts_nothing_goes_on_behind_what_it_wrote() -> None:
    """On its next stream: numbered from its base, its records would count as sent again."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, ready = await client.opened_with("clicks", producer="meter")
        await stream.send(b"0", b"1")
        await stream.last_reply()
        again, _ = await client.opened_with("clicks", producer=ready["producer"])
        await again.send(b"2")
        await again.last_reply()
        assert await payloads(served) == [b"0", b"1", b"2"]

    with_proxies("clicks")(scenario)


def test_a_gap_is_refused_and_tells_what_is_expected() -> None:
    """Between streams, and within one; what came before is acknowledged."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, ready = await client.opened_with("clicks", producer="meter")
        await stream.send(b"0", sequence=0)
        await stream.acked(1)
        await stream.send(b"2", sequence=2)
        message, metadata = await refusal(stream)
        assert "sequence 2 does not follow in this stream, expected 1" in message
        assert metadata["dlog-expected-sequence"] == "1"
        other, _ = await client.opened_with("clicks", producer=ready["producer"])
        await other.send(b"7", sequence=7)
        message, metadata = await refusal(other)
        assert "SequenceGapError: producer 'meter': sequence 7 does not follow, exp" in message
        assert metadata["dlog-expected-sequence"] == "1"
        assert await payloads(served) == [b"0"]

    with_proxies("clicks")(scenario)


def test_a_new_incarnation_fences_the_one_before() -> None:
    """Its streams may write nothing more, nor may it begin again with its old claim."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        old, ready = await client.opened_with("clicks", producer="meter")
        await old.send(b"0")
        await old.acked(1)
        reply = await client.act("producer_init", log="clicks", producer="meter")
        assert (reply["sequence"], reply["producer"]["base"]) == (0, 1)
        await old.send(b"zombie")
        message, _ = await refusal(old)
        assert "ProducerFencedError: producer 'meter': incarnation 1 was superseded by 2" in message
        late = client.put()
        await late.begin("clicks", producer=ready["producer"])
        assert "superseded" in (await refusal(late))[0]
        new, ready = await client.opened_with("clicks", producer=reply["producer"])
        assert ready["sequence"] == 0
        await new.send(b"1", sequence=1)
        await new.acked(1)
        assert await payloads(served) == [b"0", b"1"]

    with_proxies("clicks")(scenario)


def test_a_new_owner_knows_what_was_written() -> None:
    """It reads it in the log: what is sent again is not written, a gap is refused."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        claims: dict[str, Any] = {}
        for name in ("a", "b"):
            stream, ready = await client.opened_with("clicks", producer=name)
            claims[name] = ready["producer"]
            for number in range(3):
                await stream.send(b"%s%d" % (name.encode(), number))
                await stream.acked(1) if not number else None
            await stream.last_reply()
        for turn in range(3):
            assert await client.act("release", log="clicks") == {"released": True}
            stream, ready = await client.opened_with("clicks", producer=claims["a"])
            assert ready["sequence"] == 2 + turn
            await stream.send(b"a2", b"a%d" % (3 + turn), sequence=2 + turn)
            assert (await stream.last_reply() or {})["acked"] == 2
        stream, ready = await client.opened_with("clicks", producer=claims["b"])
        assert ready["sequence"] == 2
        await stream.send(b"b4", sequence=4)
        assert (await refusal(stream))[1]["dlog-expected-sequence"] == "3"
        assert await payloads(served) == [
            b"a0", b"a1", b"a2", b"b0", b"b1", b"b2", b"a3", b"a4", b"a5",
        ]  # fmt: skip

    with_proxies("clicks")(scenario)


def test_truncation_does_not_make_a_producer_forgotten() -> None:
    """Its segment stays stored, and unread, until a later one says the same."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, ready = await client.opened_with("clicks", producer="meter")
        await stream.send(b"0", b"1")
        await stream.last_reply()
        await client.act("release", log="clicks")
        last = (await records(served))[-1].dlsn
        log = await served.cluster.namespaces[0].open_log("clicks")
        await log.truncate(DLSN(last.lssn, last.entry_id + 1, 0))
        assert await payloads(served) == []
        again, ready = await client.opened_with("clicks", producer=ready["producer"])
        assert ready["sequence"] == 1
        await again.send(b"1", b"2", sequence=1)
        await again.acked(2)
        assert await payloads(served) == [b"2"]

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"producer": ""}, "producer '': expected a name of 1 to 100 bytes"),
        ({"producer": "x" * 101}, "expected a name of 1 to 100 bytes"),
        ({"producer": {"name": "a"}}, "missing required field `epoch`"),
        ({"expected": "nowhere"}, "expected a DLSN like 3:17:0"),
    ],
)
def test_a_wrong_command_is_refused(options: dict[str, Any], problem: str) -> None:
    """It says what would be right."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = client.put()
        await stream.begin("clicks", **options)
        assert await stream.next_reply() is None
        code, message, _ = await stream.status()
        assert code == "INVALID_ARGUMENT"
        assert problem in message

    with_proxies("clicks")(scenario)


def test_metadata_of_a_batch_is_checked() -> None:
    """For a producer it has the sequence."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, _ = await client.opened_with("clicks", producer="meter")
        await stream.send(b"0", sequence=-1)
        assert await stream.next_reply() is None
        assert "app_metadata of a batch" in (await stream.status())[1]

    with_proxies("clicks")(scenario)


def test_an_append_on_a_condition() -> None:
    """All of it or nothing; a late producer gets the present end of the log."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        first, _ = await client.opened_with("clicks", expected=None)
        await first.send(b"a", b"b")
        found = await first.last_reply()
        assert found == {"acked": 2, "dlsn": "1:0:1"}
        late, _ = await client.opened_with("clicks", expected=None)
        await late.send(b"no")
        await late.call.done_writing()
        message, metadata = await refusal(late)
        assert "expects its last record at no position, but it is at 1:0:1" in message
        assert metadata["dlog-last-dlsn"] == "1:0:1"
        await client.act("release", log="clicks")
        next_one, ready = await client.opened_with("clicks", expected="1:0:1", producer="p")
        await next_one.send(b"c")
        assert (await next_one.last_reply() or {})["acked"] == 1
        again, _ = await client.opened_with("clicks", expected="1:0:1", producer=ready["producer"])
        await again.send(b"c", sequence=0)
        assert (await again.last_reply() or {})["acked"] == 1
        assert await payloads(served) == [b"a", b"b", b"c"]

    with_proxies("clicks")(scenario)


def test_a_fenced_proxy_judges_no_condition() -> None:
    """It knows of no record that others wrote since: it releases the log, and looks anew."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        first, _ = await client.opened_with("clicks", expected=None)
        await first.send(b"a")
        assert await first.last_reply() == {"acked": 1, "dlsn": "1:0:0"}
        unlocked = replace(CONFIG, lock_enabled=False)
        log = await served.cluster.namespaces[0].open_log("clicks", config=unlocked)
        async with await log.open_writer() as writer:
            assert await writer.write(LogRecord(2**50, b"b")) == DLSN(2, 0, 0)
        late, _ = await client.opened_with("clicks", expected="2:0:0")
        await late.send(b"c")
        await late.call.done_writing()
        assert await late.next_reply() is None
        code, message, _ = await late.status()
        assert (code, "is lost to this proxy" in message) == ("UNAVAILABLE", True)
        again, _ = await client.opened_with("clicks", expected="2:0:0")
        await again.send(b"c")
        assert await again.last_reply() == {"acked": 1, "dlsn": "3:0:0"}
        assert await payloads(served) == [b"a", b"b", b"c"]

    with_proxies("clicks")(scenario)


def test_a_conditional_write_comes_in_one_message_and_one_entry() -> None:
    """Otherwise nothing of it is written."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream, _ = await client.opened_with("clicks", expected=None)
        await stream.send(b"a")
        await stream.send(b"b")
        assert await stream.next_reply() is None
        assert "comes in one message" in (await stream.status())[1]
        large, _ = await client.opened_with("clicks", expected=None)
        await large.send(*[bytes(1000 * 1000)] * 2)
        await large.call.done_writing()
        assert await large.next_reply() is None
        assert "do not fit into one entry" in (await large.status())[1]
        whole, _ = await client.opened_with("clicks", expected=None)
        await whole.send(*[bytes(100)] * 8000)
        assert await whole.last_reply() == {"acked": 8000, "dlsn": "1:0:7999"}

    with_proxies("clicks")(scenario)
