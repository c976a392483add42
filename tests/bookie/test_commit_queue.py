"""Goal: every transition of the queue of group commit.

Method: exact effects for each way; then seeded chance, with a device that takes what it likes.
"""

from __future__ import annotations

import random

import pytest

from bookie.files.commit_queue import (
    TRANSITIONS,
    Batch,
    Call,
    CommitQueue,
    CommitState,
    DiskFull,
    Durable,
    Effect,
    Event,
    Fail,
    Failed,
    FooterMade,
    HandOver,
    MakeFooter,
    Offer,
    RetryLater,
    Signal,
    Step,
    UnsealedFile,
    UnsealedFiles,
    Write,
)
from bookie.files.format import NOTE_BYTES, decode_file_header, encode_file_header
from bookie.files.index import FileIndex
from bookie.files.replay import WritePosition
from dlcore.base.errors import BookieStorageError

OWNER = bytes(16)
RETRY_S = 5.0
FULL = BookieStorageError("no space")
BROKEN = BookieStorageError("cannot sync")


def new_file(number: int) -> UnsealedFile:
    """Return a file that is not created yet."""
    content = encode_file_header(number, owner=OWNER, life="00" * 16, live_files={})
    header = decode_file_header(memoryview(content), number=number, owner=OWNER)
    position = WritePosition(header=header, offset=header.size, sequence=0)
    return UnsealedFile(FileIndex(number), position, content)


class Bench:
    """A machine, validated after each event; its first file is ready unless a test says no."""

    def __init__(self, *, is_ready: bool = True, batch_bytes_max: int = 100) -> None:
        first = new_file(1)
        if is_ready:
            first.file = object()  # type: ignore[assignment]  # only the driver uses it
            first.is_noted = True
        self.files = UnsealedFiles(first)
        self.machine = CommitQueue(self.files, batch_bytes_max=batch_bytes_max, retry_s=RETRY_S)
        self.moves: set[tuple[CommitState, CommitState]] = set()

    def handle(self, event: Event) -> list[Effect]:
        """Feed an event."""
        before = self.machine.state
        effects = self.machine.handle(event)
        self.machine.validate()
        if before is not self.machine.state:
            self.moves.add((before, self.machine.state))
        return effects

    def accept(
        self, size: int, *, is_urgent: bool = True, is_apart: bool = False
    ) -> tuple[Batch, list[Effect]]:
        """Accept a record; return its batch and the effects."""
        batch = self.machine.batch_for(size, is_apart=is_apart)
        self.files.current.position.offset += size
        batch.buffers.append(bytes(size))
        batch.ledger_ids.add(size)
        before = self.machine.state
        effects = self.machine.accept(size, is_urgent=is_urgent)
        self.machine.validate()
        if before is not self.machine.state:
            self.moves.add((before, self.machine.state))
        return batch, effects

    def roll(self) -> UnsealedFile:
        """Direct the next records to a new file."""
        following = new_file(self.files.current.index.number + 1)
        self.files.roll(following)
        return following

    def write(self, write: Effect) -> list[Effect]:
        """Do a write of a thread."""
        assert isinstance(write, Write)
        if write.step is Step.CREATE:
            write.file.file = object()  # type: ignore[assignment]
        return self.handle(Signal.WRITTEN)


def test_records_share_the_batch_of_the_next_turn() -> None:
    """Goal: one turn, one offer, and all that was accepted before the turn is in it."""
    bench = Bench()
    batch, effects = bench.accept(10)
    assert effects == [Call.TURN_SOON]
    assert bench.accept(20) == (batch, [])
    assert bench.accept(30, is_urgent=False) == (batch, [])
    assert bench.handle(Signal.TURN) == [Offer(bench.files.current, batch)]
    assert bench.handle(Signal.TAKEN) == [Durable(60, {10, 20, 30})]
    assert (bench.machine.durable_end, bench.machine.durable_bytes) == (60, 60)
    assert bench.machine.state is CommitState.IDLE
    assert bench.files.durable == (1, batch.offset + 60)
    assert bench.accept(1)[1] == [Call.TURN_SOON]


