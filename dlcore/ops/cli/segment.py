"""`dlog segment`: the segments of a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dlcore.base.ids import DLSN
from dlcore.ops.cli.context import common_options, run_direct, wants_json
from dlcore.ops.cli.output import show_rows, time_text

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.metadata.segment import LogSegment
    from dlcore.log.reading.scan import SegmentView


@click.group("segment")
@common_options
def segment_group() -> None:
    """Show the segments of a log."""


@segment_group.command("list", epilog="Example: dlog segment list clicks")
@click.argument("log")
@common_options
def list_segments(log: str) -> None:
    """List the segments of LOG, oldest first.

    The counts of a segment in progress are those that readers see now.
    """

    async def read(namespace: DirectNamespace) -> list[dict[str, object]]:
        async with await namespace.open_log(log) as manager:
            views = {view.lssn: view for view in (await manager.get_snapshot()).segments}
            first = await manager.get_first_active_dlsn()
            segments = await manager.get_log_segments()
            return [_row(segment, views.get(segment.lssn), first) for segment in segments]

    rows = run_direct(read)
    if not wants_json():
        for row in rows:
            if row["truncation"] != "active":  # one column less, because this is rare
                row["state"] = f"{row['state']}, {row['truncation']}"
            if row["cold"]:
                row["state"] = f"{row['state']}, cold"
    show_rows(
        rows,
        columns=("lssn", "state", "created", "records", "bytes", "extents", "ledgers"),
        empty=f"log {log} has no segments",
    )


def _row(segment: LogSegment, view: SegmentView | None, first: DLSN) -> dict[str, object]:
    # An open extent's counts are not in the metadata; the view has read them from bookies.
    seen = view if segment.has_open_extent else None
    return {
        "lssn": segment.lssn,
        "state": segment.state.name.lower().replace("_", " "),
        "truncation": "partially truncated" if first > DLSN(segment.lssn, 0, 0) else "active",
        "created": time_text(segment.created_ms),
        "completed": time_text(segment.completed_ms) if segment.completed_ms else None,
        "extents": len(segment.extents),
        "cold": any(extent.is_cold for extent in segment.extents),
        "entries": seen.entry_count if seen else segment.closed_entry_count,
        "records": seen.record_count if seen else segment.closed_record_count,
        "bytes": seen.size_bytes if seen else segment.closed_size_bytes,
        "first_sequence_id": segment.start_sequence_id,
        "min_active": str(max(first, segment.start)),
        "ledgers": list(dict.fromkeys(extent.ledger_id for extent in segment.extents)),
    }
