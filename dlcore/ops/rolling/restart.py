"""Decides a rolling restart: which member is next, and when it may be touched; pure.

One member at a time is restarted, and none before all members are ready and no ledger lacks a
replica.  Therefore a restart never takes more than one bookie from a write set, and appends go on
with the others.  Bookies come first, because clients may need what newer bookies offer: read-only
ones, which take nothing, then the others rack by rack.  Proxies follow; each hands its logs over
first.

A member is back when it is ready in another life than before: a command that restarted nothing does
not count.  Whatever fails, takes longer than the patience, or interrupts it, stops the rest.  A
proxy that was drained until then takes logs again first, or the outcome says that it could not be
asked.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, assert_never

from dlcore.base.machines import CallFailed, Ended, State, StepMachine, Transitions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOOK_S = 0.5
"""The pause between two looks at the cluster."""


class Phase(State):
    """The states."""

    WAITING = "all members must be ready, and nothing may lack a replica"
    DRAINING = "a proxy hands its logs over"
    RESTARTING = "the command of a member runs"
    RETURNING = "a restarted member must be ready again"
    UNDRAINING = "something stopped it, and a drained proxy must take logs again"
    ENDED = "all are restarted, or something stopped it"


TRANSITIONS = Transitions(
    Phase.WAITING,
    {
        Phase.WAITING: {
            Phase.DRAINING: "all is well, a proxy is next",
            Phase.RESTARTING: "all is well, a bookie is next",
            Phase.ENDED: "all is well and none is left, or it took too long",
        },
        Phase.DRAINING: {Phase.RESTARTING: "it owns no log", Phase.UNDRAINING: "it failed"},
        Phase.RESTARTING: {
            Phase.RETURNING: "the command ended",
            Phase.UNDRAINING: "it failed for a proxy",
            Phase.ENDED: "it failed for a bookie",
        },
        Phase.RETURNING: {
            Phase.WAITING: "it is ready in another life",
            Phase.UNDRAINING: "a proxy took too long",
            Phase.ENDED: "a bookie took too long",
        },
        Phase.UNDRAINING: {Phase.ENDED: "it takes logs, or could not be asked to"},
        Phase.ENDED: {},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A bookie, by its name, or a proxy, by its location."""

    name: str
    address: str
    """``host:port``."""
    is_proxy: bool = False
    rack: str = ""
    read_only: bool = False

    @property
    def host(self) -> str:
        """The host of its address."""
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> str:
        """The port of its address."""
        return self.address.rpartition(":")[2]


def order_of(members: Sequence[Member]) -> list[Member]:
    """Return the members in the order of their restarts."""
    return sorted(members, key=lambda m: (m.is_proxy, not m.read_only, m.rack, m.name))


# Events


class Signal(enum.Enum):
    """An event that carries nothing."""

    BEGIN = "the restart begins"
    INTERRUPTED = "the last effect is given up, and nothing more is restarted"


@dataclass(frozen=True, slots=True)
class Seen:
    """The cluster as it is: the life of each member that is ready, and ledgers without replicas."""

    lives: Mapping[str, str]
    missing: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """The last effect is performed."""

    now_s: float


Event: TypeAlias = Signal | Seen | Stepped | CallFailed


# Effects


