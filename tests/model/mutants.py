"""Known bugs put into the model: each must be found.

Those of the machines are the simulation's own; those of bookies and drivers change a class here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from unittest.mock import patch

from bookie.files.index import LedgerState
from dlcore.ledger.writing.appender import Add
from tests.model.bookie import Bookie, Message
from tests.model.system import Protocol, Scope
from tests.simulation.mutants import MUTANTS as SIMULATED
from tests.simulation.mutants_tested import TESTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlcore.base.ids import BookieId


@contextlib.contextmanager
def negative_answers_before_the_fence_is_durable() -> Iterator[None]:
    """Still in BookKeeper: "no such entry" leaves while the fence is on its way to disk."""

    class Early(Bookie):
        def _read(self, request: Message, *, may_answer: bool) -> Sequence[Message]:
            if request.kind == "read" and self.find(request.entry_id) is None:
                self.fence()
                return [self.answer(request)]
            if request.kind == "fence" and all(each is None for each in self.records):
                self.fence()
                return [self.answer(request)]
            return super()._read(request, may_answer=may_answer)

    with patch.object(Protocol, "bookie_class", Early):
        yield


@contextlib.contextmanager
def recovery_reads_do_not_fence() -> Iterator[None]:
    """#2614: only the LAC read fences, so a bookie may say no and then accept the entry."""

    class Lax(Bookie):
        def _read(self, request: Message, *, may_answer: bool) -> Sequence[Message]:
            if request.kind == "fence":
                return super()._read(request, may_answer=may_answer)
            held = self.find(request.entry_id)
            is_waiting = held is not None and held >= self.durable and not may_answer
            return [] if is_waiting else [self.answer(request)]

    with patch.object(Protocol, "bookie_class", Lax):
        yield


@contextlib.contextmanager
def fences_are_not_logged() -> Iterator[None]:
    """BOOKKEEPER-815: a restart forgets the fence."""

    class Forgetful(Bookie):
        def fence(self) -> None:
            self.state.fenced = True

    with patch.object(Protocol, "bookie_class", Forgetful):
        yield


@contextlib.contextmanager
def fences_refuse_recovery_adds() -> Iterator[None]:
    """A fenced bookie takes nothing, not even what recovery writes back."""
    with patch.object(LedgerState, "accepts", lambda self, *, is_recovery: not self.fenced):
        yield


@contextlib.contextmanager
def answers_are_known_by_position_only() -> Iterator[None]:
    """#4651: a late answer of a replaced bookie counts for the one that took its place."""

    def take(self: Add, position: int, _: BookieId) -> bool:
        return self.waiting.pop(position, None) is not None

    def owes(self: Add, position: int, _: BookieId) -> bool:
        return position in self.owed

    with (
        patch.object(Add, "take_answer", take),
        patch.object(Add, "owes", owes),
    ):
        yield


MUTANTS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], Scope]] = {
    "negative_answers_before_the_fence_is_durable": (
        negative_answers_before_the_fence_is_durable,
        Scope(crashes=1),
    ),
    "recovery_reads_do_not_fence": (recovery_reads_do_not_fence, Scope()),
    "fences_are_not_logged": (fences_are_not_logged, Scope(crashes=1)),
    "fences_refuse_recovery_adds": (fences_refuse_recovery_adds, Scope()),
    "recovery_stores_its_ensembles": (
        SIMULATED["recovery_stores_its_ensembles"],
        Scope(spares=1, recovery_time_outs=1),
    ),
    "acks_during_an_ensemble_change": (
        SIMULATED["acks_during_an_ensemble_change"],
        Scope(recoverers=0, entries=2, spares=1, time_outs=1),
    ),
    "replaced_bookies_get_nothing_again": (
        SIMULATED["replaced_bookies_get_nothing_again"],
        Scope(recoverers=0, entries=2, spares=1, time_outs=1),
    ),
    "one_no_ends_the_ledger": (SIMULATED["one_no_ends_the_ledger"], Scope()),
    "recovery_takes_errors_for_noes": (
        SIMULATED["recovery_takes_errors_for_noes"],
        Scope(recovery_time_outs=2),
    ),
    "the_writer_ignores_fences": (
        SIMULATED["the_writer_ignores_fences"],
        Scope(spares=1, time_outs=1),
    ),
    "answers_are_known_by_position_only": (
        answers_are_known_by_position_only,
        Scope(recoverers=0, spares=1, time_outs=1),
    ),
    "a_change_names_bookies_before_they_have_copies": (
        TESTED["a_change_names_bookies_before_they_have_copies"].apply,
        Scope(spares=1, time_outs=1),
    ),
    "acks_before_earlier_entries": (
        SIMULATED["acks_before_earlier_entries"],
        Scope(recoverers=0, entries=2),
    ),
}
