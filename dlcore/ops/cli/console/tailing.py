"""Follows a log for the page: server-sent events, bounded in size, number and rate.

Events are ``start`` (the columns of a typed log, or null), ``records``, ``end`` (the log is sealed)
and ``failed``.  A comment is sent while nothing comes, so that a page that is gone is noticed.  The
next records are read when the page has taken those before, so a slow page reads slowly.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from dlcore.base.background import side_tasks
from dlcore.base.errors import DLError, EndOfStreamError
from dlcore.base.records import NotLessThan, RecordField
from dlcore.ops.cli.console.values import end_count, payload_value, row_value
from dlcore.ops.cli.rows import RowReader, TypedRow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.api.log import DistributedLogManager
    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.reading.rows_reader import AsyncLogReader

RECORDS_MAX = 100
"""Records of an event."""
PAUSE_S = 0.2
"""Least time between two events: at most 500 records a second."""
LAST_RECORDS = 20
"""Records before the end with which a tail begins."""
KEEP_S = 5.0


def event(name: str, value: object) -> bytes:
    """Return an event in the format of server-sent events."""
    return f"event: {name}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def record_value(record: LogRecordWithDLSN | TypedRow) -> dict[str, Any]:
    """Return a record as the page shows it."""
    found: dict[str, Any] = {
        "dlsn": str(record.dlsn),
        "txid": str(record.txid),
        "timestamp_ms": record.timestamp_ms,
    }
    if isinstance(record, TypedRow):
        return found | {"row": row_value(record.row)}
    return found | payload_value(record.payload)


async def follow(
    manager: DistributedLogManager, *, dlsn: DLSN | None, timestamp_ms: int | None
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a tail; without a start from the last records on."""
    try:
        if dlsn is None and timestamp_ms is None:
            count = end_count(await manager.get_snapshot())
            last = NotLessThan(RecordField.SEQUENCE_ID, max(0, count - LAST_RECORDS))
            dlsn = (await manager.find_place(last)).dlsn
        schema = await manager.get_schema()
        yield event("start", None if schema is None else schema.names)
        opened = await manager.open_reader(dlsn=dlsn, timestamp_ms=timestamp_ms)
        async with RowReader(opened) if opened.is_typed else opened as reader:
            async for data in _records(reader):
                yield data
    except EndOfStreamError:
        yield event("end", None)
    except DLError as error:
        yield event("failed", str(error))


async def _next(reader: AsyncLogReader | RowReader) -> Sequence[LogRecordWithDLSN | TypedRow]:
    return await reader.read_bulk(RECORDS_MAX)


async def _records(reader: AsyncLogReader | RowReader) -> AsyncGenerator[bytes, None]:
    while True:
        async with side_tasks() as tasks:
            reading = tasks.start(_next(reader), name="reading for a tail")
            while not (await asyncio.wait({reading}, timeout=KEEP_S))[0]:
                yield b": waiting\n\n"
        yield event("records", [record_value(record) for record in reading.result()])
        await asyncio.sleep(PAUSE_S)
