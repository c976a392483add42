"""What the sink costs after a history of commits: curves over extents, logs and micro-batches.

Of a commit, a snapshot, opening a writer and its first write: time, CPU of the client's process,
bytes and requests to ZooKeeper, and how many of these waited for one another (their depth); the
same beside a ZooKeeper that answers 10 ms later.  And a full read of many micro-batches beside one
of the same records written in one piece.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from benchmarks.counted_client import Cost, CountedClient, counted_client
from benchmarks.delay_proxy import delay_proxy
from benchmarks.figures import Figure, Target
from benchmarks.history_picture import draw
from benchmarks.logs import CONFIG, record_batches
from benchmarks.written_history import write_history
from dlcore.metadata.paths import parse_uri
from dlcore.namespace import scan
from dlcore.records import LogRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    import pyarrow as pa

    from dlcore.log.manager import DistributedLogManager
    from dlcore.log.scan import StagedExtent
    from dlcore.log.staging import StagingWriter
    from dlcore.log.writer import AsyncLogWriter
    from dlcore.sandbox.cluster import Sandbox

DELAY_S = 0.005
PICTURE = Path("artifacts/sink_history.png")
_RECORD_BYTES = 100
_SMALL_EXTENTS = 2
_MANY_LOGS_ROUNDS = 4
_READ_ROUNDS = 3
_AT_ONCE = 32
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    extents: tuple[int, ...]
    logs: tuple[int, ...]
    micro_batches: int
    records_per_batch: int = 1_024
    rounds: int


FULL = Plan(
    extents=(10, 1_000, 10_000, 100_000), logs=(1, 100, 1_000), micro_batches=10_000, rounds=40
)
SHORT = Plan(extents=(10, 1_000, 10_000), logs=(1, 100), micro_batches=500, rounds=15)


@dataclass
class Curves:
    """Costs by name and size of the history; and by name how a log was read."""

    by_extents: dict[str, dict[int, Cost]] = field(default_factory=dict)
    by_logs: dict[str, dict[int, Cost]] = field(default_factory=dict)
    ledgers_by_logs: dict[int, list[int]] = field(default_factory=dict)
    """Staged ledgers after each append."""
    reads: dict[str, tuple[float, Cost, int]] = field(default_factory=dict)
    """Seconds of a full read, a client's first snapshot, ledgers."""


