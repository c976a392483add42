"""Goal: two proxies and clients that retry over both never double, lose or swap records.

Method: visit every interleaving of small scopes; and put bugs back, each of which must be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from dlcore.log.writing.producers import Durable, Fresh, Producers
from tests.model.producers import LARGE, SMALL, Model, Scope, search

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.log.entries.stamp import Claim

STATES_MAX = 400_000


def _names(scopes: dict[str, Scope], *marks: Any) -> list[Any]:
    return [pytest.param(scope, id=name, marks=marks) for name, scope in scopes.items()]


@pytest.mark.parametrize("scope", [*_names(SMALL), *_names(LARGE, pytest.mark.prove)])
def test_no_interleaving_breaks_a_promise(scope: Scope) -> None:
    """Every state of the scope is visited."""
    result = search(Model(scope), states_max=10 * STATES_MAX)
    assert not result.violation, str(result)
    assert result.is_complete, str(result)


class _AckedBeforeDurable(Model):
    acks_when_accepted = True


class _NotRestored(Model):
    restores = False


class _ZombiesAcknowledge(Model):
    zombies_acknowledge = True


_look_at = Producers.look_at


def _duplicates_before_durable(self: Producers[Any], claim: Claim, first: int, count: int) -> Any:
    found = _look_at(self, claim, first, count)
    return found if isinstance(found, Fresh) else Durable(None)


def _accepted_is_written_again(self: Producers[Any], claim: Claim, first: int, count: int) -> Any:
    known = self._known[claim.name]
    accepted, known.accepted = known.accepted, known.durable
    try:
        found = _look_at(self, claim, first, count)
    finally:
        known.accepted = accepted
    if isinstance(found, Fresh) and first <= accepted:
        known.accepted = first - 1  # as if it had not been accepted
        known.logged = min(known.logged, first - 1)
    return found


def _gaps_are_taken(self: Producers[Any], claim: Claim, first: int, count: int) -> Any:
    known = self._known[claim.name]
    if known.claim == claim and first > known.accepted + 1:
        known.accepted = known.logged = known.durable = first - 1
    return _look_at(self, claim, first, count)


def _believed_always(self: Producers[Any], claim: Claim, *, now_ms: int) -> int:
    known = self._known.get(claim.name)
    if known is not None and claim.epoch > known.claim.epoch:
        known.claim = claim
    return _continue_with(self, claim, now_ms=now_ms)


_continue_with = Producers.continue_with


def _tokens_are_not_looked_at(self: Producers[Any], known: Any, claim: Claim) -> None:
    if known.claim.epoch != claim.epoch:
        _require(self, known, claim)


_require = Producers._require


def _patched(name: str, value: object) -> Callable[[], Any]:
    return lambda: patch.object(Producers, name, value)


MUTANTS: dict[str, tuple[type[Model], Callable[[], Any] | None, Scope]] = {
    "acknowledged before it is durable": (_AckedBeforeDurable, None, Scope()),
    "not read by the next owner": (_NotRestored, None, Scope()),
    "a zombie goes on acknowledging": (_ZombiesAcknowledge, None, Scope()),
    "a duplicate before it is durable": (
        Model,
        _patched("look_at", _duplicates_before_durable),
        Scope(),
    ),
    "what is accepted is written again": (
        Model,
        _patched("look_at", _accepted_is_written_again),
        Scope(),
    ),
    "a gap is taken": (Model, _patched("look_at", _gaps_are_taken), Scope()),
    "the epoch is not checked": (
        Model,
        _patched("_require", lambda *_: None),
        Scope(clients=2, records=1),
    ),
    "the token is not checked": (
        Model,
        _patched("_require", _tokens_are_not_looked_at),
        Scope(clients=2, records=1),
    ),
    "a claim is believed though others wrote since": (
        Model,
        _patched("continue_with", _believed_always),
        Scope(clients=2, records=1),
    ),
    "a snapshot leaves producers out": (
        Model,
        _patched("_snapshot_of", lambda self, entry_id, _: _empty_snapshot(self, entry_id)),
        Scope(takeovers=3),
    ),
}


def _empty_snapshot(producers: Producers[Any], entry_id: int) -> tuple[()]:
    producers._snapshot, producers._bytes_since, producers.has_stamped = entry_id, 0, True
    return ()


@pytest.mark.parametrize("name", MUTANTS)
def test_known_bugs_are_found(name: str) -> None:
    """A model in which a known bug breaks nothing proves nothing."""
    kind, mutant, scope = MUTANTS[name]
    if mutant is None:
        result = search(kind(scope), states_max=STATES_MAX)
    else:
        with mutant():
            result = search(kind(scope), states_max=STATES_MAX)
    assert result.violation, str(result)
    assert result.trace
