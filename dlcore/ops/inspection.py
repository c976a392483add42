"""Finds faults in logs, and ledgers that belong to no log: for operators.

Nothing here is needed while all is well.  The checks look at a log's metadata, at that of its
ledgers and, on request, at the headers of its entries.  They find the effects of a bug, of a
metadata store restored from an old copy, or of a change by hand before a reader finds them.

Faults that can be repaired without guessing are repaired: a dead writer's segment is recovered, and
the rest of a truncation or deletion is removed.  All others are reported and left as they are.
"""

from __future__ import annotations

import contextlib
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.errors import (
    CorruptMetadataError,
    DLError,
    LedgerNotFoundError,
    NoNodeError,
    UnexpectedError,
)
from dlcore.base.html_tables import ShownFields
from dlcore.ledger.metadata.values import LedgerState
from dlcore.log.entries.body import decode_entry_header
from dlcore.log.metadata.history import ChunkMissingError, LogHistory
from dlcore.log.metadata.listing import list_logs
from dlcore.log.metadata.values import Chunk, LogHead, LogKey, SegmentEnd, VersionedHead
from dlcore.log.upkeep.removal import has_removable, remove_truncated
from dlcore.log.upkeep.staged import list_all_staged
from dlcore.metadata.one_node import persistently
from dlcore.metadata.paths import BUCKETS, is_number
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.api.log import DistributedLogManager
    from dlcore.base.ids import DLSN
    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.segment import Extent, LogSegment
    from dlcore.log.metadata.values import LogState

_AT_ONCE = 200
_GAPS_MAX = 100
"""If more segments have no node, they are reported as one gap."""

Report: TypeAlias = "Callable[[str, int, int | None], None]"
"""Called with the progress of long work: the unit, how many are done, and of how many (or None)."""

