"""Runs the benchmarks on a cluster of their own, prints a table, writes benchmarks/results.json.

Before and after each it looks how busy other programs keep the machine, and says so: then the times
are not the machine's, while ratios and CPU seconds still say something.

`python -m benchmarks.main [--only NAME] [--data-dir FOLDER]`.  The data folder should be on
the disk that is meant: by default `artifacts/`, since a temporary folder may be in memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import (
    bookies,
    cold,
    encrypted,
    forks,
    history,
    idle,
    kafka_reads,
    kafka_writes,
    logs,
    many_logs,
    old_log,
    plan_many,
    proxies,
    proxy_reads,
    proxy_transport,
    reading,
    record_write,
    scraped,
    secured,
    small_entries,
    spark,
    table_commits,
    table_reads,
    tier_rounds,
    typed,
    wire,
)
from benchmarks.peers import clients as peers_clients, spark as peers_spark
from dlcore.ops.sandbox.cluster import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.figures import Figure

BOOKIES = 3
_TABLE_WIDTH = 100
_LOOK_S = 1.0
_BUSY_SHARE = 0.1
RESULTS = Path("benchmarks/results.json")
BENCHMARKS: dict[str, Callable[[Sandbox, Path], list[Figure]]] = {
    "wire_add": wire.wire_add,
    "wire_read": wire.wire_read,
    "core_write": logs.core_write,
    "core_write_scraped": scraped.core_write_scraped,
    "core_read": logs.core_read,
    "encrypted_write": encrypted.encrypted_write,
    "encrypted_read": encrypted.encrypted_read,
    "record_write": record_write.record_write,
    "append_latency": logs.append_latency,
    "tail_latency": logs.tail_latency,
    "record_read": reading.record_read,
    "read_ahead": reading.read_ahead,
    "tail_rate": reading.tail_rate,
    "open_log": reading.open_log,
    "spark_batch_read": spark.batch_read,
    "spark_batch_read_1k": spark.batch_read_1k,
    "spark_read_value": spark.read_value,
    "spark_batch_write": spark.batch_write,
    "stream_trigger": spark.stream_trigger,
    "stream_latency": spark.stream_latency,
    "secured_write": secured.secured_write,
    "secured_batch_read": secured.secured_batch_read,
    "capability_append": secured.capability_append,
    "plan_many": plan_many.plan_many,
    "typed_read": typed.typed_read,
    "small_entries": small_entries.small_entries,
    "restart": bookies.restart,
    "restart_full": bookies.restart_full,
    "memory": bookies.memory,
    "memory_full": bookies.memory_full,
    "append_p999": bookies.append_p999,
    "append_p999_full": bookies.append_p999_full,
    "sink_history": history.sink_history,
    "sink_history_short": history.sink_history_short,
    "old_log": old_log.old_log,
    "fork_log": forks.fork_log,
    "many_logs": many_logs.many_logs,
    "table_commits": table_commits.table_commits,
    "tier_rounds": tier_rounds.tier_rounds,
    "tiering": cold.tiering,
    "cold_scan": cold.cold_scan,
    "table_union": table_reads.table_union,
    "table_freshness": table_reads.table_freshness,
    "cold_beside_adds": cold.cold_beside_adds,
    "idle": idle.idle,
    "proxy_write_large": proxies.write_large,
    "proxy_write_small": proxies.write_small,
    "proxy_append": proxies.append,
    "proxy_forward": proxies.forward,
    "proxy_fan_out": proxy_reads.fan_out,
    "proxy_handover": proxies.handover,
    "proxy_rolling_restart": proxies.rolling_restart,
    "proxy_killed": proxies.killed,
    "proxy_rebalance": proxies.rebalance,
    "proxy_read": proxy_reads.read,
    "proxy_cold_beside_adds": cold.proxy_cold_beside_adds,
    "proxy_read_kafka": kafka_reads.read,
    "proxy_write_kafka": kafka_writes.write,
    "proxy_transport": proxy_transport.proxy_transport,
    "peers_read": peers_spark.read,
    "peers_read_1k": peers_spark.read_1k,
    "peers_write": peers_spark.write,
    "peers_write_1k_synced": peers_spark.write_1k_synced,
    "peers_trigger": peers_spark.trigger,
    "peers_client_read": peers_clients.read,
    "peers_client_write": peers_clients.write,
}
PROXIES = {
    "proxy_forward": 2,
    "proxy_handover": 2,
    "proxy_rolling_restart": 3,
    "proxy_killed": 3,
    "proxy_rebalance": 3,
}
"""How many run beside the bookies, where that is not one."""
_NEED_PROXIES = ("proxy_", "peers_client_")
"""How the names begin of the benchmarks that have any."""
PEERS = tuple(name for name in BENCHMARKS if name.startswith("peers_"))
LONG = (
    "restart_full",
    "memory_full",
    "append_p999_full",
    "sink_history",
    "old_log",
    "fork_log",
    "many_logs",
    "proxy_rebalance",
    "proxy_transport",
    *PEERS,
)
"""Run only when named: minutes of work, up to 15 GB of disk, or a Kafka that Maven brings."""


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", choices=["peers", *sorted(BENCHMARKS)], help="run one benchmark")
    parser.add_argument("--data-dir", type=Path, default=Path("artifacts"))
    arguments = parser.parse_args()
    names = names_of(arguments.only)
    arguments.data_dir = arguments.data_dir.resolve()  # a tier has a whole path
    arguments.data_dir.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True, width=_TABLE_WIDTH)
    times = Times(arguments.data_dir / "bench-times.json")
    console.print(f"{len(names)} benchmarks, {times.expected(names)}")
    results: list[dict[str, object]] = []
    figures: list[Figure] = []
    others = others_share()
    for number, name in enumerate(names, 1):
        console.print(f"{number}/{len(names)} {name}, {times.expected([name])}: {_text_of(name)}")
        started = time.monotonic()
        found = run(name, arguments.data_dir)
        times.note(name, time.monotonic() - started)
        others = max(others, after := others_share())
        console.print(f"    took {times.seconds[name]:.0f} s{_others_text(others)}")
        figures += found
        results += [figure.as_json() | {"others_share_of_cpu": others} for figure in found]
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        others = after
    console.print(table_of(figures))
    for figure in figures:
        for note in figure.notes:
            console.print(note)
    console.print(f"written to {RESULTS}")


def names_of(only: str | None) -> list[str]:
    """Return what to run: one benchmark, those beside a Kafka, or all that are not `LONG`."""
    if only == "peers":
        return list(PEERS)
    return [only] if only else [name for name in BENCHMARKS if name not in LONG]


def _text_of(name: str) -> str:
    return " ".join((BENCHMARKS[name].__doc__ or "").split())


def _others_text(others: float) -> str:
    if others < _BUSY_SHARE:
        return ""
    return (
        f"; THE MACHINE WAS BUSY: other programs took {others:.0%} of its CPU, so doubt the times"
    )


class Times:
    """How long each benchmark took on this machine, kept from run to run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def note(self, name: str, seconds: float) -> None:
        """Keep how long one took."""
        self.seconds[name] = round(seconds, 1)
        self._path.write_text(json.dumps(self.seconds, indent=2) + "\n")

    def expected(self, names: Sequence[str]) -> str:
        """Return how long these will take, as far as they ran before."""
        known = [name for name in names if name in self.seconds]
        if not known:
            return "never run on this machine"
        text = f"about {sum(self.seconds[name] for name in known):.0f} s by their last runs"
        unknown = len(names) - len(known)
        return f"{text}, and {unknown} that never ran here" if unknown else text


