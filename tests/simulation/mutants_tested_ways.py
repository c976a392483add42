"""Bugs in one of two ways to do the same, that a comparison with the other way catches."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.files.commit_queue import CommitQueue, Durable, Effect, Event, Signal
from bookie.files.entry_log import GroupCommit
from bookie.files.entry_reader import EntryReader, LargerEntryError
from bookie.storage import writes as writes_module
from bookie.storage.writes import Writes
from dlcore.log.writing.transmit import Group
from dlcore.wire.frames import following_frames
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from bookie.files.index import Location
    from dlcore.wire.frames import FrameRun

_RUNS = "bookie/test_two_ways.py::test_adds_in_runs_are_adds_one_by_one"
_RANGES = "bookie/test_two_ways.py::test_a_range_is_what_reads_of_its_entries_are"
_AT_ONCE = "bookie/test_two_ways.py::test_queued_entries_are_written_at_once"
_HELD = (
    "bookie/test_two_ways.py::test_acknowledged_entries_are_held_whichever_way_they_were_written"
)
_BATCHES = "dlcore/log/test_two_ways.py::test_batches_are_their_records_one_by_one"


@caught_by(_RUNS)
def runs_leave_the_lac_behind() -> Iterator[None]:
    """The header of an entry about earlier ones counts only if the entry comes alone."""
    add_run = Writes.add_run

    def careless(self: Writes, run: FrameRun) -> asyncio.Future[None] | None:
        what = following_frames(run)
        state = None if what is None else self._core.ledgers.get(what.ledger_id)
        before = None if state is None else state.last_add_confirmed
        future = add_run(self, run)
        if future is not None and state is not None and before is not None:
            state.last_add_confirmed = before
        return future

    with patch.object(Writes, "add_run", careless):
        yield


@caught_by(_RUNS)
def runs_replace_what_is_held() -> Iterator[None]:
    """No one compares the bytes of entries that are held with those that come together."""
    may_add = writes_module.may_add

    def careless(run: Any, what: Any, state: Any, config: Any) -> bool:
        about = SimpleNamespace(
            accepts=state.accepts, is_deleted=state.is_deleted, last_entry_id=-1
        )
        return may_add(run, what, about, config)  # type: ignore[arg-type]

    with patch.object(writes_module, "may_add", careless):
        yield


@caught_by(_RUNS)
def what_is_appended_at_once_is_written_nowhere() -> Iterator[None]:
    """It is called durable, and the file has a hole."""

    with patch.object(GroupCommit, "_offered", lambda *_: Signal.TAKEN):
        yield


@caught_by(_AT_ONCE)
def what_is_written_at_once_is_not_counted() -> Iterator[None]:
    """Only the task counts what it has written, so a bookie looks at its disk too late."""
    handle = CommitQueue.handle

    def careless(self: CommitQueue, event: Event) -> list[Effect]:
        before = self.durable_bytes
        effects = handle(self, event)
        if event is Signal.TAKEN:
            self.durable_bytes = before
        return effects

    with patch.object(CommitQueue, "handle", careless):
        yield


@caught_by(_HELD)
def an_entry_that_the_device_has_not_taken_is_acknowledged() -> Iterator[None]:
    """It waits for the task, and its clients already have its acknowledgement."""
    handle = CommitQueue.handle

    def early(self: CommitQueue, event: Event) -> list[Effect]:
        effects = handle(self, event)
        if event is Signal.NOT_TAKEN and self._current is not None:
            effects.append(Durable(self.durable_end + self._current.size, set()))
        return effects

    with patch.object(CommitQueue, "handle", early):
        yield


@caught_by(_RANGES)
def ranges_pass_over_what_is_absent() -> Iterator[None]:
    """A range has the entries that there are, as if an absent one had never been."""
    find_all = EntryReader.find_all

    def careless(
        self: EntryReader, ledger_id: int, wanted: range, *, bytes_max: int
    ) -> list[Location]:
        chunk = find_all(self, ledger_id, wanted, bytes_max=bytes_max)
        behind = wanted[len(chunk) + 1 :]
        if behind:
            with contextlib.suppress(LargerEntryError):
                chunk += find_all(self, ledger_id, behind, bytes_max=bytes_max)
        return chunk

    with patch.object(EntryReader, "find_all", careless):
        yield


@caught_by(_BATCHES)
def batches_get_the_position_where_their_entry_begins() -> Iterator[None]:
    """Only a record that is written by itself is counted within its entry."""

    def add_ticket(self: Group[Any], ticket: Any) -> None:
        self.slots.append(0)
        self.tickets.append(ticket)

    with patch.object(Group, "add_ticket", add_ticket):
        yield


@caught_by(_BATCHES)
def records_get_the_position_of_the_first_one_of_their_run() -> Iterator[None]:
    """Only a batch is counted within its entry."""
    count_singles = Group.count_singles

    def careless(self: Group[Any], records: int, size_bytes: int) -> None:
        before, first = len(self.slots), self.record_count
        count_singles(self, records, size_bytes)
        self.slots[before:] = [first] * records

    with patch.object(Group, "count_singles", careless):
        yield