RECOVER = "recover"
"""A dead writer's segment: `DistributedLogManager.recover` completes it."""
REMOVE = "remove"
"""Truncated segments that were not removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(ShownFields):
    """A fault; `repair` names the way to repair it, "" if there is none here."""

    log: str
    kind: str
    detail: str
    repair: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAudit(ShownFields):
    """Ledgers compared with logs: `orphans` belong to no log, `missing` are named by logs.

    If logs are `damaged` (by their ids), it is not known which ledgers belong to them.  Then no
    ledger counts as an orphan.
    """

    ledgers: int
    logs: int
    orphans: tuple[int, ...]
    missing: dict[int, str]
    damaged: dict[str, str]


async def inspect_log(
    context: LogContext,
    name: str,
    *,
    reads_entries: bool = False,
    report: Report = lambda *_: None,
) -> list[Finding]:
    """Return the faults of a log.

    Args:
        context: the namespace's adapters.
        name: the log.
        reads_entries: read every entry, and count its records.
        report: called with the progress.

    Raises:
        LogNotFoundError: there is no such log.
    """
    try:
        log = await context.logs.find(name)
        nodes = await _segment_nodes(context, log)
        at = await context.logs.read(log)
        findings = [Finding(log=name, kind=k, detail=d) for k, d in check_nodes(at.head, nodes)]
        if any(finding.kind == "gap" for finding in findings):
            return findings
        state = await LogHistory(context.logs, log).state_of(at)
    except (CorruptMetadataError, UnexpectedError) as error:
        return [Finding(log=name, kind="damage", detail=str(error))]
    findings += [Finding(log=name, kind=k, detail=d) for k, d in check_state(state)]
    findings += await _check_ledgers(context, state, report)
    findings += await _check_work(context, log, state)
    if reads_entries:
        for number, segment in enumerate(state.segments):
            report(f"segments read of log {name}", number, len(state.segments))
            findings += await _check_entries(context, name, segment)
    return findings


async def find_nameless(context: LogContext, *, report: Report = lambda *_: None) -> list[Finding]:
    """Return the logs to which no name leads: they cannot be opened or deleted.

    Heads are listed first, so a log that is created meanwhile has its name.  Suspects are checked
    again, because logs are renamed and deleted while this runs.
    """
    heads = set(await context.logs.list_names(context.paths.heads))
    suspects = sorted(heads - await _named_logs(context, report))
    if suspects:
        suspects = sorted(set(suspects) - await _named_logs(context, report))
    findings = []
    for start in range(0, len(suspects), _AT_ONCE):
        some = suspects[start : start + _AT_ONCE]
        paths = [context.paths.log_of(log_id).head for log_id in some]
        nodes = await context.store.get_many(paths, fresh=True)
        for log_id, path, node in zip(some, paths, nodes, strict=True):
            if node is None:
                continue  # it was deleted
            try:
                head = decode(LogHead, node.value, source=path)
                detail = f"no name leads to it, whose last segment is {head.max_lssn}"
            except CorruptMetadataError as error:
                head, detail = LogHead(), f"no name leads to it: {error}"
            if not head.deleted:
                findings.append(Finding(log=f"of id {log_id}", kind="nameless", detail=detail))
    return findings


async def _named_logs(context: LogContext, report: Report) -> set[str]:
    """Return the ids of the logs to which names lead."""
    found: set[str] = set()
    number = 0
    async with aclosing(list_logs(context.store, context.paths)) as listed:
        async for logs in listed:
            report("names looked at, parts", number, len(BUCKETS))
            found |= {log.log_id for log in logs}
            number += 1
    return found


async def _segment_nodes(context: LogContext, log: LogKey) -> dict[int, bool]:
    """Return the numbers of the segments that have a node, and whether it has their end.

    One answer has all names of nodes: a MB for 100,000 segments.
    """
    paths = context.logs.paths_of(log)
    names = await persistently(lambda: context.store.get_children(paths.head)) or []
    numbers = sorted(int(name) for name in names if is_number(name))
    found: dict[int, bool] = {}
    for start in range(0, len(numbers), _AT_ONCE):
        some = numbers[start : start + _AT_ONCE]
        nodes = await context.store.get_many([paths.segment(number) for number in some])
        found |= {n: bool(node.value) for n, node in zip(some, nodes, strict=True) if node}
    return found


def check_nodes(head: LogHead, nodes: dict[int, bool]) -> Iterator[tuple[str, str]]:
    """Yield the faults of the nodes of segments: (kind, detail).

    Each segment that the head counts has a node; only that of the last may have no end.
    """
    last = head.max_lssn
    # A damaged head may count more segments than the loop below could ever go through.
    if last - head.first_lssn >= _GAPS_MAX + len(nodes):
        yield "gap", f"of segments {head.first_lssn} … {last} only {len(nodes)} have a node"
        return
    for lssn in range(head.first_lssn, last + 1):
        is_open = lssn == last and head.segment is not None
        if lssn not in nodes:
            if not is_open:
                yield "gap", f"segment {lssn} of {head.first_lssn} … {last} has no node"
        elif not nodes[lssn] and not is_open:
            yield "in-progress", f"segment {lssn} is in progress, and so are later ones"
        elif nodes[lssn] and is_open:
            yield "in-progress", f"segment {lssn} is completed, and its head says in progress"
    for lssn in nodes:
        if not head.first_lssn <= lssn <= last:
            yield "leftover", f"segment {lssn} lies outside of {head.first_lssn} … {last}"


def check_state(state: LogState) -> Iterator[tuple[str, str]]:
    """Yield the contradictions in a log's metadata: (kind, detail)."""
    for before, after in pairwise(state.segments):
        expected = before.start_sequence_id + before.closed_record_count
        if after.start_sequence_id != expected:
            detail = (
                f"segment {after.lssn} begins with sequence id {after.start_sequence_id}, the "
                f"counts of segment {before.lssn} make {expected}"
            )
            yield "count", detail
    head = state.head
    if state.segments:
        last = state.segments[-1]
        counted = last.start_sequence_id + last.closed_record_count
        if counted != head.next_sequence_id:
            yield "count", f"the head counts {head.next_sequence_id} records, segments {counted}"
    extents = [(s.lssn, e) for s in state.segments for e in s.closed_extents]
    for (_, one), (lssn, two) in pairwise(extents):
        if two.first_txid < one.last_txid:
            yield (
                "order",
                f"segment {lssn}: transaction id {two.first_txid} follows {one.last_txid}",
            )
    if extents and extents[-1][1].last_txid > head.max_txid:
        detail = f"the head's highest transaction id is {head.max_txid}, the last record has "
        yield "count", f"{detail}{extents[-1][1].last_txid}"


async def _check_ledgers(context: LogContext, state: LogState, report: Report) -> list[Finding]:
    extents = [(segment.lssn, extent) for segment in state.segments for extent in segment.extents]
    findings = []
    for start in range(0, len(extents), _AT_ONCE):
        report(f"extents of log {state.name}", start, len(extents))
        some = extents[start : start + _AT_ONCE]
        stored = await context.ledger_store.read_many([extent.ledger_id for _, extent in some])
        for lssn, extent in some:
            ledger = stored.get(extent.ledger_id)
            problems = {"ledger": ledger_problem(extent, ledger), "copies": copies_problem(ledger)}
            findings += [
                Finding(log=state.name, kind=kind, detail=f"segment {lssn}: {problem}")
                for kind, problem in problems.items()
                if problem
            ]
    return findings


