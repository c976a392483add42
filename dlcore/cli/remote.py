"""What commands ask of proxies, where an endpoint is given instead of a namespace."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.cli.output import Progress
from dlcore.errors import LogNotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.cli.reading import RecordPrinter
    from dlcore.ids import DLSN
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.records import NotLessThan
    from dlcore.remote.reading import RemoteNamespace, RemoteReader, RemoteRecord


async def snapshot_of(namespace: RemoteNamespace, log: str) -> LogSnapshot:
    """Return what a log holds now.  Raises: LogNotFoundError."""
    snapshot = (await namespace.get_snapshots([log]))[log]
    if snapshot is None:
        raise LogNotFoundError(f"log {log!r} does not exist")
    return snapshot


async def remote_status(namespace: RemoteNamespace, log: str) -> dict[str, object]:
    """Return the fields of `dlog log show` that proxies know."""
    from dlcore.schemas import describe_schema

    info = await (await namespace.open_log(log)).get_info()
    schema = (await namespace.get_schemas([log])).get(log)
    return {
        "log": log,
        "schema": None if schema is None else describe_schema(schema),
        "records": info.records,
        "sealed": info.sealed,
        "first_dlsn": info.first,
        "last_dlsn": info.last,
    }


async def remote_count(
    namespace: RemoteNamespace, log: str, start: DLSN | None, end: DLSN | None
) -> int:
    """Return how many records a log holds between two positions."""
    snapshot = await snapshot_of(namespace, log)
    first = max(start or snapshot.first, snapshot.first)
    last = min(end or snapshot.end, snapshot.end)
    low, high = await namespace.find_places([(snapshot, first), (snapshot, last)])
    return max(0, high.sequence_id - low.sequence_id)


async def remote_position(
    namespace: RemoteNamespace, log: str, wanted: NotLessThan
) -> tuple[DLSN, DLSN]:
    """Return where a record is, and the end of its log."""
    snapshot = await snapshot_of(namespace, log)
    (place,) = await namespace.find_places([(snapshot, wanted)])
    return place.dlsn, snapshot.end


async def show_records(
    reader: RemoteReader,
    printer: RecordPrinter,
    *,
    count: int | None = None,
    end: DLSN | None = None,
    follow: bool = False,
) -> None:
    """Print the records of a reader: so many, or up to a position, or what is there."""
    with Progress(beside=sys.stdout) as progress:
        done = 0
        async with aclosing(_portions(reader, follow=follow)) as portions:
            async for records in portions:
                wanted = [each for each in records if end is None or each.dlsn < end]
                wanted = wanted if count is None else wanted[: count - done]
                printer.show(wanted)
                done += len(wanted)
                progress.tell("records", done, count)
                if len(wanted) < len(records) or done == count:
                    return


async def _portions(
    reader: RemoteReader, *, follow: bool
) -> AsyncGenerator[list[RemoteRecord], None]:
    from dlcore.remote.reading import records_of

    async with aclosing(reader.batches(follow=follow)) as batches:
        async for batch in batches:
            yield records_of(batch)
