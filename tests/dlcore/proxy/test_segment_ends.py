"""Readers whose range ends where a segment does, and what became of them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from dlcore.flight.tickets import Place, Ticket
from dlcore.proxy.reading import delivery
from dlcore.proxy.reading.serving import lowest
from tests.fixtures.memory_namespace import record
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    import pytest


def test_a_stalled_reader_has_all_though_it_is_truncated_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It got the last record of the segment; the records behind that are not wanted."""
    monkeypatch.setattr(delivery, "STALL_S", 0.0)

    async def scenario(served: Proxies) -> None:
        log = await served.cluster.namespaces[0].open_log("a")
        for number in range(2):
            async with await log.open_writer() as writer:
                for each in range(3):
                    await writer.write(record(3 * number + each))
        await served.start()
        (server,) = served.servers
        sent = []

        async def send(message: bytes) -> None:
            sent.append(message)
            if len(sent) == 2:  # behind the schema
                await log.truncate(DLSN(2, 3, 0))

        ticket = Ticket(log="a", end=Place(dlsn="2:0:0"))
        await server.reads.do_get(ticket, send)
        assert len(sent) == 2

    with_proxies("a")(scenario)


def test_the_lowest_position_with_the_same_records_before_it() -> None:
    """Behind a segment it is in that segment; within one it is itself."""

    async def scenario(served: Proxies) -> None:
        log = await served.cluster.namespaces[0].open_log("a")
        assert lowest(await log.get_snapshot(), DLSN(1, 0, 0)) == DLSN(1, 0, 0)
        for number in range(2):
            async with await log.open_writer() as writer:
                for each in range(3):
                    await writer.write(record(3 * number + each))
        snapshot = await log.get_snapshot()
        for given, wanted in (
            (DLSN(1, 0, 0), DLSN(1, 0, 0)),
            (DLSN(1, 1, 0), DLSN(1, 1, 0)),
            (DLSN(2, 0, 0), DLSN(1, 3, 0)),
            (DLSN(2, 2, 0), DLSN(2, 2, 0)),
            (snapshot.end, snapshot.end),
        ):
            assert lowest(snapshot, given) == wanted

    with_proxies("a")(scenario)
