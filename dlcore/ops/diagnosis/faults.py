"""The faults that the contents of an archive show, each with its evidence and what to do.

A rule looks at values only: no cluster is asked, so an archive can be read anywhere and later.
Each rule judges by what it has; the manifest says which parts are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Values = Mapping[str, Any]

SKEW_MS = 500.0
"""Clocks that are kept by NTP differ by some milliseconds."""
LOW_SHARE, LOW_BYTES = 0.05, 2 * 2**30
"""A read-only bookie has a full disk if less space is free than the larger of these two.

The second is at most half of the disk.
"""
WAIT_MS = 15 * 60_000
"""Copying takes minutes; a ledger that waits for longer does not get on."""
ATTEMPTS_MAX = 3
EXPIRY_MS = 14 * 86_400_000
FILES_SHARE = 0.8
ACK_QUORUM_MIN = 2
"""Bookies that a ledger needs by default, at the least."""
_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of the cluster."""

    kind: str
    """A short name, for programs."""
    what: str
    evidence: tuple[str, ...]
    """The values that show it, each with its part of the archive."""
    to_do: str


def explain(values: Values) -> list[Fault]:
    """Return the faults that the parts of an archive show, the gravest first."""
    return [fault for rule in _RULES for fault in rule(values)]


def _no_metadata(values: Values) -> Iterator[Fault]:
    problem = values["manifest"]["parts"].get("namespace", {}).get("problem")
    if problem:
        yield Fault(
            kind="no-metadata",
            what="the metadata store did not answer",
            evidence=(f"manifest: namespace: {problem}",),
            to_do="see that a majority of ZooKeeper's servers run, and that this host reaches them",
        )


def _lost_quorum(values: Values) -> Iterator[Fault]:
    if "bookies" not in values:
        return
    alive = {
        f"{each['name']}/{each['incarnation'][:8]}"
        for each in _bookies(values)
        if each["told"] is not None
    }
    lost = []
    for each in values.get("ledgers", ()):
        members = each.get("bookies", ())
        answering = sum(member in alive for member in members)
        if members and answering < each["ack_quorum"]:
            lost.append(
                f"ledgers: ledger {each['ledger']} ({each['state'].lower()}) needs "
                f"{each['ack_quorum']} of {', '.join(members)}, and {answering} answer"
            )
    writable = [each for each in _bookies(values) if _is_writable(each)]
    if len(writable) < ACK_QUORUM_MIN:
        lost.insert(0, f"bookies: {len(writable)} can be written to, segments begin with 2 or more")
    if lost:
        yield Fault(
            kind="lost-quorum",
            what="too few bookies answer: records cannot be written, or not be read",
            evidence=_first(lost),
            to_do="start the bookies that are missing, on their disks; delete no cookie of theirs",
        )


def _full_disks(values: Values) -> Iterator[Fault]:
    for each in _bookies(values):
        report = each["told"]
        if report is None or not report["read_only"] or report["failed"]:
            continue
        free, total = report["free_bytes"], report["total_bytes"]
        if free < max(LOW_SHARE * total, min(LOW_BYTES, total / 2)):
            yield Fault(
                kind="full-disk",
                what=f"the disk of bookie {each['name']} is full",
                evidence=(f"bookies: read-only, {_mib(free)} of {_mib(total)} MiB are free",),
                to_do="free space on it, or add bookies; dlog log space shows which logs are large",
            )


def _failed_bookies(values: Values) -> Iterator[Fault]:
    for each in _bookies(values):
        report = each["told"]
        if report is not None and report["failed"]:
            yield Fault(
                kind="failed-bookie",
                what=f"bookie {each['name']} failed at a write or a sync, and writes nothing",
                evidence=("bookies: failed=true",),
                to_do="see its log for the error of its disk; replace the disk or start it again",
            )
        if report is not None and report["damaged_entries"]:
            count = report["damaged_entries"]
            yield Fault(
                kind="damaged-entries",
                what=f"bookie {each['name']} has damaged entries that are not repaired yet",
                evidence=(f"bookies: damaged_entries={count}",),
                to_do="see that the other bookies run; replace the disk if the number grows",
            )


def _lost_bookies(values: Values) -> Iterator[Fault]:
    for each in _bookies(values):
        if each["told"] is None:
            why = each.get("problem") if each["is_registered"] else "it is not registered"
            yield Fault(
                kind="lost-bookie",
                what=f"bookie {each['name']} does not answer",
                evidence=(f"bookies: {why}",),
                to_do="start it on its disk; if the disk is lost, dlog bookie cookie delete",
            )


