"""Bugs of the gate of proxies, put back on purpose: who is let in, and for how long."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from unittest.mock import patch

from dlcore.base.access.rights import EVERYBODY, Rules, Verdict
from dlcore.proxy.gatekeeper import Entry, Gatekeeper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.access.rights import Demand, Principal, Rule
    from dlcore.base.errors import DLError


@contextlib.contextmanager
def rules_that_deny_are_not_looked_at() -> Iterator[None]:
    """It is enough that a rule allows."""
    judge = Rules.judge

    def lax(self: Rules, principal: Principal, demand: Demand) -> Verdict:
        verdict = judge(self, principal, demand)
        return Verdict.ALLOWED if verdict is Verdict.DENIED else verdict

    with patch.object(Rules, "judge", lax):
        yield


@contextlib.contextmanager
def rules_on_logs_are_for_everybody() -> Iterator[None]:
    """The principal of a rule on a log is ignored."""

    def all_on_logs(self: Rules, principal: Principal) -> Iterator[Rule]:
        named = {EVERYBODY, str(principal)}
        yield from (rule for rule in self.all if rule.name or rule.principal in named)

    with patch.object(Rules, "_rules_of", all_on_logs):
        yield


@contextlib.contextmanager
def streams_outlive_their_right() -> Iterator[None]:
    """A stream that has begun is never ended."""

    def note(self: Entry, error: DLError) -> None:
        self.lost = error

    with patch.object(Entry, "lose", note):
        yield


@contextlib.contextmanager
def rules_are_read_once() -> Iterator[None]:
    """A proxy judges by the rules that it began with."""

    async def look_once(self: Gatekeeper) -> None:
        await self._look()

    with patch.object(Gatekeeper, "start", look_once):
        yield


MUTANTS = (
    rules_are_read_once,
    rules_on_logs_are_for_everybody,
    rules_that_deny_are_not_looked_at,
    streams_outlive_their_right,
)
