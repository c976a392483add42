"""Runs the benchmarks on a cluster of their own, prints a table, writes benchmarks/results.json.

`python -m benchmarks.main [--only NAME] [--data-dir FOLDER]`.  The data folder should be on
the disk that is meant: by default `artifacts/`, since a temporary folder may be in memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import (
    bookies,
    history,
    logs,
    old_log,
    reading,
    record_write,
    spark,
    wire,
)
from dlcore.sandbox.cluster import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.figures import Figure

BOOKIES = 3
_TABLE_WIDTH = 100
RESULTS = Path("benchmarks/results.json")
BENCHMARKS: dict[str, Callable[[Sandbox, Path], list[Figure]]] = {
    "wire_add": wire.wire_add,
    "wire_read": wire.wire_read,
    "core_write": logs.core_write,
    "core_read": logs.core_read,
    "record_write": record_write.record_write,
    "append_latency": logs.append_latency,
    "tail_latency": logs.tail_latency,
    "record_read": reading.record_read,
    "read_ahead": reading.read_ahead,
    "tail_rate": reading.tail_rate,
    "open_log": reading.open_log,
    "spark_batch_read": spark.batch_read,
    "spark_batch_read_1k": spark.batch_read_1k,
    "spark_batch_write": spark.batch_write,
    "stream_trigger": spark.stream_trigger,
    "restart": bookies.restart,
    "restart_full": bookies.restart_full,
    "memory": bookies.memory,
    "memory_full": bookies.memory_full,
    "append_p999": bookies.append_p999,
    "append_p999_full": bookies.append_p999_full,
    "sink_history": history.sink_history,
    "sink_history_short": history.sink_history_short,
    "old_log": old_log.old_log,
}
LONG = ("restart_full", "memory_full", "append_p999_full", "sink_history", "old_log")
"""Run only when named: minutes of work, and up to 15 GB of disk."""


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="run one benchmark")
    parser.add_argument("--data-dir", type=Path, default=Path("artifacts"))
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else [n for n in BENCHMARKS if n not in LONG]
    arguments.data_dir.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True, width=_TABLE_WIDTH)
    figures: list[Figure] = []
    for name in names:
        console.print(f"{name}: {BENCHMARKS[name].__doc__}")
        figures += run(name, arguments.data_dir)
    RESULTS.write_text(json.dumps([figure.as_json() for figure in figures], indent=2) + "\n")
    console.print(table_of(figures))
    console.print(f"written to {RESULTS}")


def run(name: str, data_dir: Path) -> list[Figure]:
    """Run one benchmark on a fresh cluster, so that none inherits memory or files of another."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=data_dir) as temporary,
        Sandbox(
            bookies=BOOKIES, data_dir=Path(temporary) / "cluster", autorecovery=False
        ) as sandbox,
    ):
        folder = Path(temporary) / "work"
        folder.mkdir()
        return BENCHMARKS[name](sandbox, folder)


def table_of(figures: list[Figure]) -> Table:
    """Return the figures as a table."""
    table = Table("figure", "unit", header_style="bold")
    for column in ("value", "limit", "ratio", "to reach"):
        table.add_column(column, justify="right")
    table.add_column("reached")
    for figure in figures:
        table.add_row(
            figure.name,
            figure.unit,
            f"{figure.value:,.1f}",
            f"{figure.limit:,.1f}",
            f"{figure.ratio:.2f}",
            str(figure.target),
            "yes" if figure.target.is_met_by(figure.ratio) else "no",
        )
    return table


if __name__ == "__main__":
    main()
