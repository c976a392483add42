"""Goal: whatever a client sends and a storage does, each request has one answer.

Method: seeded chance.  A client sends requests of all kinds, and mistakes; a storage, a transport
and a scheduler answer when they like.  In the end all of them do what is left.  Half of the clients
have no certificate, and present capabilities now and then, which expire; the test keeps account of
them, and of nothing that is done without one.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from bookie.serving.access import Access
from bookie.serving.session import (
    Abort,
    Call,
    CancelRead,
    CloseStream,
    Effect,
    Event,
    MessageRead,
    News,
    OpenStream,
    Outcome,
    Read,
    ReadEnded,
    RunNotTaken,
    Send,
    SessionState,
    Signal,
    Step,
    Stepped,
    Stored,
    StoreEach,
    StoreLac,
    StoreRun,
    Tick,
    WritePaused,
)
from dlcore.base.access.capability import (
    SKEW_S,
    Grant,
    LedgerRight,
    Signer,
    Verifier,
    new_private_key,
)
from dlcore.base.errors import BookieStorageError
from dlcore.wire.messages import (
    Authorize,
    Cancel,
    Chunk,
    Credit,
    Durable,
    Failed,
    Follow,
    Held,
    Lac,
    Message,
    Ping,
    Pong,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Update,
    WriteLac,
)
from tests.fixtures.raw_wire import HELLO, adds
from tests.fixtures.session_bench import FRAME, HANDSHAKE_S, RUN, Bench, messages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

BROKEN = BookieStorageError("broken")
SIGNER = Signer(new_private_key())


class World:
    """A session with everything around it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(greeted=False, bytes_max=64 * 1024, is_new=True)
        self.session = self.bench.session
        self.now_s = 1_800_000_000.0
        self.until_s: dict[LedgerRight, float] = {}  # what the client has a right to, until when
        if seed % 2:
            verifier = Verifier(lambda: self.now_s)
            verifier.use([SIGNER.public_key])
            self.session.access = Access(verifier)
        self.writes: list[tuple[Sequence[int], int]] = []
        self.reads: dict[int, Read | None] = {}  # None: cancelled
        self.streams: dict[int, OpenStream] = {}
        self.stepping: list[int] = []
        self.soon: list[Signal] = []
        self.next_id = 1
        self.expected: set[int] = set()
        self.answers: Counter[int] = Counter()

    def handle(self, event: Event) -> None:
        """Feed an event, and perform its effects."""
        for effect in self.bench.handle(event):
            self.perform(effect)

    def receive(self, *messages: Message) -> None:
        """Send messages to the session."""
        is_turn = Signal.TURN not in self.soon and self.rng.random() < 0.5
        for effect in self.bench.receive(*messages, is_turn=is_turn):
            self.perform(effect)
        self.note_turn()

    def require_right(self, effect: Effect) -> None:
        """Fail for what is done without a right; a read of an entry may wait longer than it has."""
        rights: dict[type, LedgerRight] = {StoreRun: LedgerRight.ADD, StoreEach: LedgerRight.ADD}
        rights |= {StoreLac: LedgerRight.ADD, Step: LedgerRight.READ}
        needed = rights.get(type(effect))
        if self.session.access is not None and needed is not None:
            assert self.now_s <= self.until_s.get(needed, 0.0) + SKEW_S

    def present(self) -> None:
        """Present a capability, or let time pass."""
        if self.rng.random() < 0.5:
            self.now_s += 40.0
            return
        right = self.rng.choice([LedgerRight.READ, LedgerRight.ADD])
        self.until_s[right] = self.now_s + 20.0
        grants = [Grant.of(1, right)]
        self.receive(Authorize(SIGNER.sign(grants, expires_s=int(self.until_s[right]))))

    def perform(self, effect: Effect) -> None:  # noqa: C901 - one case for each kind
        """Perform an effect; some have their answer at once."""
        self.require_right(effect)
        match effect:
            case Send(buffers):
                self.answers.update(id_ for each in messages_of(buffers) for id_ in ids_of(each))
                if self.rng.random() < 0.2:
                    self.handle(WritePaused(70_000, 0.0))
            case StoreRun(add) if self.rng.random() < 0.5:
                self.handle(RunNotTaken(add))
            case StoreRun(add):
                ids = range(add.first_request_id, add.first_request_id + RUN)
                self.writes.append((ids, sum(map(len, add.frames))))
            case StoreEach(add):
                first = add.first_request_id
                self.writes += (([first + n], len(each)) for n, each in enumerate(add.frames))
            case StoreLac(request):
                self.writes.append(([request.request_id], 0))
            case Read(request):
                self.reads[request.request_id] = effect
            case CancelRead(request_id):
                self.reads[request_id] = None
            case OpenStream(request):
                self.streams[request.request_id] = effect
            case CloseStream(request_id):
                del self.streams[request_id]
            case Step(request_id) if self.rng.random() < 0.5:
                self.stepping.append(request_id)
                self.handle(Signal.STEP_WAITS)
            case Step(request_id):
                self.end_step(request_id)
            case Call():
                self.call(effect)
            case Abort():
                self.handle(Signal.LOST)

    def call(self, call: Call) -> None:
        """Perform an effect that carries nothing."""
        if call is Call.TAKE_TURN and self.rng.random() < 0.5:
            self.take_turn()
        elif call is Call.TAKE_TURN:
            self.soon.append(Signal.TURN)
            self.handle(Signal.TURN_WAITS)
        elif call is Call.FLUSH_SOON:
            self.soon.append(Signal.FLUSH)
        elif call is Call.STEPS_SOON:
            self.soon.append(Signal.BEGIN_STEPS)

    def take_turn(self) -> None:
        """Let the session take requests; if it says so, another turn comes."""
        self.handle(Signal.TURN)
        self.note_turn()

    def note_turn(self) -> None:
        """Let the turn come that the session has without asking for it."""
        if self.session.intake.is_turn_due and Signal.TURN not in self.soon:
            self.soon.append(Signal.TURN)

    def end_step(self, request_id: int) -> None:
        """Read a stream's next message; a stream that is closed has none."""
        chance, stream = self.rng.random(), self.streams.get(request_id)
        if stream is not None and chance < 0.7:
            is_range = isinstance(stream.request, ReadEntries)
            message = (
                Chunk(request_id, [FRAME], is_last=chance < 0.2)
                if is_range
                else Update(request_id, [FRAME], 1, fenced=False)
            )
            self.handle(MessageRead(message))
        self.handle(Stepped(request_id, chance < 0.6, BROKEN if chance > 0.95 else None))

    def end_read(self, request_id: int) -> None:
        """End a single read, with its answer or an error; one that was cancelled has none."""
        read = self.reads.pop(request_id)
        is_good = self.rng.random() < 0.7
        if read is not None and is_good:
            match read.request:
                case ReadLac():
                    self.handle(MessageRead(Lac(request_id, 1)))
                case ReadHeld():
                    self.handle(MessageRead(Held(request_id, 1, 1, [])))
                case ReadEntry():
                    self.handle(MessageRead(Chunk(request_id, [FRAME], is_last=True)))
        self.handle(ReadEnded(request_id, None if read is None or is_good else BROKEN))

    def send_something(self) -> None:
        """Send a request of any kind, or seldom a mistake."""
        rng, number = self.rng, self.next_id
        add = adds(*[FRAME] * rng.choice([1, 2, RUN]), first=number)
        request: Message = rng.choice(
            list[Message](
                [
                    add,
                    WriteLac(number, 1, 0),
                    ReadLac(number, 1, fence=False),
                    ReadHeld(number, 1),
                    *[ReadEntry(number, 1, 0, fence=False)] * 3,
                    ReadEntries(number, 1, 0, 9, 1, 500, 300),
                    Follow(number, 1, 0, 300),
                ]
            )
        )
        before, chance = rng.randrange(1, number + 1), rng.random()
        if chance < 0.1:
            self.receive(Ping(1), Pong(2))
        elif chance < 0.3:
            self.receive(Credit(before, 300))
        elif chance < 0.4:
            self.expected.discard(before)
            self.receive(Cancel(before))
        elif chance < 0.402:
            self.receive(Durable((1,)))
        elif chance < 0.45:
            self.present()
        else:
            self.next_id += len(add.frames) if request is add else 1
            if not isinstance(request, ReadEntries | Follow):
                self.expected.update(range(number, self.next_id))
            self.receive(request)

    def go_on(self) -> None:
        """Do one thing that a request waits for."""
        rng, pick = self.rng, self.rng.randrange
        waiting = [each for each in (self.soon, self.writes, self.reads, self.stepping) if each]
        way = rng.choice(waiting) if waiting else None
        if self.session.patience.is_stalled and (way is None or rng.random() < 0.2):
            self.handle(Signal.WRITE_RESUMED)
        elif way is self.soon:
            signal = self.soon.pop(pick(len(self.soon)))
            self.take_turn() if signal is Signal.TURN else self.handle(signal)
        elif way is self.writes:
            rng.shuffle(self.writes)
            ended = [self.writes.pop() for _ in range(1 + pick(len(self.writes)))]
            self.handle(
                Stored([Outcome(*each, BROKEN if rng.random() < 0.1 else None) for each in ended])
            )
        elif way is self.reads:
            self.end_read(rng.choice(list(self.reads)))
        elif way is self.stepping:
            self.end_step(self.stepping.pop(pick(len(self.stepping))))

    @property
    def is_waited_for(self) -> bool:
        """Whether something is left to do."""
        waiting = self.soon or self.writes or self.reads or self.stepping
        return bool(waiting) or self.session.patience.is_stalled

    def live(self) -> None:
        """Let things happen in any order, and then everything that is left."""
        rng = self.rng
        if rng.random() < 0.05:
            self.handle(Tick(0, HANDSHAKE_S))
        elif rng.random() < 0.9:
            self.receive(HELLO)
        for _ in range(300):
            chance = rng.random()
            if chance < 0.002:
                self.handle(rng.choice([Signal.DRAIN, Signal.LOST]))
            elif chance < 0.5 and self.session.intake.is_reading:
                self.send_something()
            elif chance < 0.6 and self.streams:
                self.handle(News(rng.choice(list(self.streams))))
            elif self.session.state is not SessionState.CLOSED:
                self.go_on()
        while self.is_waited_for:
            self.go_on()


def ids_of(message: Message) -> list[int]:
    """Return the requests that a message ends."""
    match message:
        case Durable(request_ids):
            return list(request_ids)
        case Failed(request_id) | Lac(request_id) | Held(request_id) | Chunk(request_id, _, True):
            return [request_id]
    return []


def test_whatever_happens_each_request_has_one_answer() -> None:
    """Goal: none is lost and none is doubled, and a session that lives is read in the end."""
    ends: set[SessionState] = set()
    for seed in range(200):
        world = World(seed)
        world.live()
        state = world.session.state
        assert max(world.answers.values(), default=0) <= 1, seed
        assert world.bench.bounds.in_flight_bytes == 0
        if state is SessionState.OPEN:
            assert world.expected <= world.answers.keys(), seed
            assert world.session.intake.is_reading, seed
        elif state is SessionState.REFUSED:
            assert world.answers[0] == 1
            assert not world.streams
        ends.add(state)
    assert ends == {SessionState.OPEN, SessionState.REFUSED, SessionState.CLOSED}
