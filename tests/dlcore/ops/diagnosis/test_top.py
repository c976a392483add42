"""The view of `dlog top`, by two made-up looks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from dlcore.flight.answers import ProxyHealth
from dlcore.ops.autorecovery.maintenance import RecoveryStatus
from dlcore.ops.autorecovery.values import ElectedAuditor, UnderReplicatedLedger
from dlcore.ops.diagnosis.asking import Answer
from dlcore.ops.diagnosis.top import Look, view_of
from dlcore.wire.control import BookieInfo
from tests.fixtures.snapshots import snapshot_of

if TYPE_CHECKING:
    from dlcore.ops.diagnosis.top import View

AUDITOR = ElectedAuditor(owner="a:1", token="t")
STATUS = RecoveryStatus(auditor=AUDITOR, is_paused=False, ledgers=(), last_check=None)
LACKING = UnderReplicatedLedger(ledger_id=1, missing=(), since_ms=0)
INFO = BookieInfo(
    read_only=False, failed=False, ledgers=2, stored_bytes=1000, free_bytes=5, total_bytes=9,
    damaged_entries=0, repaired_entries=0, expires_at_ms=None, clock_ms=None,
)  # fmt: skip
HEALTH = ProxyHealth(location="grpc://p:1", serves=True, logs=4, balance={})


def viewed(now: Look, before: Look | None = None, *, logs_max: int = 10) -> View:
    """Return the view."""
    return view_of(before, now, logs_max=logs_max)


def test_rates_are_what_came_between_two_looks() -> None:
    """Rates of logs that grew; the busiest is the first, and the sums count all."""
    before = Look(at_s=10.0, logs={"a": snapshot_of((4,)), "b": snapshot_of((4,), log="b")})
    logs = {"a": snapshot_of((4,)), "b": snapshot_of((10,), log="b"), "c": snapshot_of((9,))}
    now = Look(at_s=12.0, logs=logs, owners={"b": "proxy"}, left_out=3)
    view = viewed(now, before, logs_max=2)
    first, second = view.logs
    assert (first.log, first.owner, first.records_per_s, first.bytes_per_s) == (
        "b", "proxy", 30.0, 3000.0,
    )  # fmt: skip
    assert (second.log, second.owner, second.records_per_s) == ("a", None, 0.0)
    assert (view.records_per_s, view.bytes_per_s, view.logs_left_out) == (30.0, 3000.0, 4)


def test_a_first_look_has_no_rates() -> None:
    """Nor has a log that was made anew under its name meanwhile."""
    view = viewed(Look(at_s=1.0, logs={"a": snapshot_of((4,))}))
    assert (view.records_per_s, view.bytes_per_s, view.logs[0].records_per_s) == (None, None, None)
    before = Look(at_s=1.0, logs={"a": snapshot_of((4,))})
    after = Look(at_s=2.0, logs={"a": snapshot_of((8,), log_id="another")})
    assert viewed(after, before).logs[0].records_per_s is None


def test_the_lag_is_that_of_the_last_subscriber() -> None:
    """A log with a subscriber far behind comes before quiet logs."""
    logs = {"a": snapshot_of((4,)), "b": snapshot_of((4,), log="b")}
    subscribers = {"b": [DLSN(1, 3, 0), DLSN(1, 1, 0)]}
    rows = viewed(Look(at_s=1.0, logs=logs, subscribers=subscribers)).logs
    assert [(row.log, row.lag) for row in rows] == [("b", 30), ("a", None)]


def test_a_silent_server_is_a_row() -> None:
    """With its reason; the others keep theirs."""
    bookies: list[Answer[BookieInfo]] = [
        Answer("b1", INFO),
        Answer("b2", None, "refused"),
        Answer("b3", replace(INFO, read_only=True, damaged_entries=2)),
        Answer("b4", replace(INFO, failed=True, read_only=True)),
    ]
    degraded = ProxyHealth(location="p2", serves=True, logs=1, balance={}, degraded="for 3 s")
    drained = ProxyHealth(location="p3", serves=False, logs=0, balance={})
    proxies: list[Answer[ProxyHealth]] = [
        Answer("p1", HEALTH), Answer("p2", degraded), Answer("p3", drained),
        Answer("p4", None, "no answer within 5 s"),
    ]  # fmt: skip
    before = Look(at_s=1.0, bookies=[Answer("b1", replace(INFO, stored_bytes=3000)), bookies[1]])
    view = viewed(Look(at_s=3.0, bookies=bookies, proxies=proxies), before)
    assert [(row.bookie, row.state, row.bytes_per_s, row.problem) for row in view.bookies] == [
        ("b1", "writable", -1000.0, ""),
        ("b2", "no answer", None, "refused"),
        ("b3", "read-only", None, "2 damaged entries"),
        ("b4", "failed", None, ""),
    ]
    assert [(row.proxy, row.state, row.logs, row.problem) for row in view.proxies] == [
        ("p1", "serves", 4, ""),
        ("p2", "degraded", 1, "for 3 s"),
        ("p3", "drained", 0, ""),
        ("p4", "no answer", None, "no answer within 5 s"),
    ]


def test_auto_recovery_is_shown() -> None:
    """Its open work, and whether a process does it."""
    states = {
        "auditor a:1": STATUS,
        "paused": replace(STATUS, is_paused=True),
        "does not run": replace(STATUS, auditor=None),
        "unknown": None,
    }
    for text, status in states.items():
        assert viewed(Look(at_s=1.0, recovery=status)).recovery == text
    lacking = Look(at_s=1.0, recovery=replace(STATUS, ledgers=(LACKING,)))
    assert viewed(lacking).under_replicated == 1
    failed = viewed(Look(at_s=1.0, problems={"recovery": "no answer"}, broken={"a": "gone"}))
    assert failed.under_replicated is None
    assert (failed.problems, failed.broken_logs) == ({"recovery": "no answer"}, {"a": "gone"})
