"""The object store of a run: one for all processes, which lies as real ones do.

A put is refused, is slow, loses its answer after it went through, goes through after its process
gave up or died, or stores a part, other bytes, or what belongs to another name.  Stored objects are
not found for a while.  Lists leave out what is new, name what is gone, name things twice, and end
too early.  Once an object was read back nothing happens to it: that would be loss of data.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.base.errors import AlreadyClosedError, ObjectStoreError
from dlcore.log.cold.objects import ListedObject, Objects

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import AsyncGenerator, Callable, Sequence

    from dlcore.wire.frames import BytesLike
    from tests.simulation.clients import SimClient
    from tests.simulation.tables import Catalog

PUT_FAULTS = ("refused", "lost", "late", "torn", "garbled", "misplaced", "unseen")
"""The ways of a put that goes wrong."""
LIST_FAULTS = ("left out", "named again", "named twice", "cut")
_LATE_S_MAX = 4.0
_UNSEEN_S_MAX = 1.0
_DIES_SHARE = 0.04
"""How often the process dies at a request, before or after it goes through."""


@dataclass(slots=True)
class Stored:
    """An object: what was to be stored, what is, and what of it was read since."""

    sent: bytes
    data: bytes
    modified_ms: int
    seen_from_s: float
    read: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_read_back(self) -> bool:
        """Whether each byte was read since it was stored, and is what was to be stored."""
        end = 0
        for first, after in sorted(self.read):
            if first > end:
                return False
            end = max(end, after)
        return end >= len(self.data) and self.data == self.sent


class ColdStore:
    """The store, as the checkers see it.

    Args:
        rng: its own chance.
        faults: what goes wrong, out of `PUT_FAULTS`, `LIST_FAULTS`, "reads" and "deaths".
        share: how often a request goes wrong.
        now_ms: the store's clock.
        is_healed: tells whether nothing goes wrong any more.
        counts: where what happened is counted.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        faults: Sequence[str],
        share: float,
        now_ms: Callable[[], int],
        is_healed: Callable[[], bool],
        counts: Counter[str],
    ) -> None:
        self.rng = rng
        self._faults = faults
        self._share = share
        self._now_ms = now_ms
        self._is_healed = is_healed
        self._counts = counts
        self.objects: dict[str, Stored] = {}
        self._gone: dict[str, ListedObject] = {}
        self.catalog: Catalog | None = None
        """The tables beside logs, if there are any."""
        self.on_deleted: Callable[[str], None] = lambda _: None
        """Takes the name of each object as it goes."""

    def fate_of(self, kinds: Sequence[str]) -> str:
        """Return what goes wrong with a request, of some kinds of faults; empty: nothing."""
        if self._is_healed() or self.rng.random() >= self._share:
            return ""
        fates = [each for each in kinds if each in self._faults]
        fate = self.rng.choice(fates) if fates else ""
        if fate:
            self._counts[f"object {fate}"] += 1
        return fate

    def store(self, url: str, data: bytes, fate: str) -> None:
        """Store an object where there is none."""
        if url in self.objects:
            raise ObjectStoreError(f"{url} exists")
        stored = data
        if fate == "torn":
            stored = data[: self.rng.randrange(len(data))]
        elif fate == "garbled":
            at = self.rng.randrange(len(data))
            stored = data[:at] + bytes([data[at] ^ (1 << self.rng.randrange(8))]) + data[at + 1 :]
        elif fate == "misplaced" and self.objects:
            stored = self.rng.choice(list(self.objects.values())).data
        unseen_s = self.rng.uniform(0.0, _UNSEEN_S_MAX) if fate == "unseen" else 0.0
        now_s = asyncio.get_running_loop().time()
        self.objects[url] = Stored(data, stored, self._now_ms(), now_s + unseen_s)

    def find(self, url: str, end: int) -> Stored:
        """Return an object that has so many bytes."""
        found = self.objects.get(url)
        now_s = asyncio.get_running_loop().time()
        if found is None or len(found.data) < end or found.seen_from_s > now_s:
            raise ObjectStoreError(f"{url} does not exist, or has fewer than {end} bytes")
        return found

    def listed(self, url: str, fate: str) -> list[ListedObject]:
        """Return what a list says."""
        found = [
            ListedObject(each, len(stored.data), stored.modified_ms)
            for each, stored in self.objects.items()
            if each.startswith(f"{url}/")
        ]
        if fate == "left out":
            found = [each for each in found if self.rng.random() < 0.5]
        elif fate == "named again":
            found += [stored for each, stored in self._gone.items() if each.startswith(f"{url}/")]
        elif fate == "named twice":
            found += found
        return found

    def remove(self, url: str) -> None:
        """Delete an object, if it is there."""
        stored = self.objects.get(url)
        if stored is not None:
            self.on_deleted(url)
            del self.objects[url]
            self._gone[url] = ListedObject(url, len(stored.data), stored.modified_ms)


