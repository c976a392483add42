"""`dlog acl`: the rules of access of the namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dlcore.base.access.rights import (
    EVERYBODY,
    Demand,
    Principal,
    Right,
    Rule,
    Rules,
    Scope,
    Verdict,
)
from dlcore.base.errors import ConfigurationError
from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    connect,
    lists_names,
    require_consent,
    run_direct,
)
from dlcore.ops.cli.output import show_done, show_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.direct.namespace import DirectNamespace


@click.group("acl")
@common_options
def acl_group() -> None:
    """Say who may do what through proxies.

    While there is no rule, every caller may do everything.  Once there is one, all that no rule
    allows is refused, and a rule that denies is stronger than any that allows.
    """


def _show(rules: Sequence[str]) -> None:
    rows = [{"rule": rule} for rule in rules]
    show_rows(rows, columns=("rule",), empty="no rules: every caller may do everything")


@acl_group.command("list", epilog="Example: dlog acl list")
@lists_names
@common_options
def list_rules() -> None:
    """List the rules."""
    with connect() as namespace:
        _show(namespace.get_access_rules())


def _rule_of(
    principal: str, rights: str, log: str | None, prefix: str | None, whole: bool, *, deny: bool
) -> Rule:
    given = [
        (scope, name)
        for scope, name in ((Scope.LOG, log), (Scope.PREFIX, prefix), (Scope.NAMESPACE, whole))
        if name
    ]
    if len(given) != 1:
        raise click.UsageError(
            "expected one of --log, --prefix and --namespace", click.get_current_context()
        )
    ((scope, name),) = given
    return Rule(
        principal=principal,
        rights=_rights_of(rights),
        scope=scope,
        name="" if name is True else str(name),
        deny=deny,
    )


def _rights_of(text: str) -> tuple[Right, ...]:
    try:
        return tuple(Right(each) for each in text.split(","))
    except ValueError as error:
        names = ", ".join(right.value for right in Right)
        raise ConfigurationError(f"rights {text!r}: expected some of {names}, by commas") from error


def _on_scope(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--log", metavar="NAME", help="On one log."),
        click.option("--prefix", metavar="START", help="On logs whose names begin so."),
        click.option(
            "--namespace", "whole", is_flag=True, help="On the namespace, and all its logs."
        ),
    ):
        command = option(command)
    return command


def _add(rule: Rule) -> None:
    with connect() as namespace:
        rules = namespace.change_access_rules(add=[str(rule)])
    show_done(f"added: {rule}", {"rule": str(rule), "rules": len(rules)})


@acl_group.command("allow", epilog="Example: dlog acl allow user:alice read,append --prefix pay/")
@click.argument("principal")
@click.argument("rights")
@_on_scope
@common_options
def allow(principal: str, rights: str, log: str | None, prefix: str | None, whole: bool) -> None:
    """Give RIGHTS to PRINCIPAL.

    PRINCIPAL is user:NAME, certificate:NAME, anonymous, user:*, certificate:* or *.  RIGHTS are
    some of describe, read, append, truncate and manage, joined by commas.
    """
    _add(_rule_of(principal, rights, log, prefix, whole, deny=False))


@acl_group.command("deny", epilog="Example: dlog acl deny user:bob read --log pay/secret")
@click.argument("principal")
@click.argument("rights")
@_on_scope
@common_options
def deny(principal: str, rights: str, log: str | None, prefix: str | None, whole: bool) -> None:
    """Refuse RIGHTS to PRINCIPAL, whatever other rules allow.

    The arguments are as for allow.
    """
    _add(_rule_of(principal, rights, log, prefix, whole, deny=True))


@acl_group.command("remove", epilog='Example: dlog acl remove "allow user:alice read log pay/in"')
@click.argument("rule")
@common_options
def remove(rule: str) -> None:
    """Remove a RULE, given as `dlog acl list` shows it."""
    with connect() as namespace:
        rules = namespace.change_access_rules(remove=[rule])
    show_done(
        f"removed: {rule}" if rules else f"removed: {rule}; every caller may do everything now",
        {"rule": rule, "rules": len(rules)},
    )


@acl_group.command("clear", epilog="Example: dlog acl clear --yes")
@confirmed
@common_options
def clear(yes: bool) -> None:
    """Remove all rules: every caller may do everything then.

    Damaged rules are removed, too.
    """
    require_consent(yes=yes)
    ask("remove all rules", yes=yes)

    async def work(namespace: DirectNamespace) -> None:
        await namespace.access_rules.clear()

    run_direct(work)
    show_done("no rules: every caller may do everything", {"rules": 0})


@acl_group.command("test", epilog="Example: dlog acl test user:alice read pay/in")
@click.argument("principal")
@click.argument("right", type=click.Choice([right.value for right in Right]))
@click.argument("log", required=False)
@common_options
def test_rules(principal: str, right: str, log: str | None) -> None:
    """Say whether PRINCIPAL has a RIGHT on LOG, and why.

    Without LOG it is a right on the namespace.  Super users of the proxies may do everything, and
    are not known here.
    """
    caller = Principal.parse(principal)
    if caller.name == EVERYBODY:
        raise ConfigurationError(f"principal {principal!r}: expected one caller, not all")
    with connect() as namespace:
        rules = Rules(map(Rule.parse, namespace.get_access_rules()))
    demand = Demand(Right(right), log)
    verdict = rules.judge(caller, demand)
    is_allowed = verdict is Verdict.ALLOWED
    show_done(
        f"{principal} may {'' if is_allowed else 'not '}{demand}: {verdict.value}",
        {"allowed": is_allowed, "reason": verdict.value},
    )
