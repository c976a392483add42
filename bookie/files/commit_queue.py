"""The queue of group commit: accepted records become durable in their order, many in one sync.

Theory of operation.  The order of acceptance is the order on disk.  Records collect in batches: one
batch is one write with one sync.  There is no timer.  The first record that must be written soon
asks for a turn of the event loop, and everything that was accepted until then shares the turn.  In
the turn the batches are offered to the device, one after the other.  A batch that the device does
not take at once is written by a thread, and new records collect meanwhile.

Invariants:

* A batch is durable only when everything accepted before it is durable.  Therefore one number,
  `durable_end`, says what is durable: the batches before it, and no part of a later one.
* One write is under way at a time, and no record joins a batch that is being written.
* A full file has its footer before the next file is made; a file is noted as existing before a
  record in it is durable.
* After a write or sync that failed nothing is written any more, because the state of the device is
  unknown.  A full disk is no such failure: nothing was written, and the same write is repeated
  until it fits.  Only a bookie that closes gives up instead.

docs/architecture/machines.md shows `TRANSITIONS` as a diagram.  `EntryLog` adds records to batches.
`UnsealedFiles` are the files that the batches go to; they know up to where they are durable.
The driver (`entry_log.py`) performs the effects and feeds the answers back.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

import msgspec

from bookie.files.format import NOTE_BYTES
from dlcore.base.machines import Machine, State, Transitions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bookie.disks.port import DiskFile
    from bookie.files.format import FileHeader
    from bookie.files.index import FileIndex, Location
    from bookie.files.replay import WritePosition
    from dlcore.base.errors import BookieError
    from dlcore.wire.frames import BytesLike


class CommitState(State):
    """The state of the machine; FAILED is final."""

    IDLE = "no record has to be written soon"
    DUE = "batches are written in the next turn of the event loop"
    OFFERED = "a batch is offered to the device"
    PREPARING = "a thread seals the full file, and makes the file of the first batch"
    WRITING = "a thread writes a batch"
    STALLED = "the disk has no space for the write, which is repeated later"
    RETRYING = "a thread repeats the write"
    FAILED = "nothing is written any more"


_S = CommitState
_ENDED = {_S.FAILED: "the storage is closed, or a defect"}
_FAILED = {_S.FAILED: "failed"}
TRANSITIONS = Transitions(
    _S.IDLE,
    {
        _S.IDLE: {_S.DUE: "a record has to be written", **_ENDED},
        _S.DUE: {
            _S.OFFERED: "turn",
            _S.PREPARING: "turn, the file is not ready",
            **_ENDED,
        },
        _S.OFFERED: {
            _S.IDLE: "taken",
            _S.OFFERED: "taken, another is due",
            _S.PREPARING: "taken, the file of another is not ready",
            _S.WRITING: "not taken",
            **_FAILED,
        },
        _S.PREPARING: {
            _S.WRITING: "the file is ready",
            _S.STALLED: "disk full",
            **_FAILED,
        },
        _S.WRITING: {
            _S.IDLE: "written",
            _S.DUE: "written, another is due",
            _S.STALLED: "disk full",
            **_FAILED,
        },
        _S.STALLED: {_S.RETRYING: "later, or the storage closes", **_ENDED},
        _S.RETRYING: {
            _S.IDLE: "written",
            _S.DUE: "written, another is due",
            _S.PREPARING: "written, the file is not ready",
            _S.WRITING: "the file is ready",
            _S.STALLED: "disk full",
            _S.FAILED: "failed, or full while the storage closes",
        },
        _S.FAILED: {},
    },
)


_OFFSET_MAX = 2**32
"""Above every offset: records state theirs in 32 bits."""


class Batch:
    """Records of one file that become durable together."""

    __slots__ = ("buffers", "file_number", "ledger_ids", "offset", "size")

    def __init__(self, file_number: int, offset: int) -> None:
        self.file_number = file_number
        self.offset = offset
        self.size = 0
        self.buffers: list[BytesLike] = []
        self.ledger_ids: set[int] = set()


class UnsealedFile:
    """A file that accepts records, or is full and waits for its footer."""

    __slots__ = ("content", "file", "index", "is_noted", "position")

    def __init__(self, index: FileIndex, position: WritePosition, content: bytes) -> None:
        self.index = index
        self.position = position
        self.content = content
        self.file: DiskFile | None = None
        self.is_noted = False
        """Whether the file is noted as existing; before that nothing in it may be acknowledged."""


class UnsealedFiles:
    """The files of the log that are not sealed yet, oldest first; the last one accepts records."""

    def __init__(self, first: UnsealedFile) -> None:
        self._files = {first.index.number: first}
        self.current = first
        """The file that accepts records."""
        self.durable = (first.index.number, first.position.offset)
        """A file and an offset in it; everything before this position is durable."""
        self.owed_footer_bytes = 0
        """Bytes of the footers of files that are full and not sealed yet."""

    def __len__(self) -> int:
        return len(self._files)

    @property
    def written_bytes(self) -> int:
        """Bytes accepted for these files."""
        return sum(each.position.offset for each in self._files.values())

    def get(self, number: int) -> UnsealedFile | None:
        """Return a file; None if it is sealed or does not exist."""
        return self._files.get(number)

    def file_of(self, number: int) -> DiskFile | None:
        """Return the file on the disk; None if the file is sealed or not created yet."""
        unsealed = self._files.get(number)
        return None if unsealed is None else unsealed.file

    def indexes(self) -> list[FileIndex]:
        """Return the indexes of the files."""
        return [each.index for each in self._files.values()]

    def durable_part(self, number: int) -> tuple[FileHeader, int, FileIndex] | None:
        """Return header, durable end and index of a file; None if it is sealed."""
        unsealed = self._files.get(number)
        if unsealed is None:
            return None
        position = unsealed.position
        end = min(position.offset, self.durable_offset(number))
        return position.header, end, unsealed.index

    def is_durable(self, location: Location) -> bool:
        """Return whether the record at `location` survives a crash."""
        return self.is_durable_at(location.file_number, location.offset)

    def is_durable_at(self, number: int, offset: int) -> bool:
        """Return whether the record around `offset` of file `number` survives a crash."""
        # Files are written one after the other, so file numbers decide before offsets.
        return (number, offset) < self.durable

    def durable_offset(self, number: int) -> int:
        """Return the offset in file `number` up to which everything is durable."""
        durable_number, offset = self.durable
        if number == durable_number:
            return offset
        return 0 if number > durable_number else _OFFSET_MAX

    def roll(self, following: UnsealedFile) -> None:
        """Direct the next records to another file."""
        self.owed_footer_bytes += self.current.index.footer_bytes
        self.current = following
        self._files[following.index.number] = following

    def forget(self, sealed: UnsealedFile) -> None:
        """Remove a file that is registered as sealed."""
        del self._files[sealed.index.number]

    def close(self) -> None:
        """Close the handles of the files."""
        for each in self._files.values():
            if each.file is not None:
                each.file.close()


class Signal(enum.Enum):
    """Events that carry nothing."""

    WAKE = "everything accepted has to be written soon"
    TURN = "the turn of `TURN_SOON` has come"
    TAKEN = "the device made the offered batch durable"
    NOT_TAKEN = "the device does not take the offered batch at once; nothing was done"
    WRITTEN = "the last `Write` is durable"
    RETRY_DUE = "the pause of `RetryLater` is over"
    END_WAITING = "the storage closes: from now on a full disk is a failure"


@dataclass(frozen=True, slots=True)
class FooterMade:
    """Event: the footer of `MakeFooter`."""

    buffers: Sequence[BytesLike]


@dataclass(frozen=True, slots=True)
class DiskFull:
    """Event: nothing was written, because the disk is full and its reserve is used up."""

    error: BookieError


@dataclass(frozen=True, slots=True)
class Fail:
    """Event: a write or sync failed, the storage is closed, or a defect ended it."""

    error: BookieError


Event: TypeAlias = Signal | FooterMade | DiskFull | Fail


class Call(enum.Enum):
    """Effects that carry nothing."""

    TURN_SOON = "say `TURN` in the next turn of the event loop"
    NOTE_STALL = "writes wait for space on the disk"
    NOTE_SPACE = "writes wait no longer"


class Offer(msgspec.Struct, frozen=True):
    """Effect: append to the file if the device takes it at once; say `TAKEN` or `NOT_TAKEN`."""

    file: UnsealedFile
    batch: Batch


class Durable(msgspec.Struct, frozen=True):
    """Effect: everything before `end` is durable, with lately records of these ledgers."""

    end: int
    ledger_ids: set[int]


class Step(enum.Enum):
    """The writes that a thread does."""

    FOOTER = "append the footer"
    CUT = "give preallocated space back"
    CREATE = "create the file with its header"
    NOTE = "note that the file exists"
    BATCH = "append a batch"


@dataclass(frozen=True, slots=True)
class Write:
    """Effect: do this in a thread, at `offset` if it appends; say `WRITTEN`."""

    step: Step
    file: UnsealedFile
    size_bytes: int = 0
    buffers: Sequence[BytesLike] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class MakeFooter:
    """Effect: make the footer in a thread; say `FooterMade`."""

    file: UnsealedFile


@dataclass(frozen=True, slots=True)
class HandOver:
    """Effect: register the file as sealed and close it; no write waits for this."""

    file: UnsealedFile


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Effect: say `RETRY_DUE` after so many seconds."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Effect: nothing more becomes durable; every waiting caller gets `error`."""

    error: BookieError


