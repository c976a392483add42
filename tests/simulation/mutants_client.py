"""Bugs of clients, put back on purpose: quorums, ensemble changes, fencing, recovery, closing.

Each mutant is a context manager that changes one rule for as long as it is open.  The numbers are
those of BookKeeper's issues.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.base.errors import (
    BookieStorageError,
    BookieUnavailableError,
    DigestMismatchError,
    DLError,
    LedgerFencedError,
)
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState, write_set
from dlcore.ledger.reading import reader as reader_module
from dlcore.ledger.reading.confirmed import LedgerEnd, judge_end
from dlcore.ledger.reading.range_read import RangeReader, ReadLane
from dlcore.ledger.reading.reader import LedgerReader
from dlcore.ledger.recovering import (
    recovery as recovery_module,
    recovery_driver as recoverer_module,
)
from dlcore.ledger.recovering.recovery import LedgerRecovery, RecoveryState
from dlcore.ledger.writing import appender as appender_module
from dlcore.ledger.writing.appender import (
    Add,
    AddFailed,
    AddWindow,
    AppenderState,
    CompleteAdds,
    Effect,
    LedgerAppender,
    StoreMetadata,
)
from dlcore.wire.frames import encode_frame, frame_parts
from tests.simulation.connections import SimBookieClient

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

    from dlcore.base.config import QuorumConfig
    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import Ensemble
    from dlcore.wire.frames import EntryFrame
    from dlcore.wire.port import HeldEntries


@contextlib.contextmanager
def changes_at_once() -> Iterator[None]:
    """Put new bookies into the metadata before they have copies, as others do; then more can break.

    With copies the next two bugs lose nothing.
    """
    chosen = LedgerAppender._chosen

    def at_once(self: LedgerAppender, choice: Any) -> list[Effect]:
        effects = chosen(self, choice)
        if self.state is not AppenderState.COPYING:
            return effects
        self.window.drop_copies()
        return self._plan_if_copied()

    with patch.object(LedgerAppender, "_chosen", at_once):
        yield


@contextlib.contextmanager
def acks_during_an_ensemble_change() -> Iterator[None]:
    """#1591, #4651: entries are acknowledged while the change is not in the metadata yet."""
    confirm = LedgerAppender._confirm

    def early(self: LedgerAppender) -> list[Effect]:
        state = self.state
        if state is not AppenderState.CHANGING:
            return confirm(self)
        self.state = AppenderState.SHORT
        effects = confirm(self)
        if self.state is AppenderState.SHORT:
            self.state = state
        return effects

    with changes_at_once(), patch.object(LedgerAppender, "_confirm", early):
        yield


@contextlib.contextmanager
def recovery_reads_do_not_fence() -> Iterator[None]:
    """#2614: only the LAC read fences, so a bookie may say no and then accept the entry."""
    read_entry = SimBookieClient.read_entry

    async def lax(
        self: SimBookieClient, bookie: BookieId, *, ledger_id: int, entry_id: int, fence: bool
    ) -> bytes | memoryview:
        return await read_entry(self, bookie, ledger_id=ledger_id, entry_id=entry_id, fence=False)

    with patch.object(SimBookieClient, "read_entry", lax):
        yield


@contextlib.contextmanager
def recovery_takes_errors_for_noes() -> Iterator[None]:
    """#2908 and others: an answer that is unknown counts as "no such entry"."""

    def guess(
        self: LedgerRecovery, entry_id: int, position: int, error: DLError
    ) -> list[recovery_module.Effect]:
        return self._missing(entry_id, position)

    with patch.object(LedgerRecovery, "_unknown", guess):
        yield


