"""Pauses that double."""

from __future__ import annotations

from dlcore.base.backoff import REPORTED_AFTER_S, Backoff, Wait


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    """One outage counts once: what fails before the next attempt is due changes nothing."""
    backoff = Backoff(0.05, 1.0)
    assert (backoff.pause_s, backoff.due_s) == (0, 0)
    now, pauses = 100.0, []
    for _ in range(7):
        pauses.append(round(backoff.failed(now), 9))
        now = backoff.due_s - 0.0005  # a timer fired early
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    now = backoff.due_s
    backoff.failed(now)
    assert backoff.failed(now + 0.75) == 0.25
    backoff.succeeded()
    assert (backoff.pause_s, backoff.due_s) == (0, 0)
    assert round(backoff.failed(now), 9) == 0.05


def test_a_long_wait_is_logged_once() -> None:
    """A timer for it may fire early."""
    wait = Wait(100.0)
    assert not wait.is_due(99.0 + REPORTED_AFTER_S)
    assert wait.is_due(wait.due_s - 0.0005)
    assert not wait.is_due(1000.0)
    assert wait.due_s > 10**9  # no timer is set for it again
