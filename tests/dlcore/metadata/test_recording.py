"""The store that counts requests: what is sent together counts as one round trip."""

from __future__ import annotations

import asyncio

from dlcore.metadata.port import Create, Put
from tests.fixtures.recording_store import RecordingStore, Requests
from tests.fixtures.simulated_store import SimulatedTree


def test_depth_counts_what_waits_for_an_answer() -> None:
    """Three requests at once are one deep, one after them makes two; a watch adds no depth."""

    async def run() -> Requests:
        store = RecordingStore(SimulatedTree().connect())
        await store.create("/a")  # before the recording: not counted
        with store.record() as requests:
            await asyncio.gather(store.sync("/a"), store.get("/a"), store.get_children("/a"))
            await store.multi([Put("/a", b"1234", 0), Create("/a/b", b"56")])
            store.watch("/a", lambda: None)()  # a third round trip, but no caller waits for it
        await store.get("/a")
        return requests

    requests = asyncio.run(run())
    assert requests.kinds == {"sync": 1, "get": 1, "get_children": 1, "multi": 1, "watch": 1}
    assert requests.depth == 2
    assert requests.bytes_written == len("/a") + 4 + len("/a/b") + 2
    assert requests.paths[3] == ("multi", "/a")


def test_a_request_is_as_deep_as_the_answers_it_could_know() -> None:
    """A chain of three beside a single request is three deep."""

    async def run() -> Requests:
        store = RecordingStore(SimulatedTree().connect())

        async def chain() -> None:
            for _ in range(3):
                await store.sync("/")

        with store.record() as requests:
            await asyncio.gather(chain(), store.sync("/"))
        return requests

    requests = asyncio.run(run())
    assert (requests.count, requests.depth) == (4, 3)
