"""`dlog log write`: records from standard input or a file."""

from __future__ import annotations

import os
import select
import sys
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import click

from dlcore.base.records import LogRecord
from dlcore.ops.cli.context import common_options, connect
from dlcore.ops.cli.framing import DELIMITER, Delimited, Framed, Splitter, Whole
from dlcore.ops.cli.output import Progress, show_done

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.sync import LogWriter

_CHUNK_BYTES = 1 << 20


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
@click.option(
    "--delimiter",
    type=DELIMITER,
    metavar="TEXT",
    help="TEXT ends each record instead of a line end; \\0 and the like are escapes.",
)
@click.option(
    "--framed",
    is_flag=True,
    help="Each record follows its length (4 bytes, big-endian): for any bytes.",
)
@click.option("--whole", is_flag=True, help="The whole input is one record.")
@click.option(
    "--stream",
    is_flag=True,
    help="The input is bytes of a stream, not records: `dlog log cat` prints them.",
)
@common_options
def write_log(
    log: str,
    path: Path | None,
    txid: str,
    *,
    delimiter: bytes | None,
    framed: bool,
    whole: bool,
    stream: bool,
) -> None:
    """Append records to LOG: each line of the input is one.

    Its line feed is not part of it.  For a typed log each line is a JSON object of its columns, as
    --raw of tail and dump prints them.  Binary is text in base64; decimals, dates and times are
    text, dates and times in ISO 8601; a duration is a whole number of its unit; a map is a list of
    {"key": …, "value": …}; an interval has months, days and nanoseconds.

    A record becomes durable and visible to readers as soon as no further input is waiting; at the
    end all records are.
    """
    if (delimiter is not None) + framed + whole + stream > 1:
        raise click.UsageError(
            "give one of --delimiter, --framed, --whole and --stream, not several"
        )
    if stream:
        _write_stream(log, path)
        return
    splitter = Framed() if framed else Whole() if whole else Delimited(delimiter or b"\n")
    with (
        _open_input(path) as source,
        _open_writer(log, numbered=txid != "now") as writer,
        Progress(beside=source) as progress,
    ):
        chunks = _read_records(source.fileno(), splitter)
        count, last = _write_chunks(writer, chunks, progress)
    fields = {"log": log, "records": count, "last_dlsn": None if last is None else str(last)}
    place = "" if last is None or not count else f", the last one at {last}"
    wrote = "1 record" if count == 1 else f"{count} records"
    show_done(f"wrote {wrote} to log {log}{place}", fields)


def _open_input(path: Path | None) -> AbstractContextManager[IO[bytes]]:
    if path is None and sys.stdin is None:
        raise click.UsageError("there is no standard input: give --file")
    return click.open_file(str(path) if path else "-", "rb")


def _write_stream(log: str, path: Path | None) -> None:
    with (
        _open_input(path) as source,
        connect() as namespace,
        namespace.open_log(log) as manager,
        manager.open_stream_writer() as stream,
    ):
        begun, descriptor = stream.tell(), source.fileno()
        with Progress(beside=source) as progress:
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                stream.write(chunk)
                # No more input waits, and a reader of the log may wait for what is here.
                if not select.select([descriptor], [], [], 0)[0]:
                    stream.flush()
                progress.tell("bytes", stream.tell() - begun)
        stream.flush()
        end = stream.tell()
    show_done(
        f"wrote {end - begun} bytes to log {log}, which ends at {end}",
        {"log": log, "bytes": end - begun, "position": end},
    )


def _read_records(descriptor: int, splitter: Splitter) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the records that each read completes, and whether more input is waiting."""
    while chunk := os.read(descriptor, _CHUNK_BYTES):
        records = splitter.feed(chunk)
        waiting, _, _ = select.select([descriptor], [], [], 0)
        yield records, bool(waiting)
    if rest := splitter.end():
        yield rest, False


class _Writer(NamedTuple):
    """How to write records, given the number of earlier ones, and how to make them durable."""

    write: Callable[[list[bytes], int], object]
    commit: Callable[[], DLSN | None]


def _numbered(records: list[bytes], count: int) -> list[LogRecord]:
    return [
        LogRecord(txid=count + index, payload=record)
        for index, record in enumerate(records, start=1)
    ]


def _rows_writer(writer: LogWriter, schema: pa.Schema, *, numbered: bool) -> _Writer:
    """Return a writer of JSON objects as rows of a typed log."""
    import pyarrow as pa

    from dlcore.ops.cli.rows import batch_of_json

    def write(records: list[bytes], count: int) -> None:
        if not records:
            return
        batch = batch_of_json(records, schema, written=count)
        if numbered:
            txids = pa.array(range(count + 1, count + 1 + len(records)), pa.int64())
            batch = batch.append_column("_txid", txids)
        writer.write_batch(batch)

    return _Writer(write, writer.commit)


@contextmanager
def _open_writer(log: str, *, numbered: bool) -> Iterator[_Writer]:
    with (
        connect() as namespace,
        namespace.open_log(log) as manager,
        manager.open_writer() as writer,
    ):
        schema = manager.get_schema()
        if schema is not None:
            yield _rows_writer(writer, schema, numbered=numbered)
            return

        def write_numbered(records: list[bytes], count: int) -> None:
            writer.write_bulk(_numbered(records, count))

        yield _Writer(write_numbered if numbered else _timed(writer), writer.commit)


def _timed(writer: LogWriter) -> Callable[[list[bytes], int], None]:
    """Return a writer of records that get the time as transaction id where the log is written."""
    from dlcore.log.entries.body import batch_of

    def write(records: list[bytes], _: int) -> None:
        if records:
            writer.write_batch(batch_of([0] * len(records), records).select(["value"]))

    return write


def _write_chunks(
    writer: _Writer, chunks: Iterable[tuple[list[bytes], bool]], progress: Progress
) -> tuple[int, DLSN | None]:
    count = 0
    last: DLSN | None = None
    for records, more_is_waiting in chunks:
        writer.write(records, count)
        count += len(records)
        if not more_is_waiting:
            last = writer.commit()
        progress.tell("records", count)
    return count, writer.commit() or last
