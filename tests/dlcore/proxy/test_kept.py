"""Older messages that are kept for the next readers: how many, and for how long."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from dlcore.base.ids import DLSN
from dlcore.flight.tickets import Place, Ticket
from dlcore.proxy.reading import kept as kept_module, serving
from dlcore.proxy.reading.delivery import Deliveries, Reading
from dlcore.proxy.reading.kept import KEPT_S, OWN_BYTES, UNUSED_S, KeptMessages, Series
from dlcore.proxy.reading.outgoing import Outgoing
from dlcore.proxy.reading.ring import RingBudget, Run
from dlcore.proxy.reading.rows import RowView
from tests.dlcore.ops.upkeep.test_redactor import NEEDLE, Scene
from tests.dlcore.proxy.test_delivery import Log
from tests.dlcore.proxy.test_runs import entry, values
from tests.fixtures.aio import until
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    import pytest

    from dlcore.log.reading.entry_rows import EntryRows

SERIES = Series("id", "a", b"", 0)
MESSAGE = b"m" * 1000
ONE = len(MESSAGE) + OWN_BYTES
FAR = DLSN(9, 0, 0)


def key(number: int, series: Series = SERIES) -> tuple[Series, DLSN]:
    """Return the key of the message with one entry."""
    return series, DLSN(1, number, 0)


def keep(kept: KeptMessages, number: int, now_s: float = 0.0) -> None:
    """Keep the message with one entry."""
    kept.keep(key(number), MESSAGE, DLSN(1, number + 1, 0), now_s)


def found(kept: KeptMessages, now_s: float = 0.0, numbers: range = range(9)) -> list[int]:
    """Return the entries whose message is found."""
    return [n for n in numbers if kept.find(key(n), FAR, now_s) is not None]


def test_a_message_is_found_where_it_begins() -> None:
    """Under its series alone, and not by a reader that wants only a part of it."""
    kept = KeptMessages(10 * ONE)
    keep(kept, 3)
    assert kept.find(key(3), DLSN(1, 4, 0), 1.0) == (MESSAGE, DLSN(1, 4, 0))
    assert kept.find(key(3), DLSN(1, 3, 1), 1.0) is None
    for other in (
        Series("other", "a", b"", 0),
        Series("id", "renamed", b"", 0),
        Series("id", "a", b"fewer columns", 0),
        Series("id", "a", b"", 1),
    ):
        assert kept.find(key(3, other), FAR, 1.0) is None
    assert found(kept, 1.0) == [3]


def test_messages_take_no_more_than_they_may() -> None:
    """Messages used lately stay, and new ones are not kept; later the longest unused give way."""
    kept = KeptMessages(3 * ONE)
    for number in range(5):
        keep(kept, number)
    assert found(kept) == [0, 1, 2]
    assert kept.size_bytes == 3 * ONE
    keep(kept, 1)
    assert kept.size_bytes == 3 * ONE
    assert found(kept, UNUSED_S, range(1)) == [0]
    keep(kept, 5, UNUSED_S)
    assert found(kept, UNUSED_S) == [0, 2, 5]
    assert kept.size_bytes == 3 * ONE
    kept.keep(key(7), b"m" * (3 * ONE), FAR, 2 * UNUSED_S)
    assert found(kept, 2 * UNUSED_S) == [0, 2, 5]
    kept.resize(ONE)
    assert len(kept) == 1
    assert kept.size_bytes == ONE


def test_no_message_is_kept_for_ever() -> None:
    """However often it is used."""
    kept = KeptMessages(3 * ONE)
    keep(kept, 1)
    keep(kept, 2, 30.0)
    assert found(kept, KEPT_S - 0.1) == [1, 2]
    kept.expire(KEPT_S - 0.1)
    assert len(kept) == 2
    assert found(kept, KEPT_S) == [2]
    assert kept.size_bytes == ONE
    kept.expire(30.0 + KEPT_S)
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_rings_come_first() -> None:
    """Older messages lose the bytes that rings take of the budget, and get them back."""
    budget = RingBudget(4 * ONE)
    for number in range(4):
        keep(budget.older, number)
    ring = budget.open_ring(DLSN(2, 0, 0))
    for number in range(2):
        start, end = DLSN(2, number, 0), DLSN(2, number + 1, 0)
        ring.append(Run(start, end, ((start, 1),), None, ONE))
    assert (len(budget.older), budget.older.size_bytes) == (2, 2 * ONE)
    ring.close()
    for number in range(4):
        keep(budget.older, number)
    assert len(budget.older) == 4
    budget.resize(ONE)
    assert len(budget.older) == 1


class Opened(Log):
    """A log that counts its readers."""

    def __init__(self) -> None:
        super().__init__([])
        self.opened: list[DLSN] = []

    async def open_part(self, start: DLSN, end: DLSN) -> Log:
        """Read the entries of two rows from a position on, one by one."""
        self.opened.append(start)
        numbers = range(start.entry_id, end.entry_id + bool(end.slot_id))
        portions: list[list[EntryRows]] = [[entry(number, 2)] for number in numbers]
        return Log(portions)


def test_the_next_reader_asks_no_bookie() -> None:
    """Also one that wants less, until a message goes beyond that, and one that wants more."""
    log, kept, got = Opened(), KeptMessages(1 << 20), list[bytes]()
    deliveries = Deliveries(cast("Any", None), Outgoing(1), kept, catching_up_max=1)

    async def send(message: bytes) -> None:
        got.extend(values(message))

    def read(end: DLSN) -> list[bytes]:
        reading = Reading(
            log=cast("Any", log),
            view=RowView("a", None, ["dlsn", "value"]),
            start=DLSN.INITIAL,
            end=end,
            known_end=end,
            follow=False,
        )
        got.clear()
        asyncio.run(deliveries.deliver(reading, send))
        return list(got)

    rows = [b"%d:%d" % (number, slot) for number in range(4) for slot in range(2)]
    assert read(DLSN(1, 2, 1)) == rows[:5]  # of the third message only a part
    assert log.opened == [DLSN.INITIAL]
    assert deliveries.kept_messages == 0
    assert read(DLSN(1, 2, 0)) == rows[:4]
    assert log.opened == [DLSN.INITIAL]
    assert deliveries.kept_messages == 2
    assert read(DLSN(1, 1, 1)) == rows[:3]  # of the second message only a part
    assert read(DLSN(1, 4, 0)) == rows
    assert log.opened == [DLSN.INITIAL, DLSN(1, 1, 0), DLSN(1, 2, 0)]
    assert read(DLSN(1, 4, 0)) == rows
    assert len(log.opened) == 3


def test_a_redacted_row_is_not_sent_again() -> None:
    """Readers that begin after a redaction get none of what was kept before."""

    async def scenario(served: Proxies) -> None:
        scene = Scene(served.cluster)
        await scene.start()
        await served.start()
        reads = served.servers[0].reads

        async def sent() -> list[bytes]:
            got: list[bytes] = []

            async def send(message: bytes) -> None:
                got.append(message)

            await reads.do_get(Ticket(log="clicks", start=Place(dlsn="1:0:0")), send)
            return got

        first = await sent()
        assert sum(message.count(NEEDLE.encode()) for message in first) == 20
        assert reads.deliveries.kept_messages == 0
        assert await sent() == first
        assert reads.deliveries.kept_messages == len(first) - 1  # one is the schema
        await (await scene.redactor()).redact()
        later = await sent()
        assert sum(message.count(NEEDLE.encode()) for message in later) == 0
        assert reads.deliveries.kept_messages == len(first) - 1

    with_proxies()(scenario)


def test_memory_is_freed_without_another_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy whose readers have all left looks at its messages until none is kept."""
    monkeypatch.setattr(serving, "CALM_S", 0.05)

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("a")
        await stream.send(b"one", b"two")
        await stream.acked(2)
        await stream.last_reply()
        reads = served.servers[0].reads
        older = reads.followed.budget.older
        await reads.do_get(Ticket(log="a"), _drop)
        assert len(older) == 1
        monkeypatch.setattr(kept_module, "KEPT_S", 0.0)
        await until(lambda: not older)

    with_proxies("a")(scenario)


async def _drop(_: object) -> None:
    pass
