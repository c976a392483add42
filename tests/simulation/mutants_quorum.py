"""Bugs of what everybody computes alike, put back on purpose: write sets, coverage, who holds what.

Components that share such a bug agree with each other: checkers that used the product's
own arithmetic would find nothing wrong.
"""

from __future__ import annotations

import bisect
import contextlib
from typing import TYPE_CHECKING
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.ledger.metadata import store as store_module
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState, write_set
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.base.config import QuorumConfig

_WRITE_SET_USERS = (
    "dlcore.ledger.writing.appender",
    "dlcore.ledger.recovering.recovery",
    "dlcore.ledger.reading.range_read",
    "dlcore.ops.autorecovery.plan",
    "bookie.upkeep.repair",
)


@contextlib.contextmanager
def _everywhere(name: str, modules: tuple[str, ...], bug: Callable[..., object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch(f"{module}.{name}", bug))
        yield


@contextlib.contextmanager
def write_sets_are_shifted() -> Iterator[None]:
    """Section 1.2: entry e begins at position e + 1: other clients look for it elsewhere."""

    def shifted(quorum: QuorumConfig, entry_id: int) -> tuple[int, ...]:
        return write_set(quorum, entry_id + 1)

    with _everywhere("write_set", _WRITE_SET_USERS, shifted):
        yield


@contextlib.contextmanager
def ensembles_begin_one_entry_late() -> Iterator[None]:
    """#4097: the first entry of an ensemble is looked for in the one before."""

    def late(self: LedgerMetadata, entry_id: int) -> Ensemble:
        firsts = [ensemble.first_entry_id for ensemble in self.ensembles]
        return self.ensembles[max(0, bisect.bisect_left(firsts, entry_id) - 1)]

    with patch.object(LedgerMetadata, "ensemble_of", late):
        yield


@contextlib.contextmanager
def a_ledger_in_recovery_is_read_as_open() -> Iterator[None]:
    """Section 2: a reader of the metadata does not learn that a recovery has begun."""

    def altered(kind: type[LedgerMetadata], value: bytes, *, source: str) -> LedgerMetadata:
        metadata = decode(kind, value, source=source)
        if metadata.state is LedgerState.IN_RECOVERY:
            return replace(metadata, state=LedgerState.OPEN)
        return metadata

    with patch.object(store_module, "decode", altered):
        yield


@contextlib.contextmanager
def old_ensembles_are_read_as_the_newest() -> Iterator[None]:
    """Section 2: every ensemble is read with the bookies of the last one."""

    def altered(kind: type[LedgerMetadata], value: bytes, *, source: str) -> LedgerMetadata:
        metadata = decode(kind, value, source=source)
        bookies = metadata.last_ensemble.bookies
        ensembles = tuple(replace(each, bookies=bookies) for each in metadata.ensembles)
        return replace(metadata, ensembles=ensembles)

    with patch.object(store_module, "decode", altered):
        yield


MUTANTS = (
    a_ledger_in_recovery_is_read_as_open,
    ensembles_begin_one_entry_late,
    old_ensembles_are_read_as_the_newest,
    write_sets_are_shifted,
)
