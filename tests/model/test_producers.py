"""Goal: two proxies and clients that retry over both never double, lose or swap records.

Method: visit every interleaving of small scopes; and put bugs back, each of which must be found.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from dlcore.flight.producer_client import Identity, Outbox, ProducerClient
from dlcore.flight.producer_server import StreamAcks
from dlcore.log.proxied.producers import Durable, Fresh, Producers
from tests.model.exploring import STATES_MAX, prove, scopes, search
from tests.model.producers import LARGE, SMALL, Model, Scope

if TYPE_CHECKING:
    from dlcore.log.entries.stamp import Claim


@pytest.mark.parametrize("scope", scopes(SMALL, LARGE))
def test_no_interleaving_breaks_a_promise(scope: Scope) -> None:
    """Every state of the scope is visited."""
    prove(Model(scope))


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


_accepted = StreamAcks.accepted


def _acked_when_accepted(self: StreamAcks, *batch: int, **fresh: int) -> None:
    _accepted(self, *batch, **fresh)
    _durable(self, None)


_durable = StreamAcks.durable


_open = ProducerClient._open


def _begun_anew(self: ProducerClient[Any], now: float) -> Any:
    self.identity.claim = None
    return _open(self, now)


def _numbered_anew(self: Outbox[Any], sequence: int) -> None:
    self._doubted = 0
    for message in self._messages:
        message.first = sequence
        sequence += message.batch.num_rows
    self._next_sequence = sequence


_begins_anew = ProducerClient._begins_anew


def _renamed_in_doubt(self: ProducerClient[Any]) -> bool:
    self.outbox._doubted = 0
    return _begins_anew(self)


def _empty_snapshot(self: Producers[Any], entry_id: int, _: int) -> tuple[()]:
    self._snapshot, self._bytes_since, self.has_stamped = entry_id, 0, True
    return ()


_Change = tuple[type[Any], str, object]
_TWO, _FORGETS = SMALL["two incarnations"], SMALL["a log forgets"]
MUTANTS: dict[str, tuple[Scope, type[Model], tuple[_Change, ...]]] = {
    "acknowledged before it is durable": (
        Scope(),
        Model,
        (
            (StreamAcks, "accepted", _acked_when_accepted),
            (StreamAcks, "durable", lambda *_: None),
        ),
    ),
    "not read by the next owner": (Scope(), _NotRestored, ()),
    "a zombie goes on acknowledging": (Scope(), _ZombiesAcknowledge, ()),
    "a duplicate before it is durable": (
        Scope(),
        Model,
        ((Producers, "look_at", _duplicates_before_durable),),
    ),
    "what is accepted is written again": (
        Scope(),
        Model,
        ((Producers, "look_at", _accepted_is_written_again),),
    ),
    "a gap is taken": (Scope(), Model, ((Producers, "look_at", _gaps_are_taken),)),
    "the epoch is not checked": (_TWO, Model, ((Producers, "_require", lambda *_: None),)),
    "the token is not checked": (
        _TWO,
        Model,
        ((Producers, "_require", _tokens_are_not_looked_at),),
    ),
    "a claim is believed though others wrote since": (
        _TWO,
        Model,
        ((Producers, "continue_with", _believed_always),),
    ),
    "a snapshot leaves producers out": (
        Scope(takeovers=3),
        Model,
        ((Producers, "_snapshot_of", _empty_snapshot),),
    ),
    "each stream is of a new incarnation": (
        Scope(),
        Model,
        ((ProducerClient, "_open", _begun_anew), (Outbox, "begin", _numbered_anew)),
    ),
    "a client in doubt takes another name": (
        _FORGETS,
        Model,
        ((ProducerClient, "_begins_anew", _renamed_in_doubt),),
    ),
    "a log that forgot is believed": (
        _FORGETS,
        Model,
        ((Identity, "is_forgotten", lambda *_: False),),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_known_bugs_are_found(name: str) -> None:
    """A model in which a known bug breaks nothing proves nothing."""
    scope, kind, changes = MUTANTS[name]
    with ExitStack() as patches:
        for changed, attribute, value in changes:
            patches.enter_context(patch.object(changed, attribute, value))
        result = search(kind(scope), states_max=STATES_MAX)
    assert result.violation, str(result)
    assert result.trace
