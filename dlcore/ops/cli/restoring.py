"""`dlog restore`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import to_builtins

from dlcore.base.clock import SystemClock
from dlcore.base.errors import ObjectStoreError
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.ops.cli.context import common_options, namespace_uri, wants_json
from dlcore.ops.cli.metadata import tell_left_out
from dlcore.ops.cli.namespace import on_store
from dlcore.ops.cli.output import show_done, show_rows, time_text

if TYPE_CHECKING:
    from dlcore.metadata.port import MetadataStore
    from dlcore.ops.backup.archive import Export
    from dlcore.ops.backup.rebuilding import Rebuilt, RebuiltLog

_NAMES_SHOWN = 3
_SEGMENTS_SKIPPED = 100


@click.command("restore", epilog="Example: dlog restore --from s3://bucket/folder")
@click.option(
    "--from",
    "place",
    required=True,
    metavar="PLACE",
    help="The URL with exports and cold segments, or of an export, or a file.",
)
@click.option("--cluster", "cluster_id", metavar="ID", help="Which cluster, if there are several.")
@click.option(
    "--skip-segments",
    type=click.IntRange(min=1),
    default=_SEGMENTS_SKIPPED,
    show_default=True,
    metavar="N",
    help="Numbers of segments left out, for those begun since the export.",
)
@click.option(
    "--only-exported", is_flag=True, help="Leave out segments that became cold after the export."
)
@click.option(
    "--lose-missing", is_flag=True, help="Take records of missing objects for lost, and go on."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be there.")
@common_options
def restore_command(
    place: str,
    cluster_id: str | None,
    *,
    skip_segments: int,
    only_exported: bool,
    lose_missing: bool,
    dry_run: bool,
) -> None:
    """Make a namespace again whose bookies and metadata are lost.

    It has all logs of the newest export below a URL, or of the one that is named, with the records
    that are in objects.  For each log it is shown what is lost.  New records get positions that no
    record had.  If bookies are left, use `dlog metadata import` instead.
    """
    uri = namespace_uri()
    parsed, clock = parse_uri(uri), SystemClock()
    paths = NamespacePaths(parsed.root)

    async def make(store: MetadataStore) -> tuple[Rebuilt, float, int]:
        from dlcore.ops.backup.importing import changed_nodes, import_namespace, require_empty

        loop = asyncio.get_running_loop()
        start_s = loop.time()
        export = await _read(place, cluster_id)
        made = await _rebuilt(
            paths,
            export,
            skip_segments,
            only_exported=only_exported,
            lose_missing=lose_missing,
        )
        changed_nodes(paths, made.export, clock.now_ms())  # raises if it is of no namespace
        if dry_run:
            await require_empty(store, paths)
        else:
            await import_namespace(store, paths, clock, made.export)
        return made, loop.time() - start_s, clock.now_ms()

    made, took_s, now_ms = on_store(parsed.servers, make, is_long=True)
    _show(uri, made, took_s, now_ms, dry_run=dry_run)


async def _rebuilt(
    paths: NamespacePaths,
    export: Export,
    skip_segments: int,
    *,
    only_exported: bool,
    lose_missing: bool,
) -> Rebuilt:
    """Return what remains of an export, with what became cold after it."""
    from dlcore.log.cold.reading import ColdLedgers
    from dlcore.ops.backup.adopting import adopted
    from dlcore.ops.backup.in_store import (
        listed_objects,
        missing_objects,
        unnamed_objects,
        without_objects,
    )
    from dlcore.ops.backup.rebuilding import rebuilt

    cold = ColdLedgers()
    listed = await listed_objects(cold.objects, export)
    if not only_exported:
        export = adopted(paths, export, await unnamed_objects(cold, export, listed))
    made = rebuilt(paths, export, segments_skipped=skip_segments)
    missing = missing_objects(made.export, listed)
    if missing and lose_missing:
        whole = without_objects(export, missing)
        made = rebuilt(paths, whole, segments_skipped=skip_segments)
    elif missing:
        raise ObjectStoreError(
            f"{len(missing)} objects that the export names are not there, or not whole, such as "
            f"{', '.join(missing[:_NAMES_SHOWN])}: nothing was made; with --lose-missing their "
            "records are taken for lost"
        )
    return made


async def _read(place: str, cluster_id: str | None) -> Export:
    from dlcore.log.cold.stores import StoredObjects
    from dlcore.ops.backup.archive import unpacked
    from dlcore.ops.backup.in_store import chosen_export, is_url

    if is_url(place):
        return await chosen_export(StoredObjects(), place, cluster_id=cluster_id)
    data = await asyncio.to_thread(Path(place).read_bytes)
    return unpacked(data, source=place)


def _show(uri: str, made: Rebuilt, took_s: float, now_ms: int, *, dry_run: bool) -> None:
    header = made.export.header
    rows = [_row(log) for log in made.logs]
    if not wants_json():
        show_rows(rows, columns=("log", "records", "lost", "next"), empty="no logs")
    what = "would be" if dry_run else "is"
    age_s = max(0, now_ms - header.exported_ms) // 1000
    show_done(
        f"{uri} {what} cluster {header.cluster_id} as of {time_text(header.exported_ms)}, "
        f"{age_s} s ago, with {len(rows)} logs; it took {took_s:.1f} s; later changes, and records "
        "that were in no object, are lost",
        {
            "uri": uri,
            "cluster": header.cluster_id,
            "exported": time_text(header.exported_ms),
            "recovery_point_age_s": age_s,
            "took_s": round(took_s, 3),
            "logs": rows,
            "left_out": [to_builtins(each) for each in header.left_out],
            "dry_run": dry_run,
        },
    )
    tell_left_out(header.left_out)


def _row(log: RebuiltLog) -> dict[str, object]:
    return {
        "log": log.name,
        "records": log.records,
        "lost": ", ".join(map(str, log.lost)),
        "next": str(log.next_position),
    }