@contextlib.contextmanager
def recovery_stores_its_ensembles() -> Iterator[None]:
    """BOOKKEEPER-355: bookies that recovery added are asked by the next recoverer."""
    plan = LedgerAppender._plan

    def store(
        self: LedgerAppender, base: LedgerMetadata, bookies: tuple[BookieId, ...]
    ) -> list[Effect]:
        was_recovery, self._is_recovery = self._is_recovery, False
        effects = plan(self, base, bookies)
        self._is_recovery = was_recovery
        return effects

    def closed_over(
        stored: LedgerMetadata,
        *,
        ensembles: tuple[Ensemble, ...],
        last_entry_id: int,
        length_bytes: int,
        **_: object,
    ) -> LedgerMetadata | None:
        if stored.state is LedgerState.CLOSED:
            return None
        return replace(stored, ensembles=ensembles).closed(
            last_entry_id=last_entry_id, length_bytes=length_bytes
        )

    with (
        patch.object(LedgerAppender, "_plan", store),
        patch.object(recovery_module, "closed_over", closed_over),
    ):
        yield


@contextlib.contextmanager
def recovery_starts_at_the_lac_alone() -> Iterator[None]:
    """#2615: the last ensemble's first entry is not considered where recovery starts."""
    after = LedgerRecovery._after_fence_answer

    def forgetful(self: LedgerRecovery) -> list[recovery_module.Effect]:
        from_the_start = replace(self._pinned.last_ensemble, first_entry_id=0)
        with patch.object(LedgerRecovery, "_ensemble", from_the_start):
            return after(self)

    with patch.object(LedgerRecovery, "_after_fence_answer", forgetful):
        yield


@contextlib.contextmanager
def one_no_ends_the_ledger() -> Iterator[None]:
    """The end is believed after one "no" where Qw - Qa + 1 are needed."""
    missing = LedgerRecovery._missing

    def gullible(
        self: LedgerRecovery, entry_id: int, position: int
    ) -> list[recovery_module.Effect]:
        effects: list[recovery_module.Effect] = []
        for each in range(self._pinned.quorum.write_quorum_size):
            effects += missing(self, entry_id, (entry_id + each) % 100)
        return effects

    with patch.object(LedgerRecovery, "_missing", gullible):
        yield


@contextlib.contextmanager
def the_writer_ignores_fences() -> Iterator[None]:
    """A refusal because of fencing is treated like any failed bookie."""

    judge = LedgerAppender._judge

    def go_on(self: LedgerAppender, metadata: LedgerMetadata, version: int) -> list[Effect]:
        planned = self._replacements.planned
        if planned is None:
            return judge(self, metadata, version)
        self.metadata, self.version = metadata, version
        return self._plan(metadata, planned.last_ensemble.bookies)

    with _a_refusal_is_a_failure(), patch.object(LedgerAppender, "_judge", go_on):
        yield


@contextlib.contextmanager
def the_writer_takes_its_ledger_back() -> Iterator[None]:
    """The same, and the state in the metadata is overwritten, too."""
    judge = LedgerAppender._judge

    def overwrite(self: LedgerAppender, metadata: LedgerMetadata, version: int) -> list[Effect]:
        if self.state is AppenderState.CHANGING:
            metadata = replace(metadata, state=LedgerState.OPEN, last_entry_id=-1, length_bytes=0)
        return judge(self, metadata, version)

    with _a_refusal_is_a_failure(), patch.object(LedgerAppender, "_judge", overwrite):
        yield


@contextlib.contextmanager
def _a_refusal_is_a_failure() -> Iterator[None]:
    add_failed = LedgerAppender._add_failed

    def stubborn(self: LedgerAppender, event: AddFailed) -> list[Effect]:
        if isinstance(event.error, LedgerFencedError):
            event = event._replace(error=DLError("refused"))
        return add_failed(self, event)

    with patch.object(LedgerAppender, "_add_failed", stubborn):
        yield


@contextlib.contextmanager
def acks_before_earlier_entries() -> Iterator[None]:
    """An entry is acknowledged as soon as it has its own quorum."""

    def eager(self: LedgerAppender) -> list[Effect]:
        if self.state is AppenderState.CHANGING:
            return []
        needed = self.metadata.quorum.ack_quorum_size
        window = self.window
        ready = [add for add in window.unconfirmed() if len(add.acks) >= needed]
        if not ready:
            return []
        first, window.last_add_confirmed = window.last_add_confirmed + 1, ready[-1].entry_id
        window.confirmed_bytes = ready[-1].ledger_bytes
        confirmed = CompleteAdds(first_entry_id=first, last_entry_id=window.last_add_confirmed)
        return [confirmed, *self._go_on_closing()]

    with patch.object(LedgerAppender, "_confirm", eager):
        yield


