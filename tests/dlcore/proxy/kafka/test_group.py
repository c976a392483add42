"""The machine of a group: its members, their logs, and refused calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import given, settings, strategies as st
from kio.schema.errors import ErrorCode

from dlcore.proxy.kafka.group import (
    MEMBERS_MAX,
    Answered,
    Commit,
    Effect,
    Gone,
    Group,
    GroupState,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Passed,
    Sync,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

OK, UNKNOWN, STALE, AGAIN = (
    ErrorCode.none,
    ErrorCode.unknown_member_id,
    ErrorCode.illegal_generation,
    ErrorCode.rebalance_in_progress,
)
SESSION_S, ROUND_S = 10.0, 60.0
RANGE = {"range": b"topics"}


@dataclass
class Driven:
    """A group, whose answers are kept by call."""

    group: Group = field(default_factory=Group)
    now_s: float = 100.0
    calls: int = 0
    answers: dict[int, Effect] = field(default_factory=dict)

    def take(self, effects: object) -> None:
        """Keep answers; each call gets one."""
        for each in effects:  # type: ignore[attr-defined]
            assert each.call not in self.answers
            self.answers[each.call] = each
        self.group.validate()

    def next(self) -> int:
        """Return the number of a new call."""
        self.calls += 1
        return self.calls

    def join(
        self, name: str = "", *, new: str = "", kind: str = "consumer",
        protocols: Mapping[str, bytes] = RANGE,
    ) -> int:  # fmt: skip
        """Join; return the call."""
        call = self.next()
        self.take(
            self.group.handle(
                Join(
                    call=call, member=name, new=new, kind=kind, protocols=protocols,
                    session_s=SESSION_S, rebalance_s=ROUND_S, now_s=self.now_s,
                )
            )
        )  # fmt: skip
        return call

    def sync(self, name: str, given: Mapping[str, bytes] | None = None, *, age: int = 0) -> int:
        """Ask for an assignment; return the call."""
        call = self.next()
        self.take(
            self.group.handle(
                Sync(
                    call=call, member=name, generation=self.group.generation - age,
                    assignments=given or {}, now_s=self.now_s,
                )
            )
        )  # fmt: skip
        return call

    def beat(self, name: str, *, age: int = 0) -> ErrorCode:
        """Send a heartbeat; return the code."""
        call, generation = self.next(), self.group.generation - age
        self.take(
            self.group.handle(
                Heartbeat(call=call, member=name, generation=generation, now_s=self.now_s)
            )
        )
        return self.answers[call].code

    def commit(self, name: str, *, generation: int | None = None) -> ErrorCode:
        """Ask whether a position may be stored."""
        call = self.next()
        at = self.group.generation if generation is None else generation
        event = Commit(call=call, member=name, generation=at, now_s=self.now_s)
        self.take(self.group.handle(event))
        return self.answers[call].code

    def leave(self, name: str) -> ErrorCode:
        """Leave."""
        call = self.next()
        self.take(self.group.handle(Leave(call=call, member=name, now_s=self.now_s)))
        return self.answers[call].code

    def passed(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.take(self.group.handle(Passed(now_s=self.now_s)))

    def joined(self, call: int) -> Joined:
        """Return the answer to a join, which succeeded."""
        found = self.answers[call]
        assert isinstance(found, Joined)
        assert found.code is OK
        return found

    def answered(self, call: int) -> tuple[ErrorCode, bytes]:
        """Return the answer to a sync."""
        found = self.answers[call]
        assert isinstance(found, Answered)
        return found.code, found.assignment


def stable(*names: str) -> Driven:
    """Return a group of these members, the first is its leader, and reads."""
    driven = Driven()
    driven.join(new=names[0])
    for each in names[1:]:
        driven.join(new=each)
        for other in names[: names.index(each)]:
            driven.join(other)
    for each in names:
        driven.sync(each, {names[0]: b"reads"} if each == names[0] else None)
    assert driven.group.state is GroupState.STABLE
    return driven


def test_one_member_reads_and_the_other_stands_by() -> None:
    """The leader gets the members, and its word reaches all."""
    driven = Driven()
    assert driven.group.due_s is None
    call = driven.join(new="a")
    assert driven.joined(call) == Joined(
        call=call, code=OK, member="a", generation=1, protocol="range", leader="a",
        members=[("a", b"topics")],
    )  # fmt: skip
    assert driven.answered(driven.sync("a", {"a": b"all"})) == (OK, b"all")
    second = driven.join(new="b")
    assert second not in driven.answers
    assert driven.beat("a") is AGAIN
    assert driven.commit("a") is OK  # what it has read until now
    first = driven.join("a")
    assert [name for name, _ in driven.joined(first).members] == ["a", "b"]
    assert (driven.joined(second).generation, driven.joined(second).members) == (2, ())
    waiting = driven.sync("b")
    assert waiting not in driven.answers
    assert driven.commit("b") is AGAIN
    assert driven.answered(driven.sync("a", {"a": b"all"})) == (OK, b"all")
    assert driven.answered(waiting) == (OK, b"")
    assert driven.answered(driven.sync("b")) == (OK, b"")
    assert (driven.beat("a"), driven.commit("a"), len(driven.group)) == (OK, OK, 2)


def test_a_member_that_leaves_is_followed_by_another() -> None:
    """The others join again, and one of them leads."""
    driven = stable("a", "b")
    assert driven.leave("a") is OK
    assert driven.beat("b") is AGAIN
    call = driven.join("b")
    assert (driven.joined(call).leader, driven.joined(call).generation) == ("b", 3)
    assert driven.answered(driven.sync("b", {"b": b"all"})) == (OK, b"all")
    assert driven.leave("a") is UNKNOWN
    assert driven.leave("b") is OK
    assert (driven.group.state, driven.group.due_s) == (GroupState.EMPTY, None)
    assert driven.commit("", generation=-1) is OK


def test_a_silent_member_is_out() -> None:
    """After its session; members that send heartbeats stay."""
    driven = stable("a", "b")
    driven.passed(SESSION_S - 1)
    assert driven.beat("b") is OK
    due_s = driven.group.due_s
    assert due_s == 100 + SESSION_S
    driven.passed(1)
    assert driven.beat("b") is AGAIN
    assert driven.beat("a") is UNKNOWN
    driven.passed(SESSION_S)
    assert driven.group.state is GroupState.EMPTY


def test_a_round_ends_without_those_who_do_not_join() -> None:
    """They may send heartbeats as long as they like."""
    driven = stable("a", "b")
    call = driven.join(new="c")
    driven.join("b")
    for _ in range(int(ROUND_S // 5) - 1):
        driven.passed(5)
        assert driven.beat("a") is AGAIN
    assert driven.group.due_s == 100 + ROUND_S
    assert call not in driven.answers
    driven.passed(5)
    assert driven.joined(call).leader == "b"
    assert driven.beat("a") is UNKNOWN


def test_the_leader_may_die_before_its_word() -> None:
    """The members that wait for it join again."""
    driven = stable("a", "b")
    driven.join("a")
    driven.join("b")
    assert driven.group.state is GroupState.SYNCING
    waiting = driven.sync("b")
    driven.passed(SESSION_S)
    assert driven.answered(waiting) == (AGAIN, b"")
    assert driven.joined(driven.join("b")).leader == "b"


def test_calls_of_others_are_refused() -> None:
    """By no member, of an earlier generation, and in a round."""
    driven = stable("a", "b")
    assert driven.beat("c") is UNKNOWN
    assert driven.beat("a", age=1) is STALE
    assert driven.answered(driven.sync("c"))[0] is UNKNOWN
    assert driven.answered(driven.sync("a", age=1))[0] is STALE
    assert driven.commit("a", generation=1) is STALE
    assert driven.commit("c") is UNKNOWN
    assert driven.commit("", generation=-1) is UNKNOWN
    refused = driven.answers[driven.join("c")]
    assert (refused.code, refused.call) == (UNKNOWN, driven.calls)
    driven.join("a")
    assert driven.answered(driven.sync("b"))[0] is AGAIN


def test_members_have_a_protocol_in_common() -> None:
    """The one that the leader prefers of those that all know."""
    driven = Driven()
    both = {"sticky": b"1", "range": b"2"}
    driven.join(new="a", protocols=both)
    other = ErrorCode.inconsistent_group_protocol
    for call in (
        driven.join(new="b", protocols={"other": b""}),
        driven.join(new="b", kind="connect"),
        driven.join(new="b", protocols={}),
    ):
        assert driven.answers[call].code is other
    call = driven.join(new="b")
    driven.join("a", protocols=both)
    assert driven.joined(call).protocol == "range"
    alone = Driven()
    assert alone.answers[alone.join(new="a", protocols={})].code is other
    assert alone.group.state is GroupState.EMPTY


def test_a_group_has_so_many_members() -> None:
    """A further one is refused; those that there are may join again."""
    driven = Driven()
    for number in range(MEMBERS_MAX):
        driven.join(new=f"{number}")
    call = driven.join(new="more")
    assert driven.answers[call].code is ErrorCode.group_max_size_reached
    assert driven.join("5") not in driven.answers


def test_a_call_that_comes_twice_is_answered_twice() -> None:
    """The first one has no listener any more."""
    driven = stable("a", "b")
    first = driven.join("b")
    second = driven.join("b")
    assert (driven.answers[first].code, second in driven.answers) == (AGAIN, False)
    driven.join("a")
    assert driven.joined(second).member == "b"
    first = driven.sync("b")
    second = driven.sync("b")
    assert driven.answered(first) == (AGAIN, b"")
    driven.sync("a", {"b": b"all"})
    assert driven.answered(second) == (OK, b"all")


def test_a_member_that_left_while_it_waited_must_come_again() -> None:
    """In time, or it is out; a member that leaves while it waits gets an answer."""
    driven = stable("a", "b")
    call = driven.join("b")
    driven.take(driven.group.handle(Gone(call=call, now_s=driven.now_s)))
    driven.join("a")
    assert driven.group.state is GroupState.JOINING
    driven.passed(SESSION_S)
    assert (driven.group.state, len(driven.group)) == (GroupState.SYNCING, 1)
    driven = stable("a", "b")
    call = driven.join("b")
    assert driven.leave("b") is OK
    assert driven.answers[call] == Answered(call, UNKNOWN)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), st.integers(0, 40)), max_size=60))
def test_whatever_members_do_each_generation_has_one_leader(
    steps: list[tuple[int, int, int]],
) -> None:
    """Every call gets one answer at most, and all that holds, holds after each."""
    driven = Driven()
    names = ["a", "b", "c", "d"]
    leaders: dict[int, str] = {}
    for kind, who, more in steps:
        name = names[who]
        is_known = name in driven.group._members
        match kind:
            case 0 | 1:
                driven.join(name if is_known else "", new=name)
            case 2 | 3:
                driven.sync(name, dict.fromkeys(names, b"x"), age=more // 39)
            case 4:
                driven.beat(name)
            case 5:
                driven.leave(name)
            case 6:
                driven.take(driven.group.handle(Gone(call=driven.calls, now_s=driven.now_s)))
            case _:
                driven.passed(more)
        for each in driven.answers.values():
            if isinstance(each, Joined) and each.code is OK:
                assert leaders.setdefault(each.generation, each.leader) == each.leader
    driven.passed(1000)
    driven.passed(1000)
    assert driven.group.state in (GroupState.EMPTY, GroupState.SYNCING, GroupState.STABLE)
