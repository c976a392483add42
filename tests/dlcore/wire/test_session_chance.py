"""Goal: whatever callers, a bookie and a transport do, each request has one answer.

Method: seeded chance; in the end the session is given up.  The wire is the real one.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import (
    BookieUnavailableError,
    DLError,
)
from dlcore.wire.fields import Status
from dlcore.wire.messages import (
    Add,
    Chunk,
    Durable,
    Failed,
    Lac,
    Ping,
    ReadEntries,
    ReadEntry,
    ReadLac,
    WriteLac,
)
from dlcore.wire.session import (
    TRANSITIONS,
    AddWrite,
    Ask,
    Bring,
    Call,
    Cancelled,
    Confirm,
    EndRead,
    Expire,
    ExpireAt,
    GivenUp,
    LacWrite,
    Lost,
    Refuse,
    Send,
    SessionState,
    Signal,
    Taken,
    Tick,
    TickAt,
)
from tests.fixtures.client_session_bench import (
    FRAME,
    RANGE,
    READ,
    SIZE,
    Bench,
)
from tests.fixtures.raw_wire import WELCOME
from tests.fixtures.session_bench import messages_of

if TYPE_CHECKING:
    from dlcore.wire.messages import Message
    from dlcore.wire.session import Effect, Event, Read


class World:
    """A session with callers, a bookie and a transport that do what they like."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(LedgerClientConfig(pending_entries_max=8), opened=False)
        self.now_s = 0.0
        self.due: dict[type, float] = {}
        self.answers = Counter[int]()
        self.asked = 0
        self.reads: dict[str, bool] = {}  # whether it has its answer
        self.unanswered: list[Message] = []
        self.flushes = 0
        self.is_up = self.was_up = self.is_gone = False

    def handle(self, event: Event[str]) -> None:
        """Feed an event, and perform its effects."""
        for effect in self.bench.handle(event):
            self.perform(effect)

    def receive(self, *messages: Message) -> None:
        """Let the bookie send."""
        for effect in self.bench.receive(*messages, now_s=self.now_s):
            self.perform(effect)

    def perform(self, effect: Effect[str]) -> None:  # noqa: C901 - one case for each kind
        """Perform an effect; its answer may come at once."""
        match effect:
            case Send(buffers):
                assert self.is_up
                self.unanswered += messages_of(buffers)
                if self.rng.random() < 0.1:
                    self.handle(Signal.WRITE_PAUSED)
            case Confirm(writes):
                for on_answer, _, _ in writes:
                    on_answer(None)
            case Refuse(on_answer, error):
                on_answer(error)
            case Bring(read, _) | EndRead(read, _):  # each read has one message here
                assert not self.reads[read]
                self.reads[read] = True
            case TickAt(at_s):
                self.due[Tick] = at_s
            case ExpireAt(at_s):
                self.due[Expire] = at_s
            case Call.FLUSH_SOON:
                self.flushes += 1
            case Call.NOTE_BROKEN:
                self.due.clear()
            case Call.ABORT:
                self.is_up = False
            case Call.NOTE_CLOSED:
                self.is_gone = True

    def write(self) -> None:
        """Add an entry or write a LAC; its answer may ask for more."""
        number, self.asked = self.asked, self.asked + 1

        def on_answer(_error: DLError | None) -> None:
            self.answers[number] += 1
            if self.rng.random() < 0.2:
                self.write()

        if self.rng.random() < 0.3:
            self.handle(LacWrite(1, number, on_answer, self.now_s))
        else:
            is_recovery = self.rng.random() < 0.2
            self.handle(AddWrite(FRAME, SIZE, is_recovery, on_answer, self.now_s))

    def read(self) -> None:
        """Send a read, or be done with one."""
        if self.reads and self.rng.random() < 0.4:
            read = self.rng.choice(list(self.reads))
            self.handle(Taken(read, 400))
            self.handle(Cancelled(read))
            del self.reads[read]
        else:
            read = f"read {self.asked}"
            self.asked += 1
            self.answers[self.asked - 1] = 1
            self.reads[read] = False
            requests: list[Read] = [READ, RANGE, ReadEntry(0, 1, 0, fence=False)]
            self.handle(Ask(self.rng.choice(requests), read))

    def answer(self) -> None:
        """Let the bookie answer a request."""
        if not self.is_up or not self.unanswered:
            return
        match self.unanswered.pop(self.rng.randrange(len(self.unanswered))):
            case Add(first, _, frames):
                ids = list(range(first, first + len(frames)))
                self.receive(Failed(ids.pop(), Status.FENCED, ""), Durable(tuple(ids)))
            case WriteLac(request_id):
                self.receive(Durable((request_id,)), Ping(1))
            case ReadLac(request_id):
                self.receive(Lac(request_id, 3))
            case ReadEntries(request_id) | ReadEntry(request_id):
                self.receive(Chunk(request_id, [FRAME], is_last=True))

    def connect(self) -> None:
        """Let the connection be made, and the bookie say WELCOME."""
        if not self.was_up:
            self.is_up = self.was_up = True
            self.handle(Signal.CONNECTED)
        elif self.is_up and self.bench.state is SessionState.GREETING:
            self.receive(WELCOME)

    def lose(self) -> None:
        """Lose the connection, or give it up."""
        if self.rng.random() < 0.9:
            return
        if self.was_up and self.rng.random() < 0.5:
            self.is_up = False
            self.handle(Lost(""))
            self.was_up = True
        else:
            self.handle(GivenUp(BookieUnavailableError("given up")))

    def wait(self) -> None:
        """Let time pass, and let due events come."""
        self.now_s += self.rng.choice([0.1, 1.0, 4.0])
        for kind, at_s in list(self.due.items()):
            if self.due.get(kind, self.now_s + 1) <= self.now_s:
                del self.due[kind]
                self.handle(kind(max(self.now_s, at_s)))
        self.flush()

    def flush(self) -> None:
        """Let an iteration of the event loop end."""
        flushes, self.flushes = self.flushes, 0
        for _ in range(flushes):
            self.handle(Signal.FLUSH)

    def resume(self) -> None:
        """Let the bookie receive."""
        self.handle(Signal.WRITE_RESUMED)


def test_each_request_has_one_answer() -> None:
    """Whatever happens, and every transition of the table occurs."""
    moves: set[tuple[SessionState, SessionState]] = set()
    for seed in range(300):
        world = World(seed)
        world.handle(Tick(0.0))
        steps = [world.write, world.read, world.answer, world.flush, world.resume, world.wait]
        for _ in range(world.rng.randrange(60)):
            world.rng.choice([*steps, world.answer, world.connect, world.lose])()
        world.handle(GivenUp(BookieUnavailableError("the end")))
        if world.was_up:
            world.handle(Lost(""))
        assert world.is_gone
        assert [world.answers[each] for each in range(world.asked)] == [1] * world.asked
        assert all(world.reads.values())
        moves |= world.bench.session.moves
    table = TRANSITIONS.causes.items()
    assert moves == {(before, after) for before, afters in table for after in afters}
