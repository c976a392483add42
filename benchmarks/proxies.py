"""Figures of the service tier: what clients get through a proxy, beside what the core gives."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.flight as fl
import uvloop

from benchmarks.figures import Figure, Target, measure
from benchmarks.followers import STAMP
from benchmarks.logs import (
    CONFIG,
    RECORD_BYTES,
    WRITE_BYTES,
    CpuCost,
    append_times,
    cpu_of,
    drop_log,
    fresh_log,
    peak_memory_mb,
    read_to_its_end,
    record_batches,
    run,
    write_log,
)
from benchmarks.proxy_transport import put_rate, served
from dlcore.records import LogRecord
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.sandbox.cluster import Sandbox

_ROUNDS = 3
_WINDOW = 8
_CLIENTS = 32
_SMALL_S = 2.0
_APPENDS = 300
_FOLLOWERS = (100, 1000)
_PER_SECOND = 50
_FED_S = 4
_MEMORY_MB_MAX = 300.0
_MOVES = 10
_LOADED_S = 0.3
_GAP_MS_MAX = 100.0
_AGAIN_S = 0.005
_WAIT_S = 60.0


class Put:
    """One stream to a log, which is written by batches and acknowledged in records."""

    def __init__(self, location: str, log: str, schema: pa.Schema) -> None:
        self._client = fl.connect(location)
        descriptor = fl.FlightDescriptor.for_path(log)
        self._writer, self._answers = self._client.do_put(descriptor, schema)
        self.sent = self.acked = 0
        self.acked_at: list[float] = []
        self.moved_to: str | None = None
        assert "ready" in self._told()

    def _told(self) -> dict[str, Any]:
        """Wait for the next answer."""
        answer = self._answers.read()
        if answer is None:
            self._writer.close()  # raises why
            raise AssertionError("the stream ended, and nobody says why")
        told: dict[str, Any] = json.loads(answer.to_pybytes())
        if "acked" in told:
            self.acked = told["acked"]
            self.acked_at.append(time.perf_counter())
        elif "draining" in told:
            self.moved_to = told["draining"]["location"] or ""
        return told

    def write(self, batch: pa.RecordBatch, *, in_flight_max: int) -> None:
        """Send a batch; wait until only so many records are on their way, or the log moves."""
        self._writer.write_batch(batch)
        self.sent += batch.num_rows
        while self.sent - self.acked > in_flight_max and self.moved_to is None:
            self._told()

    def close(self) -> None:
        """Wait until all is durable."""
        while self.acked < self.sent:
            self._told()
        self.leave()

    def leave(self) -> None:
        """End the stream without looking back."""
        self._writer.done_writing()
        self._writer.close()
        self._client.close()


def _new_log(uri: str) -> str:
    name = f"bench/{uuid4().hex}"
    with open_namespace(uri) as namespace:
        namespace.create_log(name, config=CONFIG)
    return name


def _drop(sandbox: Sandbox, log: str) -> None:
    """Delete a log that a proxy may own."""
    _act(sandbox.proxies[0].location, "delete", log=log)


def _act(location: str, action: str, **body: object) -> Any:
    with fl.connect(location) as client:
        (result,) = client.do_action(fl.Action(action, json.dumps(body).encode()))
        return json.loads(result.body.to_pybytes())


def write_large(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """One client, 1 MiB batches of 1 KB records, 8 on their way, durable on three bookies.

    Beside the core's writer in the client's process.  CPU is that of clients, proxy and bookies.
    """
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    in_flight = (_WINDOW - 1) * batches[0].num_rows
    pids = [os.getpid(), *(each.pid for each in (*sandbox.bookies, *sandbox.proxies))]
    cpu_s: dict[str, list[float]] = {"through a proxy": [], "core": []}

    def value() -> float:
        log = _new_log(sandbox.uri)
        put = Put(sandbox.proxies[0].location, log, batches[0].schema)
        started, before = time.perf_counter(), cpu_of(pids)
        for batch in batches:
            put.write(batch, in_flight_max=in_flight)
        put.close()
        seconds = time.perf_counter() - started
        cpu_s["through a proxy"].append(cpu_of(pids) - before)
        _drop(sandbox, log)
        return WRITE_BYTES / 1e6 / seconds

    def limit() -> float:
        before = cpu_of(pids)
        log, seconds = write_log(sandbox.uri, batches)
        cpu_s["core"].append(cpu_of(pids) - before)
        drop_log(sandbox.uri, log)
        return WRITE_BYTES / 1e6 / seconds

    figure = measure(
        name="proxy_write_large",
        unit="MB/s",
        target=Target(ratio=0.8, is_rate=True),
        value=value,
        limit=limit,
        rounds=_ROUNDS,
    )
    value_s, limit_s = (
        statistics.median(each[1:]) / (WRITE_BYTES / 1e9) for each in cpu_s.values()
    )
    return [
        figure,
        Figure(
            name="proxy_write_large_cpu",
            unit="s/GB",
            value=value_s,
            limit=limit_s,
            target=Target(ratio=1 / 0.8, is_rate=False),
        ),
    ]


def write_small(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """32 clients that each wait for the acknowledgement of 1 KB, beside one of them.

    The notes tell what a server of grpc.aio gives them that acknowledges at once, without a log.
    """
    batch = pa.record_batch({"payload": pa.array([os.urandom(RECORD_BYTES)], pa.binary())})

    def rate(clients: int) -> float:
        log = _new_log(sandbox.uri)
        counts = [0] * clients
        begin = threading.Barrier(clients)

        def write(number: int) -> None:
            put = Put(sandbox.proxies[0].location, log, batch.schema)
            begin.wait(_WAIT_S)
            until = time.perf_counter() + _SMALL_S
            while time.perf_counter() < until:
                put.write(batch, in_flight_max=0)
            counts[number] = put.acked
            put.close()

        threads = [threading.Thread(target=write, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _drop(sandbox, log)
        return sum(counts) / _SMALL_S

    figure = measure(
        name="proxy_write_small",
        unit="records/s",
        target=Target(ratio=10, is_rate=True),
        value=partial(rate, _CLIENTS),
        limit=partial(rate, 1),
        rounds=_ROUNDS,
    )
    limits = {"one client": figure.limit}
    with served("aio") as address:
        for clients in (_CLIENTS, 1):
            put = partial(put_rate, address, kib=1, window=1, clients=clients)
            rates = [put()["rate"] for _ in range(_ROUNDS)]
            limits[f"{clients} of a bare server"] = statistics.median(rates)
    return [replace(figure, limits=limits)]


def append(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """One record at a time from one client, beside the core's append; medians."""
    batch = pa.record_batch({"payload": pa.array([os.urandom(RECORD_BYTES)], pa.binary())})

    def value() -> float:
        log = _new_log(sandbox.uri)
        put = Put(sandbox.proxies[0].location, log, batch.schema)
        put.write(batch, in_flight_max=0)
        times = []
        for _ in range(_APPENDS):
            started = time.perf_counter()
            put.write(batch, in_flight_max=0)
            times.append(time.perf_counter() - started)
        put.close()
        _drop(sandbox, log)
        return statistics.median(times) * 1000

    return [
        measure(
            name="proxy_append",
            unit="ms",
            target=Target(ratio=1.8, is_rate=False),
            value=value,
            limit=lambda: run(_core_append_ms(sandbox.uri)),
        )
    ]