def sink_history(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """The sink after 10 to 100,000 extents, with 1 to 1,000 logs, and after 10,000 batches."""
    return _measure_all(sandbox, FULL)


def sink_history_short(sandbox: Sandbox, _folder: Path) -> list[Figure]:
    """The sink after 10 to 10,000 extents, with 1 to 100 logs, and after 500 batches."""
    return _measure_all(sandbox, SHORT)


def _measure_all(sandbox: Sandbox, plan: Plan) -> list[Figure]:
    curves = asyncio.run(_measure(sandbox, plan))
    _tell(curves)
    draw(curves, PICTURE)
    print(f"picture: {PICTURE}")
    return _figures(curves, plan)


async def _measure(sandbox: Sandbox, plan: Plan) -> Curves:
    curves = Curves()
    uri = parse_uri(sandbox.uri)
    with delay_proxy(uri.servers, delay_s=DELAY_S) as distant:
        async with (
            counted_client(uri.servers, uri.root) as client,
            counted_client(distant, uri.root) as far,
        ):
            for count in plan.extents:
                await _measure_history(client, far, plan, count, curves)
            for count in plan.logs:
                await _measure_logs(client, count, curves)
            await _measure_reads(client, plan, curves)
    return curves


async def _measure_history(
    client: CountedClient, far: CountedClient, plan: Plan, count: int, curves: Curves
) -> None:
    """Measure each operation on a log of `count` extents, from near and from far."""
    name = f"bench/{uuid4().hex}"
    await client.namespace.create_log(name, config=CONFIG)
    await write_history(client.context, name, count)

    def note(what: str, costs: Sequence[Cost]) -> None:
        curves.by_extents.setdefault(what, {})[count] = Cost.typical(costs)

    for where, each in (("", client), (", 10 ms away", far)):
        note("commit" + where, await _commits(each, name, plan.rounds))
        async with await each.namespace.open_log(name, config=CONFIG) as log:
            await log.get_snapshot()
            changed, unchanged = await _snapshots(client, each, log, plan.rounds)
            note("snapshot, changed log" + where, changed)
            note("snapshot, same log" + where, unchanged)
            opens, writes = await _openings(each, log, plan.rounds)
            note("open writer" + where, opens)
            note("first write" + where, writes)


async def _stage(writer: StagingWriter, log: str) -> list[StagedExtent]:
    """Stage small extents of one task."""
    extents: list[StagedExtent] = []
    for _ in range(_SMALL_EXTENTS):
        await writer.write_batch(log, _one_row())
        extents += await writer.stage()
    return extents


def _one_row() -> pa.RecordBatch:
    batch = record_batches(total_bytes=1_024 * _RECORD_BYTES, record_bytes=_RECORD_BYTES)[0]
    return batch.select(["payload"]).slice(0, 1)


async def _commits(client: CountedClient, log: str, rounds: int) -> list[Cost]:
    """Commit batches of two extents, the first of which opens the staged ledger."""
    async with await client.namespace.open_staging_writer(identity=client.identity) as writer:
        costs = [await client.commit(await _stage(writer, log)) for _ in range(rounds + 1)]
    return costs[1:]


async def _snapshots(
    committer: CountedClient, client: CountedClient, log: DistributedLogManager, rounds: int
) -> tuple[list[Cost], list[Cost]]:
    """Take snapshots after commits, and others after nothing happened."""
    changed, unchanged = [], []
    namespace = committer.namespace
    async with await namespace.open_staging_writer(identity=committer.identity) as writer:
        for _ in range(rounds):
            await committer.commit(await _stage(writer, log.name))
            changed.append(await client.measure(log.get_snapshot))
            unchanged.append(await client.measure(log.get_snapshot))
    return changed, unchanged


async def _openings(
    client: CountedClient, log: DistributedLogManager, rounds: int
) -> tuple[list[Cost], list[Cost]]:
    """Open writers, and have each of them write one record."""
    opens, writes = [], []
    opened: list[AsyncLogWriter] = []

    async def open_writer() -> None:
        opened.append(await log.open_writer())

    async def write() -> None:
        await opened[0].write(LogRecord(opened[0].last_txid, b"x" * _RECORD_BYTES))

    for _ in range(rounds):
        opens.append(await client.measure(open_writer))
        writes.append(await client.measure(write))
        await opened.pop().aclose()
    return opens, writes


async def _measure_logs(client: CountedClient, count: int, curves: Curves) -> None:
    """Append to `count` logs at once, a small extent each, and look at all of them."""
    names = [f"bench/{uuid4().hex}" for _ in range(count)]
    await _gather(client.namespace.create_log(name, config=CONFIG) for name in names)
    client.start_identity()
    rows = _one_row()
    costs: list[Cost] = []
    ledgers: list[int] = []
    async with await client.namespace.open_staging_writer(identity=client.identity) as writer:
        for _ in range(_MANY_LOGS_ROUNDS):
            for name in names:
                await writer.write_batch(name, rows)
            costs.append(await client.commit(await writer.stage()))
            ledgers.append(await client.count_staged())

        async def look() -> None:
            await client.namespace.get_snapshots(names)

        await look()
        looks = [await client.measure(look) for _ in range(_MANY_LOGS_ROUNDS)]
    curves.by_logs.setdefault("append to all", {})[count] = Cost.typical(costs[1:])
    curves.by_logs.setdefault("snapshot of all, unchanged", {})[count] = Cost.typical(looks)
    curves.ledgers_by_logs[count] = ledgers


async def _gather(works: Iterable[Awaitable[_Result]]) -> list[_Result]:
    """Do as much at once as a client does."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def limited(work: Awaitable[_Result]) -> _Result:
        async with turn:
            return await work

    return list(await asyncio.gather(*map(limited, works)))


async def _measure_reads(client: CountedClient, plan: Plan, curves: Curves) -> None:
    """Read micro-batches back, and the same records written in one piece."""
    batches = record_batches(
        total_bytes=plan.micro_batches * plan.records_per_batch * _RECORD_BYTES,
        record_bytes=_RECORD_BYTES,
    )
    pieces, piece = f"bench/{uuid4().hex}", f"bench/{uuid4().hex}"
    for name in (pieces, piece):
        await client.namespace.create_log(name, config=CONFIG)
    started_s = time.perf_counter()
    client.start_identity()
    async with await client.namespace.open_staging_writer(identity=client.identity) as writer:
        for batch in batches:
            await writer.write_batch(pieces, batch.select(["payload"]))
            await client.commit(await writer.stage())
    print(f"{plan.micro_batches} micro-batches in {time.perf_counter() - started_s:.0f} s")
    async with (
        await client.namespace.open_log(piece, config=CONFIG) as log,
        await log.open_writer() as log_writer,
    ):
        for batch in batches:
            await log_writer.submit_batch(batch)
    curves.reads["in one piece"] = await _read(client, piece)
    curves.reads["in micro-batches"] = await _read(client, pieces)
    curves.reads["in one piece"] = await _read(client, piece)


async def _read(client: CountedClient, name: str) -> tuple[float, Cost, int]:
    """Take a first snapshot and read all of it, some times over."""
    times_s = []
    costs = []
    for _ in range(_READ_ROUNDS):
        log = await client.namespace.open_log(name, config=CONFIG)
        costs.append(await client.measure(log.get_snapshot))
        snapshot = await log.get_snapshot()
        started_s = time.perf_counter()
        rows = 0
        async for batch in scan(snapshot.scans(snapshot.first, snapshot.end)):
            rows += batch.batch.num_rows
        times_s.append(time.perf_counter() - started_s)
        ledgers = {e.ledger.ledger_id for s in snapshot.segments for e in s.extents}
    return statistics.median(times_s), Cost.typical(costs), len(ledgers)


def _tell(curves: Curves) -> None:
    """Print every point of the curves."""
    for what, points in (curves.by_extents | curves.by_logs).items():
        unit = "extents" if what in curves.by_extents else "logs"
        print(what)
        for count, cost in points.items():
            print(f"  {count:7,d} {unit} {cost}")
    for count, ledgers in curves.ledgers_by_logs.items():
        print(f"staged ledgers of {count:,d} logs after each append: {ledgers}")
    for how, (seconds, cost, count) in curves.reads.items():
        print(f"read {how}: {seconds:.2f} s, {count} ledgers, first snapshot {cost}")


def _figures(curves: Curves, plan: Plan) -> list[Figure]:
    """Return what is asked for, each beside its limit."""
    low, high = plan.extents[0], plan.extents[-1]
    most = plan.logs[-1]
    commits = curves.by_extents["commit"]
    figures = []

    def add(name: str, unit: str, value: float, limit: float, ratio: float = 1.0) -> None:
        target = Target(ratio=ratio, is_rate=False)
        figures.append(Figure(name=name, unit=unit, value=value, limit=limit, target=target))

    add(f"commit_time_{high}", "ms", commits[high].ms, commits[low].ms, 1.2)
    add(f"commit_cpu_{high}", "ms", commits[high].cpu_ms, commits[low].cpu_ms, 1.2)
    add(f"commit_bytes_{high}", "B", commits[high].bytes_written, commits[low].bytes_written, 1.2)
    appends = curves.by_logs["append to all"]
    add("append_bytes_per_log", "B", appends[most].bytes_written / most, 300)
    add("commit_depth", "round trips", max(c.depth for c in commits.values()), 3)
    add(f"append_depth_{most}_logs", "round trips", appends[most].depth, 3)
    for what in ("open writer", "first write"):
        depth = max(cost.depth for cost in curves.by_extents[what].values())
        add(what.replace(" ", "_") + "_depth", "round trips", depth, 4)
    same = curves.by_extents["snapshot, same log"]
    add("snapshot_same_requests", "requests", max(c.requests for c in same.values()), 1, 0.0)
    looks = curves.by_logs["snapshot of all, unchanged"]
    add(f"snapshot_{most}_logs", "ms", looks[most].ms, 100)
    ledgers = curves.ledgers_by_logs[most]
    add(f"staged_ledgers_{most}_logs", "ledgers", ledgers[-1], ledgers[0])
    whole, pieces = curves.reads["in one piece"], curves.reads["in micro-batches"]
    add("read_micro_batches", "s", pieces[0], whole[0], 1.3)
    add("first_snapshot_micro_batches", "ms", pieces[1].ms, whole[1].ms, 2.0)
    return figures