def test_a_record_that_is_not_urgent_waits_until_it_is_asked_for() -> None:
    """Goal: a LAC alone is written only at `WAKE`, and nothing is written for nothing."""
    bench = Bench()
    assert bench.handle(Signal.WAKE) == []
    batch, effects = bench.accept(10, is_urgent=False)
    assert effects == []
    assert bench.handle(Signal.WAKE) == [Call.TURN_SOON]
    assert bench.handle(Signal.WAKE) == []
    assert bench.handle(Signal.TURN) == [Offer(bench.files.current, batch)]


def test_a_batch_is_full_or_apart() -> None:
    """Goal: batches of bounded size, in order, all of them in one turn if the device takes them."""
    bench = Bench()
    first, _ = bench.accept(60)
    second, _ = bench.accept(60)
    third, _ = bench.accept(10, is_apart=True)
    assert len({first.offset, second.offset, third.offset}) == 3
    file = bench.files.current
    assert bench.handle(Signal.TURN) == [Offer(file, first)]
    assert bench.handle(Signal.TAKEN) == [Durable(60, {60}), Offer(file, second)]
    assert bench.handle(Signal.TAKEN) == [Durable(120, {60}), Offer(file, third)]
    assert bench.handle(Signal.TAKEN) == [Durable(130, {10})]


def test_a_batch_that_is_not_due_stays() -> None:
    """Goal: a record that is not urgent, in a batch of its own, is not written with the others."""
    bench = Bench()
    first, _ = bench.accept(60)
    bench.accept(60, is_urgent=False)
    bench.handle(Signal.TURN)
    assert bench.handle(Signal.TAKEN) == [Durable(60, {60})]
    assert bench.machine.state is CommitState.IDLE
    assert bench.machine.accepted_end == first.size + 60


@pytest.mark.parametrize("answer", [Signal.NOT_TAKEN, DiskFull(FULL)], ids=["slow", "full"])
def test_a_thread_writes_a_batch_that_the_device_does_not_take(answer: Event) -> None:
    """Goal: no record joins the batch meanwhile, and the next batch comes a turn later."""
    bench = Bench()
    file = bench.files.current
    batch, _ = bench.accept(10)
    bench.handle(Signal.TURN)
    effects = bench.handle(answer)
    assert effects == [Write(Step.BATCH, file, 10, batch.buffers, batch.offset)]
    following, none = bench.accept(5)
    assert following is not batch
    assert none == []
    assert bench.handle(Signal.TURN) == []
    assert bench.handle(Signal.WRITTEN) == [Durable(10, {10}), Call.TURN_SOON]
    assert bench.handle(Signal.TURN) == [Offer(file, following)]
    bench.handle(Signal.NOT_TAKEN)
    assert bench.handle(Signal.WRITTEN) == [Durable(15, {5})]
    assert bench.machine.state is CommitState.IDLE


def test_a_file_is_created_and_noted_before_its_first_batch() -> None:
    """Goal: nothing in a file is durable before a start would miss the file."""
    bench = Bench(is_ready=False)
    file = bench.files.current
    batch, _ = bench.accept(10)
    (create,) = bench.handle(Signal.TURN)
    assert create == Write(Step.CREATE, file, len(file.content), (file.content,))
    assert bench.accept(20)[0] is batch  # it is not being written yet
    (note,) = bench.write(create)
    assert note == Write(Step.NOTE, file, NOTE_BYTES)
    assert not file.is_noted
    (append,) = bench.write(note)
    assert bench.files.current.is_noted
    assert append == Write(Step.BATCH, file, 30, batch.buffers, batch.offset)
    assert bench.write(append) == [Durable(30, {10, 20})]
    assert bench.machine.durable_bytes == len(file.content) + NOTE_BYTES + 30


