"""`dlog log watch`: shows changes of a log as they happen."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from dlcore.base.errors import LogNotFoundError
from dlcore.ops.cli.context import common_options, run_direct, wants_json
from dlcore.ops.cli.output import show_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.metadata.values import LogState


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
    if wants_json():
        show_json({"log": log, "event": event, "end": end})
    else:
        click.echo(event)
