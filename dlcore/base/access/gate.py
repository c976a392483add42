"""The gate of a server: it judges each call by the rules, and ends calls that lost their right.

Promises:

* Nothing is let in before the rules were read once, or while the stored rules are damaged.
* A call is judged by the rules that were read last.  When they change, each running call is judged
  again, and one that lost its right is ended.
* The audit log has a line of each refused call, and of each management action.

The driver (`dlcore.proxy.gatekeeper`) reads and watches the rules and performs the effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.access.rights import Rules, Verdict
from dlcore.base.errors import AccessDeniedError, DLError, LogNotReadyError
from dlcore.base.machines import Machine, State, Transitions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.access.rights import Demand, Principal, Rule

RUNNING_MAX = 100_000
"""Most calls that are judged again when the rules change; servers bound their calls below it."""
RETRY_S = 0.2


class GateState(State):
    """The state of the machine."""

    CLOSED = "the rules were not read yet: calls are asked to come again"
    OPEN = "the rules are known"
    SHUT = "the stored rules are damaged: only super users pass"


_S = GateState
TRANSITIONS = Transitions(
    _S.CLOSED,
    {
        _S.CLOSED: {_S.OPEN: "the rules were read", _S.SHUT: "the rules do not parse"},
        _S.OPEN: {_S.OPEN: "other rules were read", _S.SHUT: "the rules do not parse"},
        _S.SHUT: {_S.OPEN: "the rules were mended", _S.SHUT: "they still do not parse"},
    },
)


@dataclass(frozen=True, slots=True)
class RulesRead:
    """The stored rules were read."""

    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class RulesDamaged:
    """The stored rules do not parse."""

    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A call wants to do something; a call may ask several times, with other demands."""

    call: int
    principal: Principal
    demands: tuple[Demand, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A call is over."""

    call: int


Event: TypeAlias = RulesRead | RulesDamaged | Asked | Ended


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse what a call asked for."""

    call: int
    error: DLError


@dataclass(frozen=True, slots=True)
class End:
    """End a running call, which lost its right."""

    call: int
    error: DLError


Effect: TypeAlias = Refuse | End


class Gate(Machine[GateState]):
    """The gate of one server.

    Args:
        super_users: texts of principals that may do everything.
    """

    transitions = TRANSITIONS

    def __init__(self, *, super_users: frozenset[str] = frozenset()) -> None:
        self.state = GateState.CLOSED
        self._super_users = super_users
        self._rules = Rules()
        self._damage = ""
        self._running: dict[int, tuple[Principal, tuple[Demand, ...]]] = {}

    @property
    def has_rules(self) -> bool:
        """Whether a call can be refused; without rules nothing need be looked up for demands."""
        return self.state is not GateState.OPEN or bool(self._rules.all)

    def judge(self, principal: Principal, demand: Demand) -> DLError | None:
        """Return the error for a demand that is not allowed, None for one that is."""
        if self.state is GateState.CLOSED:
            return LogNotReadyError(
                "this server has not read the rules of the namespace yet: try again",
                retry_after_s=RETRY_S,
            )
        if self.state is GateState.SHUT and str(principal) not in self._super_users:
            return AccessDeniedError(
                f"{principal} may not {demand}: the rules of the namespace are damaged, and only "
                f"super users pass: {self._damage}"
            )
        verdict = self._rules.judge(principal, demand)
        if verdict is Verdict.ALLOWED:
            return None
        return AccessDeniedError(
            f"{principal} may not {demand}: {verdict.value}; to do: "
            + _what_to_do(verdict, principal, demand)
        )

    def handle(self, event: Event) -> Sequence[Effect]:
        """Take an event; return what to do."""
        match event:
            case Asked():
                return self._asked(event)
            case Ended(call):
                self._running.pop(call, None)
                return ()
            case RulesRead(rules):
                self._rules = Rules(rules, super_users=self._super_users)
                self._become(GateState.OPEN)
                return self._judge_again()
            case RulesDamaged(reason):
                self._damage = reason
                self._become(GateState.SHUT)
                return self._judge_again()
            case _:
                assert_never(event)

    def validate(self) -> None:
        """Check the invariants; tests call it after each event."""
        assert len(self._running) <= RUNNING_MAX
        for principal, demands in self._running.values():
            assert all(self.judge(principal, demand) is None for demand in demands)

    def _asked(self, event: Asked) -> Sequence[Effect]:
        for demand in event.demands:
            error = self.judge(event.principal, demand)
            if error is not None:
                return (Refuse(event.call, error),)
        _, before = self._running.get(event.call, (event.principal, ()))
        if event.call not in self._running and len(self._running) == RUNNING_MAX:
            error = LogNotReadyError("this server has too many calls: try again")
            return (Refuse(event.call, error),)
        demands = tuple(dict.fromkeys((*before, *event.demands)))
        self._running[event.call] = (event.principal, demands)
        return ()

    def _judge_again(self) -> Sequence[Effect]:
        ends = []
        for call, (principal, demands) in self._running.items():
            found = (self.judge(principal, demand) for demand in demands)
            error = next((each for each in found if each is not None), None)
            if error is not None:
                ends.append(End(call, error))
        for end in ends:
            del self._running[end.call]
        return ends


def _what_to_do(verdict: Verdict, principal: Principal, demand: Demand) -> str:
    if verdict is Verdict.DENIED:
        return "ask an operator, to whom dlog acl list shows the rule"
    where = "--namespace" if demand.log is None else f"--log {demand.log!r}"
    return f"ask an operator for dlog acl allow {str(principal)!r} {demand.right.value} {where}"