def ledger_problem(extent: Extent, ledger: LedgerMetadata | CorruptMetadataError | None) -> str:
    """Return why an extent's entries cannot all be in its ledger, "" if they can."""
    if ledger is None:
        return f"its ledger {extent.ledger_id} does not exist"
    if isinstance(ledger, CorruptMetadataError):
        return f"its ledger {extent.ledger_id} is damaged: {ledger}"
    if extent.last_entry_id is None or ledger.state is not LedgerState.CLOSED:
        return ""
    if extent.last_entry_id > ledger.last_entry_id:
        return (
            f"its ledger {extent.ledger_id} ends with entry {ledger.last_entry_id}, "
            f"{extent.last_entry_id} is needed"
        )
    return ""


def copies_problem(ledger: LedgerMetadata | CorruptMetadataError | None) -> str:
    """Return how many copies a ledger lacks that began with too few bookies, "" if none."""
    if ledger is None or isinstance(ledger, CorruptMetadataError) or not ledger.copies_lacking:
        return ""
    end = (
        "auto-recovery adds some when bookies are there"
        if ledger.state is LedgerState.CLOSED
        else "auto-recovery adds some once it is closed"
    )
    return (
        f"its ledger {ledger.ledger_id} has bookies for {ledger.quorum} where {ledger.wanted} is "
        f"wanted: {end}"
    )


async def _check_work(context: LogContext, log: LogKey, state: LogState) -> list[Finding]:
    """Return unfinished work that no process continues."""
    findings = []
    paths = context.logs.paths_of(log)
    is_open = bool(state.segments) and state.segments[-1].has_open_extent
    if is_open and await persistently(lambda: context.store.get(paths.lock, fresh=True)) is None:
        detail = f"segment {state.head.max_lssn} is in progress, and no writer owns the log"
        findings.append(Finding(log=log.name, kind="writer", detail=detail, repair=RECOVER))
    first = state.first_active
    if state.head.first_lssn < min(first.lssn, state.head.max_lssn + 1):
        detail = f"segments {state.head.first_lssn} … {first.lssn - 1} are truncated, not removed"
        findings.append(Finding(log=log.name, kind="leftover", detail=detail, repair=REMOVE))
    elif await _has_removable(context, state):
        detail = f"extents of segment {state.head.first_lssn} are truncated, not removed"
        findings.append(Finding(log=log.name, kind="leftover", detail=detail, repair=REMOVE))
    return findings


async def _has_removable(context: LogContext, state: LogState) -> bool:
    at = VersionedHead(log=state.log, head=state.head, version=state.version)
    try:
        return await has_removable(context, at)
    except ChunkMissingError:
        return False  # the nodes were those of this head, so it has changed since
    except CorruptMetadataError:
        return False  # settings that are damaged: nothing is removed before they are replaced


async def _check_entries(context: LogContext, name: str, segment: LogSegment) -> list[Finding]:
    findings = []
    for extent in segment.closed_extents:
        try:
            problem = await _entry_problem(context, extent)
        except DLError as error:
            problem = str(error)
        if problem:
            detail = f"segment {segment.lssn}, ledger {extent.ledger_id}: {problem}"
            findings.append(Finding(log=name, kind="entry", detail=detail))
    return findings


async def _entry_problem(context: LogContext, extent: Extent) -> str:
    assert extent.last_entry_id is not None
    reader = await context.ledgers.open_ledger(extent.ledger_id)
    counted = 0
    async with aclosing(reader.read(extent.first_entry_id, extent.last_entry_id)) as chunks:
        async for frames in chunks:
            for frame in frames:
                header = decode_entry_header(frame.body)
                if header.records_before != counted:
                    return (
                        f"entry {frame.entry_id} counts {header.records_before} records before "
                        f"it, there are {counted}"
                    )
                counted += header.record_count
    if counted != extent.record_count:
        return f"its entries hold {counted} records, its metadata says {extent.record_count}"
    return ""


async def finish_removal(context: LogContext, name: str) -> None:
    """Remove the truncated part of a log that was not removed."""
    await remove_truncated(context, await context.logs.read(await context.logs.find(name)))


