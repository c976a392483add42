"""Rules of faults: each by the values that show it, and by those that nearly do."""

from __future__ import annotations

from typing import Any

import pytest

from dlcore.ops.diagnosis.faults import Fault, explain

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
GIB = 2**30


def bookie(name: str, *, registered: bool = True, **changed: object) -> dict[str, Any]:
    """Return a bookie that answers, with other figures than usual."""
    figures = {
        "read_only": False, "failed": False, "free_bytes": 50 * GIB, "total_bytes": 100 * GIB,
        "damaged_entries": 0, "expires_at_ms": None,
    }  # fmt: skip
    return {
        "name": name,
        "incarnation": f"{name}-incarnation",
        "is_registered": registered,
        "told": figures | changed,
        "ahead_ms": 1.0,
        "within_ms": 2.0,
    }


def values(**parts: object) -> dict[str, Any]:
    """Return the parts of a healthy cluster of three bookies, with others in place of some."""
    members = [f"b{n}/b{n}-incar" for n in range(3)]
    return {
        "manifest": {"begun_ms": NOW_MS, "parts": {"namespace": {"problem": None}}},
        "bookies": [bookie(f"b{n}") for n in range(3)],
        "proxies": [
            {"name": "grpc://p:1", "told": {"logs": 1}, "ahead_ms": 0.5, "within_ms": 1.0}
        ],
        "ledgers": [
            {"ledger": 7, "state": "OPEN", "ack_quorum": 2, "bookies": members},
            {"ledger": 8, "problem": "damaged"},
        ],
        "recovery": {
            "now_ms": NOW_MS, "is_paused": False, "auditor": {"owner": "a:1"}, "ledgers": [],
        },
        "processes": [
            {"role": "bookie", "name": "b0", "open_files": 80, "open_files_max": 100},
            {"role": "bookie", "name": "b1", "open_files": 80, "open_files_max": None},
        ],
    } | parts  # fmt: skip


def waiting(**fields: object) -> dict[str, Any]:
    """Return the state of auto-recovery with one ledger on its list."""
    listed = {"ledger_id": 7, "since_ms": NOW_MS - 1000, "attempts": 2, "reason": ""} | fields
    return {**values()["recovery"], "ledgers": [listed]}


def silent(name: str, *, registered: bool = True) -> dict[str, Any]:
    """Return a bookie that does not answer."""
    return bookie(name, registered=registered) | {"told": None, "problem": "no answer"}


def test_a_healthy_cluster_has_no_fault() -> None:
    """And of one of which nothing is known, nothing is said."""
    assert explain(values()) == []
    assert explain({"manifest": values()["manifest"]}) == []
    assert explain(values(recovery=waiting())) == []


PLANTED: dict[str, dict[str, Any]] = {
    "no-metadata": {
        "manifest": {"begun_ms": NOW_MS, "parts": {"namespace": {"problem": "no answer"}}}
    },
    "full-disk": {
        "bookies": [
            bookie("b0", read_only=True, free_bytes=4 * GIB),
            bookie("b1"),
            bookie("b2", read_only=True),  # an operator holds it
            bookie("b3"),
        ]
    },
    "failed-bookie": {"bookies": [bookie("b0", failed=True, read_only=True, free_bytes=0),
                                  bookie("b1"), bookie("b2")]},
    "damaged-entries": {"bookies": [bookie("b0", damaged_entries=3), bookie("b1"), bookie("b2")]},
    "lost-bookie": {"bookies": [bookie("b0"), bookie("b1"), silent("b2", registered=False)]},
    "partitioned-proxy": {
        "proxies": [
            {"name": "grpc://p:1", "told": None, "problem": "no answer within 5 s"},
            {"name": "grpc://p:2", "told": {"degraded": "not answered for 3 s"}},
        ]
    },
    "clock-skew": {"bookies": [bookie("b0"), bookie("b1"), bookie("b2") | {"ahead_ms": 510.0}]},
    "stuck-recovery": {"recovery": waiting(attempts=3, reason="too few bookies")},
    "no-recovery": {"recovery": values()["recovery"] | {"is_paused": True, "auditor": None}},
    "expiring-certificate": {
        "bookies": [bookie("b0", expires_at_ms=NOW_MS + 13 * DAY_MS), bookie("b1"),
                    bookie("b2", expires_at_ms=NOW_MS + 15 * DAY_MS)]
    },
    "open-files": {
        "processes": [{"role": "proxy", "name": "p", "open_files": 81, "open_files_max": 100}]
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "parts"), PLANTED.items(), ids=PLANTED)
def test_each_fault_is_named(kind: str, parts: dict[str, Any]) -> None:
    """It and no other, with evidence and what to do."""
    faults = explain(values(**parts))
    assert {fault.kind for fault in faults} == {kind}
    assert all(fault.evidence and fault.to_do for fault in faults)


def only(kind: str, **parts: object) -> Fault:
    """Return the one fault of a kind."""
    (fault,) = (each for each in explain(values(**parts)) if each.kind == kind)
    return fault


def test_a_lost_quorum_has_its_ledgers_as_evidence() -> None:
    """Those that need a bookie more than answer, and that nothing new can begin."""
    bookies = [bookie("b0"), silent("b1"), silent("b2", registered=False)]
    ledgers = [values()["ledgers"][0] | {"ledger": number} for number in range(7)]
    evidence = only("lost-quorum", bookies=bookies, ledgers=ledgers).evidence
    assert evidence[0] == "bookies: 1 can be written to, segments begin with 2 or more"
    assert evidence[1].endswith("needs 2 of b0/b0-incar, b1/b1-incar, b2/b2-incar, and 1 answer")
    assert evidence[-1] == "and 3 more"
    # A bookie on a new disk is not the one that the ledger needs.
    bookies = [bookie(f"b{n}") | {"incarnation": "another"} for n in range(3)]
    assert len(only("lost-quorum", bookies=bookies).evidence) == 1


def test_why_a_recovery_does_not_get_on() -> None:
    """It waits for long, it is paused, or no process does it."""
    old = waiting(since_ms=NOW_MS - 16 * 60_000, attempts=0)
    assert "waits for 960 s after 0 attempts: no reason" in only(
        "stuck-recovery", recovery=old
    ).evidence[0]  # fmt: skip
    paused = waiting() | {"is_paused": True}
    assert only("stuck-recovery", recovery=paused).evidence == ("recovery: it is paused",)
    alone = waiting() | {"auditor": None}
    assert "no process" in only("stuck-recovery", recovery=alone).evidence[0]


def test_clocks_are_compared_within_the_time_of_an_answer() -> None:
    """A slow answer proves nothing; nor does a release that tells no clock."""
    slow = [bookie(f"b{n}") for n in range(2)] + [bookie("b2", ahead_ms=0)]
    slow[2] |= {"ahead_ms": 900.0, "within_ms": 450.0}
    assert explain(values(bookies=slow)) == []
    slow[2] |= {"ahead_ms": None}
    assert explain(values(bookies=slow)) == []
    # The clock of the caller is one of them.
    ahead = [bookie(f"b{n}") | {"ahead_ms": -700.0} for n in range(3)]
    fault = only("clock-skew", bookies=ahead, proxies=[])
    assert fault.what == "clocks differ by 700 ms"
    assert fault.evidence[-1].startswith("the maker of the archive: +0 ms")
