"""The machine of a rolling restart: its order, what it waits for, and what stops it."""

from __future__ import annotations

import pytest

from dlcore.base.errors import DLError
from dlcore.base.machines import CallFailed, Ended
from dlcore.ops.rolling.restart import (
    LOOK_S,
    Drain,
    Effect,
    Event,
    Look,
    Member,
    Restarted,
    RollingRestart,
    Run,
    Seen,
    Signal,
    Stepped,
    Undrain,
    order_of,
)

ONE = Member(name="one", address="a:1", rack="/r1")
TWO = Member(name="two", address="b:1", rack="/r2")
PROXY = Member(name="grpc://c:2", address="c:2", is_proxy=True)
ALL = (PROXY, TWO, ONE)
WELL = {"one": "1", "two": "1", PROXY.name: "s1"}


class Checked(RollingRestart):
    """A machine that is validated after each event."""

    def handle(self, event: Event) -> Effect:
        """Take an event."""
        effect = super().handle(event)
        self.validate()
        return effect


def machine(*chosen: Member, patience_s: float = 10.0) -> RollingRestart:
    """Return a machine that begins at 0, and has looked once."""
    made = Checked(ALL, chosen, patience_s=patience_s, now_s=0.0)
    assert made.handle(Signal.BEGIN) == Look(0.0)
    return made


def test_the_order() -> None:
    """Read-only bookies, the others rack by rack, then proxies."""
    three = Member(name="three", address="d:1", rack="/r9", read_only=True)
    four = Member(name="a-four", address="d:2", rack="/r2")
    assert order_of([PROXY, TWO, ONE, four, three]) == [three, ONE, four, TWO, PROXY]
    assert (PROXY.host, PROXY.port) == ("c", "2")


def test_a_whole_restart() -> None:
    """Each is waited for; a proxy is drained first; after the last one all must be well, too."""
    one = machine(*ALL)
    assert one.handle(Seen(WELL, 0, 1.0)) == Run(ONE)
    assert one.handle(Stepped(2.0)) == Look(LOOK_S)
    lives = dict(WELL)
    del lives["one"]
    assert one.handle(Seen(lives, 0, 3.0)) == Look(LOOK_S)
    assert one.handle(Seen(WELL, 0, 4.0)) == Look(LOOK_S)  # still in its old life
    lives = WELL | {"one": "2"}
    assert one.handle(Seen(lives, 3, 5.0)) == Look(LOOK_S)  # back, but replicas are missing
    assert one.handle(Seen(lives, 0, 14.0)) == Run(TWO)
    one.handle(Stepped(15.0))
    lives = lives | {"two": "2"}
    assert one.handle(Seen(lives, 0, 16.0)) == Drain(PROXY)
    assert one.handle(Stepped(17.0)) == Run(PROXY)
    assert one.handle(Stepped(18.0)) == Look(LOOK_S)
    lives = lives | {PROXY.name: "s2"}
    del lives["two"]
    assert one.handle(Seen(lives, 0, 19.0)) == Look(LOOK_S)
    ended = one.handle(Seen(lives | {"two": "3"}, 0, 20.0))
    assert ended == Ended(Restarted(("one", "two", PROXY.name)))


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (Seen({"two": "1", PROXY.name: "s"}, 0, 11.0), "one: not ready, after 10 s"),
        (Seen({}, 0, 11.0), f"one, two, {PROXY.name}: not ready, after 10 s"),
        (Seen(WELL, 4, 11.0), "4 ledgers lack a replica, after 10 s"),
    ],
)
def test_nothing_is_touched_before_all_is_well(seen: Seen, reason: str) -> None:
    """It waits for its patience, then ends."""
    one = machine(ONE)
    assert one.handle(Seen(seen.lives, seen.missing, 10.0)) == Look(LOOK_S)
    assert one.handle(seen) == Ended(Restarted((), reason))


@pytest.mark.parametrize(
    ("lives", "reason"),
    [
        (WELL, "one: the command ended, but it was not restarted, after 10 s"),
        ({}, "one: not ready, after 10 s"),
    ],
)
def test_a_member_that_does_not_come_back(lives: dict[str, str], reason: str) -> None:
    """The rest is left alone."""
    one = machine(ONE, TWO)
    one.handle(Seen(WELL, 0, 50.0 - 50.0))
    one.handle(Stepped(100.0))
    assert one.handle(Seen(lives, 0, 110.0)) == Look(LOOK_S)
    assert one.handle(Seen(lives, 0, 110.5)) == Ended(Restarted((), reason))


def test_a_step_that_fails() -> None:
    """A drain or a command."""
    one = machine(PROXY)
    assert one.handle(Seen(WELL, 0, 0.0)) == Drain(PROXY)
    assert one.handle(CallFailed(DLError("busy"))) == Undrain(PROXY)
    assert one.handle(Stepped(1.0)) == Ended(Restarted((), "busy"))
    two = machine(ONE, TWO)
    two.handle(Seen(WELL, 0, 0.0))
    two.handle(Stepped(1.0))
    assert two.handle(Seen(WELL | {"one": "2"}, 0, 2.0)) == Run(TWO)
    assert two.handle(CallFailed(DLError("exit code 1"))) == Ended(
        Restarted(("one",), "exit code 1")
    )


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_drained_proxy_takes_logs_again(steps: int) -> None:
    """Whatever stops its restart: while it is drained, while the command runs, and after that."""
    one = machine(PROXY)
    one.handle(Seen(WELL, 0, 0.0))
    for _ in range(steps):
        one.handle(Stepped(1.0))
    assert one.handle(Signal.INTERRUPTED) == Undrain(PROXY)
    assert one.handle(Stepped(2.0)) == Ended(Restarted((), "interrupted"))


def test_a_proxy_that_does_not_come_back() -> None:
    """It takes logs again, or the outcome says how to make it do so."""
    one = machine(PROXY, patience_s=3.0)
    one.handle(Seen(WELL, 0, 0.0))
    one.handle(Stepped(1.0))
    one.handle(Stepped(2.0))
    lives = {"one": "1", "two": "1"}
    assert one.handle(Seen(lives, 0, 5.0)) == Look(LOOK_S)
    assert one.handle(Seen(lives, 0, 5.5)) == Undrain(PROXY)
    ended = one.handle(CallFailed(DLError("refused")))
    assert isinstance(ended, Ended)
    assert isinstance(ended.outcome, Restarted)
    assert ended.outcome.reason == (
        f"{PROXY.name}: not ready, after 3 s; and {PROXY.name} was drained, and cannot be asked to "
        f"take logs again (refused): if it runs, call dlog proxy undrain --endpoint {PROXY.name}"
    )


def test_an_interruption_before_anything_is_touched() -> None:
    """Nothing is done."""
    one = machine(PROXY)
    assert one.handle(Signal.INTERRUPTED) == Ended(Restarted((), "interrupted"))