async def audit_ledgers(context: LogContext, *, report: Report) -> LedgerAudit:
    """Compare all ledgers with those that logs and staged appends name.

    Ledgers are listed first, so a ledger that is created meanwhile is in neither list.  Suspects
    are checked again, because logs are written while this runs.

    Args:
        context: the namespace's adapters.
        report: called with the progress.
    """
    listed: set[int] = set()
    async for ledger_id in context.ledger_store.list_ledgers():
        listed.add(ledger_id)
        report("ledgers", len(listed), None)
    damaged: dict[str, str] = {}
    named, logs = await _named_ledgers(context, report, damaged)
    suspects = [] if damaged else sorted(listed - named.keys())
    again, _ = await _named_ledgers(context, report, damaged) if suspects else ({}, 0)
    orphans = [i for i in suspects if i not in again and await _exists(context, i)]
    gone = [i for i in sorted(named.keys() - listed) if named[i] and not await _exists(context, i)]
    missing = {i: named[i] for i in gone if i in await _ledgers_of(context, named[i])}
    return LedgerAudit(
        ledgers=len(listed),
        logs=logs,
        orphans=() if damaged else tuple(orphans),
        missing=missing,
        damaged=damaged,
    )


async def delete_orphan(context: LogContext, ledger_id: int) -> None:
    """Delete a ledger that belongs to no log; a ledger that is gone is no error."""
    paths = context.paths
    ledger, staged = paths.ledger(ledger_id), paths.staged_ledger(ledger_id)
    with contextlib.suppress(NoNodeError):
        await context.store.delete(staged)  # several logs shared it
    # Last, because an audit lists this node: an interrupted deletion is found again.
    with contextlib.suppress(NoNodeError):
        await context.store.delete(ledger)


async def _named_ledgers(
    context: LogContext, report: Report, damaged: dict[str, str]
) -> tuple[dict[int, str], int]:
    """Return every ledger in use, with the id of its log, and how many logs there are.

    Errors of logs whose ledgers cannot be found are added to `damaged`.
    """
    named: dict[int, str] = {each.staged.ledger_id: "" for each in await list_all_staged(context)}
    children = await persistently(lambda: context.store.get_children(context.paths.merged))
    named |= {int(child): "" for child in children or () if is_number(child)}
    log_ids = await context.logs.list_names(context.paths.heads)
    for number, log_id in enumerate(log_ids):
        report("logs", number, len(log_ids))
        try:
            named |= dict.fromkeys(await _ledgers_of(context, log_id), log_id)
        except CorruptMetadataError as error:
            damaged[log_id] = str(error)
    return named, len(log_ids)


async def _ledgers_of(context: LogContext, log_id: str) -> set[int]:
    """Return all ledgers that a log's nodes name, also in parts that wait for removal."""
    paths = context.paths.log_of(log_id)
    node = await persistently(lambda: context.store.get(paths.head, fresh=True))
    if node is None:
        return set()
    head = decode(LogHead, node.value, source=paths.head)
    found = {extent.ledger_id for extent in head.segment.tail} if head.segment else set()
    names = await persistently(lambda: context.store.get_children(paths.head)) or []
    # By the existing nodes: a damaged head may count more segments than can be read.
    lssns = sorted(int(name) for name in names if is_number(name))
    for start in range(0, len(lssns), _AT_ONCE):
        segments = [paths.segment(lssn) for lssn in lssns[start : start + _AT_ONCE]]
        for path, end in zip(segments, await _values(context, segments), strict=True):
            if end:
                found |= {e.ledger_id for e in decode(SegmentEnd, end, source=path).tail}
            below = await persistently(partial(context.store.get_children, path)) or []
            for first in range(0, len(below), _AT_ONCE):
                chunks = [f"{path}/{name}" for name in below[first : first + _AT_ONCE]]
                for chunk, value in zip(chunks, await _values(context, chunks), strict=True):
                    if value:
                        found |= {e.ledger_id for e in decode(Chunk, value, source=chunk).extents}
    return found


async def _values(context: LogContext, paths: list[str]) -> list[bytes]:
    nodes = await persistently(lambda: context.store.get_many(paths))
    return [b"" if node is None else node.value for node in nodes]


async def _exists(context: LogContext, ledger_id: int) -> bool:
    try:
        await context.ledger_store.read(ledger_id, fresh=True)
    except LedgerNotFoundError:
        return False
    return True


async def seconds_behind(manager: DistributedLogManager, position: DLSN, *, now_ms: int) -> float:
    """Return the age of the next record of a reader at a position.

    It is 0 at the end of the log.

    Raises: LogNotFoundError, LedgerReadError, MetadataError.
    """
    snapshot = await manager.get_snapshot()
    if position >= snapshot.end:
        return 0.0
    async with await manager.open_reader(dlsn=max(position, snapshot.first)) as reader:
        record = await reader.read_next(until_caught_up=True)
    return 0.0 if record is None else max(0, now_ms - record.timestamp_ms) / 1000
