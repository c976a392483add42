"""One group of Kafka's consumers at its coordinator: its members, and their logs.

Theory of operation.  Members join, and one of them, the leader, assigns the topics to all, by rules
that only the clients know; the coordinator passes on what they say.  Each such round is a
generation.  A log has one partition, so that one member reads it, and the others stand by.

When a member comes, leaves, or is silent for its session, a new round begins: the answers to their
next heartbeats say so, and the members join again.  The round ends when all have joined, or when
its time is over; a member that has not joined by then is out.  Then all ask for their assignments,
and wait for the leader's word.

    a call           in a round         until the leader has spoken     in STABLE
    join             waits              begins a round                  begins a round
    sync             join again         waits, or is the leader's word  its assignment
    heartbeat        join again         ok                              ok
    commit           ok                 join again                      ok
    leave            out                out, and a round begins         out, and a round begins

Calls of an earlier generation, or of a client that is no member, are refused: those clients join
anew.  The state lives in memory only.  When the coordinator dies the members join again at another
one; positions are stored with the logs (`positions`).

Promises: a waiting call is answered once; in a generation each member has what the leader gave it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, assert_never

from kio.schema.errors import ErrorCode

from dlcore.base.machines import Machine, State, Transitions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MEMBERS_MAX = 100
_OK, _UNKNOWN = ErrorCode.none, ErrorCode.unknown_member_id
_STALE, _AGAIN = ErrorCode.illegal_generation, ErrorCode.rebalance_in_progress


class GroupState(State):
    """The state of the machine."""

    EMPTY = "there are no members"
    JOINING = "a round: the members join again"
    SYNCING = "the leader is to assign the logs"
    STABLE = "each member has its assignment"


_S = GroupState
_ROUND = {_S.JOINING: "a member comes, leaves or is silent"}
_NO_MEMBER = {_S.EMPTY: "the last member leaves or is silent"}
TRANSITIONS = Transitions(
    _S.EMPTY,
    {
        _S.EMPTY: {_S.JOINING: "a member comes"},
        _S.JOINING: {_S.SYNCING: "all have joined, or the time is over", **_NO_MEMBER},
        _S.SYNCING: {_S.STABLE: "the leader has spoken", **_ROUND, **_NO_MEMBER},
        _S.STABLE: {**_ROUND, **_NO_MEMBER},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Event: a member joins; without an id it is a new one, and gets `new`."""

    call: int
    member: str
    new: str
    kind: str
    """The type of the group's protocols, as ``consumer``."""
    protocols: Mapping[str, bytes]
    """The rules that the client knows by name, the preferred one first, with what it says."""
    session_s: float
    rebalance_s: float
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Event: a member asks for its assignment; the leader has those of all."""

    call: int
    member: str
    generation: int
    assignments: Mapping[str, bytes]
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Event: a member is alive."""

    call: int
    member: str
    generation: int
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Event: a member wants to store positions; one without an id, below generation 0, is none."""

    call: int
    member: str
    generation: int
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Event: a member leaves."""

    call: int
    member: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Event: the client of a waiting call has gone."""

    call: int
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Event: time has passed; see `Group.due_s`."""

    now_s: float


Event: TypeAlias = Join | Sync | Heartbeat | Commit | Leave | Gone | Passed


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Effect: answer a join."""

    call: int
    code: ErrorCode
    member: str
    generation: int = -1
    protocol: str = ""
    leader: str = ""
    members: Sequence[tuple[str, bytes]] = ()
    """For the leader: all members, and what they say by the protocol."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Effect: answer another call; a sync gets an assignment."""

    call: int
    code: ErrorCode
    assignment: bytes = b""


Effect: TypeAlias = Joined | Answered


@dataclass(slots=True)
class _Member:
    """A member; while a call of it waits, it has no deadline."""

    kind: str
    protocols: Mapping[str, bytes]
    session_s: float
    rebalance_s: float
    until_s: float
    call: int | None = None
    assignment: bytes = field(default=b"")


