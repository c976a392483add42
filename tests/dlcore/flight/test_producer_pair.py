"""Goal: clients and proxies that lose streams and logs write each record once, and come to an end.

Method: random walks through the model of `tests/model/producers.py`, in a scope that is too large
to be searched.  Streams break, lose their first messages, and deliver the others late; proxies
crash, give the log away, and go on as zombies.  After each walk nothing breaks any more, and every
client must end.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings, strategies as st

from dlcore.base.errors import ProducerFencedError
from tests.model.producers import Model, Scope, State

STEPS = 60
STEPS_MAX = 1000


def walk(model: Model, state: State, chance: random.Random) -> State | None:
    """Take a random step, after which the promises hold; None: there is none."""
    steps = list(model.steps(state))
    if not steps:
        return None
    what, after = chance.choice(steps)
    assert not model.check(after), f"{what}: {model.check(after)}"
    return after


def are_done(model: Model, state: State) -> bool:
    """Return whether each client is closed or has failed."""
    clients = [model.client(state, number) for number in range(len(state.clients))]
    return all(each.has_ended for each in clients)


@given(
    seed=st.integers(0, 2**32),
    is_named=st.booleans(),
    clients=st.integers(1, 2),
    records=st.integers(1, 4),
    pauses=st.integers(0, 1),
)
@settings(deadline=None, max_examples=40)
def test_every_accepted_record_is_in_the_log_once(
    seed: int, *, is_named: bool, clients: int, records: int, pauses: int
) -> None:
    """In order; only a fence, or a log that forgot a record in doubt, ends a client before."""
    chance = random.Random(seed)
    scope = Scope(
        clients=clients,
        records=records,
        is_named=is_named,
        takeovers=5,
        crashes=2,
        breaks=5,
        releases=2,
        pauses=pauses,
        others=2,
    )
    model = Model(scope)
    state = model.initial()
    for _ in range(STEPS):
        after = walk(model, state, chance)
        if after is None:
            break
        state = after
    calm = replace(scope, crashes=0, breaks=0, releases=0, pauses=0, others=0)
    for _ in range(STEPS_MAX):
        if are_done(model, state):
            break
        needs_owner = not model.is_owned(state)
        model.scope = replace(calm, takeovers=state.takeovers + needs_owner)
        after = walk(model, state, chance)
        assert after is not None, "neither side can do anything"
        state = after
    assert are_done(model, state)
    for number in range(clients):
        client = model.client(state, number)
        if client.failed_with is None:
            assert client.acked == list(range(records))
        else:
            assert isinstance(client.failed_with, ProducerFencedError)
            assert pauses or (is_named and clients > 1)
