"""Bulk writes while all bookies are scraped each second, beside the same writes unwatched."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, Target, measure
from benchmarks.logs import RECORD_BYTES, WRITE_BYTES, drop_log, record_batches, write_log
from dlcore.ops.sandbox.cluster import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_BOOKIES = 3
_SCRAPES = 200
_SERVED = re.compile(r"metrics and health on (http://\S+)")
_CPU = re.compile(r"^process_cpu_seconds_total (\S+)$", re.MULTILINE)
_MONITOR = """
import sys, time, urllib.request
while True:
    for url in sys.argv[1:]:
        urllib.request.urlopen(url).read()
    time.sleep(1)
"""


def core_write_scraped(_: Sandbox, folder: Path) -> list[Figure]:
    """Bulk writes: a monitor in a process of its own scrapes each second, or does not."""
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    with Sandbox(
        _BOOKIES,
        data_dir=folder / "scraped",
        bookie_options=("--http-address", "127.0.0.1:0"),
        autorecovery=False,
    ) as sandbox:
        urls = [
            f"{_SERVED.findall(each.log_path.read_text())[-1]}/metrics" for each in sandbox.bookies
        ]

        def rate() -> float:
            name, seconds = write_log(sandbox.uri, batches)
            drop_log(sandbox.uri, name)
            return WRITE_BYTES / 1e6 / seconds

        with _monitor(urls) as monitor:

            def scraped_rate() -> float:
                monitor.send_signal(signal.SIGCONT)
                try:
                    return rate()
                finally:
                    monitor.send_signal(signal.SIGSTOP)

            written = measure(
                name="core_write_scraped",
                unit="MB/s",
                target=Target(ratio=0.99, is_rate=True),
                value=scraped_rate,
                limit=rate,
            )
        return [written, _scrape_cost(urls[0])]


@contextmanager
def _monitor(urls: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a monitor that is stopped, so that its start is no part of a round."""
    monitor = subprocess.Popen([sys.executable, "-c", _MONITOR, *urls])
    try:
        monitor.send_signal(signal.SIGSTOP)
        yield monitor
    finally:
        monitor.kill()
        monitor.wait()


def _scrape_cost(url: str) -> Figure:
    """Return what a scrape costs a bookie that does nothing else, of the second between two."""
    begun_s = _cpu_s(url)
    for _ in range(_SCRAPES):
        _cpu_s(url)
        time.sleep(0.01)
    spent_ms = (_cpu_s(url) - begun_s) / _SCRAPES * 1000
    target = Target(ratio=1.0, is_rate=False)
    return Figure(name="scrape_cpu", unit="ms", value=spent_ms, limit=10.0, target=target)


def _cpu_s(url: str) -> float:
    with urllib.request.urlopen(url) as answer:
        found = _CPU.search(answer.read().decode())
    assert found is not None
    return float(found[1])
