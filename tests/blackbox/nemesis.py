"""Kills, freezes, drains and restarts proxies and bookies of a sandbox, as a seed says."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow.flight as flight

from dlcore.ops.sandbox.cluster import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlcore.ops.sandbox.cluster import Bookie, Sandbox

KINDS = {
    "proxy": ("kill proxy", "freeze proxy", "drain proxy", "restart proxy"),
    "bookie": ("kill bookie", "freeze bookie", "restart bookie"),
}
"""One proxy at most is broken at a time, and beside it one bookie at most."""
_LASTS_S_MAX = 7.0
"""Half of what is frozen outlasts the session of a proxy, 4 s."""
_PAUSE_S_MAX = 3.0
_DRAIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault for one of the processes of a sort, counted from 0, and its length."""

    kind: str
    target: int
    lasts_s: float
    pause_s: float
    """After it is undone."""


def faults(seed: int, sort: str, count: int) -> Iterator[Fault]:
    """Yield the faults of a seed without an end, for so many processes of a sort."""
    chance = random.Random(f"{seed} {sort}")
    while True:
        yield Fault(
            kind=chance.choice(KINDS[sort]),
            target=chance.randrange(count),
            lasts_s=chance.uniform(0.2, _LASTS_S_MAX),
            pause_s=chance.uniform(0.2, _PAUSE_S_MAX),
        )


class Nemesis:
    """Breaks what runs in a sandbox, from two threads: one for proxies, one for bookies.

    `failures` says what could not be broken or undone, which should be nothing.
    """

    def __init__(self, sandbox: Sandbox, seed: int, say: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._sandbox = sandbox
        self._seed = seed
        self._say = say
        self._is_over = threading.Event()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Break things meanwhile; at the end all run again."""
        sorts: dict[str, Sequence[Proxy | Bookie]] = {
            "proxy": self._sandbox.proxies,
            "bookie": self._sandbox.bookies,
        }
        threads = [
            threading.Thread(target=self._break, args=item, name=f"breaks each {item[0]}")
            for item in sorts.items()
        ]
        with ExitStack() as stack:
            for thread in threads:
                thread.start()
                stack.callback(thread.join)
            stack.callback(self._is_over.set)
            yield

    def _break(self, sort: str, processes: Sequence[Proxy | Bookie]) -> None:
        for fault in faults(self._seed, sort, len(processes)):
            if self._is_over.is_set():
                return
            process = processes[fault.target]
            self._say(f"{fault.kind} {process.name} for {fault.lasts_s:.1f} s")
            try:
                self._do(fault, process)
            except Exception as error:  # noqa: BLE001  # it is reported, and fails the run
                self.failures.append(f"{fault.kind} {process.name}: {error!r}")
                return
            self.counts[fault.kind] += 1
            self._is_over.wait(fault.pause_s)

    def _do(self, fault: Fault, process: Proxy | Bookie) -> None:
        match fault.kind.partition(" ")[0]:
            case "kill":
                process.kill()
                self._is_over.wait(fault.lasts_s)
                process.restart()
            case "freeze":
                process.pause()
                try:
                    self._is_over.wait(fault.lasts_s)
                finally:
                    process.resume()
            case "restart":
                process.restart()
            case "drain":
                assert isinstance(process, Proxy), "bookies are not drained"
                self._drain(process.location, fault.lasts_s)

    def _drain(self, location: str, lasts_s: float) -> None:
        options = flight.FlightCallOptions(timeout=_DRAIN_S)
        with flight.connect(location) as proxy:
            list(proxy.do_action(flight.Action("drain", b"{}"), options))
            self._is_over.wait(lasts_s)
            list(proxy.do_action(flight.Action("undrain", b"{}"), options))
