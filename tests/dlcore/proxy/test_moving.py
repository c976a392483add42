"""Logs that move while they are written: nothing lost, nothing doubled, each producer in order.

Goal: a planned move loses and doubles nothing, for a client that sends again what was not
acknowledged; and a client that does not read, or many that are silent, cost others nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from tests.fixtures.memory_namespace import read_all
from tests.fixtures.served_proxies import Client, Proxies, Stream, with_proxies

LOGS = ("a", "b", "c")


@dataclass
class Producer:
    """Writes numbers to one log, wherever it is, and sends again what was not acknowledged."""

    name: str
    log: str
    clients: dict[str, Client]
    at: str
    sent: int = 0
    pending: deque[int] = field(default_factory=deque)
    moves: int = 0

    async def run(self, stopped: asyncio.Event) -> None:
        """Write until it is stopped, and all of it is acknowledged."""
        while self.pending or not stopped.is_set():
            stream = self.clients[self.at].put()
            await stream.begin(self.log)
            ready = await stream.next_reply()
            if ready is not None:
                await self._write(stream, stopped)
            code, message, metadata = await stream.status()
            assert code in ("OK", "UNAVAILABLE"), message
            self.at = metadata.get("dlog-location", self.at)

    async def _write(self, stream: Stream, stopped: asyncio.Event) -> None:
        acked = 0
        for number in list(self.pending):
            await stream.send(self._payload(number))
        while self.pending or not stopped.is_set():
            if not stopped.is_set():
                self.pending.append(self.sent)
                self.sent += 1
                await stream.send(self._payload(self.pending[-1]))
            message = await stream.next_reply()
            assert message is not None, await stream.status()
            if "draining" in message:
                self.at = message["draining"]["location"] or self.at
                self.moves += 1
                break
            for _ in range(message["acked"] - acked):
                self.pending.popleft()
            acked = message["acked"]
        assert await stream.last_reply() is None

    def _payload(self, number: int) -> bytes:
        return b"%s/%d" % (self.name.encode(), number)


def test_logs_move_under_load() -> None:
    """Four times all logs go to another proxy, as in a rolling restart."""

    async def scenario(served: Proxies) -> None:
        clients = {}
        first = await served.start()
        clients[served.servers[0].location] = first
        stopped = asyncio.Event()
        producers = [
            Producer(f"{log}{number}", log, clients, served.servers[0].location)
            for log in LOGS
            for number in range(3)
        ]
        running = [asyncio.create_task(each.run(stopped)) for each in producers]
        for turn in range(4):
            target = [each.sent + 10 for each in producers]
            while any(each.sent < wanted for each, wanted in zip(producers, target, strict=True)):
                await asyncio.wait(running, timeout=0.01)
                assert not any(task.done() for task in running), [
                    task.exception() for task in running if task.done()
                ]
            following = await served.start()
            clients[served.servers[-1].location] = following
            await clients[served.servers[turn].location].act("drain")
        stopped.set()
        await asyncio.gather(*running)
        assert all(each.moves >= 4 for each in producers)
        for log in LOGS:
            found = await read_all(await served.cluster.namespaces[0].open_log(log))
            payloads = [each.payload for each in found]
            for each in producers:
                if each.log == log:
                    mine = [p for p in payloads if p.startswith(each.name.encode() + b"/")]
                    assert mine == [each._payload(number) for number in range(each.sent)]
            assert [each.txid for each in found] == sorted(each.txid for each in found)

    with_proxies(*LOGS)(scenario)


def test_a_client_that_never_reads_and_many_silent_ones_do_no_harm() -> None:
    """Acknowledgements that are not read are not kept; a silent stream is one of many calls."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        silent = [await client.opened("a") for _ in range(300)]
        deaf = client.put()
        await deaf.begin("a")
        for number in range(2000):
            await deaf.send(b"%d" % number)
        busy = await client.opened("b")
        for number in range(50):
            await busy.send(b"%d" % number)
            await busy.next_reply()
        await busy.last_reply()
        assert (await deaf.last_reply() or {})["acked"] == 2000
        for stream in silent:
            assert await stream.last_reply() is None
            assert (await stream.status())[0] == "OK"

    with_proxies(*LOGS)(scenario)
