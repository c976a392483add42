"""Goal: appends beside an owner never double or lose a record, and none waits for ever.

Method: visit every interleaving of small scopes; and put bugs back, each of which must be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from dlcore.log.metadata.changes import plan_append
from dlcore.log.metadata.commits import decide
from dlcore.log.proxied.turns import Signal, Turns
from dlcore.log.staging import commit
from dlcore.log.staging.commit import AwaitedLock, HeldLog
from dlcore.metadata.port import Put
from tests.model.appends import LARGE, SMALL, Model, Scope
from tests.model.exploring import STATES_MAX, prove, scopes, search

if TYPE_CHECKING:
    from collections.abc import Callable

LOSSY = SMALL["one append, an answer is lost"]


@pytest.mark.parametrize("scope", scopes(SMALL, LARGE))
def test_no_interleaving_breaks_a_promise(scope: Scope) -> None:
    """Every state of the scope is visited."""
    prove(Model(scope))


def _heads_are_written_over(*about: Any, **more: Any) -> Any:
    change, first, end = plan_append(*about, **more)
    *ops, head = change.ops
    assert isinstance(head, Put)
    after = type(change)((*ops, Put(head.path, head.value, -1)), change.after)
    return after, first, end


def _records_are_not_read(_: Any, **more: Any) -> Any:
    return decide(None, **more)


def _only_free_locks_are_asked(held: HeldLog) -> AwaitedLock:
    found = _awaited(held)
    return found if held.holder.turn == "free" else AwaitedLock(held.log, held.holder, None)


_awaited = commit._awaited


def _nothing_is_read_after_a_rest(self: Turns, event: Any) -> Any:
    return [] if event is Signal.REST_DUE else _handle(self, event)


_handle = Turns.handle


MUTANTS: dict[str, tuple[Callable[[], Any], Scope]] = {
    "a turn is taken beside an open extent": (
        lambda: patch.object(HeldLog, "gives_turn_at", lambda self, _: self.holder.turn == "given"),
        LOSSY,
    ),
    "heads are written over": (
        lambda: patch.object(commit, "plan_append", _heads_are_written_over),
        LOSSY,
    ),
    "the record is not read": (
        lambda: patch.object(commit, "decide", _records_are_not_read),
        LOSSY,
    ),
    "only free locks are asked": (
        lambda: patch.object(commit, "_awaited", _only_free_locks_are_asked),
        LOSSY,
    ),
    "the lock is not read after a rest": (
        lambda: patch.object(Turns, "handle", _nothing_is_read_after_a_rest),
        SMALL["two appends"],
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_known_bugs_are_found(name: str) -> None:
    """A model that lets a known bug pass proves nothing about unknown ones."""
    put_back, scope = MUTANTS[name]
    with put_back():
        result = search(Model(scope), states_max=STATES_MAX)
    assert result.violation, str(result)
