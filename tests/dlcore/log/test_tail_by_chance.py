"""Goal: a log is read whole and in order, whatever happens meanwhile.

Method: seeded chance, with ledgers that fail at times and a log that grows; every effect performed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from dlcore.log.reading.cursor import FollowExtent
from dlcore.log.reading.tail import (
    AlarmAt,
    Control,
    Effect,
    Event,
    Fetched,
    Follow,
    Open,
    Read,
    ReadState,
    StateRead,
    StreamFailed,
    TailState,
    WaitOver,
    Waits,
    WarnIdle,
)
from tests.fixtures.log_states import Tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.wire.frames import EntryFrame


from tests.fixtures.tail_bench import (
    CHANGED,
    CONFIG,
    ENDED,
    GONE,
    LOST,
    START,
    Bench,
    completed,
    entries,
    sealed,
    started,
)


class World:
    """A log that grows, ledgers that fail at times, and a caller, by chance."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tree = Tree()
        self.segments = 0
        self.is_open = False
        config = replace(CONFIG, read_ahead_bytes=self.rng.choice([50, 250, 10_000]))
        self.bench = Bench(self.tree, config=config)
        self.stream: list[EntryFrame] | None = None
        self.goes_on = False
        self.is_followed = False
        self.reads = 0
        self.now = 0.0
        self.seen: set[TailState] = set()
        self.handle(START)

    def handle(self, event: Event) -> None:
        """Feed an event, and note its effects."""
        self.note(self.bench.handle(event))

    def note(self, effects: list[Effect]) -> None:
        """Perform what the streams need, and remember the rest."""
        for effect in effects:
            match effect:
                case Read(step) | Follow(step):
                    ids = range(step.first_entry_id, 3)
                    self.stream, self.goes_on = entries(*ids), True
                    self.is_followed = isinstance(effect, Follow)
                case Control.GO_ON:
                    self.goes_on = True
                case Control.STOP:
                    self.stream = None
                case ReadState():
                    self.reads += 1
                case WaitOver(error):
                    assert error is None
                case _:
                    known = isinstance(effect, Open | AlarmAt | WarnIdle)
                    assert known or effect in (Control.DROP, Control.AWAIT_ROOM)
        self.seen.add(self.bench.state)

    def turn(self) -> None:
        """Let one thing happen."""
        self.now += self.rng.choice([0.01, 1.0])
        choices: list[Callable[[], None]] = [
            self.grow,
            lambda: self.handle(Waits(self.now, self.now)),
        ]
        if self.stream is not None and self.goes_on:
            choices += [self.flow] * 3
        if self.reads:
            choices += [self.learn] * 2
        if self.bench.machine.buffer.entries:
            choices += [lambda: self.note(self.bench.take())] * 2
        self.rng.choice(choices)()

    def grow(self) -> None:
        """Change the log, and the machine hears of it now or never, but of the last change."""
        if self.bench.tree.at.head.sealed:
            self.handle(CHANGED)
            return
        if self.is_open:
            completed(self.tree, self.segments + 10)
        elif self.segments == 6:
            sealed(self.tree)
        else:
            self.segments += 1
            started(self.tree, self.segments + 10)
        self.is_open = not self.is_open and not self.tree.at.head.sealed
        if self.rng.random() < 0.7:
            self.handle(CHANGED)

    def flow(self) -> None:
        """Let the stream bring entries, fail or end."""
        assert self.stream is not None
        self.goes_on = False
        if self.rng.random() < 0.1 and self.reads == 0:
            self.stream = None
            self.tree.at = structs.replace(self.tree.at, version=self.tree.at.version + 1)
            self.handle(StreamFailed(self.rng.choice([LOST, GONE])))
            return
        if not self.stream:
            self.stream = None
            self.handle(ENDED)
            return
        count = self.rng.randint(1, len(self.stream))
        chunk, self.stream = self.stream[:count], self.stream[count:]
        step = self.bench.machine._step
        if isinstance(step, FollowExtent) and count == 1:
            effects = self.bench.push(chunk[0])
            if Control.REFUSE not in effects:
                self.goes_on = True
                self.note(effects)
                return
        self.handle(Fetched(chunk))

    def learn(self) -> None:
        """Let the segment list be read."""
        self.reads -= 1
        self.handle(StateRead(self.tree.state))


def test_every_entry_comes_once_whatever_happens() -> None:
    """In order, up to the end of a sealed log, in 200 histories."""
    seen: set[TailState] = set()
    for seed in range(200):
        world = World(seed)
        turns = 0
        while world.bench.state is not TailState.ENDED or world.bench.machine.buffer.entries:
            world.turn()
            turns += 1
            assert turns < 20_000, seed
        assert world.bench.taken == [(lssn, each) for lssn in range(1, 7) for each in range(3)], (
            seed
        )
        seen |= world.seen
    assert seen == set(TailState) - {TailState.FAILED, TailState.CLOSED}