Effect: TypeAlias = Call | Offer | Durable | Write | MakeFooter | HandOver | RetryLater | Failed


class CommitQueue(Machine[CommitState]):
    """The batches of one log that are not durable yet, and the files that they go to.

    Args:
        files: the unsealed files; the records of `batch_for` go to the current one.
        batch_bytes_max: most bytes of a batch that more than one record shares.
        retry_s: how long a full disk is left alone.
    """

    transitions = TRANSITIONS

    def __init__(self, files: UnsealedFiles, *, batch_bytes_max: int, retry_s: float) -> None:
        self.state = _S.IDLE
        self.error: BookieError | None = None
        """Why nothing is written any more."""
        self.accepted_end = 0
        """Bytes accepted since the log was opened, as the position behind the last record."""
        self.durable_end = 0
        """The part of `accepted_end` that is durable."""
        self.durable_bytes = 0
        """Bytes made durable since the log was opened, with headers and footers of files."""
        self._files = files
        self._batch_bytes_max = batch_bytes_max
        self._retry_s = retry_s
        self._batches: deque[Batch] = deque()
        self._due_end = 0  # everything before it has to be written soon
        self._current: Batch | None = None  # it is offered or written, and takes no more records
        self._write: Write | MakeFooter | None = None  # what a thread does, or has to repeat
        self._is_ending = False

    @property
    def pending_bytes(self) -> int:
        """Bytes that are accepted and not yet durable."""
        return self.accepted_end - self.durable_end

    def batch_for(self, size_bytes: int, *, is_apart: bool) -> Batch:
        """Return the batch that takes the next records: the last one, unless it is full.

        The caller adds their bytes, and calls `accept`.
        """
        file = self._files.current
        number = file.index.number
        # A batch that is being written is not in the list, so it takes no more records.
        if self._batches and not is_apart:
            last = self._batches[-1]
            if last.file_number == number and last.size + size_bytes <= self._batch_bytes_max:
                return last
        batch = Batch(number, file.position.offset)
        self._batches.append(batch)
        return batch

    def accept(self, size_bytes: int, *, is_urgent: bool) -> list[Effect]:
        """Count records that were added to the last batch.

        If they are not urgent, the caller says `WAKE` later.
        """
        self._batches[-1].size += size_bytes
        self.accepted_end += size_bytes
        # Records that are accepted later only move the end of what is due, and need no other turn.
        return self._wake() if is_urgent else []

    def handle(self, event: Event) -> list[Effect]:  # noqa: C901 - one case for each kind
        """Take one event."""
        match event:
            case Signal.TURN:
                return self._begin() if self.state is _S.DUE else []
            case Signal.TAKEN:
                assert self._current is not None
                self.durable_bytes += self._current.size
                return self._end_batch()
            case Signal.WAKE:
                return self._wake()
            case Signal.NOT_TAKEN:
                return self._append()
            case Signal.WRITTEN:
                return self._written()
            case FooterMade(buffers):
                return self._footer_made(buffers)
            case DiskFull(error):
                return self._full(error)
            case Signal.RETRY_DUE:
                return self._retry()
            case Signal.END_WAITING:
                self._is_ending = True
                return self._retry()
            case Fail(error):
                return self._fail(error)
            case _:
                assert_never(event)

    def _wake(self) -> list[Effect]:
        self._due_end = self.accepted_end
        if self.state is not _S.IDLE or self._due_end == self.durable_end:
            return []
        self._become(_S.DUE)
        return [Call.TURN_SOON]

    def _begin(self) -> list[Effect]:
        """Offer the first batch to the device, after its file is made."""
        # The first batch alone says what is next, so files are made in the order of their numbers.
        target = self._target()
        if target.file is not None and target.is_noted:
            self._current = self._batches.popleft()
            self._become(_S.OFFERED)
            return [Offer(target, self._current)]
        self._become(_S.PREPARING)
        if target.file is not None:
            return self._do(Write(Step.NOTE, target, NOTE_BYTES))
        before = self._files.get(target.index.number - 1)
        # Without a file before, the log was opened behind a sealed one on a full disk.
        return self._create(target) if before is None else self._do(MakeFooter(before))

    def _target(self) -> UnsealedFile:
        target = self._files.get(self._batches[0].file_number)
        assert target is not None  # it is sealed after its last batch
        return target

    def _append(self) -> list[Effect]:
        """Let a thread write the current batch."""
        batch = self._current
        assert batch is not None
        target = self._files.get(batch.file_number)
        assert target is not None
        self._become(_S.WRITING)
        return self._do(Write(Step.BATCH, target, batch.size, batch.buffers, batch.offset))

    def _create(self, target: UnsealedFile) -> list[Effect]:
        content = target.content
        return self._do(Write(Step.CREATE, target, len(content), (content,)))

    def _do(self, write: Write | MakeFooter) -> list[Effect]:
        self._write = write
        return [write]

    def _footer_made(self, buffers: Sequence[BytesLike]) -> list[Effect]:
        assert isinstance(self._write, MakeFooter)
        full = self._write.file
        size = sum(map(len, buffers))
        return self._do(Write(Step.FOOTER, full, size, buffers, full.position.offset))

    def _written(self) -> list[Effect]:
        """Go on behind a write of a thread."""
        write, self._write = self._write, None
        assert isinstance(write, Write)
        self.durable_bytes += write.size_bytes
        effects: list[Effect] = []
        if self.state is _S.RETRYING:
            effects.append(Call.NOTE_SPACE)
            # The next step after these two sets the state by itself.
            if write.step not in (Step.NOTE, Step.BATCH):
                self._become(_S.PREPARING)
        match write.step:
            case Step.FOOTER:
                # A footer is found from the end of its file, so no preallocated space may lie
                # behind it.
                effects += self._do(Write(Step.CUT, write.file))
            case Step.CUT:
                self._files.owed_footer_bytes -= write.file.index.footer_bytes
                # Only now: after the cut the file never changes, so it can be opened as a sealed
                # one.
                effects.append(HandOver(write.file))
                effects += self._create(self._target())
            case Step.CREATE:
                effects += self._do(Write(Step.NOTE, write.file, NOTE_BYTES))
            case Step.NOTE:
                write.file.is_noted = True
                self._current = self._batches.popleft()
                effects += self._append()
            case Step.BATCH:
                effects += self._end_batch()
            case _:
                assert_never(write.step)
        return effects

    def _end_batch(self) -> list[Effect]:
        """Note that the current batch is durable; write the next one, if it is due."""
        batch, self._current = self._current, None
        assert batch is not None
        self._files.durable = (batch.file_number, batch.offset + batch.size)
        self.durable_end += batch.size
        effects: list[Effect] = [Durable(self.durable_end, batch.ledger_ids)]
        if self.durable_end >= self._due_end:
            self._become(_S.IDLE)
        elif self.state is _S.OFFERED:
            effects += self._begin()
        else:
            # Not at once: requests that waited for the thread are answered before.
            self._become(_S.DUE)
            effects.append(Call.TURN_SOON)
        return effects

    def _full(self, error: BookieError) -> list[Effect]:
        if self.state is _S.OFFERED:
            return self._append()  # the reserve may have space
        # A supervisor waits for a process that ends, and the space may never come.
        if self._is_ending:
            return self._fail(error)
        effects: list[Effect] = [] if self.state is _S.RETRYING else [Call.NOTE_STALL]
        self._become(_S.STALLED)
        return [*effects, RetryLater(self._retry_s)]

    def _retry(self) -> list[Effect]:
        if self.state is not _S.STALLED:
            return []
        assert self._write is not None
        self._become(_S.RETRYING)
        return [self._write]

    def _fail(self, error: BookieError) -> list[Effect]:
        if self.error is not None:
            return []
        self._become(_S.FAILED)
        self.error = error
        self._batches.clear()
        self._current = self._write = None
        return [Failed(error)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, current, batches = self.state, self._current, self._batches
        assert (self.error is not None) == (state is _S.FAILED)
        if state is _S.FAILED:
            assert not batches
            return
        waiting = [*([] if current is None else [current]), *batches]
        assert self.accepted_end - self.durable_end == sum(each.size for each in waiting)
        assert self.durable_end <= self.accepted_end >= self._due_end
        assert state is not _S.IDLE or self._due_end <= self.durable_end
        assert state is not _S.DUE or self._due_end > self.durable_end
        in_thread = (_S.PREPARING, _S.WRITING, _S.STALLED, _S.RETRYING)
        assert (self._write is not None) == (state in in_thread)
        is_batch = isinstance(self._write, Write) and self._write.step is Step.BATCH
        assert (current is not None) == (state is _S.OFFERED or is_batch)
        at = self._files.durable
        for batch in waiting:
            # Without a gap in its file, or at the beginning of the next one.
            assert (
                batch.offset == at[1] if batch.file_number == at[0] else batch.file_number > at[0]
            )
            at = (batch.file_number, batch.offset + batch.size)
