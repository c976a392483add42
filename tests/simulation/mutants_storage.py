"""Bugs of a bookie's log and index, put back on purpose: what is durable, held and listed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.files import entry_log as entry_log_module
from bookie.files.entry_log import EntryLog
from bookie.files.format import encode_file_header
from bookie.files.group_commit import GroupCommit
from bookie.files.unsealed import UnsealedFiles
from bookie.ledger_state import LedgerState
from bookie.storage.held_entries import HeldEntries
from bookie.storage.writes import Writes
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bookie.files.unsealed import Batch


@contextlib.contextmanager
def group_commit_acknowledges_the_next_batch() -> Iterator[None]:
    """Section 4.2: what collects while a batch is synced is answered together with it."""
    note_durable = GroupCommit._note_durable

    def generous(self: GroupCommit, batch: Batch) -> None:
        note_durable(self, batch)
        for waiting in list(self._batches)[:1]:
            _answer(waiting)

    with patch.object(GroupCommit, "_note_durable", generous):
        yield


def _answer(batch: Batch) -> None:
    for future in batch.futures:
        if not future.done():
            future.set_result(None)


@contextlib.contextmanager
def a_batch_is_answered_before_its_sync() -> Iterator[None]:
    """Section 4.2: the futures of a batch are set when its write begins."""
    write_batch = GroupCommit._write_batch

    async def hasty(self: GroupCommit, batch: Batch) -> None:
        _answer(batch)
        await write_batch(self, batch)

    with patch.object(GroupCommit, "_write_batch", hasty):
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
        state = self._core.ledger_for_change(ledger_id)
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
    """Section 4.2: after a write that failed the next batch is written all the same."""
    write_batch, write_now = GroupCommit._write_batch, GroupCommit._write_now

    async def stubborn(self: GroupCommit, batch: Batch) -> None:
        try:
            await write_batch(self, batch)
        except BookieStorageError:
            self._writing = None
            self.pending_bytes -= batch.size
            _answer(batch)

    def stubborn_now(self: GroupCommit, batch: Batch) -> bool:
        try:
            return write_now(self, batch)
        except BookieStorageError:
            self._batches.popleft()
            self.pending_bytes -= batch.size
            _answer(batch)
            return True

    with (
        patch.object(GroupCommit, "_write_batch", stubborn),
        patch.object(GroupCommit, "_write_now", stubborn_now),
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
