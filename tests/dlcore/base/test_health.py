"""Health as values: checks that hold or not, and trials."""

from __future__ import annotations

from dlcore.base.health import Readiness, Trial


def test_a_process_is_ready_if_every_check_holds() -> None:
    """The answer names each check, and tells why one does not hold."""
    good = Readiness.of({"disk": lambda: None})
    assert good.is_ready
    assert good.shown() == {"ready": True, "checks": {"disk": {"ok": True}}}
    bad = Readiness.of({"disk": lambda: None, "session": lambda: "it is lost"})
    assert not bad.is_ready
    assert bad.shown() == {
        "ready": False,
        "checks": {"disk": {"ok": True}, "session": {"ok": False, "reason": "it is lost"}},
    }


def test_a_trial_tells_its_age_and_its_failure() -> None:
    """The reason is there only if it failed."""
    good = Trial(ended_s=10.0, took_s=0.5, reason=None)
    assert good.shown(now_s=12.0) == {"works": True, "took_s": 0.5, "age_s": 2.0}
    bad = Trial(ended_s=10.0, took_s=0.5, reason="no bookie")
    assert bad.shown(now_s=10.0) == {
        "works": False,
        "took_s": 0.5,
        "age_s": 0.0,
        "reason": "no bookie",
    }
