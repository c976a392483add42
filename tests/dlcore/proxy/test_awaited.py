"""Records that are awaited by what they will hold, and how they are found as their log grows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import EntryPlace, NotLessThan, RecordField
from dlcore.flight.tickets import Place, Ticket
from dlcore.log.entries.body import batch_of
from dlcore.log.reading.entry_rows import StoredRows
from dlcore.log.reading.opening import ReaderOpener
from dlcore.proxy.reading.awaited import Awaited, first_not_less
from dlcore.proxy.reading.delivery import Deliveries
from tests.dlcore.proxy.test_runs import values
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import record
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.log.reading.reader import DirectReader
    from dlcore.proxy.reading.delivery import Reading
    from dlcore.proxy.reading.outgoing import Send

TXID, TIME, SEQUENCE = RecordField.TXID, RecordField.TIMESTAMP_MS, RecordField.SEQUENCE_ID


def rows_of(entry_id: int, *, first_slot: int = 0) -> StoredRows:
    """Return an entry with the records 10 * entry_id …: ten, of ascending transaction ids."""
    first = 10 * entry_id
    txids = [2 * number for number in range(first, first + 10)]
    place = EntryPlace(1, entry_id, first, 0, 1000 + entry_id)
    rows = StoredRows(batch_of(txids, [b""] * 10), place, 0)
    return rows.slice(first_slot, 10)


@pytest.mark.parametrize(
    ("field", "value", "slot"),
    [
        (TXID, 0, 4),
        (TXID, 75, 8),
        (TXID, 78, 9),
        (TXID, 79, None),
        (SEQUENCE, 0, 4),
        (SEQUENCE, 38, 8),
        (SEQUENCE, 40, None),
        (TIME, 1003, 4),
        (TIME, 1004, None),
    ],
)
def test_the_first_of_an_entrys_rows(field: RecordField, value: int, slot: int | None) -> None:
    """By each field, also of rows that are the later part of an entry."""
    found = first_not_less(rows_of(3, first_slot=4), NotLessThan(field, value))
    assert found == (None if slot is None else DLSN(1, 3, slot))


def test_each_waiting_call_learns_once_where_its_record_is() -> None:
    """In whatever order they came; a caller that left gets nothing, nor one without its record."""
    awaited: Awaited[str] = Awaited()
    for name, field, value in (
        ("late", TXID, 75),
        ("early", TXID, 31),
        ("same", TXID, 31),
        ("number", SEQUENCE, 20),
        ("left", TXID, 40),
        ("time", TIME, 1003),
        ("never", TIME, 9999),
    ):
        awaited.wait(NotLessThan(field, value), name)
    awaited.leave("left")
    awaited.leave("unknown")
    found = {number: dict(awaited.came(rows_of(number))) for number in range(5)}
    assert found == {
        0: {},
        1: {"early": DLSN(1, 1, 6), "same": DLSN(1, 1, 6)},
        2: {"number": DLSN(1, 2, 0)},
        3: {"late": DLSN(1, 3, 8), "time": DLSN(1, 3, 0)},
        4: {},
    }
    assert len(awaited) == 1
    assert list(awaited.give_up()) == ["never"]
    assert len(awaited) == 0


class Reader:
    """A follower from a record on that is yet to come."""

    def __init__(self, served: Proxies, **start: int) -> None:
        place = msgspec.convert(start, Place)
        ticket = Ticket(log="clicks", start=place, follow=True, columns=["dlsn", "value"])
        self.values: list[bytes] = []
        reads = served.servers[0].reads
        self.task = asyncio.create_task(reads.do_get(ticket, self._send))

    async def _send(self, message: bytes) -> None:
        if pb.FlightData.FromString(message).app_metadata:  # else it is the schema
            self.values += values(message)


def test_all_who_wait_for_records_to_come_share_one_follower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None has a reader of its own; each gets all from its record on, over segments."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        followed = served.servers[0].reads.followed
        opened = []
        open_reader = ReaderOpener.open_reader

        async def counted(self: ReaderOpener, *start: Any, **options: Any) -> DirectReader:
            opened.append(options)
            return await open_reader(self, *start, **options)

        monkeypatch.setattr(ReaderOpener, "open_reader", counted)
        wanted = [("txid", 4), ("txid", 1), ("txid", 40), ("sequence_id", 3), ("txid", 1000)]
        readers = [Reader(served, **{field: value}) for field, value in wanted]
        await until(lambda: [len(each._awaited) for each in followed] == [len(readers)])
        assert len(opened) == 1
        gone, *readers = readers[-1], *readers[:-1]
        gone.task.cancel()
        await asyncio.wait({gone.task})
        assert [len(each._awaited) for each in followed] == [len(readers)]
        log = await served.cluster.namespaces[0].open_log("clicks")
        sent = []
        for lssn in range(1, 4):
            async with await log.open_writer() as writer:
                for entry in range(3):
                    sent.append(b"%d:0" % entry)
                    await writer.write(record(len(sent), sent[-1]))
                if lssn == 3:
                    await writer.mark_end_of_stream()
        await asyncio.gather(*(each.task for each in readers))
        assert [each.values for each in readers] == [sent[3:], sent, [], sent[3:]]
        late = Reader(served, txid=1000)
        await late.task
        assert late.values == []
        assert not len(followed)

    with_proxies("clicks")(scenario)


def test_records_before_the_log_was_followed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the log and where others follow it from, or in a run that is there."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await served.cluster.namespaces[0].open_log("clicks")
        await (await log.open_writer()).aclose()
        deliver = Deliveries.deliver

        async def late(self: Deliveries, reading: Reading, send: Send) -> None:
            async with await log.open_writer() as writer:
                for number in range(4):
                    await writer.write(record(number, b"%d:0" % number))
            end = (await log.get_snapshot()).end
            with self._followed.follow(reading.log, end):
                await deliver(self, reading, send)

        monkeypatch.setattr(Deliveries, "deliver", late)
        reader = Reader(served, txid=2)
        await until(lambda: len(reader.values) == 2)
        reader.task.cancel()
        await asyncio.wait({reader.task})
        assert reader.values == [b"2:0", b"3:0"]

    with_proxies("clicks")(scenario)


def test_a_call_cancelled_as_its_record_comes_harms_no_other() -> None:
    """Others go on to follow the log."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        log = await served.cluster.namespaces[0].open_log("clicks")
        other = Reader(served, txid=0)
        gone = Reader(served, txid=1)
        followed = served.servers[0].reads.followed
        await until(lambda: [len(each._awaited) for each in followed] == [2])
        (one,) = followed
        came = one._awaited.came

        def cancelling(rows: StoredRows) -> Any:
            gone.task.cancel()
            return came(rows)

        one._awaited.came = cancelling  # type: ignore[method-assign]
        async with await log.open_writer() as writer:
            for number in range(3):
                await writer.write(record(number, b"%d:0" % number))
        await until(lambda: len(other.values) == 3)
        assert (one.error, gone.values) == (None, [])
        other.task.cancel()
        await asyncio.wait({other.task, gone.task})

    with_proxies("clicks")(scenario)
