"""The view of `dlog top`: rates, owners, lag and space, of two looks at a cluster.

Rates are what came between the looks.  A part without an answer is a row or a line with its reason,
and never the end of the view.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlcore.base.ids import DLSN
    from dlcore.flight.answers import ProxyHealth
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.ops.autorecovery.maintenance import RecoveryStatus
    from dlcore.ops.diagnosis.asking import Answer
    from dlcore.wire.control import BookieInfo

NO_ANSWER = "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All that was seen of a cluster at one moment."""

    at_s: float
    """The time of the look, by a clock that does not go back."""
    logs: Mapping[str, LogSnapshot] = field(default_factory=dict)
    owners: Mapping[str, str | None] = field(default_factory=dict)
    subscribers: Mapping[str, Sequence[DLSN]] = field(default_factory=dict)
    """By log, the positions of its subscribers."""
    bookies: Sequence[Answer[BookieInfo]] = ()
    proxies: Sequence[Answer[ProxyHealth]] = ()
    recovery: RecoveryStatus | None = None
    broken: Mapping[str, str] = field(default_factory=dict)
    """Logs that cannot be read, with the reason."""
    left_out: int = 0
    """Logs that were not looked at."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Parts that are missing, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """A log; rates are None at the first look."""

    log: str
    owner: str | None
    records_per_s: float | None
    bytes_per_s: float | None
    lag: int | None
    """About how many records the last of its subscribers is behind; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieRow:
    """A bookie."""

    bookie: str
    state: str
    free_bytes: int | None
    total_bytes: int | None
    ledgers: int | None
    bytes_per_s: float | None
    """How fast its entry logs grow; negative while space is regained."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRow:
    """A proxy."""

    proxy: str
    state: str
    logs: int | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The whole view: sums, and rows in the order in which they are shown."""

    records_per_s: float | None
    bytes_per_s: float | None
    under_replicated: int | None
    recovery: str
    """The state of auto-recovery."""
    logs: tuple[LogRow, ...]
    logs_left_out: int
    broken_logs: Mapping[str, str]
    bookies: tuple[BookieRow, ...]
    proxies: tuple[ProxyRow, ...]
    problems: Mapping[str, str]


def view_of(before: Look | None, now: Look, *, logs_max: int) -> View:
    """Return the view of a look, with rates since the one before; the busiest logs come first."""
    logs = sorted(
        (_log_row(name, before, now) for name in now.logs),
        key=lambda row: (-(row.bytes_per_s or 0.0), -(row.lag or 0), row.log),
    )
    has_rates = before is not None
    return View(
        records_per_s=sum(row.records_per_s or 0.0 for row in logs) if has_rates else None,
        bytes_per_s=sum(row.bytes_per_s or 0.0 for row in logs) if has_rates else None,
        under_replicated=None if now.recovery is None else len(now.recovery.ledgers),
        recovery=_recovery_state(now.recovery),
        logs=tuple(logs[:logs_max]),
        logs_left_out=max(0, len(logs) - logs_max) + now.left_out,
        broken_logs=now.broken,
        bookies=tuple(_bookie_row(each, before, now) for each in now.bookies),
        proxies=tuple(map(proxy_row, now.proxies)),
        problems=now.problems,
    )


def _log_row(name: str, before: Look | None, now: Look) -> LogRow:
    snapshot = now.logs[name]
    known = None if before is None else before.logs.get(name)
    records_per_s = bytes_per_s = None
    # A log that was created again under its name has other positions: no rate between the two.
    if before is not None and known is not None and known.log_id == snapshot.log_id:
        parts = snapshot.scans(known.end, snapshot.end)
        passed_s = now.at_s - before.at_s
        records_per_s = sum(part.record_count_estimate for part in parts) / passed_s
        bytes_per_s = sum(part.size_bytes_estimate for part in parts) / passed_s
    behind = [snapshot.count_records(each, snapshot.end) for each in now.subscribers.get(name, ())]
    return LogRow(
        log=name,
        owner=now.owners.get(name),
        records_per_s=records_per_s,
        bytes_per_s=bytes_per_s,
        lag=max(behind, default=None),
    )


def _bookie_row(answer: Answer[BookieInfo], before: Look | None, now: Look) -> BookieRow:
    report = answer.report
    if report is None:
        return BookieRow(
            bookie=answer.server,
            state=NO_ANSWER,
            free_bytes=None,
            total_bytes=None,
            ledgers=None,
            bytes_per_s=None,
            problem=answer.problem,
        )
    earlier = {each.server: each.report for each in before.bookies} if before is not None else {}
    known = earlier.get(answer.server)
    bytes_per_s = None
    if before is not None and known is not None:
        bytes_per_s = (report.stored_bytes - known.stored_bytes) / (now.at_s - before.at_s)
    state = "failed" if report.failed else "read-only" if report.read_only else "writable"
    damaged = f"{report.damaged_entries} damaged entries" if report.damaged_entries else ""
    return BookieRow(
        bookie=answer.server,
        state=state,
        free_bytes=report.free_bytes,
        total_bytes=report.total_bytes,
        ledgers=report.ledgers,
        bytes_per_s=bytes_per_s,
        problem=damaged,
    )


def proxy_row(answer: Answer[ProxyHealth]) -> ProxyRow:
    """Return the row of a proxy."""
    report = answer.report
    if report is None:
        return ProxyRow(proxy=answer.server, state=NO_ANSWER, logs=None, problem=answer.problem)
    serving = "serves" if report.serves else "drained"
    state = serving if report.degraded is None else "degraded"
    problem = report.degraded or ""
    return ProxyRow(proxy=answer.server, state=state, logs=report.logs, problem=problem)


def _recovery_state(status: RecoveryStatus | None) -> str:
    if status is None:
        return "unknown"
    if status.is_paused:
        return "paused"
    return "does not run" if status.auditor is None else f"auditor {status.auditor.owner}"
