"""`dlog log tail` and `dlog log dump`: print records and entries, for people and programs."""

from __future__ import annotations

import base64
import re
import string
import sys
from collections import deque
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from dlcore.base.clock import SystemClock
from dlcore.base.config import LogConfig
from dlcore.base.errors import EndOfStreamError
from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace, LogRecordWithDLSN
from dlcore.ops.cli.context import (
    common_options,
    note,
    run_async,
    run_direct,
    wants_json,
)
from dlcore.ops.cli.framing import DELIMITER, framed as frame_of
from dlcore.ops.cli.output import (
    Progress,
    payload_text,
    show_bytes,
    show_json,
    time_text,
)
from dlcore.ops.cli.times import EpochMs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable
    from typing import Any, TypeAlias, TypeVar

    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.log.reading.scan import ExtentView, LogSnapshot, ScanRange
    from dlcore.ops.cli.rows import RowReader, TypedRow

    _Shown: TypeAlias = LogRecordWithDLSN | TypedRow
    _Reader: TypeAlias = AsyncLogReader | RowReader
    _Command = TypeVar("_Command", bound=Callable[..., Any])

_BULK_RECORDS = 1000
_TAIL_RECORDS = 10
_ENTRY_LINE = "{:<14} {:>14} {:>8} {:>9}  {}  {}"
_FIELDS: dict[str, Callable[[_Shown], object]] = {
    "dlsn": lambda record: str(record.dlsn),
    "txid": lambda record: record.txid,
    "sequence_id": lambda record: record.sequence_id,
    "timestamp_ms": lambda record: record.timestamp_ms,
    "time": lambda record: time_text(record.timestamp_ms),
    "size": lambda record: len(record.payload),
    "value": lambda record: payload_text(record.payload),
    "value_hex": lambda record: record.payload.hex(),
    "value_base64": lambda record: base64.b64encode(record.payload).decode("ascii"),
}


@dataclass(frozen=True, kw_only=True)
class RecordPrinter:
    """Prints records: for people, by a format, as JSON lines, or as payloads only."""

    template: str | None = None
    delimiter: bytes | None = None
    is_framed: bool = False

    @classmethod
    def of(
        cls, *, template: str | None, raw: bool, delimiter: bytes | None, framed: bool
    ) -> RecordPrinter:
        """Return the printer that the options describe.

        Raises:
            click.UsageError: they contradict each other, or the format has an unknown field.
        """
        if (template is not None) + raw + framed + wants_json() > 1:
            raise click.UsageError("give one of --format, --raw, --framed and --json, not several")
        if delimiter is not None and not raw:
            raise click.UsageError("--delimiter ends each payload of --raw: give both")
        if template is not None:
            template = _parsed(template)
        return cls(
            template=template,
            delimiter=(delimiter or b"\n") if raw else None,
            is_framed=framed,
        )

    def show(self, records: Iterable[_Shown]) -> None:
        """Print records; flush them, so that none waits in a pipe for later ones."""
        if self.delimiter is not None or self.is_framed:
            show_bytes(b"".join(self._bytes_of(record.payload) for record in records))
        else:
            for record in records:
                self._show_one(record)
        if sys.stdout is not None:
            sys.stdout.flush()

    def _bytes_of(self, payload: bytes) -> bytes:
        return frame_of(payload) if self.delimiter is None else payload + self.delimiter

    def _show_one(self, record: _Shown) -> None:
        if self.template is not None:
            click.echo(_filled(self.template, record))
        elif wants_json():
            from dlcore.ops.cli.rows import record_json  # most commands show none

            show_json(record_json(record))
        else:
            click.echo(
                f"{record.dlsn!s:<14} {record.txid:>14}  {time_text(record.timestamp_ms)}  "
                f"{payload_text(record.payload)}"
            )


_ESCAPED = {"t": "\t", "n": "\n", "\\": "\\"}
_ESCAPE = re.compile(r"\\([tn\\])")


def _parsed(given: str) -> str:
    """Return a template with its escapes replaced, after a test with a record."""
    template = _ESCAPE.sub(lambda found: _ESCAPED[found[1]], given)
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        unknown = [name for name in names if name not in _FIELDS]
        if not unknown:
            _filled(template, LogRecordWithDLSN(0, b"", 0, EntryPlace(1, 0, 0, 0, 0)))
    except (ValueError, KeyError, IndexError) as error:
        raise click.UsageError(f"--format {given!r}: {error}") from error
    if unknown:
        raise click.UsageError(
            f"--format {given!r}: no field {unknown[0]!r}, expected {', '.join(_FIELDS)}"
        )
    return template


def _filled(template: str, record: _Shown) -> str:
    return template.format(**{name: of(record) for name, of in _FIELDS.items()})