def _partitioned_proxies(values: Values) -> Iterator[Fault]:
    for each in values.get("proxies", ()):
        report = each["told"]
        if report is None:
            why = f"its session lasts, and it does not answer: {each['problem']}"
        elif report.get("degraded"):
            why = f"it answers, and has no connection to the metadata store: {report['degraded']}"
        else:
            continue
        yield Fault(
            kind="partitioned-proxy",
            what=f"the proxy at {each['name']} does not answer, or has lost the metadata store",
            evidence=(f"proxies: {why}",),
            to_do="see whether its process runs; then see to the network between it, ZooKeeper and "
            "this host; else restart it",
        )


def _skewed_clocks(values: Values) -> Iterator[Fault]:
    found = [
        (each["ahead_ms"], each["within_ms"], f"{part}: {each['name']}")
        for part in ("bookies", "proxies")
        for each in values.get(part, ())
        if each.get("ahead_ms") is not None
    ]
    # The clock of this machine may be the wrong one: the servers are compared with each other, too.
    found.append((0.0, 0.0, "the maker of the archive"))
    (low, low_within, _), (high, high_within, _) = min(found), max(found)
    if high - low - low_within - high_within > SKEW_MS:
        yield Fault(
            kind="clock-skew",
            what=f"clocks differ by {high - low:.0f} ms",
            evidence=tuple(
                f"{name}: {ahead:+.0f} ms, give or take {within:.0f}"
                for ahead, within, name in sorted(found)
            ),
            to_do="start the time service (NTP) on the host that is off; times of records and the "
            "expiry of tokens depend on these clocks",
        )


def _stuck_recovery(values: Values) -> Iterator[Fault]:
    status = values.get("recovery")
    if status is None:
        return
    reasons = []
    if status["is_paused"]:
        reasons.append("recovery: it is paused")
    if status["auditor"] is None:
        reasons.append("recovery: no process of auto-recovery runs")
    for each in status["ledgers"]:
        waits_ms = status["now_ms"] - each["since_ms"]
        if each["attempts"] >= ATTEMPTS_MAX or waits_ms > WAIT_MS:
            reasons.append(
                f"recovery: ledger {each['ledger_id']} waits for {waits_ms / 1000:.0f} s after "
                f"{each['attempts']} attempts: {each['reason'] or 'no reason is known'}"
            )
    if status["ledgers"] and reasons:
        yield Fault(
            kind="stuck-recovery",
            what=f"{len(status['ledgers'])} ledgers lack replicas, and do not get them",
            evidence=_first(reasons),
            to_do="add or start bookies if too few can take copies; dlog autorecovery run, or "
            "pause --off, if it does not run",
        )
    elif reasons:
        yield Fault(
            kind="no-recovery",
            what="no worker would restore lost replicas",
            evidence=_first(reasons),
            to_do="dlog autorecovery run, on two hosts; dlog autorecovery pause --off",
        )


def _expiring_certificates(values: Values) -> Iterator[Fault]:
    now_ms = values["manifest"]["begun_ms"]
    for part in ("bookies", "proxies"):
        for each in values.get(part, ()):
            expires_ms = (each.get("told") or {}).get("expires_at_ms")
            if expires_ms is not None and expires_ms - now_ms < EXPIRY_MS:
                days = (expires_ms - now_ms) / 86_400_000
                yield Fault(
                    kind="expiring-certificate",
                    what=f"a certificate of {each['name']} expires in {days:.1f} days",
                    evidence=(f"{part}: expires_at_ms={expires_ms}",),
                    to_do="replace it (docs/tls.md); servers read it again without a restart",
                )


def _many_files(values: Values) -> Iterator[Fault]:
    for each in values.get("processes", ()):
        most = each["open_files_max"]
        if most is not None and each["open_files"] > FILES_SHARE * most:
            yield Fault(
                kind="open-files",
                what=f"{each['role']} {each['name']} has nearly as many open files as it may",
                evidence=(f"processes: {each['open_files']} of {most}",),
                to_do="raise its limit (LimitNOFILE of its unit, or ulimit -n), and restart it",
            )


_RULES: tuple[Callable[[Values], Iterator[Fault]], ...] = (
    _no_metadata,
    _lost_quorum,
    _full_disks,
    _failed_bookies,
    _partitioned_proxies,
    _stuck_recovery,
    _lost_bookies,
    _skewed_clocks,
    _expiring_certificates,
    _many_files,
)


def _bookies(values: Values) -> Sequence[Values]:
    found: Sequence[Values] = values.get("bookies", ())
    return [{"told": None, **each} for each in found]


def _is_writable(bookie: Values) -> bool:
    report = bookie["told"]
    return report is not None and not report["read_only"] and not report["failed"]


def _first(texts: Sequence[str]) -> tuple[str, ...]:
    more = len(texts) - _SHOWN_MAX
    return tuple(texts[:_SHOWN_MAX]) + ((f"and {more} more",) if more > 0 else ())


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"
