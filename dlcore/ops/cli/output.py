"""Answers of the command: tables on a terminal, plain columns in a pipe, JSON for programs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

import click

from dlcore.base.background import side_tasks
from dlcore.base.clock import SystemClock
from dlcore.base.errors import DLError
from dlcore.ops.cli.context import note, wants_json, wants_names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
Row = Mapping[str, object]
_LIST_SHOWN_MAX = 5
"""Most ledgers of a segment in a table: it may have a thousand; JSON has all of them."""
_PROGRESS_INTERVAL_MS = 200
_UNIT = 1024


def show_rows(rows: Sequence[Row], *, columns: Sequence[str], empty: str) -> None:
    """Show `rows` as a table with `columns`, or all their fields as a JSON array.

    With --quiet only the first column, without a header.

    Args:
        rows: one mapping per row; fields that are not in `columns` appear only in JSON.
        columns: field names, in order; the headers have spaces instead of underscores.
        empty: message on standard error if there are no rows.
    """
    if wants_json():
        show_json(list(rows))
        return
    if wants_names():
        for row in rows:
            click.echo(cell(row[columns[0]]))
        return
    if not rows:
        click.echo(empty, err=True)
        return
    titles = [column.replace("_", " ") for column in columns]
    cells = [[cell(row[column]) for column in columns] for row in rows]
    numeric = [all(isinstance(row[column], int | None) for row in rows) for column in columns]
    if sys.stdout is not None and sys.stdout.isatty():
        _show_table(titles, cells, numeric)
    else:
        _show_columns(titles, cells, numeric)


def show_fields(fields: Row) -> None:
    """Show one object, a line per field, or as a JSON object."""
    if wants_json():
        show_json(dict(fields))
        return
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        click.echo(f"{name.replace('_', ' '):<{width}}  {cell(value)}".rstrip())


def show_done(text: str, fields: Row) -> None:
    """Report a result: `text` for people, `fields` as a JSON object for programs."""
    if wants_json():
        show_json(dict(fields))
    else:
        click.echo(text)


def show_json(value: object) -> None:
    """Print `value` as one line of JSON."""
    click.echo(json.dumps(value, ensure_ascii=False))


def show_error(text: str, error: BaseException, *, exit_code: int, as_json: bool) -> None:
    """Report a failure on standard error: one line, or a JSON object."""
    message = " ".join(text.split())
    if not as_json:
        click.echo(f"error: {message}", err=True)
        return
    fields = {
        "error": message,
        "kind": type(error).__name__,
        "code": error.code if isinstance(error, DLError) else None,
        "retriable": isinstance(error, DLError) and error.retriable,
        "exit_code": exit_code,
    }
    click.echo(json.dumps(fields, ensure_ascii=False), err=True)


def end_with(failures: Mapping[str, DLError]) -> None:
    """Report failures on standard error, by the item that failed; exit with 1 if there are any.

    It is for failures of single items, after the other items were shown.
    """
    for name, failure in failures.items():
        show_error(f"{name}: {failure}", failure, exit_code=1, as_json=wants_json())
    if failures:
        click.get_current_context().exit(1)


def show_bytes(data: bytes | memoryview) -> None:
    """Print bytes unchanged."""
    if sys.stdout is not None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)


class Progress:
    """Shows the progress of long work to people: on standard error, never with JSON.

    It is shown only if standard error is a terminal.  It is not shown if `beside`, the other stream
    of the work, is a terminal: the user sees the progress there.
    """

    def __init__(self, *, beside: IO[Any] | None = None) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        is_seen = beside is not None and beside.isatty()
        self.is_shown = is_terminal and not is_seen and not wants_json()
        self._shown_at_ms = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the line, also after an error."""
        if self.is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)

    def tell(self, what: str, done: object, total: int | None = None) -> None:
        """Show that `done` is done, at most a few times a second."""
        now_ms = SystemClock().now_ms()
        if self.is_shown and abs(now_ms - self._shown_at_ms) >= _PROGRESS_INTERVAL_MS:
            self._shown_at_ms = now_ms
            of = "" if total is None else f" of {total}"
            click.echo(f"\r{what}: {done}{of}\x1b[K", nl=False, err=True)

    def say(self, text: str) -> None:
        """Print a message on a line that stays."""
        if self.is_shown:
            click.echo(f"\r{text}\x1b[K", err=True)

    def warn(self, text: str) -> None:
        """Print a message on a line that stays; without a terminal, as a note."""
        if self.is_shown:
            self.say(text)
        else:
            note(text)


def telling_time(
    what: str, work: Callable[[_Argument], Awaitable[_Result]]
) -> Callable[[_Argument], Coroutine[Any, Any, _Result]]:
    """Return `work` that shows its running time, for work without parts to count."""

    async def tell_time(progress: Progress) -> None:
        begun_ms = SystemClock().now_ms()
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_MS / 1000)
            progress.tell(what, f"{(SystemClock().now_ms() - begun_ms) / 1000:.0f} s")

    async def run(argument: _Argument) -> _Result:
        with Progress() as progress:
            async with side_tasks() as tasks:
                tasks.start(tell_time(progress))
                return await work(argument)

    return run


def cell(value: object) -> str:
    """Return `value` as text for a table."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            shown = [cell(part) for part in value[:_LIST_SHOWN_MAX]]
            left = len(value) - len(shown)
            return ", ".join([*shown, f"… {left} more"] if left else shown)
        case _:
            return printable(str(value))


def printable(text: str) -> str:
    """Return `text` with everything that would move a terminal's cursor escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def payload_text(payload: bytes) -> str:
    """Return a payload for people: as text if it is UTF-8, else as a bytes literal."""
    try:
        return printable(payload.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(payload)


def bytes_text(count: int) -> str:
    """Return a size for people, in binary units."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= _UNIT and len(units) > 1:
        size /= _UNIT
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def time_text(epoch_ms: int) -> str:
    """Return a time as UTC text with milliseconds, or the number if it is beyond the calendar."""
    try:
        moment = datetime.fromtimestamp(epoch_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(epoch_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _show_table(
    titles: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for title, is_number in zip(titles, numeric, strict=True):
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(text) for text in row))  # Text: names may hold [brackets]
    Console().print(table)


def _show_columns(
    titles: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> None:
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    for row in (titles, *cells):
        line = "  ".join(
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(row, widths, numeric, strict=True)
        )
        click.echo(line.rstrip())
