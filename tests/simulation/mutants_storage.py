"""Bugs of a bookie's log and index, put back on purpose: what is durable, held and listed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.files import entry_log as entry_log_module
from bookie.files.commit_queue import (
    CommitQueue,
    Durable,
    Effect,
    Event,
    Fail,
    MakeFooter,
    Offer,
    Signal,
    Step,
    UnsealedFiles,
    Write,
)
from bookie.files.entry_log import EntryLog, GroupCommit
from bookie.files.format import encode_file_header
from bookie.files.index import LedgerState
from bookie.storage.writes import HeldEntries, Writes, ledger_for_change

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def group_commit_acknowledges_the_next_batch() -> Iterator[None]:
    """Section 4.2: what collects while a batch is synced is answered together with it."""
    end_batch = CommitQueue._end_batch

    def generous(self: CommitQueue) -> list[Effect]:
        effects = end_batch(self)
        following = self._current or (self._batches[0] if self._batches else None)
        if following is not None:
            effects.insert(1, Durable(self.durable_end + following.size, set()))
        return effects

    with patch.object(CommitQueue, "_end_batch", generous):
        yield


@contextlib.contextmanager
def a_batch_is_answered_before_its_sync() -> Iterator[None]:
    """Section 4.2: the futures of a batch are set when its write begins."""
    with answered_before_it_is_written():
        yield


@contextlib.contextmanager
def answered_before_it_is_written() -> Iterator[None]:
    """Call a batch durable when a thread begins to write it."""
    append = CommitQueue._append

    def early(self: CommitQueue) -> list[Effect]:
        effects = append(self)
        assert self._current is not None
        return [Durable(self.durable_end + self._current.size, set()), *effects]

    with patch.object(CommitQueue, "_append", early):
        yield


@contextlib.contextmanager
def listings_hold_what_is_not_durable() -> Iterator[None]:
    """BOOKKEEPER-237: a bookie lists entries that a crash will take away."""
    with patch.object(UnsealedFiles, "durable_offset", lambda *_: 1 << 32):
        yield


@contextlib.contextmanager
def a_fence_flag_is_set_too_late() -> Iterator[None]:
    """#4462: adds slip in after the fence is logged, and are answered after it is, too."""

    async def late(self: Writes, ledger_id: int) -> None:
        log = self._core.log
        log.commits.check()
        state = ledger_for_change(self._core, ledger_id)
        if not state.fenced:
            log.append_fence(ledger_id)
        await log.commits.flush()
        state.is_fence_durable = True
        asyncio.get_running_loop().call_later(0.02, setattr, state, "fenced", True)

    with patch.object(Writes, "fence", late):
        yield


@contextlib.contextmanager
def lacs_may_fall() -> Iterator[None]:
    """Section 1.4: the LAC that came last counts, not the highest."""

    def last(self: LedgerState, last_add_confirmed: int) -> bool:
        self.last_add_confirmed = last_add_confirmed
        return True

    with patch.object(LedgerState, "note_lac", last):
        yield


@contextlib.contextmanager
def explicit_lacs_are_not_logged() -> Iterator[None]:
    """Section 1.4: a LAC that came without an add is kept in memory only."""

    def forget(self: EntryLog, *about: Any) -> Any:
        return self.commits.watch()

    with patch.object(EntryLog, "append_lac", forget):
        yield


@contextlib.contextmanager
def headers_name_no_files() -> Iterator[None]:
    """BOOKKEEPER-636: a new file does not say which other ones are needed."""
    encode = encode_file_header

    def forgetful(number: int, **about: Any) -> bytes:
        return encode(number, **{**about, "live_files": {}})

    with patch.object(entry_log_module, "encode_file_header", forgetful):
        yield


@contextlib.contextmanager
def an_add_again_is_answered_unread() -> Iterator[None]:
    """Section 4.1: an add is answered because its entry is held, in whatever state."""

    async def trust(self: HeldEntries, entry: Any, *, is_recovery: bool) -> None:
        """Look at nothing."""

    with patch.object(HeldEntries, "_add_again", trust):
        yield


@contextlib.contextmanager
def a_failed_log_goes_on() -> Iterator[None]:
    """Section 4.2: after a write that failed the next batch is still written."""
    answer_to, offered = GroupCommit._answer_to, GroupCommit._offered

    async def stubborn(self: GroupCommit, work: Write | MakeFooter) -> Event:
        answer = await answer_to(self, work)
        is_batch = isinstance(work, Write) and work.step is Step.BATCH
        return Signal.WRITTEN if is_batch and isinstance(answer, Fail) else answer

    def stubborn_now(self: GroupCommit, offer: Offer) -> Event:
        answer = offered(self, offer)
        return Signal.TAKEN if isinstance(answer, Fail) else answer

    with (
        patch.object(GroupCommit, "_answer_to", stubborn),
        patch.object(GroupCommit, "_offered", stubborn_now),
    ):
        yield


MUTANTS = (
    a_batch_is_answered_before_its_sync,
    a_failed_log_goes_on,
    a_fence_flag_is_set_too_late,
    an_add_again_is_answered_unread,
    explicit_lacs_are_not_logged,
    group_commit_acknowledges_the_next_batch,
    headers_name_no_files,
    lacs_may_fall,
    listings_hold_what_is_not_durable,
)