def printed(command: _Command) -> _Command:
    """Add the options for the form of printed records."""
    for option in (
        click.option(
            "--framed",
            is_flag=True,
            help="Print only the payloads, each after its length in 4 bytes, big-endian.",
        ),
        click.option(
            "--delimiter",
            type=DELIMITER,
            metavar="TEXT",
            help="With --raw: end each payload with TEXT instead of a line end.",
        ),
        click.option("--raw", is_flag=True, help="Print only the payloads, unchanged."),
        click.option(
            "--format",
            "template",
            metavar="TEXT",
            help="Print each record as a line like '{dlsn} {value}'; the fields are "
            rf"{', '.join(_FIELDS)}; \t is a tab, \n a line end.",
        ),
    ):
        command = option(command)
    return command


@click.command("tail", epilog="Example: dlog log tail clicks -n 100 -f")
@click.argument("log")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), metavar="N", help="Number of records [10]."
)
@click.option("-f", "--follow", is_flag=True, help="Wait for more records, until interrupted.")
@click.option("--from-dlsn", metavar="DLSN", help="Start at this position instead of near the end.")
@click.option("--from-txid", type=int, metavar="TXID", help="Start at this transaction id instead.")
@click.option(
    "--from-timestamp",
    type=EpochMs(SystemClock().now_ms),
    metavar="TIME",
    help="Start at this time: 2026-01-31T12:00:00Z, -1h (an hour ago), or epoch milliseconds.",
)
@printed
@click.option(
    "--unavailable-timeout",
    "unavailable_timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=LogConfig().read_unavailable_timeout_s,
    show_default=True,
    metavar="SECONDS",
    help="With -f: give up if ZooKeeper or all bookies are gone for this time.",
)
@common_options
def tail_log(
    log: str,
    lines: int | None,
    *,
    follow: bool,
    from_dlsn: str | None,
    from_txid: int | None,
    from_timestamp: int | None,
    template: str | None,
    raw: bool,
    delimiter: bytes | None,
    framed: bool,
    unavailable_timeout_s: float,
) -> None:
    """Show the last records of LOG.

    With DLSN, transaction id, time of writing and payload.  With a start, show all records from
    there on, or N of them.  A payload that is not UTF-8 text is shown as a bytes literal.  A row of
    a typed log is shown as a JSON object of its columns.  With --json each record is one line.
    """
    if sum(start is not None for start in (from_dlsn, from_txid, from_timestamp)) > 1:
        raise click.UsageError(
            "give one of --from-dlsn, --from-txid and --from-timestamp, not several"
        )
    tail = _Tail(
        log=log,
        follow=follow,
        count=lines,
        dlsn=None if from_dlsn is None else DLSN.parse(from_dlsn),
        txid=from_txid,
        timestamp_ms=from_timestamp,
        printer=RecordPrinter.of(template=template, raw=raw, delimiter=delimiter, framed=framed),
    )
    config = LogConfig(read_unavailable_timeout_s=unavailable_timeout_s)
    run_async(tail.run, is_long=True, config=config)


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """The records of a log to show; async, because following is waiting."""

    log: str
    follow: bool
    count: int | None
    dlsn: DLSN | None
    txid: int | None
    timestamp_ms: int | None
    printer: RecordPrinter

    async def run(self, namespace: Namespace) -> None:
        async with await namespace.open_log(self.log) as log:
            await self._show(log)

    async def _show(self, log: DistributedLogManager) -> None:
        with suppress(EndOfStreamError):  # a sealed log has an end, also with -f
            if self.dlsn is None and self.txid is None and self.timestamp_ms is None:
                await self._show_end(log, await log.get_snapshot())
            else:
                async with await _open_reader(
                    log, dlsn=self.dlsn, txid=self.txid, timestamp_ms=self.timestamp_ms
                ) as reader:
                    shown = await self._show_on(reader, self.count)
                if not shown and self.count != 0:
                    note(f"no record of log {self.log} is at the given start or behind it")

    async def _show_end(self, log: DistributedLogManager, snapshot: LogSnapshot) -> None:
        # The start has at least `count` records behind it, mostly more: only the last are kept.
        count = _TAIL_RECORDS if self.count is None else self.count
        last: deque[_Shown] = deque(maxlen=count)
        async with await _open_reader(log, dlsn=start_of_tail(snapshot, count)) as reader:
            try:
                while records := await reader.read_bulk(_BULK_RECORDS, until_caught_up=True):
                    last.extend(records)
            finally:  # the end of a sealed log is an error, which must not hide its last records
                self.printer.show(last)
            if self.follow:
                await self._show_on(reader, None)

    async def _show_on(self, reader: _Reader, count: int | None) -> int:
        """Show the next records, or `count` of them; return their number."""
        done = 0
        with Progress(beside=sys.stdout) as progress:
            while count is None or done < count:
                size = _BULK_RECORDS if count is None else min(count - done, _BULK_RECORDS)
                records = await reader.read_bulk(size, until_caught_up=not self.follow)
                if not records:
                    break
                self.printer.show(records)
                done += len(records)
                progress.tell("records", done, count)
        return done


async def _open_reader(log: DistributedLogManager, **start: Any) -> _Reader:
    """Open a reader; for a typed log one that returns its rows as records."""
    reader = await log.open_reader(**start)
    if not reader.is_typed:
        return reader
    from dlcore.ops.cli.rows import RowReader

    return RowReader(reader)


