"""Flight by grpc.aio beside pyarrow's own server: what each can carry, and what it takes for it."""

from __future__ import annotations

import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as fl

from benchmarks.figures import Figure, Target
from benchmarks.flight_servers import SCHEMA
from benchmarks.put_clients import Put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

_KINDS = ("aio", "pyarrow")
_USED = ("memory_mb", "threads")
_SECONDS = 0.7
_ROUNDS = 3
_FOLLOWERS = 100
_PER_SECOND = 50
_FED_S = 3
_LOADS = (
    *((1, window, 1) for window in (1, 8, 32)),
    *((128, window, 1) for window in (1, 8, 32)),
    *((1024, window, 1) for window in (1, 8)),
    (1, 32, 8),
    (128, 8, 8),
    (1, 1, 32),
)
"""KiB of a batch, batches not yet acknowledged, clients."""


def proxy_transport(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """DoPut alone and durable on three bookies, DoGet to 100 followers: grpc.aio beside pyarrow."""
    figures = []
    for name, uri in (("bare", []), ("durable", [sandbox.uri])):
        with _both(*uri) as addresses:
            for load in _LOADS:
                kib, window, clients = load
                found = _in_turn(
                    addresses, partial(_put_rate, kib=kib, window=window, clients=clients)
                )
                label = f"{name}_{kib}k_w{window}_c{clients}"
                figures.append(_beside(label, "batches/s", "rate", found, is_rate=True))
                figures += [
                    _beside(f"{label}_{who}", "CPU us/batch", who, found)
                    for who in ("server", "client")
                ]
            used = _in_turn(addresses, lambda address: _usage(fl.connect(address)))
            figures += [_beside(f"{name}_{each}", each, each, used) for each in _USED]
    found = {}
    for kind in _KINDS:
        with served(kind) as server:
            found[kind] = [_follow(server.location)]
    whats = ("p50_ms", "p99_ms", "cpu_s", *_USED, "left", "missed")
    return figures + [_beside(f"followers_{what}", what, what, found) for what in whats]


@contextmanager
def _both(*arguments: str) -> Iterator[dict[str, str]]:
    with served("aio", *arguments) as one, served("pyarrow", *arguments) as other:
        yield {"aio": one.location, "pyarrow": other.location}


def _in_turn(
    addresses: dict[str, str], measured: Callable[[str], dict[str, float]]
) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in addresses}
    for _ in range(_ROUNDS):
        for kind, address in addresses.items():
            found[kind].append(measured(address))
    return found


def _beside(
    name: str,
    unit: str,
    what: str,
    found: dict[str, list[dict[str, float]]],
    *,
    is_rate: bool = False,
) -> Figure:
    value, limit = (statistics.median(each[what] for each in found[kind]) for kind in _KINDS)
    target = Target(ratio=1.0, is_rate=is_rate)
    return Figure(name=name, unit=unit, value=value, limit=limit or 1e-9, target=target)


class Served(NamedTuple):
    """A server that runs."""

    location: str
    pid: int


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """Run one of the servers, a process of its own."""
    command = [sys.executable, "-m", "benchmarks.flight_servers", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Served(f"grpc://127.0.0.1:{int(process.stdout.readline())}", process.pid)
        process.stdin.close()


def _usage(client: Any, action: str = "usage", body: bytes = b"[]") -> dict[str, float]:
    (result,) = client.do_action(fl.Action(action, body))
    used: dict[str, float] = json.loads(result.body.to_pybytes())
    return used


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _put_rate(address: str, *, kib: int, window: int, clients: int) -> dict[str, float]:
    """Return batches per second, and the CPU of both sides for each."""
    batch = pa.record_batch([pa.array([os.urandom(1024)] * kib, pa.binary())], schema=SCHEMA)
    counts: list[int] = []
    watched = fl.connect(address)
    before, own = _usage(watched), _own_cpu_s()
    started = time.perf_counter()

    def write() -> None:
        put = Put(address, "transport", SCHEMA)
        while time.perf_counter() - started < _SECONDS or not put.sent:
            put.write(batch, in_flight_max=(window - 1) * kib)
        put.close()
        counts.append(put.acked // kib)

    _together(write, clients)
    seconds = time.perf_counter() - started
    used, count = _usage(watched)["cpu_s"] - before["cpu_s"], sum(counts)
    client_s = _own_cpu_s() - own
    return {
        "rate": count / seconds,
        "server": used / count * 1e6,
        "client": client_s / count * 1e6,
    }


def _together(work: Any, count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _follow(address: str) -> dict[str, float]:
    """Return how late records come to many followers, what they cost, how many stay when gone."""
    wanted = _PER_SECOND * _FED_S
    late_ms: list[float] = []
    clients = [fl.connect(address) for _ in range(_FOLLOWERS)]
    watched = fl.connect(address)
    before = _usage(watched)
    ready = threading.Barrier(_FOLLOWERS + 1)

    def follow() -> None:
        reader = clients.pop().do_get(fl.Ticket(b""))
        ready.wait()
        for _ in range(wanted):
            row = reader.read_chunk().data.column(0)[0].as_buffer()
            late_ms.append((time.time_ns() - struct.unpack(">q", memoryview(row)[:8])[0]) / 1e6)
        reader.cancel()

    threads = [threading.Thread(target=follow) for _ in range(_FOLLOWERS)]
    for thread in threads:
        thread.start()
    ready.wait()
    _usage(watched, "feed", json.dumps([_PER_SECOND, _FED_S]).encode())
    for thread in threads:
        thread.join()
    time.sleep(1)
    used = _usage(watched)
    late_ms.sort()
    return {
        "p50_ms": late_ms[len(late_ms) // 2],
        "p99_ms": late_ms[len(late_ms) * 99 // 100],
        "cpu_s": used["cpu_s"] - before["cpu_s"],
        "memory_mb": used["memory_mb"],
        "threads": used["threads"],
        "left": used["followers"],
        "missed": wanted * _FOLLOWERS - len(late_ms),
    }
