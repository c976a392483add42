"""Bugs of compaction and auto-recovery, put back on purpose: what must be whole before a change."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec import structs

from bookie.files.entry_reader import EntryReader
from bookie.upkeep.compaction import Compactor
from dlcore.ledger.metadata.values import LedgerMetadata, LedgerState
from dlcore.ops.autorecovery import check as check_module, repair as repair_module
from dlcore.ops.autorecovery.copying import EntryCopier
from dlcore.ops.autorecovery.repair import LedgerRepairer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.autorecovery.check import Fragment


@contextlib.contextmanager
def compaction_forgets_fences_and_lacs() -> Iterator[None]:
    """BOOKKEEPER-815: only entries are moved out of a file that is compacted."""

    async def forget(self: Compactor, *about: Any) -> None:
        """Copy nothing."""

    with patch.object(Compactor, "_copy_states", forget):
        yield


@contextlib.contextmanager
def compaction_drops_damaged_entries() -> Iterator[None]:
    """Section 4.6: what cannot be copied is left behind, and the file is dropped."""
    with patch.object(EntryReader, "note_damaged", lambda _self, _location: False):
        yield


@contextlib.contextmanager
def compaction_moves_nothing() -> Iterator[None]:
    """Section 4.6: the file is deleted, and the copies were never made."""

    async def skip(self: Compactor, *about: Any) -> None:
        """Copy nothing."""

    with patch.object(Compactor, "_copy_entries", skip):
        yield


@contextlib.contextmanager
def replicas_are_named_before_they_are_copied() -> Iterator[None]:
    """BOOKKEEPER-237: a bookie enters the ensemble while entries are still missing there."""

    async def trust(self: LedgerRepairer, *about: Any) -> tuple[()]:
        return ()

    with patch.object(LedgerRepairer, "_missing_on", trust):
        yield


@contextlib.contextmanager
def copies_are_counted_when_they_are_sent() -> Iterator[None]:
    """BOOKKEEPER-237: the new bookie is not asked again whether it holds what was sent."""
    copy = EntryCopier.copy
    missing_on = LedgerRepairer._missing_on
    copied: list[Any] = []

    async def early(self: EntryCopier, ledger_id: int, lane: Any, *, target: Any) -> None:
        copied.append((ledger_id, target))
        half = replace(lane, last_entry_id=max(lane.first_entry_id, lane.last_entry_id - 1))
        await copy(self, ledger_id, half, target=target)

    async def trust(self: LedgerRepairer, bookie: Any, metadata: Any, *about: Any) -> Any:
        if (metadata.ledger_id, bookie) in copied:
            return ()
        return await missing_on(self, bookie, metadata, *about)

    with (
        patch.object(EntryCopier, "copy", early),
        patch.object(LedgerRepairer, "_missing_on", trust),
    ):
        yield


@contextlib.contextmanager
def the_last_ensemble_of_an_open_ledger_is_changed() -> Iterator[None]:
    """Section 5: auto-recovery swaps a bookie under the writer's hands."""
    fragments_of = check_module.fragments_of

    def all_final(*about: Any, **more: Any) -> list[Fragment]:
        return [replace(each, is_final=True) for each in fragments_of(*about, **more)]

    def swap(self: LedgerMetadata, *, first_entry_id: int, **names: Any) -> LedgerMetadata:
        closed = structs.replace(self, state=LedgerState.CLOSED, last_entry_id=first_entry_id)
        swapped = with_replaced(closed, first_entry_id=first_entry_id, **names)
        return structs.replace(self, ensembles=swapped.ensembles)

    with_replaced = LedgerMetadata.with_replaced
    with (
        patch.object(check_module, "fragments_of", all_final),
        patch.object(repair_module, "fragments_of", all_final),
        patch.object(LedgerMetadata, "with_replaced", swap),
    ):
        yield


MUTANTS = (
    compaction_drops_damaged_entries,
    compaction_forgets_fences_and_lacs,
    compaction_moves_nothing,
    copies_are_counted_when_they_are_sent,
    replicas_are_named_before_they_are_copied,
    the_last_ensemble_of_an_open_ledger_is_changed,
)
