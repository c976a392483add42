"""`dlog log write` and `dlog log tail`: records in as lines, records out as lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlcore.cli.context import common_options, connect, namespace_tls, namespace_uri, wants_json
from dlcore.cli.output import payload_json, payload_text, show_done, show_json, time_text
from dlcore.clock import SystemClock
from dlcore.config import LogConfig
from dlcore.errors import EndOfStreamError
from dlcore.ids import DLSN
from dlcore.namespace import open_namespace
from dlcore.records import LogRecord, LogRecordWithDLSN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dlcore.log.manager import DistributedLogManager
    from dlcore.log.reading.reader import AsyncLogReader
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.sync import LogWriter
    from dlcore.tls import TlsFiles

_CHUNK_BYTES = 1 << 20
_BULK_RECORDS = 1000
_TAIL_RECORDS = 10


@click.command("write", epilog="Example: seq 1000 | dlog log write numbers --txid line-number")
@click.argument("log")
@click.option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read this file instead of standard input.",
)
@click.option(
    "--txid",
    type=click.Choice(["now", "line-number"]),
    default="now",
    show_default=True,
    help="Transaction ids: the time in epoch milliseconds, or 1, 2, 3, …",
)
@common_options
def write_log(log: str, path: Path | None, txid: str) -> None:
    """Append one record per line to LOG, without the line's end.

    A line is durable and visible to readers when no further input is waiting behind it; at the end
    everything is.
    """
    with (
        click.open_file(str(path) if path else "-", "rb") as source,
        connect() as namespace,
        namespace.open_log(log) as manager,
        manager.open_writer() as writer,
    ):
        count, last = _write_chunks(writer, _read_lines(source.fileno()), numbered=txid != "now")
    fields = {"log": log, "records": count, "last_dlsn": None if last is None else str(last)}
    place = "" if last is None else f", the last one at {last}"
    show_done(f"wrote {count} records to log {log}{place}", fields)


def _read_lines(descriptor: int) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the lines that each read completes, and whether more input is waiting."""
    rest = b""
    while chunk := os.read(descriptor, _CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        waiting, _, _ = select.select([descriptor], [], [], 0)
        yield lines, bool(waiting)
    if rest:
        yield [rest], False


def _write_chunks(
    writer: LogWriter, chunks: Iterable[tuple[list[bytes], bool]], *, numbered: bool
) -> tuple[int, DLSN | None]:
    clock = SystemClock()
    count = 0
    txid_floor = 0  # the clock may step back, transaction ids may not
    last: DLSN | None = None
    for lines, more_is_waiting in chunks:
        txid_floor = max(txid_floor, clock.now_ms())
        writer.write_bulk(
            [
                LogRecord(txid=count + index if numbered else txid_floor, payload=line)
                for index, line in enumerate(lines, start=1)
            ]
        )
        count += len(lines)
        if not more_is_waiting:
            last = writer.commit()
    return count, writer.commit() or last


@click.command("tail", epilog="Example: dlog log tail clicks -n 100 -f")
@click.argument("log")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), metavar="N", help="How many records [10]."
)
@click.option("-f", "--follow", is_flag=True, help="Wait for more records, until interrupted.")
@click.option("--from-dlsn", metavar="DLSN", help="Start at this position instead of near the end.")
@click.option("--from-txid", type=int, metavar="TXID", help="Start at this transaction id instead.")
@click.option(
    "--unavailable-timeout",
    "unavailable_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=LogConfig().read_unavailable_timeout_s,
    show_default=True,
    metavar="SECONDS",
    help="With -f: give up when ZooKeeper or all bookies are gone for so long.",
)
@common_options
def tail_log(
    log: str,
    lines: int | None,
    *,
    follow: bool,
    from_dlsn: str | None,
    from_txid: int | None,
    unavailable_timeout_s: float,
) -> None:
    """Show the last records of LOG: DLSN, transaction id, time of writing and payload.

    With a start, all records from there on, or N of them.  A payload that is not UTF-8 text is
    shown as a bytes literal.  With --json each record is a line of its own.
    """
    if from_dlsn is not None and from_txid is not None:
        raise click.UsageError("give --from-dlsn or --from-txid, not both")
    start = None if from_dlsn is None else DLSN.parse(from_dlsn)
    tail = _Tail(follow=follow, count=lines, start=start, start_txid=from_txid)
    config = LogConfig(read_unavailable_timeout_s=unavailable_timeout_s)
    asyncio.run(tail.run(namespace_uri(), namespace_tls(), log, config))


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """What to show of a log; async, since following is waiting."""

    follow: bool
    count: int | None
    start: DLSN | None
    start_txid: int | None

    async def run(self, uri: str, tls: TlsFiles | None, log: str, config: LogConfig) -> None:
        async with (
            await open_namespace(uri, tls=tls) as namespace,
            await namespace.open_log(log, config=config) as manager,
        ):
            with contextlib.suppress(EndOfStreamError):  # a sealed log has an end, also for -f
                if self.start is None and self.start_txid is None:
                    await self._show_end(manager)
                else:
                    async with await manager.open_reader(
                        dlsn=self.start, txid=self.start_txid
                    ) as reader:
                        await self._show_on(reader, self.count)

    async def _show_end(self, manager: DistributedLogManager) -> None:
        count = _TAIL_RECORDS if self.count is None else self.count
        last: deque[LogRecordWithDLSN] = deque(maxlen=count)
        start = start_of_tail(await manager.get_snapshot(), count)
        async with await manager.open_reader(dlsn=start) as reader:
            try:
                while records := await reader.read_bulk(_BULK_RECORDS, until_caught_up=True):
                    last.extend(records)
            finally:
                _show_records(last)
            if self.follow:
                await self._show_on(reader, None)

    async def _show_on(self, reader: AsyncLogReader, count: int | None) -> None:
        left = count
        while left is None or left > 0:
            size = _BULK_RECORDS if left is None else min(left, _BULK_RECORDS)
            records = await reader.read_bulk(size, until_caught_up=not self.follow)
            if not records:
                return
            _show_records(records)
            left = None if left is None else left - len(records)


def start_of_tail(snapshot: LogSnapshot, count: int) -> DLSN:
    """Return a position with at least `count` records behind it, close to the end of the log.

    Extents know how many records they hold, so whole extents before the tail are never read.
    """
    found = 0
    for segment in reversed(snapshot.segments):
        for extent in reversed(segment.extents):
            if found >= count:
                return max(snapshot.first, DLSN(segment.lssn, extent.end_entry_id, 0))
            found += extent.record_count
    return snapshot.first


def _show_records(records: Iterable[LogRecordWithDLSN]) -> None:
    as_json = wants_json()
    for record in records:
        if as_json:
            show_json(
                {
                    "dlsn": str(record.dlsn),
                    "txid": record.txid,
                    "sequence_id": record.sequence_id,
                    "timestamp_ms": record.timestamp_ms,
                    **payload_json(record.payload),
                }
            )
        else:
            click.echo(
                f"{record.dlsn!s:<14} {record.txid:>14}  {time_text(record.timestamp_ms)}  "
                f"{payload_text(record.payload)}"
            )
    sys.stdout.flush()  # in a pipe, what was read must not wait for more