async def _core_append_ms(uri: str) -> float:
    return statistics.median(await append_times(uri, _APPENDS)) * 1000


def fan_out(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """1,000 followers of one log on one proxy, 50 records a second of 1 KB, beside 100 followers.

    Times are from the writing of a record to a follower having it.  It fails if one misses any.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for number in range(_ROUNDS + 1):
        for followers in _FOLLOWERS:
            for what, figure in uvloop.run(_fanned_out(sandbox, followers)).items():
                runs = found.setdefault(what, {}).setdefault(followers, [])
                runs += [figure] if number else []  # the first one warmed up
    proxy = sandbox.proxies[0].pid
    few, many = _FOLLOWERS
    units = {"p50": ("ms", 10.0), "p99": ("ms", 10.0), "cpu": ("us/delivery", 1.0)}
    return [
        *(
            Figure(
                name=f"proxy_fan_out_{what}",
                unit=unit,
                value=statistics.median(found[what][many]),
                limit=statistics.median(found[what][few]),
                target=Target(ratio=ratio, is_rate=False),
            )
            for what, (unit, ratio) in units.items()
        ),
        Figure(
            name="proxy_fan_out_memory",
            unit="MB",
            value=peak_memory_mb(proxy),
            limit=_MEMORY_MB_MAX,
            target=Target(ratio=1.0, is_rate=False),
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
                told = json.loads(await process.stdout.readline())
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        cpu_s = cpu_of([proxy.pid]) - before
    assert told["deliveries"] == followers * (records - 1)
    return {
        "p50": told["p50_ms"],
        "p99": told["p99_ms"],
        "cpu": cpu_s / told["deliveries"] * 1e6,
    }


def _stamped(number: int) -> bytes:
    return STAMP.pack(time.time_ns(), number).ljust(RECORD_BYTES, b"\0")


def handover(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """A log under load moves ten times between two proxies, of which the owner is told to stop.

    The longest time without an acknowledgement in each move; the median of them.
    """
    log = _new_log(sandbox.uri)
    batch = pa.record_batch({"payload": pa.array([os.urandom(RECORD_BYTES)], pa.binary())})
    location = _act(sandbox.proxies[0].location, "owner", log=log)["location"]
    put = Put(location, log, batch.schema)
    gaps_ms = []
    for _ in range(_MOVES):
        put.acked_at.clear()  # nothing was sent while the other proxy started again
        _load(put, batch)
        stopped, other = sorted(sandbox.proxies, key=lambda each: each.location != location)
        stopping = threading.Thread(target=stopped.terminate)
        stopping.start()
        while put.moved_to is None:
            put.write(batch, in_flight_max=_WINDOW - 1)
        moved, location = put, put.moved_to or other.location
        put = _open(location, log, batch.schema)
        _load(put, batch)
        gaps_ms.append(max(map(_gap, pairwise([*moved.acked_at, *put.acked_at]))) * 1000)
        with suppress(fl.FlightUnavailableError):  # more was on its way
            moved.leave()
        stopping.join()
        stopped.restart()
    put.close()
    return [
        Figure(
            name="proxy_handover",
            unit="ms",
            value=statistics.median(gaps_ms),
            limit=_GAP_MS_MAX,
            target=Target(ratio=1.0, is_rate=False),
            limits={"longest": max(gaps_ms), "shortest": min(gaps_ms)},
        )
    ]


def _load(put: Put, batch: pa.RecordBatch) -> None:
    until = time.perf_counter() + _LOADED_S
    while time.perf_counter() < until:
        put.write(batch, in_flight_max=_WINDOW - 1)


def _open(location: str, log: str, schema: pa.Schema) -> Put:
    """Open a stream; a proxy may learn a moment later that the other one has gone."""
    while True:
        try:
            return Put(location, log, schema)
        except fl.FlightUnavailableError:
            time.sleep(_AGAIN_S)


def _gap(times: tuple[float, float]) -> float:
    return times[1] - times[0]


def read(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """All records of a log by DoGet, beside the core's reader in the client's process.

    CPU is that of the client, the proxy and the bookies.
    """
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    log, _ = write_log(sandbox.uri, batches)
    del batches
    ticket = fl.Ticket(json.dumps({"log": log}).encode())
    bookies = [each.pid for each in sandbox.bookies]
    proxied = CpuCost([*bookies, sandbox.proxies[0].pid])
    direct = CpuCost(bookies)

    def value() -> float:
        with fl.connect(sandbox.proxies[0].location) as client:
            started = time.perf_counter()
            with proxied.counted():
                count = sum(chunk.data.num_rows for chunk in client.do_get(ticket))
            assert count == WRITE_BYTES // RECORD_BYTES
            return WRITE_BYTES / 1e6 / (time.perf_counter() - started)

    def limit() -> float:
        with open_namespace(sandbox.uri) as namespace, namespace.open_log(log) as manager:
            started = time.perf_counter()
            with direct.counted():
                read_to_its_end(manager)
            return WRITE_BYTES / 1e6 / (time.perf_counter() - started)

    figure = measure(
        name="proxy_read",
        unit="MB/s",
        target=Target(ratio=0.7, is_rate=True),
        value=value,
        limit=limit,
    )
    (client, servers), (core, core_servers) = proxied.per_gb(), direct.per_gb()
    return [
        replace(
            figure,
            cpu_s_per_gb={
                "client": client,
                "proxy and bookies": servers,
                "client of the core": core,
                "its bookies": core_servers,
            },
        )
    ]
