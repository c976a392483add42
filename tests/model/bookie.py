"""A bookie of the model: the real rules of one ledger over a log that a crash shortens.

`bookie.storage` mixes the rules with files, so this is a thin model of two things only: records
become durable in the order in which they were accepted, and no answer that rests on a record leaves
before that.  The real `LedgerState` decides what is accepted, and what a restart remembers
goes through the real `FileIndex` (test_bookie.py compares every step with the real storage).

Durability takes no step of its own.  Either a record becomes durable at once: an answer that comes
later is one that travels longer.  Or it never will, because the bookie loses its power first: it is
*doomed* from then on, accepts and answers what needs no disk, and forgets it at the crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bookie.files.index import FileIndex, LedgerState
from dlcore.wire.frames import decode_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

LEDGER_ID = 0


class Message(NamedTuple):
    """A request of a client to a bookie, or its answer; `data` is a frame or a LAC."""

    kind: str
    client: int
    position: int
    bookie: int
    entry_id: int = -1
    data: bytes | int = b""


class Deliver(NamedTuple):
    """Event: a request arrives; `doomed` means that a crash is faster than the disk."""

    request: Message
    doomed: bool = False


class Crash(NamedTuple):
    """Event: the power is lost; `kept` of the records that were not durable survive, in order."""

    kept: int


class Bookie:
    """One bookie and the one ledger."""

    def __init__(self) -> None:
        self.state = LedgerState()
        self.records: list[bytes | int | None] = []  # frames, LACs; None is a fence
        self.durable = 0
        self.is_doomed = False

    def take(self, event: Deliver | Crash) -> Sequence[Message]:
        """Return the answers that leave now."""
        if isinstance(event, Crash):
            self._restart(event.kept)
            return ()
        before = len(self.records)
        answers = self._serve(event.request, may_answer=not (event.doomed or self.is_doomed))
        if event.doomed and len(self.records) > before:
            self.is_doomed = True
        elif not self.is_doomed:
            self.durable = len(self.records)
            self.state.is_fence_durable = self.state.fenced
        return answers

    def _serve(self, request: Message, *, may_answer: bool) -> Sequence[Message]:
        """`may_answer` says whether what is accepted now becomes durable."""
        if request.kind in ("add", "recovery add"):
            return self._add(request, may_answer=may_answer)
        if request.kind == "lac":
            return self._lac(request, may_answer=may_answer)
        return self._read(request, may_answer=may_answer)

    def _add(self, request: Message, *, may_answer: bool) -> Sequence[Message]:
        assert isinstance(request.data, bytes)
        if not self.state.accepts(is_recovery=request.kind == "recovery add"):
            return [request._replace(kind="refused", data=b"")]
        held = self.find(request.entry_id)
        if held is not None:
            is_same = self.records[held] == request.data
            answer = "added" if is_same else "mismatch"
            is_durable = held < self.durable
            return [request._replace(kind=answer, data=b"")] if is_durable or may_answer else []
        frame = decode_frame(request.data)
        self.records.append(request.data)
        self.state.note_entry(frame.entry_id, frame.last_add_confirmed)
        return [request._replace(kind="added", data=b"")] if may_answer else []

    def _lac(self, request: Message, *, may_answer: bool) -> Sequence[Message]:
        """A LAC that is known is accepted once its record is durable, too."""
        assert isinstance(request.data, int)
        if self.state.note_lac(request.data):
            self.records.append(request.data)
        is_durable = self.durable == len(self.records)
        return [request._replace(kind="lac accepted")] if may_answer or is_durable else []

    def _read(self, request: Message, *, may_answer: bool) -> Sequence[Message]:
        """Fence first; any answer comes after the fence is durable."""
        self.fence()
        is_durable = self.durable == len(self.records)
        return [self.answer(request)] if may_answer or is_durable else []

    def fence(self) -> None:
        """Accept a fence."""
        if not self.state.fenced:
            self.records.append(None)
            self.state.fenced = True

    def answer(self, request: Message) -> Message:
        """Return what a read request is answered with."""
        if request.kind == "fence":
            return request._replace(kind="fenced", data=self.state.last_add_confirmed)
        held = self.find(request.entry_id)
        if held is None:
            return request._replace(kind="missing")
        frame = self.records[held]
        assert isinstance(frame, bytes)
        return request._replace(kind="found", data=frame)

    def find(self, entry_id: int) -> int | None:
        """Return the place of an entry's record."""
        for place, record in enumerate(self.records):
            if isinstance(record, bytes) and decode_frame(record).entry_id == entry_id:
                return place
        return None

    def holds(self, entry_id: int) -> bool:
        """Whether the entry is durable here."""
        held = self.find(entry_id)
        return held is not None and held < self.durable

    def durable_lac(self) -> int:
        """Return the LAC that a crash leaves."""
        lacs = [
            decode_frame(each).last_add_confirmed if isinstance(each, bytes) else each
            for each in self.records[: self.durable]
            if each is not None
        ]
        return max(lacs, default=-1)

    def _restart(self, kept: int) -> None:
        self.records = self.records[: self.durable + kept]
        self.durable = len(self.records)
        self.is_doomed = False
        self.state = LedgerState()
        index = FileIndex(1)
        for place, record in enumerate(self.records):
            if record is None:
                index.note_fence(LEDGER_ID)
                continue
            if isinstance(record, int):
                index.note_lac(LEDGER_ID, record)
                continue
            frame = decode_frame(record)
            index.add_entry(
                ledger_id=LEDGER_ID,
                entry_id=frame.entry_id,
                offset=place,
                size=len(record),
                last_add_confirmed=frame.last_add_confirmed,
            )
        for summary in index.summaries():
            self.state.note_summary(summary)