class Group(Machine[GroupState]):
    """The machine of one group."""

    transitions = TRANSITIONS

    def __init__(self) -> None:
        self.state = TRANSITIONS.start
        self.generation = 0
        self._members: dict[str, _Member] = {}  # in the order in which they came
        self._leader = ""
        self._protocol = ""
        self._until_s = 0.0  # the end of the round

    def __len__(self) -> int:
        return len(self._members)

    @property
    def due_s(self) -> float | None:
        """The time at which `Passed` has an effect; None: never."""
        ends = [each.until_s for each in self._members.values() if each.call is None]
        if self.state is _S.JOINING:
            ends.append(self._until_s)
        return min(ends, default=None)

    def handle(self, event: Event) -> Sequence[Effect]:
        """Take an event, and return the calls that are answered now."""
        # Time first: a call of a member whose session has ended is that of a stranger.
        effects = self._expired(event.now_s)
        match event:
            case Join():
                effects += self._join(event)
            case Sync():
                effects += self._sync(event)
            case Heartbeat():
                effects.append(Answered(event.call, self._beat(event)))
            case Commit():
                effects.append(Answered(event.call, self._commit(event)))
            case Leave(call=call, member=name):
                effects.append(Answered(call, _OK if name in self._members else _UNKNOWN))
                effects += self._removed([name], event.now_s)
            case Gone(call=call):
                for each in self._members.values():
                    if each.call == call:
                        each.call, each.until_s = None, event.now_s + each.session_s
            case Passed():
                pass
            case _:
                assert_never(event)
        return effects

    # Rounds

    def _expired(self, now_s: float) -> list[Effect]:
        is_over = self.state is _S.JOINING and now_s >= self._until_s
        waiting = [(name, each) for name, each in self._members.items() if each.call is None]
        silent = [name for name, each in waiting if is_over or each.until_s <= now_s]
        return self._removed(silent, now_s)

    def _removed(self, names: Iterable[str], now_s: float) -> list[Effect]:
        """Remove members; the others begin a round, or end the present one."""
        gone = [each for name in names if (each := self._members.pop(name, None))]
        if not gone:
            return []
        effects: list[Effect] = [
            Answered(each.call, _UNKNOWN) for each in gone if each.call is not None
        ]
        if not self._members:
            self._become(_S.EMPTY)
            return effects
        return effects + self._begin(now_s) + self._complete(now_s)

    def _begin(self, now_s: float, rebalance_s: float = 0.0) -> list[Effect]:
        """Begin a round, unless one is on; members that wait for the leader must join again."""
        if self.state is _S.JOINING:
            return []
        self._become(_S.JOINING)
        waiting = [each for each in self._members.values() if each.call is not None]
        calls = [each.call for each in waiting if each.call is not None]
        for each in waiting:
            each.call, each.until_s = None, now_s + each.session_s
        times_s = [each.rebalance_s for each in self._members.values()]
        # As at Kafka, the member that asks for the longest time decides.
        self._until_s = now_s + max([rebalance_s, *times_s])
        return [Answered(each, _AGAIN) for each in calls]

    def _join(self, event: Join) -> list[Effect]:
        name = event.member or event.new
        known = self._members.get(name)
        if refusal := self._refusal(event, known):
            return [Joined(call=event.call, code=refusal, member=event.member)]
        effects = self._begin(event.now_s, event.rebalance_s)
        if known is not None and known.call is not None:  # it has asked twice
            effects.append(Joined(call=known.call, code=_AGAIN, member=name))
        self._members[name] = _Member(
            event.kind,
            event.protocols,
            event.session_s,
            event.rebalance_s,
            event.now_s,
            call=event.call,
        )
        return effects + self._complete(event.now_s)

    def _refusal(self, event: Join, known: _Member | None) -> ErrorCode | None:
        if event.member and known is None:
            return _UNKNOWN
        if known is None and len(self._members) >= MEMBERS_MAX:
            return ErrorCode.group_max_size_reached
        others = [each for each in self._members.values() if each is not known]
        common = set(event.protocols).intersection(*(each.protocols for each in others))
        if not common or any(each.kind != event.kind for each in others):
            return ErrorCode.inconsistent_group_protocol
        return None

    def _complete(self, now_s: float) -> list[Effect]:
        """End the round if all have joined."""
        if any(each.call is None for each in self._members.values()):
            return []
        self._become(_S.SYNCING)
        self.generation += 1
        if self._leader not in self._members:
            self._leader = next(iter(self._members))
        common = set.intersection(*(set(each.protocols) for each in self._members.values()))
        self._protocol = next(
            each for each in self._members[self._leader].protocols if each in common
        )
        said = [(name, each.protocols[self._protocol]) for name, each in self._members.items()]
        effects: list[Effect] = []
        for name, each in self._members.items():
            assert each.call is not None
            effects.append(
                Joined(
                    call=each.call,
                    code=_OK,
                    member=name,
                    generation=self.generation,
                    protocol=self._protocol,
                    leader=self._leader,
                    members=said if name == self._leader else (),
                )
            )
            each.call, each.until_s, each.assignment = None, now_s + each.session_s, b""
        return effects

    # Calls of members

    def _found(self, name: str, generation: int, now_s: float) -> _Member | ErrorCode:
        """Return a member of this generation, which is alive, or why there is none."""
        member = self._members.get(name)
        if member is None:
            return _UNKNOWN
        if generation != self.generation:
            return _STALE
        member.until_s = now_s + member.session_s
        return member

    def _sync(self, event: Sync) -> list[Effect]:
        member = self._found(event.member, event.generation, event.now_s)
        if isinstance(member, ErrorCode):
            return [Answered(event.call, member)]
        match self.state:
            case _S.SYNCING:
                effects: list[Effect] = []
                if member.call is not None:  # it has asked twice
                    effects.append(Answered(member.call, _AGAIN))
                member.call = event.call
                if event.member == self._leader:
                    effects += self._assign(event)
                return effects
            case _S.STABLE:
                return [Answered(event.call, _OK, member.assignment)]
        return [Answered(event.call, _AGAIN)]

    def _assign(self, event: Sync) -> list[Effect]:
        self._become(_S.STABLE)
        effects: list[Effect] = []
        for name, each in self._members.items():
            each.assignment = event.assignments.get(name, b"")
            if each.call is not None:
                effects.append(Answered(each.call, _OK, each.assignment))
                each.call, each.until_s = None, event.now_s + each.session_s
        return effects

    def _beat(self, event: Heartbeat) -> ErrorCode:
        member = self._found(event.member, event.generation, event.now_s)
        if isinstance(member, ErrorCode):
            return member
        return _AGAIN if self.state is _S.JOINING else _OK

    def _commit(self, event: Commit) -> ErrorCode:
        if not event.member and event.generation < 0:  # it is no consumer of a group
            # While there are members, their positions must not change without them.
            return _UNKNOWN if self._members else _OK
        member = self._found(event.member, event.generation, event.now_s)
        if isinstance(member, ErrorCode):
            return member
        # A member stores its position before it joins again, so a commit is accepted while JOINING.
        return _AGAIN if self.state is _S.SYNCING else _OK

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        calls = [each.call for each in self._members.values()]
        assert (self.state is _S.EMPTY) == (not self._members)
        assert len(self._members) <= MEMBERS_MAX
        assert self.state is not _S.JOINING or None in calls
        assert self.state is not _S.STABLE or calls.count(None) == len(calls)
        if self.state in (_S.SYNCING, _S.STABLE):
            assert self._members[self._leader].call is None
            assert all(self._protocol in each.protocols for each in self._members.values())