@contextlib.contextmanager
def replaced_bookies_get_nothing_again() -> Iterator[None]:
    """After an ensemble change what is unconfirmed is not sent to the new bookie."""
    change_stored = LedgerAppender._change_stored

    def forgetful(self: LedgerAppender, metadata: LedgerMetadata) -> list[Effect]:
        with patch.object(Add, "send", lambda *_: []):
            acks = {add.entry_id: set(add.acks) for add in self.window.adds.values()}
            with patch.object(LedgerAppender, "_confirm", lambda _: []):
                effects = change_stored(self, metadata)
            for add in self.window.adds.values():
                add.acks |= acks[add.entry_id]
        return effects + self._confirm()

    with changes_at_once(), patch.object(LedgerAppender, "_change_stored", forgetful):
        yield


@contextlib.contextmanager
def received_bytes_are_overwritten() -> Iterator[None]:
    """Seen with Python 3.14: the buffer of an answer is used again while its entries are held."""
    read = LedgerReader.read

    async def overwritten(
        self: LedgerReader, first: int, last: int
    ) -> AsyncGenerator[Sequence[EntryFrame], None]:
        async with contextlib.aclosing(read(self, first, last)) as chunks:
            async for frames in chunks:
                yield [each._replace(body=frames[-1].body) for each in frames]

    with patch.object(LedgerReader, "read", overwritten):
        yield


@contextlib.contextmanager
def recovery_takes_damage_for_noes() -> Iterator[None]:
    """#2908: an entry that is damaged, or cannot be read, counts as one that is not there."""
    unknown = LedgerRecovery._unknown

    def guess(
        self: LedgerRecovery, entry_id: int, position: int, error: DLError
    ) -> list[recovery_module.Effect]:
        if isinstance(error, BookieStorageError | DigestMismatchError):
            return self._missing(entry_id, position)
        return unknown(self, entry_id, position, error)

    with patch.object(LedgerRecovery, "_unknown", guess):
        yield


@contextlib.contextmanager
def recovery_takes_silence_for_noes() -> Iterator[None]:
    """Section 3.1: a read that timed out counts as "no such entry"."""
    unknown = LedgerRecovery._unknown

    def guess(
        self: LedgerRecovery, entry_id: int, position: int, error: DLError
    ) -> list[recovery_module.Effect]:
        if isinstance(error, BookieUnavailableError):
            return self._missing(entry_id, position)
        return unknown(self, entry_id, position, error)

    with patch.object(LedgerRecovery, "_unknown", guess):
        yield


@contextlib.contextmanager
def recovery_asks_the_bookies_it_added() -> Iterator[None]:
    """BOOKKEEPER-581: after an ensemble change of its own recovery reads from the new ensemble."""

    read_ahead = LedgerRecovery._read_ahead

    def follow_the_change(self: LedgerRecovery) -> list[recovery_module.Effect]:
        if self.state is RecoveryState.CHECKING:
            return read_ahead(self)
        changed = replace(self._pinned, ensembles=self._ensembles)
        return self._reads.up_to(self._written + self._reads.ahead_max, changed)

    one_at_a_time = partial(LedgerRecovery, read_ahead_max=1)
    with (
        patch.object(LedgerRecovery, "_read_ahead", follow_the_change),
        patch.object(recoverer_module, "LedgerRecovery", one_at_a_time),
    ):
        yield


@contextlib.contextmanager
def recovery_writes_back_to_one_bookie() -> Iterator[None]:
    """Section 3.1: a recovered entry counts as written back once any bookie holds it."""
    confirm = LedgerAppender._confirm

    def early(self: LedgerAppender) -> list[Effect]:
        if not self._is_recovery:
            return confirm(self)
        needed, self.window._ack_quorum_size = self.window._ack_quorum_size, 1
        effects = confirm(self)
        self.window._ack_quorum_size = needed
        return effects

    with patch.object(LedgerAppender, "_confirm", early):
        yield


