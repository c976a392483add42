"""Figures of reading through the service tier: what readers get, beside what the core gives."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow.flight as fl
import uvloop

from benchmarks.figures import Figure, Target, measure
from benchmarks.followers import STAMP
from benchmarks.limits import MIB, bare_server
from benchmarks.logs import (
    CONFIG,
    KEEPS_NOTHING,
    RECORD_BYTES,
    WRITE_BYTES,
    CpuCost,
    cpu_of,
    drop_log,
    fresh_log,
    peak_memory_mb,
    record_batches,
    restarted,
    write_log,
)
from benchmarks.proxy_transport import served
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

_ROUNDS = 3
_FOLLOWERS = (100, 1000)
_PER_SECOND = 50
_FED_S = 4
_MEMORY_MB_MAX = 300.0
_WAIT_S = 60.0
_RECORDS = WRITE_BYTES // RECORD_BYTES
_SENT_ROWS = 1024
_AT_ONCE = 4


def read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """All records of a log by DoGet, ids and bytes, beside the core's scan in the client's process.

    The logs are one of one segment, the same with all columns that either side has, and one of 16
    segments, whose parts four threads ask for.  And beside a bare relay, which is what any
    proxy on grpc.aio has to do: it reads chunks of a bare server, sums them, and sends each as ids
    and values.  The notes tell what it gives that sends one batch of a MiB again and again.  CPU is
    that of all processes.
    """
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    figures = []
    narrow = ["txid", "value"]
    with restarted(sandbox, **KEEPS_NOTHING):
        for name, columns, segment_bytes in (
            ("proxy_read", narrow, CONFIG.segment_bytes_max),
            ("proxy_read_all_columns", None, CONFIG.segment_bytes_max),
            ("proxy_read_parts", narrow, 16 * MIB),
        ):
            config = replace(CONFIG, segment_bytes_max=segment_bytes)
            log, _ = write_log(sandbox.uri, batches, config=config)
            figures += _read(sandbox, folder, name, log, columns)
            drop_log(sandbox.uri, log)
    return figures


def _read(
    sandbox: Sandbox, folder: Path, name: str, log: str, columns: list[str] | None
) -> list[Figure]:
    bookies = [each.pid for each in sandbox.bookies]
    proxied = CpuCost([*bookies, sandbox.proxies[0].pid])
    direct = CpuCost(bookies)

    def value() -> float:
        started = time.perf_counter()
        with proxied.counted():
            assert get_all(sandbox.proxies[0].location, log, columns) == _RECORDS
        return WRITE_BYTES / 1e6 / (time.perf_counter() - started)

    def core() -> float:
        with open_namespace(sandbox.uri) as namespace, namespace.open_log(log) as manager:
            started = time.perf_counter()
            with direct.counted():
                found = sum(batch.num_rows for batch in manager.read(columns=columns))
            assert found == _RECORDS
            return WRITE_BYTES / 1e6 / (time.perf_counter() - started)

    with served("aio") as server, bare_server(folder) as source:
        bare, relayed = CpuCost([server.pid]), CpuCost([server.pid, source.pid])

        def sent(cost: CpuCost, **more: str) -> float:
            asked = {"batches": _RECORDS // _SENT_ROWS, "rows": _SENT_ROWS, **more}
            started = time.perf_counter()
            with cost.counted():
                assert _count(server.location, fl.Ticket(json.dumps(asked))) == _RECORDS
            return WRITE_BYTES / 1e6 / (time.perf_counter() - started)

        figure = measure(
            name=name,
            unit="MB/s",
            target=Target(ratio=0.7, is_rate=True),
            value=value,
            limit={
                "core": core,
                "bare relay": lambda: sent(relayed, source=source.address),
                "bare server": lambda: sent(bare),
            },
        )
    costs = {}
    for who, what, cost in (
        ("client", "proxy and bookies", proxied),
        ("client of the core", "its bookies", direct),
        ("client of a bare relay", "bare relay and its source", relayed),
        ("client of a bare server", "bare server", bare),
    ):
        costs[who], costs[what] = cost.per_gb()
    beside_relay = replace(
        figure, name=f"{name}_relayed", limit=figure.limits["bare relay"], limits={}
    )
    return [
        replace(figure, limit=figure.limits["core"], cpu_s_per_gb=costs),
        beside_relay,
    ]


def get_all(location: str, log: str, columns: list[str] | None) -> int:
    """Return how many rows came: of one part after the other, or of some at once if there are."""
    command = json.dumps({"log": log} | ({"columns": columns} if columns else {})).encode()
    with fl.connect(location) as client:
        info = client.get_flight_info(fl.FlightDescriptor.for_command(command))
    tickets = [endpoint.ticket for endpoint in info.endpoints]
    with ThreadPoolExecutor(min(len(tickets), _AT_ONCE)) as pool:
        return sum(pool.map(lambda ticket: _count(location, ticket), tickets))


def _count(location: str, ticket: fl.Ticket) -> int:
    with fl.connect(location) as client:
        return sum(chunk.data.num_rows for chunk in client.do_get(ticket))


def fan_out(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """1,000 followers of one log on one proxy, 50 records a second of 1 KB, beside 100 followers.

    Times are from the writing of a record to a follower having it.  It fails if one misses any.
    Memory is the peak of a proxy that has served no other client.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for number in range(_ROUNDS + 1):
        for followers in _FOLLOWERS:
            sandbox.proxies[0].restart()
            for what, figure in uvloop.run(_fanned_out(sandbox, followers)).items():
                runs = found.setdefault(what, {}).setdefault(followers, [])
                runs += [figure] if number else []  # the first one warmed up
    few, many = _FOLLOWERS
    at_most = Target(ratio=1.0, is_rate=False)
    units = {"p50": ("ms", None), "p99": ("ms", None), "cpu": ("us/delivery", at_most)}
    return [
        *(
            Figure(
                name=f"proxy_fan_out_{what}",
                unit=unit,
                value=statistics.median(found[what][many]),
                limit=statistics.median(found[what][few]),
                target=target,
            )
            for what, (unit, target) in units.items()
        ),
        Figure(
            name="proxy_fan_out_memory",
            unit="MB",
            value=max(found["memory"][many]),
            limit=_MEMORY_MB_MAX,
            target=at_most,
            limits={f"{few} followers": max(found["memory"][few])},
        ),
    ]


async def _fanned_out(sandbox: Sandbox, followers: int) -> dict[str, float]:
    proxy = sandbox.proxies[0]
    records = _PER_SECOND * _FED_S
    async with fresh_log(sandbox.uri) as (log, writer):
        await writer.write(LogRecord(0, _stamped(0)))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.followers", proxy.location.removeprefix("grpc://")),
            *(log.name, str(followers), str(records)),
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_WAIT_S):
                assert await process.stdout.readline() == b"ready\n"
                before = cpu_of([proxy.pid])
                began = time.perf_counter()
                for number in range(1, records):
                    await asyncio.sleep(began + number / _PER_SECOND - time.perf_counter())
                    writer.write(LogRecord(number, _stamped(number)))
                await writer.flush()
                report = json.loads(await process.stdout.readline())
                cpu_s = cpu_of([proxy.pid]) - before
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
    assert report["deliveries"] == followers * (records - 1)
    return {
        "p50": report["p50_ms"],
        "p99": report["p99_ms"],
        "cpu": cpu_s / report["deliveries"] * 1e6,
        "memory": peak_memory_mb(proxy.pid),
    }


def _stamped(number: int) -> bytes:
    return STAMP.pack(time.time_ns(), number).ljust(RECORD_BYTES, b"\0")