def test_a_file_that_replay_created_is_noted_only() -> None:
    """Goal: a start without space has a file that nothing knows of yet."""
    bench = Bench()
    bench.files.current.is_noted = False
    bench.accept(10)
    assert bench.handle(Signal.TURN) == [Write(Step.NOTE, bench.files.current, NOTE_BYTES)]


def test_a_full_file_is_sealed_before_the_next_one_is_made() -> None:
    """Goal: footer, cut, next file; the hand-over holds up nothing."""
    bench = Bench()
    full = bench.files.current
    first, _ = bench.accept(10)
    following = bench.roll()
    second, _ = bench.accept(20)
    owed = bench.files.owed_footer_bytes
    assert bench.handle(Signal.TURN) == [Offer(full, first)]
    assert bench.handle(Signal.TAKEN) == [Durable(10, {10}), MakeFooter(full)]
    (footer,) = bench.handle(FooterMade((b"foo", b"ter")))
    assert footer == Write(Step.FOOTER, full, 6, (b"foo", b"ter"), full.position.offset)
    (cut,) = bench.write(footer)
    assert cut == Write(Step.CUT, full)
    assert bench.files.owed_footer_bytes == owed > 0
    hand_over, create = bench.write(cut)
    assert hand_over == HandOver(full)
    assert bench.files.owed_footer_bytes == 0
    assert isinstance(create, Write)
    assert (create.step, create.file) == (Step.CREATE, following)
    (append,) = bench.write(bench.write(create)[0])
    assert bench.write(append) == [Durable(30, {20})]
    assert bench.files.durable == (2, second.offset + 20)


def stalled(bench: Bench) -> Write:
    """Bring a queue to a disk that is full; return the write that waits."""
    bench.accept(10)
    bench.handle(Signal.TURN)
    (write,) = bench.handle(Signal.NOT_TAKEN)
    assert isinstance(write, Write)
    assert bench.handle(DiskFull(FULL)) == [Call.NOTE_STALL, RetryLater(RETRY_S)]
    return write


def test_a_full_disk_is_tried_again_until_it_has_space() -> None:
    """Goal: the same write each time, nothing else meanwhile, and both ends are noted once."""
    bench = Bench()
    write = stalled(bench)
    assert bench.accept(20)[1] == []
    assert bench.handle(Signal.RETRY_DUE) == [write]
    assert bench.handle(Signal.RETRY_DUE) == []
    assert bench.handle(DiskFull(FULL)) == [RetryLater(RETRY_S)]
    assert bench.handle(Signal.RETRY_DUE) == [write]
    effects = bench.handle(Signal.WRITTEN)
    assert effects == [Call.NOTE_SPACE, Durable(10, {10}), Call.TURN_SOON]


def test_a_disk_that_is_full_for_the_next_file_stalls_the_queue() -> None:
    """Goal: each step of a new file is repeated by itself."""
    bench = Bench(is_ready=False)
    bench.accept(10)
    (create,) = bench.handle(Signal.TURN)
    assert bench.handle(DiskFull(FULL)) == [Call.NOTE_STALL, RetryLater(RETRY_S)]
    assert bench.handle(Signal.RETRY_DUE) == [create]
    space, note = bench.write(create)
    assert space is Call.NOTE_SPACE
    assert bench.handle(DiskFull(FULL)) == [Call.NOTE_STALL, RetryLater(RETRY_S)]
    assert bench.handle(Signal.RETRY_DUE) == [note]
    space, append = bench.write(note)
    assert space is Call.NOTE_SPACE
    assert bench.write(append) == [Durable(10, {10})]