class ColdStoreOfProcess(Objects):
    """The store as one process reaches it."""

    def __init__(self, store: ColdStore, client: SimClient) -> None:
        self._store = store
        self._client = client

    async def _pass(self, dies_at: tuple[str, str] | None = None) -> None:
        """Take some time; a process that is paused waits, and one that is dead never goes on.

        `dies_at` is a request and a step of it, at which the process may die.
        """
        client, rng = self._client, self._store.rng
        if dies_at and self._store.fate_of(("deaths",)) and rng.random() < _DIES_SHARE:
            client.crash_at(*dies_at)
        await asyncio.sleep(rng.choice((0.001, 0.01, 0.3)) * rng.random())
        await client.store.gate.wait()
        if not client.is_alive:
            await client.store.buried()
            raise AlreadyClosedError("the process is dead")

    async def put_new(self, url: str, data: BytesLike) -> None:
        """Store an object."""
        store, sent = self._store, bytes(data)
        await self._pass(("put object", "before"))
        fate = store.fate_of(PUT_FAULTS)
        if fate == "refused":
            raise ObjectStoreError(f"writing {url}: 503")
        if fate == "late":
            asyncio.get_running_loop().call_later(
                store.rng.uniform(0.0, _LATE_S_MAX), self._arrive, url, sent
            )
            raise ObjectStoreError(f"writing {url}: no answer")
        store.store(url, sent, fate)
        await self._pass(("put object", "after"))
        if fate == "lost" or (
            fate in ("torn", "garbled", "misplaced") and store.rng.random() < 0.5
        ):
            raise ObjectStoreError(f"writing {url}: no answer")

    def _arrive(self, url: str, sent: bytes) -> None:
        if url not in self._store.objects:
            self._store.store(url, sent, "")

    async def read(self, url: str, start: int, end: int) -> BytesLike:
        """Return a part of an object."""
        store = self._store
        await self._pass()
        if store.fate_of(("reads",)):
            raise ObjectStoreError(f"reading {url}: 503")
        found = store.find(url, end)
        await self._pass(("read object", "after"))
        found.read.append((start, end))
        return found.data[start:end]

    async def list_below(self, url: str) -> AsyncGenerator[Sequence[ListedObject], None]:
        """Yield all objects below a URL."""
        store = self._store
        await self._pass()
        fate = store.fate_of(LIST_FAULTS)
        found = store.listed(url, fate)
        half = len(found) // 2
        yield found[:half]
        await self._pass()
        if fate == "cut":
            raise ObjectStoreError(f"listing {url}: 503")
        yield found[half:]

    async def delete(self, url: str) -> None:
        """Delete an object; no error if it is gone."""
        store = self._store
        await self._pass()
        fate = store.fate_of(("refused", "lost"))
        if fate == "refused":
            raise ObjectStoreError(f"deleting {url}: 503")
        store.remove(url)
        if fate:
            raise ObjectStoreError(f"deleting {url}: no answer")
