"""Figures of writing through the service tier: what clients get, beside what the core gives."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.flight as fl
import uvloop

import dlcore
from benchmarks.figures import Figure, Target, measure
from benchmarks.logs import (
    CONFIG,
    RECORD_BYTES,
    WRITE_BYTES,
    CpuCost,
    append_times,
    drop_log,
    fresh_log,
    record_batches,
    run,
)
from benchmarks.proxy_transport import served
from benchmarks.put_clients import Put, one_record, small_put_rate
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dlcore import AsyncLogWriter
    from dlcore.ops.sandbox.cluster import Sandbox

_ROUNDS = 3
_WINDOW = 8
_CLIENTS = 32
_SMALL_S = 2.0
_APPENDS = 300
_MOVES = 10
_LOADED_S = 0.3
_GAP_MS_MAX = 100.0
_AGAIN_S = 0.005
_LOGS = 12
_PAUSE_S = 0.01
_CALM_S = 1.0
_APPEND_MS_MAX = 1000.0

_MANY_LOGS = 60
_LONG_PAUSE_S = 0.1
_EVEN_S_MAX = 900.0
_KILLS = 20
_KILLED_MS_MAX = 1000.0


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

    Beside the core's writer in the client's process, with as many on their way; each until the last
    record is acknowledged.  The notes tell what a server of grpc.aio takes of the same client if it
    acknowledges at once, without a log.  CPU is that of all processes.
    """
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    bookies = [each.pid for each in sandbox.bookies]
    proxied = CpuCost([*bookies, sandbox.proxies[0].pid])
    direct = CpuCost(bookies)

    def value() -> float:
        log = _new_log(sandbox.uri)
        rate = _put_all(sandbox.proxies[0].location, log, batches, proxied)
        _drop(sandbox, log)
        return rate

    def limit() -> float:
        return run(_write_all(sandbox.uri, batches, direct))

    with served("aio") as server:
        bare = CpuCost([server.pid])
        figure = measure(
            name="proxy_write_large",
            unit="MB/s",
            target=Target(ratio=0.8, is_rate=True),
            value=value,
            limit={
                "core": limit,
                "bare server": lambda: _put_all(server.location, "bare", batches, bare),
            },
            rounds=_ROUNDS,
        )
    (client, servers), (core, core_servers) = proxied.per_gb(), direct.per_gb()
    bare_client, bare_server = bare.per_gb()
    costs = {
        "client": client,
        "proxy and bookies": servers,
        "client of the core": core,
        "its bookies": core_servers,
        "client of a bare server": bare_client,
        "bare server": bare_server,
    }
    return [
        replace(figure, limit=figure.limits["core"], cpu_s_per_gb=costs),
        Figure(
            name="proxy_write_large_cpu",
            unit="s/GB",
            value=client + servers,
            limit=core + core_servers,
            target=None,
        ),
    ]