@dataclass(frozen=True, slots=True)
class Look:
    """Look at the cluster after a pause."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    """Make a proxy release its logs and take no more."""

    member: Member


@dataclass(frozen=True, slots=True)
class Run:
    """Run the command of a member."""

    member: Member


@dataclass(frozen=True, slots=True)
class Undrain:
    """Make a proxy take logs again."""

    member: Member


@dataclass(frozen=True, slots=True)
class Restarted:
    """The outcome; `reason` says why it stopped early, "" if all members were restarted."""

    names: tuple[str, ...]
    reason: str = ""


Work: TypeAlias = Look | Drain | Run | Undrain
Effect: TypeAlias = Work | Ended[Restarted]


class RollingRestart(StepMachine[Phase, Event, Work, Restarted]):
    """Restarts some members of a cluster, while all of its members are watched.

    Args:
        members: all members of the cluster.
        chosen: those to restart.
        patience_s: how long each wait may take.
        now_s: the time of the start.
    """

    transitions = TRANSITIONS

    def __init__(
        self,
        members: Sequence[Member],
        chosen: Sequence[Member],
        *,
        patience_s: float,
        now_s: float,
    ) -> None:
        self.state = Phase.WAITING
        self._members = order_of(members)
        self._left = order_of(chosen)
        self._restarted: list[str] = []
        self._patience_s = patience_s
        self._since_s = now_s
        self._life = ""  # of the member in turn, before its restart
        self._reason = ""  # why it stops, while a proxy takes logs again

    def handle(self, event: Event) -> Effect:
        """Return the effect of an event."""
        assert self.state is not Phase.ENDED
        match event:
            case Signal.BEGIN:
                return Look(0.0)
            case Seen():
                return self._waited(event) if self.state is Phase.WAITING else self._returned(event)
            case Stepped(now_s):
                return self._stepped(now_s)
            case Signal.INTERRUPTED:
                return self._failed("interrupted")
            case CallFailed(error):
                return self._failed(str(error))
            case _:
                assert_never(event)

    def _waited(self, seen: Seen) -> Effect:
        trouble = self._trouble(seen)
        if trouble:
            return self._look_again(seen.now_s, trouble)
        if not self._left:
            return self._end("")
        member = self._left[0]
        self._life = seen.lives[member.name]
        if member.is_proxy:
            self._become(Phase.DRAINING)
            return Drain(member)
        self._become(Phase.RESTARTING)
        return Run(member)

    def _trouble(self, seen: Seen) -> str:
        absent = [each.name for each in self._members if each.name not in seen.lives]
        if absent:
            return f"{', '.join(absent)}: not ready"
        return f"{seen.missing} ledgers lack a replica" if seen.missing else ""

    def _stepped(self, now_s: float) -> Effect:
        if self.state is Phase.UNDRAINING:
            return self._end(self._reason)
        if self.state is Phase.DRAINING:
            self._become(Phase.RESTARTING)
            return Run(self._left[0])
        self._become(Phase.RETURNING)
        self._since_s = now_s
        return Look(LOOK_S)

    def _returned(self, seen: Seen) -> Effect:
        member = self._left[0]
        life = seen.lives.get(member.name)
        if life in (None, self._life):
            what = "not ready" if life is None else "the command ended, but it was not restarted"
            return self._look_again(seen.now_s, f"{member.name}: {what}")
        self._restarted.append(self._left.pop(0).name)
        self._become(Phase.WAITING)
        self._since_s = seen.now_s
        return self._waited(seen)

    def _look_again(self, now_s: float, trouble: str) -> Effect:
        if now_s - self._since_s > self._patience_s:
            return self._stop(f"{trouble}, after {self._patience_s:g} s")
        return Look(LOOK_S)

    def _failed(self, error: str) -> Effect:
        if self.state is not Phase.UNDRAINING:
            return self._stop(error)
        location = self._left[0].name
        return self._end(
            f"{self._reason}; and {location} was drained, and cannot be asked to take logs again "
            f"({error}): if it runs, call dlog proxy undrain --endpoint {location}"
        )

    def _stop(self, reason: str) -> Effect:
        touched = self.state in (Phase.DRAINING, Phase.RESTARTING, Phase.RETURNING)
        if not (touched and self._left[0].is_proxy):
            return self._end(reason)
        self._become(Phase.UNDRAINING)
        self._reason = reason
        return Undrain(self._left[0])

    def _end(self, reason: str) -> Effect:
        self._become(Phase.ENDED)
        return Ended(Restarted(tuple(self._restarted), reason))

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        state, left = self.state, self._left
        assert not {each.name for each in left} & set(self._restarted)
        assert left or state in (Phase.WAITING, Phase.ENDED)
        assert state not in (Phase.DRAINING, Phase.UNDRAINING) or left[0].is_proxy
        assert bool(self._reason) == (state is Phase.UNDRAINING) or state is Phase.ENDED