@contextlib.contextmanager
def write_sets_count_from_the_ensemble() -> Iterator[None]:
    """Section 1.2: the writer stripes by the distance from the ensemble's first entry."""

    handle = LedgerAppender.handle
    metadata: LedgerMetadata

    def noting(self: LedgerAppender, event: Any) -> list[Effect]:
        nonlocal metadata
        metadata = self.metadata
        return handle(self, event)

    def positions(_: AddWindow, entry_id: int) -> tuple[int, ...]:
        return write_set(metadata.quorum, max(0, entry_id - metadata.last_ensemble.first_entry_id))

    with (
        patch.object(LedgerAppender, "handle", noting),
        patch.object(AddWindow, "positions", positions),
    ):
        yield


@contextlib.contextmanager
def new_ensembles_start_at_the_lac() -> Iterator[None]:
    """#4097: a change starts at the LAC, where LAC + 1 is the first entry it may move."""

    def plan(
        self: LedgerAppender, base: LedgerMetadata, bookies: tuple[BookieId, ...]
    ) -> list[Effect]:
        first = max(self.window.last_add_confirmed, base.last_ensemble.first_entry_id)
        self._become(AppenderState.CHANGING)
        planned = base.with_last_ensemble(first_entry_id=first, bookies=bookies)
        self._replacements.planned = planned
        if self._is_recovery:
            return self._change_stored(planned)
        return [StoreMetadata(planned, self.version)]

    with patch.object(LedgerAppender, "_plan", plan):
        yield


@contextlib.contextmanager
def adds_carry_what_is_not_confirmed() -> Iterator[None]:
    """Section 1.4: an add carries the last entry that was sent in place of the LAC."""

    def carrying_more(encode: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **about: encode(**{**about, "last_add_confirmed": about["entry_id"] - 1})

    with (
        patch.object(appender_module, "encode_frame", carrying_more(encode_frame)),
        patch.object(appender_module, "frame_parts", carrying_more(frame_parts)),
    ):
        yield


@contextlib.contextmanager
def a_read_relies_on_the_lac() -> Iterator[None]:
    """Section 1.4: what bookies hold and were not judged to be confirmed is not looked at."""

    def judged(
        quorum: QuorumConfig, first_entry_id: int, answers: Mapping[int, HeldEntries]
    ) -> LedgerEnd | None:
        end = judge_end(quorum, first_entry_id, answers)
        return None if end is None else end._replace(held=end.claimed, is_decided=True)

    with patch.object(reader_module, "judge_end", judged):
        yield


@contextlib.contextmanager
def a_read_gives_up_after_one_replica() -> Iterator[None]:
    """Section 1.3: the error of one bookie is passed on, and no other one is asked."""
    with patch.object(ReadLane, "has_failed", property(lambda lane: bool(lane._answers))):
        yield


@contextlib.contextmanager
def chunks_are_passed_on_as_they_come() -> Iterator[None]:
    """Section 1.3: what is read from several bookies at once is not put in order."""

    def take_any(self: RangeReader) -> Sequence[EntryFrame]:
        for lane in self._lanes:
            if lane.ready:
                return lane.ready.popleft()
        return ()

    with patch.object(RangeReader, "_merged", take_any):
        yield


MUTANTS = (
    acks_during_an_ensemble_change,
    acks_before_earlier_entries,
    adds_carry_what_is_not_confirmed,
    a_read_gives_up_after_one_replica,
    a_read_relies_on_the_lac,
    chunks_are_passed_on_as_they_come,
    new_ensembles_start_at_the_lac,
    one_no_ends_the_ledger,
    received_bytes_are_overwritten,
    recovery_asks_the_bookies_it_added,
    recovery_reads_do_not_fence,
    recovery_starts_at_the_lac_alone,
    recovery_stores_its_ensembles,
    recovery_takes_damage_for_noes,
    recovery_takes_errors_for_noes,
    recovery_takes_silence_for_noes,
    recovery_writes_back_to_one_bookie,
    replaced_bookies_get_nothing_again,
    the_writer_ignores_fences,
    the_writer_takes_its_ledger_back,
    write_sets_count_from_the_ensemble,
)