def start_of_tail(snapshot: LogSnapshot, count: int) -> DLSN:
    """Return a position with at least `count` records behind it, close to the end of the log.

    The metadata of extents has their record counts, so whole extents before the tail are not read.
    """
    found = 0
    for segment in reversed(snapshot.segments):
        for extent in reversed(segment.extents):
            if found >= count:
                return max(snapshot.first, DLSN(segment.lssn, extent.end_entry_id, 0))
            found += extent.record_count
    return snapshot.first


@click.command("dump", epilog="Example: dlog log dump clicks --entries --json")
@click.argument("log")
@click.option("--from-dlsn", metavar="DLSN", help="Start at DLSN instead of at the first record.")
@click.option("--to-dlsn", metavar="DLSN", help="End before this position.")
@click.option("--entries", is_flag=True, help="Show entries instead of records.")
@printed
@common_options
def dump_log(
    log: str,
    *,
    from_dlsn: str | None,
    to_dlsn: str | None,
    entries: bool,
    template: str | None,
    raw: bool,
    delimiter: bytes | None,
    framed: bool,
) -> None:
    """Show the records of LOG, or those between two positions.

    Rows of a typed log are JSON objects of its columns; with --raw nothing else is shown.

    With --entries, show a line for each entry: its position, its ledger and entry id there, the
    number of its records, their transaction ids, its size and its time.
    """
    printer = RecordPrinter.of(template=template, raw=raw, delimiter=delimiter, framed=framed)
    if entries and (template is not None or raw or framed):
        raise click.UsageError("--entries shows no records: leave out --format, --raw and --framed")
    start = None if from_dlsn is None else DLSN.parse(from_dlsn)
    end = None if to_dlsn is None else DLSN.parse(to_dlsn)

    async def dump(namespace: Namespace) -> None:
        # The end is fixed at the start: a log that is written faster than it is printed would never
        # end.
        async with await namespace.open_log(log) as manager:
            now = (await manager.get_snapshot()).end
            await _dump_records(manager, printer, start, min(end or now, now))

    async def dump_entries(namespace: DirectNamespace) -> None:
        async with await namespace.open_log(log) as manager:
            await _dump_entries(namespace, await manager.get_snapshot(), start, end)

    if entries:
        run_direct(dump_entries, is_long=True)
    else:
        run_async(dump, is_long=True)


async def _dump_records(
    log: DistributedLogManager, printer: RecordPrinter, start: DLSN | None, end: DLSN
) -> None:
    async with await _open_reader(log, dlsn=start) as reader:
        with suppress(EndOfStreamError), Progress(beside=sys.stdout) as progress:
            done = 0
            while records := await reader.read_bulk(_BULK_RECORDS, until_caught_up=True):
                printer.show(record for record in records if record.dlsn < end)
                if records[-1].dlsn >= end:
                    return
                done += len(records)
                progress.tell("records", done)


async def _dump_entries(
    namespace: DirectNamespace, snapshot: LogSnapshot, start: DLSN | None, end: DLSN | None
) -> None:
    as_json = wants_json()
    if not as_json:
        click.echo(_ENTRY_LINE.format(*("dlsn", "ledger/entry", "records", "bytes", "txids", "")))
    with Progress(beside=sys.stdout) as progress:
        for part in snapshot.scans(start or snapshot.first, end or snapshot.end):
            for extent in part.extents:
                async with aclosing(_entries_of(namespace, part, extent)) as rows:
                    async for row in rows:
                        if as_json:
                            show_json(row)
                        else:
                            click.echo(_entry_line(row))
                        progress.tell("entries", row["dlsn"])


def _entry_line(row: dict[str, Any]) -> str:
    return _ENTRY_LINE.format(
        row["dlsn"],
        f"{row['ledger']}/{row['entry']}",
        row["records"],
        row["bytes"],
        f"{row['first_txid']}-{row['last_txid']}",
        time_text(row["timestamp_ms"]),
    )


async def _entries_of(
    namespace: DirectNamespace, part: ScanRange, extent: ExtentView
) -> AsyncGenerator[dict[str, Any], None]:
    from dlcore.log.entries.body import decode_entry_header

    reader = namespace.ports.ledgers.open_ledger_of(part.ledgers[extent.ledger_id])
    async with aclosing(reader.read(extent.first_entry_id, extent.last_entry_id)) as chunks:
        async for frames in chunks:
            for frame in frames:
                header = decode_entry_header(frame.body)
                assigned = extent.assigned_txid
                yield {
                    "dlsn": str(DLSN(part.lssn, extent.in_segment(frame.entry_id), 0)),
                    "ledger": extent.ledger_id,
                    "entry": frame.entry_id,
                    "records": header.record_count,
                    "bytes": len(frame.body),
                    "first_txid": header.first_txid if assigned is None else assigned,
                    "last_txid": header.last_txid if assigned is None else assigned,
                    "timestamp_ms": extent.timestamp_ms(header.write_time_ms),
                }
