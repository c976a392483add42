"""`dlog top`: a live view of the cluster in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import click

from dlcore.ops.cli.context import (
    common_options,
    namespace_tls,
    namespace_uri,
    proxy_token,
    run_direct,
    wants_json,
)
from dlcore.ops.cli.output import bytes_text, cell, printable, show_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.diagnosis.top import Look, View

_NUMERIC = ("records/s", "bytes/s", "lag", "free", "of", "ledgers", "logs")


@click.command("top", epilog="Example: dlog top --interval 5")
@click.argument("prefix", required=False)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Pause between two looks.",
)
@click.option(
    "-n",
    "logs_max",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of logs: the busiest ones.",
)
@click.option("--once", is_flag=True, help="Print one view, also without a terminal.")
@common_options
def top_command(prefix: str | None, interval_s: float, logs_max: int, *, once: bool) -> None:
    """Show rates, owners, lag and space, until interrupted.

    With PREFIX only the logs whose names start with it, and 200 at most.  The lag is that of the
    last subscriber, estimated in records.  Without a terminal, and with --json, one view is
    printed, as with --once.
    """
    namespace_uri()  # its error comes before anything is drawn
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    if once or wants_json() or not is_terminal:
        _print(run_direct(lambda namespace: _two_looks(namespace, prefix, interval_s, logs_max)))
        return
    run_direct(lambda namespace: _live(namespace, prefix, interval_s, logs_max), is_long=True)


async def _two_looks(
    namespace: DirectNamespace, prefix: str | None, interval_s: float, logs_max: int
) -> View:
    from dlcore.ops.diagnosis.looking import Looker
    from dlcore.ops.diagnosis.top import view_of

    looker = Looker(namespace, prefix=prefix, tls=namespace_tls(), token=proxy_token())
    try:
        before = await looker.look()
        await asyncio.sleep(interval_s)
        return view_of(before, await looker.look(), logs_max=logs_max)
    finally:
        await looker.aclose()


async def _live(
    namespace: DirectNamespace, prefix: str | None, interval_s: float, logs_max: int
) -> None:
    from rich.live import Live

    from dlcore.ops.diagnosis.looking import Looker
    from dlcore.ops.diagnosis.top import view_of

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    looker = Looker(namespace, prefix=prefix, tls=namespace_tls(), token=proxy_token())
    before: Look | None = None
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                now = await looker.look()
                live.update(_drawn(view_of(before, now, logs_max=logs_max)), refresh=True)
                before = now
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), interval_s)
    finally:
        await looker.aclose()


def _print(view: View) -> None:
    if wants_json():
        show_json(asdict(view))
        return
    from rich.console import Console

    # As wide as its rows need, where no terminal has a width.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    Console(width=None if is_terminal else 200).print(_drawn(view))


def _drawn(view: View) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    under = "unknown" if view.under_replicated is None else str(view.under_replicated)
    rates = f"{_rate(view.records_per_s)} records/s, {_size(view.bytes_per_s)}/s"
    lines = [
        f"{rates}; under-replicated ledgers: {under}; auto-recovery: {printable(view.recovery)}",
        *(f"{part}: {printable(problem)}" for part, problem in view.problems.items()),
    ]
    logs = [
        [row.log, row.owner, _rate(row.records_per_s), _size(row.bytes_per_s), row.lag]
        for row in view.logs
    ]
    bookies = [
        [
            row.bookie, row.state, _size(row.free_bytes), _size(row.total_bytes), row.ledgers,
            _size(row.bytes_per_s), row.problem,
        ]
        for row in view.bookies
    ]  # fmt: skip
    proxies = [[row.proxy, row.state, row.logs, row.problem] for row in view.proxies]
    tables = [
        _table(["log", "owner", "records/s", "bytes/s", "lag"], logs),
        _table(["bookie", "state", "free", "of", "ledgers", "bytes/s", "problem"], bookies),
        _table(["proxy", "state", "logs", "problem"], proxies),
    ]
    left = [f"log {log}: {why}" for log, why in view.broken_logs.items()]
    left += [f"{view.logs_left_out} more logs"] if view.logs_left_out else []
    return Group(*map(Text, lines), tables[0], *map(Text, map(printable, left)), *tables[1:])


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        side: Literal["right", "left"] = "right" if title in _NUMERIC else "left"
        table.add_column(title, justify=side, overflow="ellipsis", no_wrap=True)
    for row in rows:
        texts = (cell(None if value == "" else value) for value in row)
        table.add_row(*map(Text, texts))  # names may hold [brackets]
    return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _size(count: float | None) -> str:
    if count is None:
        return "-"
    return f"-{bytes_text(round(-count))}" if count < 0 else bytes_text(round(count))
