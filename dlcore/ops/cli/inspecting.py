"""`dlog log inspect`, `repair`, `space`, `lag` and `watch`: problems, sizes, lag and changes."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, TypeAlias

import click

from dlcore.base.clock import SystemClock
from dlcore.base.errors import DLError, LogNotFoundError
from dlcore.base.ids import DLSN
from dlcore.ops.cli.context import (
    ask,
    common_options,
    confirmed,
    require_consent,
    run_async,
    run_direct,
)
from dlcore.ops.cli.output import (
    Progress,
    bytes_text,
    end_with,
    show_done,
    show_fields,
    show_rows,
    telling_time,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.metadata.values import LogState
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.ops.inspection import Finding


@click.command("watch", epilog="Example: dlog log watch clicks --json")
@click.argument("log")
@common_options
def watch_log(log: str) -> None:
    """Show changes of LOG until interrupted.

    These are segments, appends, truncation, seal and deletion.  Changes in quick succession may be
    shown as one.
    """
    run_direct(lambda namespace: _watch(namespace, log), is_long=True)


async def _watch(namespace: DirectNamespace, name: str) -> None:
    from dlcore.log.metadata.history import LogHistory

    context = namespace.log_context
    log = await context.logs.find(name)
    history = LogHistory(context.logs, log)
    # Watched before the first look: a change between the two ends the first wait.
    changed = asyncio.Event()
    unsubscribe = context.store.watch(context.logs.paths_of(log).head, changed.set, children=False)
    known = await history.read()
    _show(name, f"watching, {len(known.segments)} segments", end=str(known.head.end_dlsn))
    try:
        while True:
            await changed.wait()
            changed.clear()
            state = await history.read()
            for event in changes_of(known, state):
                _show(name, event, end=str(state.head.end_dlsn))
            known = state
    except LogNotFoundError:
        _show(name, "deleted", end=None)
    finally:
        unsubscribe()


def changes_of(before: LogState, after: LogState) -> Iterator[str]:
    """Yield the changes from one state of a log to a later one, in words."""
    for segment in after.segments:
        old = before.segment(segment.lssn)
        if old is None and segment.lssn > before.head.max_lssn:
            yield f"segment {segment.lssn} started"
        if segment.state is not (old.state if old else None) and segment.completed_ms:
            yield f"segment {segment.lssn} completed with {segment.closed_record_count} records"
    appended = after.head.next_sequence_id - before.head.next_sequence_id
    if appended:
        yield f"{appended} records final"
    if after.first_active > before.first_active:
        yield f"truncated before {after.first_active}"
    if after.head.sealed and not before.head.sealed:
        yield "sealed"


def _show(log: str, event: str, *, end: str | None) -> None:
    show_done(event, {"log": log, "event": event, "end": end})


_LOGS_AT_ONCE = 100
_Space: TypeAlias = tuple[int, ...]
"""Logs, segments, records, bytes, and bytes on all bookies together."""
_NO_SPACE: _Space = (0,) * 5


@click.command("inspect", epilog="Example: dlog log inspect clicks --entries")
@click.argument("logs", nargs=-1, metavar="[LOG]...")
@click.option("--entries", is_flag=True, help="Also read every entry, and count its records.")
@common_options
def inspect_logs(logs: tuple[str, ...], *, entries: bool) -> None:
    """Find problems of each LOG, or of all logs.

    These are: missing segments, several segments in progress, counts and transaction ids that
    contradict each other, ledgers that are gone or too short, and leftovers of dead writers and
    interrupted truncations.  With --entries also entries that no bookie can return, or with other
    numbers of records than stored.  If no LOG is given, also logs without a name.  Exit code 1 if
    anything was found.
    """
    findings = run_direct(lambda namespace: _inspect(namespace, logs, entries), is_long=True)
    rows = [
        {"log": f.log, "kind": f.kind, "detail": f.detail, "repair": f.repair or None}
        for f in findings
    ]
    show_rows(rows, columns=("log", "kind", "detail", "repair"), empty="nothing is wrong")
    if rows:
        click.get_current_context().exit(1)


async def _inspect(
    namespace: DirectNamespace, logs: tuple[str, ...], entries: bool
) -> list[Finding]:
    from dlcore.ops.inspection import find_nameless, inspect_log

    names = list(logs) or await namespace.get_logs()
    findings: list[Finding] = []
    with Progress() as progress:
        for number, name in enumerate(names):
            progress.tell("logs inspected", number, len(names))
            try:
                findings += await inspect_log(
                    namespace.log_context, name, reads_entries=entries, report=progress.tell
                )
            except LogNotFoundError:
                if logs:
                    raise  # else the log was deleted after it was listed
        if not logs:
            findings += await find_nameless(namespace.log_context, report=progress.tell)
    return findings


@click.command("repair", epilog="Example: dlog log repair clicks --yes")
@click.argument("log")
@confirmed
@common_options
def repair_log(log: str, *, yes: bool) -> None:
    """Repair what `dlog log inspect` finds wrong in LOG.

    Only what needs no guess is repaired.  A dead writer's segment is recovered.  Truncated data
    that was not removed is removed.  Other problems remain and are shown, with exit code 1.
    """
    require_consent(yes=yes)
    found = run_direct(lambda namespace: _inspect(namespace, (log,), False), is_long=True)
    wanted = sorted({finding.repair for finding in found if finding.repair})
    if wanted:
        details = "; ".join(finding.detail for finding in found if finding.repair)
        ask(f"Repair log {log} ({', '.join(wanted)}): {details}", yes=yes)
        run_direct(
            telling_time("repairing", lambda namespace: _repair(namespace, log, wanted)),
            is_long=True,
        )
    left = run_direct(lambda namespace: _inspect(namespace, (log,), False), is_long=True)
    fields = {
        "log": log,
        "repaired": wanted,
        "left": [{"kind": finding.kind, "detail": finding.detail} for finding in left],
    }
    what = f"repaired log {log}: {', '.join(wanted)}" if wanted else f"log {log} needs no repair"
    show_done("\n".join([what, *(f"left: {f.kind}: {f.detail}" for f in left)]), fields)
    if left:
        click.get_current_context().exit(1)


async def _repair(namespace: DirectNamespace, log: str, wanted: list[str]) -> None:
    from dlcore.ops.inspection import RECOVER, REMOVE, finish_removal

    if RECOVER in wanted:
        async with await namespace.open_log(log) as manager:
            await manager.recover()
    if REMOVE in wanted:
        await finish_removal(namespace.log_context, log)


@click.command("space", epilog="Example: dlog log space --total --group-by '^[^/]+'")
@click.argument("prefix", required=False)
@click.option(
    "--group-by",
    metavar="REGEX",
    help="Sum up logs with the same match of REGEX in their names, or the same first group of it.",
)
@click.option("--total", is_flag=True, help="End with a row of the sums.")
@common_options
def show_space(prefix: str | None, group_by: str | None, *, total: bool) -> None:
    """Show the size of each log, the largest first.

    With PREFIX only of those whose names start with it.  Stored is the size of its records on all
    bookies together.  Logs with damaged metadata, or without an answer of a bookie, are listed on
    standard error, with exit code 1.
    """
    try:
        pattern = None if group_by is None else re.compile(group_by)
    except re.error as error:
        raise click.UsageError(f"--group-by {group_by!r}: {error}") from error

    async def read(namespace: DirectNamespace) -> tuple[dict[str, _Space], dict[str, DLError]]:
        names = await namespace.get_logs(prefix)
        sums: dict[str, _Space] = {}
        failed: dict[str, DLError] = {}
        with Progress() as progress:
            for start in range(0, len(names), _LOGS_AT_ONCE):
                progress.tell("logs", start, len(names))
                found = await namespace.survey_logs(names[start : start + _LOGS_AT_ONCE])
                for name, snapshot in found.items():
                    if isinstance(snapshot, DLError):
                        failed[f"log {name}"] = snapshot
                        continue
                    before = sums.get(group := _group(name, pattern), _NO_SPACE)
                    sums[group] = _sums(before, _space_of(snapshot))
        return sums, failed

    keys = ("logs", "segments", "records", "bytes", "stored_bytes")
    found, failed = run_direct(read, is_long=True)
    ordered = sorted(found.items(), key=lambda item: (-item[1][-1], item[0]))
    if total:
        ordered.append(("(total)", _sums(*found.values())))
    rows: list[dict[str, object]] = [
        {"log": name, **dict(zip(keys, sums, strict=True)), "stored": bytes_text(sums[-1])}
        for name, sums in ordered
    ]
    show_rows(
        rows, columns=("log", "logs", "segments", "records", "bytes", "stored"), empty="no logs"
    )
    end_with(failed)


def _sums(*spaces: _Space) -> _Space:
    return tuple(map(sum, zip(_NO_SPACE, *spaces, strict=True)))


def _group(name: str, pattern: re.Pattern[str] | None) -> str:
    if pattern is None:
        return name
    match = pattern.search(name)
    if match is None:
        return "(others)"
    return (match[1] if pattern.groups else match[0]) or ""


def _space_of(snapshot: LogSnapshot) -> _Space:
    extents = [extent for segment in snapshot.segments for extent in segment.extents]
    stored = sum(
        extent.size_bytes * segment.ledgers[extent.ledger_id].quorum.write_quorum_size
        for segment in snapshot.segments
        for extent in segment.extents
    )
    records = snapshot.count_records(snapshot.first, snapshot.end)
    return 1, len(snapshot.segments), records, sum(e.size_bytes for e in extents), stored


@click.command("lag", epilog="Example: dlog log lag clicks 3:17:0 --json")
@click.argument("log")
@click.argument("dlsn", required=False)
@common_options
def show_lag(log: str, dlsn: str | None) -> None:
    """Show how far a reader at DLSN is behind the end of LOG.

    DLSN is the position of the next record that it reads.  Without DLSN, show the lag of all
    subscribers of LOG.  The lag is in records and bytes, and in seconds since the next record to
    read was written.  Spark's queries are among the subscribers.
    """
    position = None if dlsn is None else DLSN.parse(dlsn)

    async def read(namespace: Namespace) -> list[dict[str, object]]:
        async with await namespace.open_log(log) as manager:
            if position is not None:
                return [{"subscriber": None} | await _lag_of(manager, position)]
            found = await manager.get_subscriptions()
            return [{"subscriber": n} | await _lag_of(manager, found[n]) for n in sorted(found)]

    rows = run_async(read)
    if position is not None:
        show_fields({"log": log} | {k: v for k, v in rows[0].items() if k != "subscriber"})
        return
    show_rows(
        rows,
        columns=("subscriber", "dlsn", "records_behind", "bytes_behind", "seconds_behind"),
        empty=f"log {log} has no subscribers",
    )


async def _lag_of(manager: DistributedLogManager, position: DLSN) -> dict[str, object]:
    from dlcore.ops.inspection import seconds_behind

    snapshot = await manager.get_snapshot()
    records = await manager.get_log_record_count(position)
    scans = snapshot.scans(position, snapshot.end)
    return {
        "dlsn": str(position),
        "end": str(snapshot.end),
        "records_behind": records,
        "bytes_behind": sum(scan.size_bytes_estimate for scan in scans),
        "seconds_behind": await seconds_behind(manager, position, now_ms=SystemClock().now_ms()),
        "truncated": snapshot.is_truncated_before(position),
    }
