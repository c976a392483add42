"""A seeded network between processes: delay, loss, duplication, reordering, partitions, pauses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

_DELAY_S = 0.002
_LAG_S = 4.0


class Network:
    """Messages between named processes.

    Disorder comes from delays.  A partition is one-way and loses what is sent into it; a lag is
    one-way and delays it by seconds; a flaky link loses every other message; a paused process
    neither sends nor receives until it goes on; a dead one never does again.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self.loss = 0.0
        self.duplication = 0.0
        self.slowness = 0.0
        self._blocked: set[tuple[str, str]] = set()
        self._lagging: set[tuple[str, str]] = set()
        self._flaky: set[tuple[str, str]] = set()
        self._held: dict[str, list[Callable[[], None]]] = {}
        self._dead: set[str] = set()

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Send one message: `deliver` is called when, as often as, and if it arrives."""
        if source in self._dead:
            return
        if source in self._held:
            self._held[source].append(lambda: self.send(source, target, deliver))
            return
        if self.loses(source, target):
            return
        copies = 2 if self._rng.random() < self.duplication else 1
        for _ in range(copies):
            self._loop.call_later(self.delay(source, target), self._arrive, source, target, deliver)

    def carry(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Send what is not lost, once."""
        if source not in self._dead:
            delay_s = self.delay(source, target)
            self._loop.call_later(delay_s, self._arrive, source, target, deliver)

    def is_held(self, source: str) -> bool:
        """Return whether a process is paused."""
        return source in self._held

    def hold(self, source: str, action: Callable[[], None]) -> None:
        """Do something once a paused process goes on."""
        self._held[source].append(action)

    def loses(self, source: str, target: str) -> bool:
        """Decide whether a message sent now is lost."""
        link = (source, target)
        loss = 0.5 if link in self._flaky else self.loss
        return link in self._blocked or self._rng.random() < loss

    def delay(self, source: str, target: str) -> float:
        """Draw a message's travel time."""
        if (source, target) in self._lagging:
            return self._rng.uniform(0.0, _LAG_S)
        if self._rng.random() < self.slowness:
            return self._rng.uniform(0.0, 0.5)
        return self._rng.uniform(0.5, 1.5) * _DELAY_S

    def _arrive(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        if target in self._dead or (source, target) in self._blocked:
            return
        if target in self._held:
            self._held[target].append(deliver)
        else:
            deliver()

    def block(self, source: str, target: str) -> None:
        """Lose everything from `source` to `target`."""
        self._blocked.add((source, target))

    def lag(self, source: str, target: str) -> None:
        """Delay everything from `source` to `target`."""
        self._lagging.add((source, target))

    def make_flaky(self, source: str, target: str) -> None:
        """Lose half of everything from `source` to `target`."""
        self._flaky.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        """End whatever disturbs a link."""
        for links in (self._blocked, self._lagging, self._flaky):
            links.discard((source, target))

    def pause(self, name: str) -> None:
        """Hold what a process sends and receives."""
        self._held.setdefault(name, [])

    def resume(self, name: str) -> None:
        """Let everything held go, in order."""
        for action in self._held.pop(name, []):
            action()

    def kill(self, name: str) -> None:
        """End a process: nothing comes from it or reaches it any more."""
        self._dead.add(name)
        self._held.pop(name, None)

    def heal(self) -> None:
        """End every disturbance but death."""
        self.loss = self.duplication = self.slowness = 0.0
        for links in (self._blocked, self._lagging, self._flaky):
            links.clear()
        for name in list(self._held):
            self.resume(name)
