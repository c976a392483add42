"""The gate of a server, as a machine."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dlcore.base.access import gate as gates
from dlcore.base.access.gate import Asked, End, Ended, Event, Gate, Refuse, RulesDamaged, RulesRead
from dlcore.base.access.rights import ANONYMOUS, Demand, Principal, Proof, Right, Rule, Scope
from dlcore.base.errors import AccessDeniedError, LogNotReadyError

ALICE = Principal(Proof.TOKEN, "alice")
ROOT = Principal(Proof.CERTIFICATE, "root")
READ, APPEND = Demand(Right.READ, "a"), Demand(Right.APPEND, "a")
ALICE_READS = Rule(principal="user:alice", rights=(Right.READ,), scope=Scope.LOG, name="a")
DENY_ALL = Rule(principal="*", rights=tuple(Right), scope=Scope.NAMESPACE, deny=True)


def a_gate(*events: Event) -> Gate:
    """Return a gate with one super user after these events, none of which has an effect."""
    gate = Gate(super_users=frozenset({str(ROOT)}))
    for event in events:
        assert not gate.handle(event)
        gate.validate()
    return gate


def refusal(gate: Gate, asked: Asked) -> str | None:
    """Return why a call is refused."""
    effects = gate.handle(asked)
    gate.validate()
    if not effects:
        return None
    (refuse,) = effects
    assert isinstance(refuse, Refuse)
    assert refuse.call == asked.call
    return f"{type(refuse.error).__name__}: {refuse.error}"


def test_no_caller_passes_before_the_rules_are_known() -> None:
    """A server that starts while the metadata store is away must not let strangers in."""
    gate = a_gate()
    assert gate.has_rules
    refused = refusal(gate, Asked(1, ROOT, (READ,)))
    assert refused is not None
    assert refused.startswith("LogNotReadyError: this server has not read the rules")
    assert LogNotReadyError.retriable


def test_without_rules_everybody_passes() -> None:
    """And nothing need be looked up to know demands."""
    gate = a_gate(RulesRead(()))
    assert not gate.has_rules
    assert refusal(gate, Asked(1, ANONYMOUS, (READ, APPEND))) is None


def test_each_demand_of_a_call_is_judged() -> None:
    """The refusal names the caller, the first thing that it may not do, and why."""
    gate = a_gate(RulesRead((ALICE_READS,)))
    assert gate.has_rules
    assert refusal(gate, Asked(1, ALICE, (READ,))) is None
    refused = refusal(gate, Asked(2, ALICE, (READ, APPEND)))
    assert refused == (
        "AccessDeniedError: user:alice may not append log 'a': no rule allows it; to do: ask an "
        "operator for dlog acl allow 'user:alice' append --log 'a'"
    )
    refused = refusal(gate, Asked(3, ALICE, (Demand(Right.MANAGE),)))
    assert refused is not None
    assert refused.endswith("for dlog acl allow 'user:alice' manage --namespace")
    denied = a_gate(RulesRead((Rule.parse("deny user:alice append log a"),)))
    refused = refusal(denied, Asked(1, ALICE, (APPEND,)))
    assert refused is not None
    assert "a rule denies it; to do: ask an operator, to whom dlog acl list shows" in refused


def test_damaged_rules_let_super_users_in_only() -> None:
    """Rules that cannot be read might deny everything."""
    gate = a_gate(RulesRead(()), RulesDamaged("no JSON"))
    refused = refusal(gate, Asked(1, ALICE, (READ,)))
    assert refused is not None
    assert refused.endswith(
        "the rules of the namespace are damaged, and only super users pass: no JSON"
    )
    assert refusal(gate, Asked(2, ROOT, (READ,))) is None
    assert not gate.handle(RulesRead(()))
    assert refusal(gate, Asked(3, ALICE, (READ,))) is None


@pytest.mark.parametrize("change", [RulesRead((DENY_ALL,)), RulesDamaged("no JSON")])
def test_a_running_call_that_loses_its_right_is_ended_once(change: Event) -> None:
    """The super user goes on, and no one else does."""
    gate = a_gate(RulesRead((ALICE_READS,)), Asked(1, ALICE, (READ,)), Asked(2, ROOT, (APPEND,)))
    (end,) = gate.handle(change)
    gate.validate()
    assert isinstance(end, End)
    assert end.call == 1
    assert isinstance(end.error, AccessDeniedError)
    assert not gate.handle(change)
    assert not gate.handle(Ended(1))  # the driver tells of its end as of any other


def test_a_call_that_ended_is_forgotten() -> None:
    """Nothing is ended twice, and memory does not grow with the calls."""
    gate = a_gate(RulesRead((ALICE_READS,)), Asked(1, ALICE, (READ,)), Ended(1), Ended(1))
    assert not gate.handle(RulesRead((DENY_ALL,)))


def test_a_call_that_asks_again_keeps_its_earlier_demands() -> None:
    """A stream that stages asks for each of its logs when the first batch for it comes."""
    other = Rule(principal="user:alice", rights=(Right.READ,), scope=Scope.LOG, name="b")
    gate = a_gate(
        RulesRead((ALICE_READS, other)),
        Asked(1, ALICE, (READ,)),
        Asked(1, ALICE, (Demand(Right.READ, "b"), READ)),
    )
    (end,) = gate.handle(RulesRead((other,)))
    assert isinstance(end, End)
    assert str(end.error).startswith("user:alice may not read log 'a'")


def test_the_number_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call beyond it is asked to come again; those inside may ask for more."""
    monkeypatch.setattr(gates, "RUNNING_MAX", 2)
    gate = a_gate(RulesRead(()), Asked(1, ALICE, (READ,)), Asked(2, ALICE, (READ,)))
    assert refusal(gate, Asked(3, ALICE, (READ,))) is not None
    assert refusal(gate, Asked(2, ALICE, (APPEND,))) is None
    assert not gate.handle(Ended(1))
    assert refusal(gate, Asked(3, ALICE, (READ,))) is None


EVENTS = st.one_of(
    st.lists(st.sampled_from([ALICE_READS, DENY_ALL]), max_size=2).map(
        lambda rules: RulesRead(tuple(rules))
    ),
    st.just(RulesDamaged("no JSON")),
    st.builds(
        Asked,
        st.integers(0, 3),
        st.sampled_from([ALICE, ROOT, ANONYMOUS]),
        st.sampled_from([(READ,), (APPEND,), (READ, APPEND), ()]),
    ),
    st.builds(Ended, st.integers(0, 3)),
)


@given(st.lists(EVENTS))
def test_no_running_call_is_without_its_rights(events: list[Event]) -> None:
    """After each event, in any order of events; the machine's own invariant says so."""
    gate = a_gate()
    for event in events:
        gate.handle(event)
        gate.validate()
