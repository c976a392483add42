"""Proxies that are started again one after the other, under writers: no writer waits for long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

from dlcore.proxy.rendezvous import preferred_owner
from tests.dlcore.backends.test_writing import numbered, remote
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import read_all
from tests.fixtures.ports import free_ports
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.backends.flight.log import FlightLog

PROXIES, LOGS_EACH = 3, 2
APPEND_S_MAX = 1.0


@dataclass
class Appending:
    """Appends one record after the other."""

    done: int = 0
    longest_s: float = 0.0

    async def run(self, log: FlightLog, ending: asyncio.Event) -> None:
        """Do so until the end, and note what took longest."""
        clock = asyncio.get_running_loop().time
        async with await log.open_writer() as writer:
            while not ending.is_set():
                begun_s = clock()
                await writer.write(numbered(self.done, 1)[0])
                self.longest_s = max(self.longest_s, clock() - begun_s)
                self.done += 1


def owned_by(location: str, locations: set[str]) -> list[str]:
    """Return names of logs that this proxy should own."""
    names = (f"log-{number}" for number in count())
    return list(
        islice((name for name in names if preferred_owner(name, locations) == location), LOGS_EACH)
    )


def test_no_append_takes_long() -> None:
    """Each proxy leaves in good order, and comes back at its address; none of them keeps a log."""

    async def scenario(served: Proxies) -> None:
        first = free_ports(PROXIES)
        ports = range(first, first + PROXIES)
        for port in ports:
            await served.start(port=port)
        locations = {each.location for each in served.servers}
        direct = served.cluster.namespaces[0]
        logs = [log for location in locations for log in owned_by(location, locations)]
        for log in logs:
            await direct.create_log(log)
        ending, appending = asyncio.Event(), [Appending() for _ in logs]
        running = [
            asyncio.create_task(each.run(await remote(served, log), ending))
            for each, log in zip(appending, logs, strict=True)
        ]

        async def goes_on() -> None:
            wanted = [each.done + 10 for each in appending]
            await until(
                lambda: (
                    any(each.done() for each in running)
                    or all(each.done > least for each, least in zip(appending, wanted, strict=True))
                )
            )

        await goes_on()
        for number, port in enumerate(ports):
            await served.servers[number].aclose()
            await goes_on()
            await served.start(port=port)
            await goes_on()
        ending.set()
        await asyncio.gather(*running)
        assert max(each.longest_s for each in appending) < APPEND_S_MAX
        for log, each in zip(logs, appending, strict=True):
            found = await read_all(await direct.open_log(log))
            assert [row.txid for row in found] == list(range(each.done))

    with_proxies()(scenario)