def test_a_storage_that_closes_does_not_wait_for_space() -> None:
    """Goal: one more try at once, then the end; also if the disk is full only later."""
    bench = Bench()
    write = stalled(bench)
    assert bench.handle(Signal.END_WAITING) == [write]
    assert bench.handle(DiskFull(FULL)) == [Failed(FULL)]
    assert bench.handle(Signal.RETRY_DUE) == []
    bench = Bench()
    assert bench.handle(Signal.END_WAITING) == []
    bench.accept(10)
    bench.handle(Signal.TURN)
    bench.handle(Signal.NOT_TAKEN)
    assert bench.handle(DiskFull(FULL)) == [Failed(FULL)]


def test_nothing_is_written_after_a_failure() -> None:
    """Goal: the queue reports its first failure only, and writes nothing after it."""
    bench = Bench()
    bench.accept(10)
    bench.handle(Signal.TURN)
    assert bench.handle(Fail(BROKEN)) == [Failed(BROKEN)]
    assert bench.machine.error is BROKEN
    assert bench.machine.durable_end == 0
    for event in (Fail(FULL), Signal.WAKE, Signal.TURN, Signal.RETRY_DUE, Signal.END_WAITING):
        assert bench.handle(event) == []
    assert bench.machine.error is BROKEN


class Device:
    """A device that takes what it likes; it checks the order of what is durable."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.bench = Bench(is_ready=rng.random() < 0.5, batch_bytes_max=30)
        self.written = self.durable = 0
        self.todo: list[Effect] = []

    def step(self) -> None:
        """Accept a record, or perform one effect."""
        rng, bench = self.rng, self.bench
        if rng.random() < 0.005:  # the storage is closed
            self.todo = bench.handle(Fail(BROKEN))
        elif rng.random() < 0.4 and bench.machine.error is None:
            position = bench.files.current.position
            if rng.random() < 0.1 and position.sequence:
                bench.roll()
            position.sequence = 1
            size, is_urgent, is_apart = rng.randrange(1, 40), rng.random() < 0.7, rng.random() < 0.1
            self.todo += bench.accept(size, is_urgent=is_urgent, is_apart=is_apart)[1]
        elif self.todo:
            event = self.answer(self.todo.pop(0))
            self.todo = (bench.handle(event) if event else []) + self.todo
        else:
            self.todo = bench.handle(Signal.WAKE)

    def answer(self, effect: Effect) -> Event | None:
        """Perform an effect; return its answer."""
        match effect:
            case Offer(file, batch):
                assert file.is_noted
                return self.answer_to(batch.size, Signal.TAKEN, Signal.NOT_TAKEN)
            case Durable(end, _):
                assert self.durable < end == self.bench.machine.durable_end == self.written
                self.durable = end
            case Write(step, file, size):
                answer = self.answer_to(size if step is Step.BATCH else 0, Signal.WRITTEN)
                if step is Step.CREATE and answer is Signal.WRITTEN:
                    file.file = object()  # type: ignore[assignment]
                return answer
            case MakeFooter():
                return FooterMade((b"footer",))
            case HandOver(file):
                self.bench.files.forget(file)
            case Call.TURN_SOON:
                return Signal.TURN
            case RetryLater():
                return Signal.RETRY_DUE
        return None

    def answer_to(self, size: int, *answers: Event) -> Event:
        """Return an answer to a write; the first one says that it was done."""
        chance = self.rng.random()
        if chance < 0.3:
            return Fail(BROKEN) if chance < 0.01 else DiskFull(FULL)
        answer = self.rng.choice(answers)
        self.written += size if answer is answers[0] else 0
        return answer


def test_whatever_the_device_does_the_order_stays() -> None:
    """Goal: what is durable is a prefix of what was accepted; each transition is made."""
    moves: set[tuple[CommitState, CommitState]] = set()
    for seed in range(200):
        device = Device(seed)
        for _ in range(200):
            device.step()
        moves |= device.bench.moves
    causes = TRANSITIONS.causes
    assert moves == {(one, other) for one in causes for other in causes[one] if one is not other}
