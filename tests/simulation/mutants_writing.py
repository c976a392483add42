"""Bugs of writers, recoveries and followers, put back on purpose: what they believe and tell."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakSet

from msgspec import structs

from dlcore.base.errors import MetadataConnectionError
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState, write_set
from dlcore.ledger.reading.follow import FollowState, LedgerFollow
from dlcore.ledger.recovering.recovery import LedgerRecovery, WriteBack
from dlcore.ledger.writing.appender import AppenderState, Effect, LedgerAppender, Signal
from dlcore.ledger.writing.writer import LedgerWriter
from dlcore.metadata.stored import encode
from dlcore.ops.autorecovery import (
    check as check_module,
    plan as plan_module,
    repair as repair_module,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.config import QuorumConfig
    from dlcore.ops.autorecovery.check import Fragment


@contextlib.contextmanager
def lost_writes_are_classified_by_version_only() -> Iterator[None]:
    """Section 3.4: any write that made the next version counts as the own one."""
    write = LedgerStore.write

    async def hopeful(self: LedgerStore, metadata: LedgerMetadata, *, version: int) -> int:
        path = self._paths.ledger(metadata.ledger_id)
        try:
            return await self._store.put(path, encode(metadata), version=version)
        except MetadataConnectionError:
            node = await self._store.get(path, fresh=True)
            if node is not None and node.version == version + 1:
                return node.version
            return await write(self, metadata, version=version)

    with patch.object(LedgerStore, "write", hopeful):
        yield


@contextlib.contextmanager
def the_last_ensemble_is_changed_in_recovery() -> Iterator[None]:
    """BOOKKEEPER-355: auto-recovery swaps a bookie while a client recovers the ledger."""
    fragments_of = check_module.fragments_of

    def final_in_recovery(metadata: LedgerMetadata, **more: Any) -> list[Fragment]:
        fragments = fragments_of(metadata, **more)
        if metadata.state is LedgerState.IN_RECOVERY:
            return [replace(each, is_final=True) for each in fragments]
        return fragments

    def swap(self: LedgerMetadata, *, first_entry_id: int, **names: Any) -> LedgerMetadata:
        closed = structs.replace(self, state=LedgerState.CLOSED, last_entry_id=first_entry_id)
        swapped = with_replaced(closed, first_entry_id=first_entry_id, **names)
        return structs.replace(self, ensembles=swapped.ensembles)

    with_replaced = LedgerMetadata.with_replaced
    with (
        patch.object(check_module, "fragments_of", final_in_recovery),
        patch.object(repair_module, "fragments_of", final_in_recovery),
        patch.object(LedgerMetadata, "with_replaced", swap),
    ):
        yield


@contextlib.contextmanager
def copies_come_from_where_the_fragment_starts() -> Iterator[None]:
    """BOOKKEEPER-237: in a striped ledger entries are sought where the fragment's first one is."""
    copy_lanes = plan_module.copy_lanes

    def from_the_start(quorum: QuorumConfig, fragment: Fragment, **about: Any) -> Any:
        start = write_set(quorum, fragment.first_entry_id)
        with patch.object(plan_module, "write_set", lambda *_: start):
            return copy_lanes(quorum, fragment, **about)

    with patch.object(repair_module, "copy_lanes", from_the_start):
        yield


@contextlib.contextmanager
def a_ledger_is_closed_behind_its_lac() -> Iterator[None]:
    """Section 2: its writer closes the ledger after what it sent, not after what was confirmed."""
    close = LedgerAppender._close

    def early(self: LedgerAppender, signal: Signal) -> list[Effect]:
        window = self.window
        sent = (window.last_add_pushed, window.pushed_bytes)
        window.last_add_confirmed, window.confirmed_bytes = sent
        return close(self, signal)

    with patch.object(LedgerAppender, "_close", early):
        yield


@contextlib.contextmanager
def a_close_ignores_a_recovery() -> Iterator[None]:
    """#2116: a writer gets the answer that its ledger is closed while another one recovers it."""
    judge = LedgerAppender._judge

    def believe(self: LedgerAppender, metadata: LedgerMetadata, version: int) -> list[Effect]:
        is_recovered = metadata.state is LedgerState.IN_RECOVERY
        if is_recovered and self.state is AppenderState.STORING:
            return self._closed(self.window.closed(metadata))
        return judge(self, metadata, version)

    with patch.object(LedgerAppender, "_judge", believe):
        yield


@contextlib.contextmanager
def recovery_ends_before_it_wrote_back() -> Iterator[None]:
    """Section 3.1: the end is stored as soon as it is known."""
    finish = LedgerRecovery._finish

    def early(self: LedgerRecovery) -> Any:
        self._written = max(self._written, self._next_entry - 1)
        return finish(self)

    with patch.object(LedgerRecovery, "_finish", early):
        yield


@contextlib.contextmanager
def recovery_does_not_ask_for_the_length() -> Iterator[None]:
    """Section 2: a recovery that finds nothing new stores a length of nothing."""

    decide, store = LedgerRecovery._decide, LedgerRecovery._store
    wrote: WeakSet[LedgerRecovery] = WeakSet()

    def noting(self: LedgerRecovery) -> Any:
        effects = decide(self)
        if any(isinstance(each, WriteBack) for each in effects):
            wrote.add(self)
        return effects

    def guess(self: LedgerRecovery) -> Any:
        if self not in wrote:
            self._before.size_bytes = 0
        return store(self)

    with (
        patch.object(LedgerRecovery, "_decide", noting),
        patch.object(LedgerRecovery, "_store", guess),
    ):
        yield


@contextlib.contextmanager
def a_writer_has_no_limits() -> Iterator[None]:
    """#1088: nothing bounds what a writer has in flight."""
    with patch.object(LedgerWriter, "_has_capacity", lambda _: True):
        yield


@contextlib.contextmanager
def followers_pass_over_gaps() -> Iterator[None]:
    """Section 1.4: what the followed bookie does not hold is not read from another one."""

    go_on = LedgerFollow._go_on

    def hand_out(self: LedgerFollow) -> Any:
        if self.state is not FollowState.WAITING or self.is_closed:
            return go_on(self)
        coming, pushed = self._coming, self._coming.pushed
        coming.pushed = []
        wanted = [each for each in pushed if coming.first <= each.entry_id <= self._lac]
        return self._hand_out(wanted) if wanted else self._listen()

    with patch.object(LedgerFollow, "_go_on", hand_out):
        yield


MUTANTS = (
    a_close_ignores_a_recovery,
    a_ledger_is_closed_behind_its_lac,
    a_writer_has_no_limits,
    copies_come_from_where_the_fragment_starts,
    followers_pass_over_gaps,
    lost_writes_are_classified_by_version_only,
    recovery_does_not_ask_for_the_length,
    recovery_ends_before_it_wrote_back,
    the_last_ensemble_is_changed_in_recovery,
)