def forward(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """As `proxy_write_large`, at a proxy that does not own the log, beside the one that does.

    The same with one record at a time.  CPU is that of all processes.
    """
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    pids = [each.pid for each in (*sandbox.bookies, *sandbox.proxies)]
    costs = {True: CpuCost(pids), False: CpuCost(pids)}

    def rate(*, forward: bool) -> float:
        log, location = _log_and_proxy(sandbox, is_owner=not forward)
        found = _put_all(location, log, batches, costs[forward], forward=forward)
        _drop_anywhere(sandbox, log)
        return found

    def append_ms(*, forward: bool) -> float:
        log, location = _log_and_proxy(sandbox, is_owner=not forward)
        found = _append_ms(location, log, forward=forward)
        _drop_anywhere(sandbox, log)
        return found

    large = measure(
        name="proxy_forward",
        unit="MB/s",
        target=Target(ratio=0.5, is_rate=True),
        value=partial(rate, forward=True),
        limit={"owner": partial(rate, forward=False)},
        rounds=_ROUNDS,
    )
    one = measure(
        name="proxy_forward_append",
        unit="ms",
        target=Target(ratio=2.0, is_rate=False),
        value=partial(append_ms, forward=True),
        limit={"owner": partial(append_ms, forward=False)},
        rounds=_ROUNDS,
    )
    per_gb = {"forwarded": sum(costs[True].per_gb()), "owner": sum(costs[False].per_gb())}
    return [replace(large, cpu_s_per_gb=per_gb), one]


def _log_and_proxy(sandbox: Sandbox, *, is_owner: bool) -> tuple[str, str]:
    """Return a new log, and a proxy that should own it, or one that should not."""
    log = _new_log(sandbox.uri)
    owner = _act(sandbox.proxies[0].location, "owner", log=log)["location"]
    locations = (each.location for each in sandbox.proxies)
    return log, next(each for each in locations if (each == owner) is is_owner)


def _drop_anywhere(sandbox: Sandbox, log: str) -> None:
    owner = _act(sandbox.proxies[0].location, "owner", log=log)["location"]
    _act(owner, "delete", log=log)


def _put_all(
    location: str,
    log: str,
    batches: Sequence[pa.RecordBatch],
    cost: CpuCost,
    *,
    forward: bool = False,
) -> float:
    put = Put(location, log, batches[0].schema, forward=forward)
    started = time.perf_counter()
    with cost.counted():
        for batch in batches:
            put.write(batch, in_flight_max=(_WINDOW - 1) * batch.num_rows)
        put.flush()
    seconds = time.perf_counter() - started
    put.leave()
    return WRITE_BYTES / 1e6 / seconds


async def _write_all(uri: str, batches: Sequence[pa.RecordBatch], cost: CpuCost) -> float:
    async with fresh_log(uri) as (log, writer):
        on_their_way: deque[asyncio.Future[Any]] = deque()
        started = time.perf_counter()
        with cost.counted():
            for batch in batches:
                on_their_way.append(writer.write_batch(batch))
                if len(on_their_way) == _WINDOW:
                    await on_their_way.popleft()
            await asyncio.gather(*on_their_way)
        seconds = time.perf_counter() - started
    await asyncio.to_thread(drop_log, uri, log.name)
    return WRITE_BYTES / 1e6 / seconds


def write_small(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """32 clients that each wait for the acknowledgement of 1 KB, beside one of them.

    They are of four processes.  The notes tell what a server of grpc.aio gives them that
    acknowledges at once, without a log.
    """

    def rate(clients: int) -> float:
        log = _new_log(sandbox.uri)
        location = sandbox.proxies[0].location
        found = small_put_rate(location, log, clients=clients, seconds=_SMALL_S)
        _drop(sandbox, log)
        return found

    with served("aio") as server:
        bare = partial(small_put_rate, server.location, "bare", seconds=_SMALL_S)
        figure = measure(
            name="proxy_write_small",
            unit="records/s",
            target=Target(ratio=10, is_rate=True),
            value=partial(rate, _CLIENTS),
            limit={
                "one client": partial(rate, 1),
                f"{_CLIENTS} of a bare server": partial(bare, clients=_CLIENTS),
                "one of a bare server": partial(bare, clients=1),
            },
            rounds=_ROUNDS,
        )
    return [replace(figure, limit=figure.limits["one client"])]


def append(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """One record at a time from one client, beside the core's append; medians.

    The notes tell how long the same client waits for a server of grpc.aio that has no log.
    """

    def value() -> float:
        log = _new_log(sandbox.uri)
        found = _append_ms(sandbox.proxies[0].location, log)
        _drop(sandbox, log)
        return found

    with served("aio") as server:
        figure = measure(
            name="proxy_append",
            unit="ms",
            target=Target(ratio=1.8, is_rate=False),
            value=value,
            limit={
                "core": lambda: run(_core_append_ms(sandbox.uri)),
                "bare server": lambda: _append_ms(server.location, "bare"),
            },
        )
    return [replace(figure, limit=figure.limits["core"])]


def _append_ms(location: str, log: str, *, forward: bool = False) -> float:
    batch = one_record()
    put = Put(location, log, batch.schema, forward=forward)
    put.write(batch, in_flight_max=0)
    times = []
    for _ in range(_APPENDS):
        started = time.perf_counter()
        put.write(batch, in_flight_max=0)
        times.append(time.perf_counter() - started)
    put.close()
    return statistics.median(times) * 1000


async def _core_append_ms(uri: str) -> float:
    return statistics.median(await append_times(uri, _APPENDS)) * 1000


def handover(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """A log under load moves ten times between two proxies: the owner gets a signal to stop.

    The longest time without an acknowledgement in each move; the median of them.
    """
    log = _new_log(sandbox.uri)
    batch = one_record()
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
    return [_median_gap("proxy_handover", gaps_ms, _GAP_MS_MAX)]


def _median_gap(name: str, gaps_ms: Sequence[float], limit_ms: float) -> Figure:
    return Figure(
        name=name,
        unit="ms",
        value=statistics.median(gaps_ms),
        limit=limit_ms,
        target=Target(ratio=1.0, is_rate=False),
        limits={"longest": max(gaps_ms), "shortest": min(gaps_ms)},
    )


def _endpoint_of(sandbox: Sandbox) -> str:
    """Return what names all proxies as they are now."""
    addresses = (each.location.partition("://")[2] for each in sandbox.proxies)
    return f"grpc://{','.join(addresses)}"


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


def rolling_restart(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """Twelve logs are written through three proxies, which are started again one after the other.

    The longest of all appends, of one record by a writer over proxies; in each round all
    proxies are started again once.
    """
    longest_ms = [uvloop.run(_restarted(sandbox)) for _ in range(_ROUNDS)]
    return [
        Figure(
            name="proxy_rolling_restart",
            unit="ms",
            value=max(longest_ms),
            limit=_APPEND_MS_MAX,
            target=Target(ratio=1.0, is_rate=False),
            limits={f"round {number}": each for number, each in enumerate(longest_ms, 1)},
        )
    ]


def killed(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """The proxy that owns a log is killed, twenty times, each time while a record is written.

    From the kill to the acknowledgement of the next record, by a writer over proxies; the
    median of them.
    """
    return [_median_gap("proxy_killed", uvloop.run(_killed(sandbox)), _KILLED_MS_MAX)]


async def _killed(sandbox: Sandbox) -> list[float]:
    log = _new_log(sandbox.uri)
    gaps_ms = []
    for txid in range(0, 2 * _KILLS, 2):
        async with (  # a proxy that was started again has another address
            await dlcore.open_namespace(_endpoint_of(sandbox)) as namespace,
            await (await namespace.open_log(log)).open_writer() as writer,
        ):
            await writer.write(LogRecord(txid, bytes(RECORD_BYTES)))
            location = _act(sandbox.proxies[0].location, "owner", log=log)["location"]
            (owner,) = (each for each in sandbox.proxies if each.location == location)
            started = time.perf_counter()
            owner.kill()
            await writer.write(LogRecord(txid + 1, bytes(RECORD_BYTES)))
            gaps_ms.append((time.perf_counter() - started) * 1000)
        owner.restart()
    return gaps_ms


async def _restarted(sandbox: Sandbox) -> float:
    """Return how many ms the longest append took."""
    names = [_new_log(sandbox.uri) for _ in range(_LOGS)]
    async with await dlcore.open_namespace(_endpoint_of(sandbox)) as namespace:
        logs = [await namespace.open_log(name) for name in names]
        writers = [await log.open_writer() for log in logs]
        ending = asyncio.Event()
        appending = [Appending(writer, _PAUSE_S) for writer in writers]
        writing = [asyncio.create_task(each.run(ending)) for each in appending]
        for proxy in sandbox.proxies:
            await asyncio.sleep(_CALM_S)
            await asyncio.to_thread(proxy.restart)
        await asyncio.sleep(_CALM_S)
        ending.set()
        await asyncio.gather(*writing)
        for writer in writers:
            await writer.aclose()
    return max(each.longest_s for each in appending) * 1000


@dataclass
class Appending:
    """Appends records one after the other, after pauses, and notes how long the longest took."""

    writer: AsyncLogWriter
    pause_s: float
    longest_s: float = 0.0
    done: int = 0

    async def run(self, ending: asyncio.Event) -> None:
        """Do so until the end."""
        while not ending.is_set():
            started = time.perf_counter()
            self.done += 1
            await self.writer.write(LogRecord(self.done, bytes(RECORD_BYTES)))
            self.longest_s = max(self.longest_s, time.perf_counter() - started)
            await asyncio.sleep(self.pause_s)


def rebalance(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """Sixty logs are written through three proxies, of which each is started again: who owns them?

    The most logs that one proxy owns when all have come to a balance by themselves, with the
    defaults; beside it what each owned after the restarts and then, how many seconds it took, and
    the longest append while logs moved, and in the minute before, of one record by a writer of
    proxies.
    """
    return uvloop.run(_rebalanced(sandbox))


async def _rebalanced(sandbox: Sandbox) -> list[Figure]:
    names = [_new_log(sandbox.uri) for _ in range(_MANY_LOGS)]
    async with await dlcore.open_namespace(_endpoint_of(sandbox)) as namespace:
        writers = [await (await namespace.open_log(name)).open_writer() for name in names]
        ending, appending = asyncio.Event(), [Appending(each, _LONG_PAUSE_S) for each in writers]
        writing = [asyncio.create_task(each.run(ending)) for each in appending]
        for proxy in sandbox.proxies:
            await asyncio.sleep(_CALM_S)
            await asyncio.to_thread(proxy.restart)
        await asyncio.sleep(_CALM_S)
        before, started = await asyncio.to_thread(_owned, sandbox), time.perf_counter()
        _longest_ms(appending)
        while "settling" in await asyncio.to_thread(_states, sandbox):  # noqa: ASYNC110 - no event
            await asyncio.sleep(_CALM_S)
        calm_ms = _longest_ms(appending)
        while set(await asyncio.to_thread(_states, sandbox)) != {"even"}:
            if time.perf_counter() - started > _EVEN_S_MAX:
                raise TimeoutError(f"after {_EVEN_S_MAX:g} s the proxies are not even")
            await asyncio.sleep(_CALM_S)
        took_s, after = time.perf_counter() - started, await asyncio.to_thread(_owned, sandbox)
        moving_ms = _longest_ms(appending)
        ending.set()
        await asyncio.gather(*writing)
        for writer in writers:
            await writer.aclose()
    counts = {f"before {place}": float(count) for place, count in enumerate(before, 1)}
    counts |= {f"after {place}": float(count) for place, count in enumerate(after, 1)}
    mean = _MANY_LOGS / len(sandbox.proxies)
    name, target = "proxy_rebalance", Target(ratio=1.0, is_rate=False)
    return [
        Figure(name=name, unit="logs", value=max(after), limit=mean, target=None, limits=counts),
        Figure(name=f"{name}_time", unit="s", value=took_s, limit=_EVEN_S_MAX, target=None),
        Figure(
            name=f"{name}_append",
            unit="ms",
            value=moving_ms,
            limit=_APPEND_MS_MAX,
            target=target,
            limits={"before logs moved": calm_ms},
        ),
    ]


def _owned(sandbox: Sandbox) -> list[int]:
    return [len(_act(each.location, "logs")["logs"]) for each in sandbox.proxies]


def _states(sandbox: Sandbox) -> list[str]:
    return [_act(each.location, "health")["balance"]["state"] for each in sandbox.proxies]


def _longest_ms(appending: Sequence[Appending]) -> float:
    """Return how long the longest append took since this was asked last."""
    longest_s = max(each.longest_s for each in appending)
    for each in appending:
        each.longest_s = 0.0
    return longest_s * 1000