def others_share() -> float:
    """Return which share of the machine's CPU is taken for a second, while nothing of ours runs."""
    busy, total = _cpu_ticks()
    time.sleep(_LOOK_S)
    busy_later, total_later = _cpu_ticks()
    return (busy_later - busy) / max(1, total_later - total)


def _cpu_ticks() -> tuple[int, int]:
    # user, nice, system, idle, waiting for the disk, and so on; guests are in the first two.
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    return sum(fields) - fields[3] - fields[4], sum(fields)


def run(name: str, data_dir: Path) -> list[Figure]:
    """Run one benchmark on a fresh cluster, so that none inherits memory or files of another."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=data_dir) as temporary,
        Sandbox(
            bookies=BOOKIES,
            proxies=PROXIES.get(name, 1) if name.startswith(_NEED_PROXIES) else 0,
            data_dir=Path(temporary) / "cluster",
            autorecovery=False,
            zookeeper=True,
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
        target = figure.target
        table.add_row(
            figure.name,
            figure.unit,
            f"{figure.value:,.1f}",
            f"{figure.limit:,.1f}",
            f"{figure.ratio:.2f}",
            "" if target is None else str(target),
            "" if target is None else "yes" if target.is_met_by(figure.ratio) else "no",
        )
    return table


if __name__ == "__main__":
    main()
