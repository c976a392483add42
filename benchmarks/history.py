"""The sink's cost after a history of commits: curves over extents, logs and micro-batches.

For a commit, a snapshot, opening a writer and its first write: time, CPU of the client's process,
bytes and requests to ZooKeeper, and how many of these waited for one another (their depth); the
same beside a ZooKeeper that answers 10 ms later.  And a full read of many micro-batches beside one
of the same records written in one piece.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from benchmarks.counted_client import Cost, CountedClient, counted_client
from benchmarks.delay_proxy import delay_proxy
from benchmarks.figures import Figure, Target
from benchmarks.history_picture import draw
from benchmarks.logs import CONFIG, record_batches
from benchmarks.written_history import write_history
from dlcore.backends.scanning import scan
from dlcore.base.records import LogRecord
from dlcore.log.entries.body import with_txid
from dlcore.log.upkeep.staged import drop_merged
from dlcore.metadata.paths import parse_uri
from dlcore.ops.upkeep.config import MergePolicy
from dlcore.ops.upkeep.merger import LogMerger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    import pyarrow as pa

    from dlcore.backends.direct.log import DirectLog
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.log.staging.writer import DirectStagingWriter
    from dlcore.log.writing.writer import DirectWriter
    from dlcore.ops.sandbox.cluster import Sandbox

DELAY_S = 0.005
PICTURE = Path("artifacts/sink_history.png")
_RECORD_BYTES = 100
_SMALL_EXTENTS = 2
_MANY_LOGS_ROUNDS = 4
_READ_ROUNDS = 5
_MERGE_BYTES_PER_S = 1e9
_PAYLOADS = 16
_BATCH_RECORDS = 1_024
"""The size of one micro-batch: 100 KB, one entry."""
_AT_ONCE = 32
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    extents: tuple[int, ...]
    logs: tuple[int, ...]
    micro_batches: int
    rounds: int


FULL = Plan(
    extents=(10, 1_000, 10_000, 100_000), logs=(1, 100, 1_000), micro_batches=10_000, rounds=20
)
SHORT = Plan(extents=(10, 1_000, 10_000), logs=(1, 100), micro_batches=500, rounds=15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A full read of a log by a client that knew nothing of it."""

    seconds: float
    snapshot: Cost
    rows: int
    size_bytes: int
    extents: int
    ledgers: int

    @classmethod
    def median(cls, reads: Sequence[Read]) -> Read:
        """Return what is typical of several reads of one log."""
        return replace(
            reads[-1],
            seconds=statistics.median(read.seconds for read in reads),
            snapshot=Cost.typical([read.snapshot for read in reads]),
        )


@dataclass
class Curves:
    """Costs by name and size of the history; and by name how a log was read."""

    by_extents: dict[str, dict[int, Cost]] = field(default_factory=dict)
    by_logs: dict[str, dict[int, Cost]] = field(default_factory=dict)
    ledgers_by_logs: dict[int, list[int]] = field(default_factory=dict)
    """Staged ledgers after each append."""
    reads: dict[str, Read] = field(default_factory=dict)


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


async def _stage(writer: DirectStagingWriter, log: str) -> list[StagedExtent]:
    """Stage small extents of one task."""
    extents: list[StagedExtent] = []
    for _ in range(_SMALL_EXTENTS):
        await writer.write_batch(log, _one_row())
        extents += await writer.stage()
    return extents


def _one_row() -> pa.RecordBatch:
    batch = record_batches(total_bytes=1_024 * _RECORD_BYTES, record_bytes=_RECORD_BYTES)[0]
    return batch.select(["value"]).slice(0, 1)


async def _commits(client: CountedClient, log: str, rounds: int) -> list[Cost]:
    """Commit batches of two extents, the first of which opens the staged ledger."""
    async with await client.namespace.open_staging_writer(identity=client.identity) as writer:
        costs = [await client.commit(await _stage(writer, log)) for _ in range(rounds + 1)]
    return costs[1:]


async def _snapshots(
    committer: CountedClient, client: CountedClient, log: DirectLog, rounds: int
) -> tuple[list[Cost], list[Cost]]:
    """Take snapshots after commits, and others after nothing happened."""
    changed, unchanged = [], []
    namespace = committer.namespace

    async def look() -> None:
        await client.namespace.get_snapshots([log.name])

    async with await namespace.open_staging_writer(identity=committer.identity) as writer:
        await client.measure(look)  # the log is followed from here on
        for _ in range(rounds):
            await committer.commit(await _stage(writer, log.name))
            changed.append(await client.measure(log.get_snapshot))
            await client.namespace.get_snapshots([log.name], fresh=True)
            unchanged.append(await client.measure(look))
    return changed, unchanged


