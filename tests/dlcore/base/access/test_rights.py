"""Rules of a namespace, and their answers to demands."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dlcore.base.access.rights import (
    ANONYMOUS,
    RULES_MAX,
    Demand,
    Principal,
    Proof,
    Right,
    Rule,
    Rules,
    Scope,
    Verdict,
    changed,
    require_present,
    texts_of,
)
from dlcore.base.errors import ConfigurationError

ALICE = Principal(Proof.TOKEN, "alice")
BOB = Principal(Proof.TOKEN, "bob")
INGEST = Principal(Proof.CERTIFICATE, "ingest")
READ = Demand(Right.READ, "pay/in")


def rule(
    principal: str, *rights: Right, log: str = "", prefix: str = "", deny: bool = False
) -> Rule:
    """Return a rule on a log, a prefix, or without both on the namespace."""
    scope = Scope.LOG if log else Scope.PREFIX if prefix else Scope.NAMESPACE
    return Rule(principal=principal, rights=rights, scope=scope, name=log or prefix, deny=deny)


@pytest.mark.parametrize("principal", [ALICE, INGEST, ANONYMOUS])
def test_without_a_rule_everybody_may_do_everything(principal: Principal) -> None:
    """A namespace without access control works as before."""
    for right, log in product(Right, (None, "pay/in")):
        assert Rules().judge(principal, Demand(right, log)) is Verdict.ALLOWED


@pytest.mark.parametrize(
    ("given", "principal", "verdict"),
    [
        (rule("user:alice", Right.READ, log="pay/in"), ALICE, Verdict.ALLOWED),
        (rule("user:alice", Right.READ, prefix="pay/"), ALICE, Verdict.ALLOWED),
        (rule("user:alice", Right.READ), ALICE, Verdict.ALLOWED),
        (rule("user:*", Right.READ), ALICE, Verdict.ALLOWED),
        (rule("*", Right.READ), ALICE, Verdict.ALLOWED),
        (rule("*", Right.READ), ANONYMOUS, Verdict.ALLOWED),
        (rule("certificate:*", Right.READ), INGEST, Verdict.ALLOWED),
        (rule("anonymous", Right.READ), ANONYMOUS, Verdict.ALLOWED),
        (rule("user:alice", Right.READ, log="pay/in2"), ALICE, Verdict.NOT_ALLOWED),
        (rule("user:alice", Right.READ, prefix="paying"), ALICE, Verdict.NOT_ALLOWED),
        (rule("user:alice", Right.APPEND, Right.MANAGE), ALICE, Verdict.NOT_ALLOWED),
        (rule("user:alice", Right.READ), BOB, Verdict.NOT_ALLOWED),
        (rule("certificate:alice", Right.READ), ALICE, Verdict.NOT_ALLOWED),
        (rule("certificate:*", Right.READ), ALICE, Verdict.NOT_ALLOWED),
        (rule("user:*", Right.READ), ANONYMOUS, Verdict.NOT_ALLOWED),
        (rule("user:alice", Right.READ, deny=True), ALICE, Verdict.DENIED),
        (rule("user:alice", Right.READ, deny=True), BOB, Verdict.NOT_ALLOWED),
    ],
)  # fmt: skip
def test_one_rule(given: Rule, principal: Principal, verdict: Verdict) -> None:
    """Each scope, and each form of a principal."""
    assert Rules([given]).judge(principal, READ) is verdict


def test_a_demand_on_the_namespace_needs_a_rule_on_it() -> None:
    """The rights on all logs that there are do not include the proxies of the namespace."""
    demand = Demand(Right.MANAGE)
    on_logs = rule("user:alice", Right.MANAGE, prefix="p")
    assert Rules([on_logs]).judge(ALICE, demand) is Verdict.NOT_ALLOWED
    assert Rules([rule("user:alice", Right.MANAGE)]).judge(ALICE, demand) is Verdict.ALLOWED


@pytest.mark.parametrize("right", Right)
def test_every_right_includes_describe_and_nothing_else(right: Right) -> None:
    """A writer has to see the schema; a manager need not see the records."""
    rules = Rules([rule("user:alice", right)])
    may = {each for each in Right if rules.judge(ALICE, Demand(each, "a")) is Verdict.ALLOWED}
    assert may == {right, Right.DESCRIBE}


def test_super_users_may_do_everything_whatever_the_rules_say() -> None:
    """Otherwise no one could mend rules that shut everybody out."""
    denied = [rule("*", *Right, deny=True)]
    rules = Rules(denied, super_users=frozenset({"user:alice"}))
    assert rules.judge(ALICE, READ) is Verdict.ALLOWED
    assert rules.judge(INGEST, READ) is Verdict.DENIED


@given(st.lists(st.sampled_from(["user:alice", "user:*", "*"]), min_size=1), st.randoms())
def test_a_denial_wins_in_any_order(principals: list[str], random: Any) -> None:
    """Allowing rules of any number and scope do not change it."""
    rules = [rule(each, *Right, log="pay/in") for each in principals]
    rules.append(rule(random.choice(principals), Right.READ, prefix="pay/", deny=True))
    random.shuffle(rules)
    assert Rules(rules).judge(ALICE, READ) is Verdict.DENIED
    assert Rules(rules).judge(ALICE, Demand(Right.APPEND, "pay/in")) is Verdict.ALLOWED


@pytest.mark.parametrize(
    "fields",
    [
        {"principal": "alice"},
        {"rights": ()},
        {"rights": (Right.READ, Right.READ)},
        {"name": ""},
        {"name": "/pay"},
        {"name": "a b"},
        {"scope": Scope.PREFIX, "name": ""},
        {"scope": Scope.PREFIX, "name": "/pay"},
        {"scope": Scope.NAMESPACE, "name": "pay"},
    ],
)
def test_a_rule_that_means_nothing_is_refused(fields: dict[str, Any]) -> None:
    """A rule with a mistake would protect less than its author believes."""
    right = {"principal": "user:alice", "rights": (Right.READ,), "scope": Scope.LOG, "name": "pay"}
    Rule(**right)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"expected|not allowed|empty"):
        Rule(**{**right, **fields})


@pytest.mark.parametrize(
    "text",
    [
        "allow user:alice read,append prefix pay/",
        "deny * read log pay/secret",
        "allow certificate:Night Shift manage namespace",
        "allow user:* describe log namespace",
        "deny anonymous describe,read,append,truncate,manage namespace",
        "allow user:read log x read log log",
    ],
)
def test_a_rule_is_its_text(text: str) -> None:
    """Names of principals may have spaces, as in certificates; names of logs have none."""
    assert str(Rule.parse(text)) == text


def test_the_parts_of_a_text() -> None:
    """Each word has its place."""
    assert Rule.parse("deny user:alice read log pay") == rule(
        "user:alice", Right.READ, log="pay", deny=True
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "allow user:alice read",
        "permit user:alice read log a",
        "allow user:alice fly log a",
        "allow user:alice read,read log a",
        "allow user:alice read table a",
        "allow user:alice read log a b",
        "allow alice read log a",
        "allow user:alice read log /a",
        "allow user:alice read  log a",
        "ALLOW user:alice read log a",
        7,
    ],
)
def test_another_text_is_no_rule(text: Any) -> None:
    """The error names the text or its wrong part, and what would be right."""
    with pytest.raises(ConfigurationError, match="expected"):
        Rule.parse(text)


def test_the_number_of_rules_is_bounded() -> None:
    """They are one value in the metadata store."""
    rules = [rule(f"user:{number}", Right.READ) for number in range(RULES_MAX)]
    Rules(rules)
    with pytest.raises(ConfigurationError, match="at most 1000; use prefixes"):
        Rules([*rules, rule("*", Right.READ)])


def test_rules_are_added_once_and_removed() -> None:
    """A change that is repeated after a lost answer changes nothing."""
    one, two = rule("user:alice", Right.READ), rule("user:bob", Right.READ, deny=True)
    assert changed((one,), add=[two, one], remove=[]) == [one, two]
    assert changed((one, two), add=[], remove=[one]) == [two]
    assert changed((one,), add=[one], remove=[one, two]) == [one]


def test_one_text_is_no_list_of_rules() -> None:
    """Its letters would each be refused with a text that does not help."""
    with pytest.raises(ConfigurationError, match="expected a list of rules"):
        texts_of("allow * read namespace")
    assert texts_of(["allow * read namespace"]) == ["allow * read namespace"]


def test_a_removal_that_finds_nothing_is_an_error() -> None:
    """Its author has to learn that the rule that was meant still holds."""
    texts = ["allow user:alice read namespace"]
    require_present(texts, texts)
    with pytest.raises(ConfigurationError, match="alice append namespace' is not there"):
        require_present(texts, ["allow user:alice append namespace"])


@pytest.mark.parametrize(
    ("demand", "text"),
    [(READ, "read log 'pay/in'"), (Demand(Right.MANAGE), "manage the namespace")],
)
def test_a_demand_names_what_it_needs(demand: Demand, text: str) -> None:
    """For errors and the audit log."""
    assert str(demand) == text