async def _openings(
    client: CountedClient, log: DirectLog, rounds: int
) -> tuple[list[Cost], list[Cost]]:
    """Open writers, and have each of them write one record."""
    opens, writes = [], []
    opened: list[DirectWriter] = []

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
    """Read micro-batches back, also merged, and the same records written in one piece."""
    batches = record_batches(
        total_bytes=_PAYLOADS * _BATCH_RECORDS * _RECORD_BYTES, record_bytes=_RECORD_BYTES
    )
    pieces, piece = f"bench/{uuid4().hex}", f"bench/{uuid4().hex}"
    namespace = client.namespace
    for name in (pieces, piece):
        await namespace.create_log(name, config=CONFIG)
    started_s = time.perf_counter()
    client.start_identity()
    async with (
        await namespace.open_staging_writer(identity=client.identity) as one,
        await namespace.open_staging_writer(identity=client.identity) as other,
    ):
        for number in range(plan.micro_batches):
            writer = one if number % 2 else other  # tasks run in several processes
            await writer.write_batch(pieces, batches[number % _PAYLOADS].select(["value"]))
            append = await client.begin_append()
            await append.commit(await writer.stage())
    print(f"{plan.micro_batches} micro-batches in {time.perf_counter() - started_s:.0f} s")
    async with (
        await namespace.open_log(piece, config=CONFIG) as log,
        await log.open_writer() as log_writer,
    ):
        for number in range(plan.micro_batches):
            await log_writer.submit_batch(with_txid(batches[number % _PAYLOADS], number))
    curves.reads["micro-batches"] = await _read(client, pieces)
    await _merge(client, pieces)
    # In turn, so that what slows the machine slows both.
    reads = [(await _read(client, piece), await _read(client, pieces)) for _ in range(_READ_ROUNDS)]
    curves.reads["one piece"] = Read.median([whole for whole, _ in reads])
    curves.reads["micro-batches, merged"] = Read.median([merged for _, merged in reads])


async def _merge(client: CountedClient, name: str) -> None:
    """Merge all there is to merge in a log, and remove what it leaves."""
    started_s = time.perf_counter()
    context = client.context
    merger = LogMerger(
        context,
        client.namespace.staging_owner,
        policy=MergePolicy(),
        bytes_per_s=_MERGE_BYTES_PER_S,
    )
    count = await merger.merge(await context.logs.find(name))
    await drop_merged(context, grace_ms=0)
    print(f"{count} merges in {time.perf_counter() - started_s:.1f} s")


async def _read(client: CountedClient, name: str) -> Read:
    """Take a first snapshot and read all of it."""
    async with await client.namespace.open_log(name, config=CONFIG) as log:
        cost = await client.measure(log.get_snapshot)
        snapshot = await log.get_snapshot()
    extents = [extent for segment in snapshot.segments for extent in segment.extents]
    started_s = time.perf_counter()
    rows = 0
    async for batch in scan(snapshot.scans(snapshot.first, snapshot.end)):
        rows += batch.batch.num_rows
    return Read(
        seconds=time.perf_counter() - started_s,
        snapshot=cost,
        rows=rows,
        size_bytes=sum(extent.size_bytes for extent in extents),
        extents=len(extents),
        ledgers=len({extent.ledger_id for extent in extents}),
    )


def _tell(curves: Curves) -> None:
    """Print every point of the curves."""
    for what, points in (curves.by_extents | curves.by_logs).items():
        unit = "extents" if what in curves.by_extents else "logs"
        print(what)
        for count, cost in points.items():
            print(f"  {count:7,d} {unit} {cost}")
    for count, ledgers in curves.ledgers_by_logs.items():
        print(f"staged ledgers of {count:,d} logs after each append: {ledgers}")
    for how, read in curves.reads.items():
        print(
            f"read {how}: {read.seconds:.2f} s, {read.rows:,d} rows, {read.extents:,d} extents in "
            f"{read.ledgers:,d} ledgers; first snapshot {read.snapshot}"
        )


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
    whole, merged = curves.reads["one piece"], curves.reads["micro-batches, merged"]
    assert whole.rows == merged.rows == curves.reads["micro-batches"].rows
    add("read_merged", "s", merged.seconds, whole.seconds, 1.3)
    add("first_snapshot_merged", "ms", merged.snapshot.ms, whole.snapshot.ms, 2.0)
    add("ledgers_merged", "ledgers", merged.ledgers, merged.size_bytes / MergePolicy().large_weight)
    return figures
