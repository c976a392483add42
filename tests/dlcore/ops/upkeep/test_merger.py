"""Merging: the same records in fewer ledgers, whatever else happens to the log meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest

from dlcore.backends.scanning import LedgerClients, ScanClients, scan
from dlcore.base.config import LedgerClientConfig, LogConfig, QuorumConfig
from dlcore.base.errors import DLError, LogNotFoundError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.ledger.client import LedgerClient
from dlcore.log.metadata.values import Chunk, LogHead, SegmentEnd, StagedLedger
from dlcore.log.upkeep.staged import drop_merged, list_staged, read_staged, settle
from dlcore.metadata.stored import decode
from dlcore.ops.upkeep.config import MergePolicy
from dlcore.ops.upkeep.merger import LogMerger
from dlcore.ops.upkeep.swap import MERGING_IDENTITY
from dlcore.wire.memory_bookies import MemoryBookieClient
from tests.fixtures.interrupted_store import InterruptedStore
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.memory_namespace import (
    ManualClock,
    MemoryCluster,
    memory_cluster,
    read_all,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.ids import BookieId
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogKey
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.log.staging.writer import DirectStagingWriter
    from dlcore.metadata.port import MetadataStore
    from tests.fixtures.simulated_store import SimulatedStore

CONFIG = LogConfig(
    quorum=QuorumConfig(), lock_timeout_s=0, entry_bytes=64 * 1024, segment_bytes_max=60_000
)
POLICY = MergePolicy(
    large_weight=20_000, fan_in=4, run_weight_max=80_000, run_extents_max=40, run_ledgers_max=20
)
TIME_LIMIT_S = 60
STRIDE = amount(3, sampled=11)
"""A prime: changes that follow each other in the list begin at different requests."""


class Scene:
    """A log of small extents, and a process that merges them."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster = cluster
        self.namespace: DirectNamespace
        self.log: DirectLog
        self.merging: DirectNamespace
        self.store: InterruptedStore
        self.merging_name = ""
        self.merger: LogMerger
        self._processes = 0
        self._version = 0
        self._writers: list[tuple[ManualClock, DirectStagingWriter]] = []

    async def start(self, *, appends: int = 30) -> None:
        """Append many small extents, by two processes, with transaction ids assigned and own."""
        self.namespace = await self.cluster.open("driver", config=CONFIG)
        await self.namespace.create_log("clicks")
        self.log = await self.namespace.open_log("clicks", config=CONFIG)
        for number in range(appends):
            if number == appends - 2:
                await self.close_staging()
            await self.append()
        await self.open_merging()

    async def open_merging(self) -> None:
        """Start a process that merges."""
        self._processes += 1
        name = self.merging_name = f"merging-{self._processes}"

        def wrap(store: SimulatedStore) -> MetadataStore:
            self.store = InterruptedStore(store)
            return cast("MetadataStore", self.store)

        self.merging = await self.cluster.open(name, config=CONFIG, wrap=wrap)
        self.merger = merger_of(self.merging)

    async def rewrite(self, log: LogKey) -> None:
        """Merge what may be merged."""
        await self.merger.merge(log)

    async def tidy(self) -> None:
        """Do what sweeps do once dead processes are known to be dead and graces are over."""
        await tidy(self)

    def check(self) -> None:
        """Check what the metadata counts."""
        check_ledgers(self.cluster)

    async def append(self) -> None:
        """Append two extents of a few records, each staged by a process of its own."""
        if not self._writers:
            await self._open_staging()
        self._version += 1
        version = self._version
        clock = self.cluster.clocks["driver"]
        clock.current_ms += 7
        extents = []
        for number, (task_clock, writer) in enumerate(self._writers):
            payloads = [f"{version}-{number}-{row}".encode() * 10 for row in range(1 + version % 3)]
            columns: dict[str, list[bytes] | list[int]] = {"value": payloads}
            if version % 2:
                columns["txid"] = [clock.current_ms + number] * len(payloads)
            task_clock.current_ms = clock.current_ms - 3 * number  # clocks differ: floors count
            await writer.write_batch("clicks", pa.record_batch(columns))
            extents += await writer.stage()
        append = await self.namespace.begin_append("job", version)
        assert (await append.commit(extents)).committed
        await self.namespace.log_context.tidier.settled()

    async def _open_staging(self) -> None:
        for name in ("task-1", "task-2"):
            task = await self.cluster.open(name, config=CONFIG)
            writer = await task.open_staging_writer(identity="job")
            self._writers.append((self.cluster.clocks[name], writer))

    async def close_staging(self) -> None:
        """End the processes that staged; their ledgers are settled."""
        for _, writer in self._writers:
            await writer.aclose()
        self._writers = []
        context = self.namespace.log_context
        await settle(context, await list_staged(context, "job"))

    async def extent_counts(self) -> list[int]:
        """Return how many extents each segment has."""
        return [len(segment.extents) for segment in await self.log.get_log_segments()]


def merger_of(namespace: DirectNamespace) -> LogMerger:
    """Return a merger for a process."""
    return LogMerger(namespace.log_context, namespace.staging_owner, policy=POLICY, bytes_per_s=1e9)


def on_scene(body: Callable[[Scene], Awaitable[None]], *, appends: int = 30) -> None:
    """Run `body` on a fresh scene."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            scene = Scene(cluster)
            await scene.start(appends=appends)
            await body(scene)

    run_in_own_time(asyncio.wait_for(run(), TIME_LIMIT_S))


def referred(cluster: MemoryCluster) -> Counter[int]:
    """Return how many extents of all logs refer to each ledger, by what is stored."""
    counts: Counter[int] = Counter()
    for path, node in cluster.tree.dump().items():
        parts = path.removeprefix("/dlog/heads/").split("/")
        if (
            not path.startswith("/dlog/heads/")
            or not node.value
            or parts[-1] in ("lock", "settings", "schema")
        ):
            continue
        if len(parts) == 2:
            head = decode(LogHead, node.value, source=path)
            extents = head.segment.tail if head.segment is not None else ()
        elif len(parts) == 3:
            extents = decode(SegmentEnd, node.value, source=path).tail
        else:
            extents = decode(Chunk, node.value, source=path).extents
        counts.update(extent.ledger_id for extent in extents)
    return counts


def stored_ledgers(cluster: MemoryCluster) -> dict[int, int | None]:
    """Return the ledgers there are, and of the registered ones how many extents are counted."""
    found: dict[int, int | None] = {}
    for path, node in cluster.tree.dump().items():
        parts = path.removeprefix("/dlog/ledgers/").split("/")
        if not path.startswith("/dlog/ledgers/") or len(parts) < 3:
            continue
        ledger_id = cluster.paths.ledger_id_of(*parts[:3])
        if len(parts) == 3:
            found.setdefault(ledger_id, None)
        else:
            found[ledger_id] = decode(StagedLedger, node.value, source=path).extents
    return found


async def tidy(scene: Scene) -> None:
    """Do what a sweep does once every process that died is known to be dead and graces are over."""
    context = scene.namespace.log_context
    scene.cluster.clocks["driver"].current_ms += 100_000
    await settle(context, await list_staged(context, MERGING_IDENTITY))
    await drop_merged(context, grace_ms=10_000)


def check_ledgers(cluster: MemoryCluster, *, filled: int = 2) -> None:
    """Every extent is counted, and no ledger is left over but those that are being filled."""
    counts, ledgers = referred(cluster), stored_ledgers(cluster)
    assert counts.keys() <= ledgers.keys()
    registered = {ledger_id: n for ledger_id, n in ledgers.items() if n is not None}
    assert registered == {ledger_id: counts[ledger_id] for ledger_id in registered}
    unused = ledgers.keys() - counts.keys()
    assert len(unused) <= filled, f"ledgers {unused} are left over"


def test_the_same_records_in_few_extents() -> None:
    """Positions, sequence ids, transaction ids, timestamps and payloads are what they were."""

    async def body(scene: Scene) -> None:
        before = await read_all(scene.log)
        counts = await scene.extent_counts()
        assert sum(counts) == 60
        assert await scene.merger.merge(scene.log._log) > 0
        assert sum(await scene.extent_counts()) <= 8 + 7
        assert await read_all(scene.log) == before
        fresh = await (await scene.cluster.open("other")).open_log("clicks")
        assert await read_all(fresh) == before
        assert [r.sequence_id for r in before] == list(range(len(before)))
        check_ledgers(scene.cluster)
        for _ in range(20):
            await scene.append()
        more = await read_all(scene.log)
        assert more[: len(before)] == before
        while await scene.merger.merge(scene.log._log):
            pass
        assert await read_all(fresh) == more
        await tidy(scene)
        assert await read_all(fresh) == more
        check_ledgers(scene.cluster)

    on_scene(body)


def test_ledgers_that_lost_extents_to_a_merge_go_after_a_grace() -> None:
    """Also those that were being filled then, and whose last extents are truncated."""

    async def body(scene: Scene) -> None:
        for _ in range(4):
            await scene.append()
        snapshot = await scene.log.get_snapshot()
        expected = as_rows(await read_all(scene.log))
        assert await scene.merger.merge(scene.log._log)
        context = scene.namespace.log_context
        nodes = await read_staged(context, sorted(stored_ledgers(scene.cluster)))
        merged = {i for i, node in nodes.items() if node.staged.released_ms}
        assert any(nodes[i].staged.owner and nodes[i].staged.extents for i in merged)
        await scene.close_staging()
        await remove(scene)
        assert merged <= stored_ledgers(scene.cluster).keys()
        assert not merged & referred(scene.cluster).keys()
        assert await scan_all(scene, snapshot) == expected  # as of the older view
        await tidy(scene)
        assert not merged & stored_ledgers(scene.cluster).keys()

    on_scene(body)


class MemoryLedgers(LedgerClients):
    """Clients of the memory bookies."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(LedgerClientConfig(), None, lambda _: None)
        self._cluster = cluster

    def client_of(self, cluster_id: str, addresses: Mapping[BookieId, str]) -> LedgerClient:
        """Return a client of the memory bookies."""
        return LedgerClient(
            ledger_store=None,
            registry=None,
            bookies=MemoryBookieClient(self._cluster.bookies),
            config=LedgerClientConfig(),
            clock=ManualClock("scan"),
            rng=random.Random(0),
        )


class MemoryClients(ScanClients):
    """Reads by a plan without a metadata store, and asks a namespace when that fails."""

    def __init__(self, cluster: MemoryCluster, namespace: DirectNamespace) -> None:
        super().__init__()
        self.ledgers = MemoryLedgers(cluster)
        self._namespace = namespace

    async def fresh_context(self, uri: str) -> LogContext:
        """Return the one of the test."""
        return self._namespace.log_context


def forget_ledgers(cluster: MemoryCluster) -> int:
    """Let bookies drop the entries of ledgers that are deleted; return how many ledgers went."""
    there = stored_ledgers(cluster).keys()
    gone: set[int] = set()
    for bookie in cluster.bookies:
        for ledger_id in bookie._ledgers.keys() - there:
            del bookie._ledgers[ledger_id]
            gone.add(ledger_id)
    return len(gone)


async def scan_all(
    scene: Scene,
    snapshot: LogSnapshot,
    *,
    after: int = -1,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
) -> list[tuple[DLSN, int, int, int, bytes]]:
    """Return the rows of a snapshot; `meanwhile` runs once `after` batches were read."""
    rows: list[tuple[DLSN, int, int, int, bytes]] = []
    clients = MemoryClients(scene.cluster, await scene.cluster.open("scan"))
    scans = snapshot.scans(snapshot.first, snapshot.end)
    count = 0
    async for each in scan(scans, uri="memory", clients=clients):
        for row, (txid, payload) in enumerate(
            zip(each.batch.column(0).to_pylist(), each.batch.column(1).to_pylist(), strict=True)
        ):
            dlsn = DLSN(each.lssn, each.entry_id, each.first_slot + row)
            rows.append((dlsn, txid, each.sequence_id + row, each.timestamp_ms, payload))
        count += 1
        if count == after and meanwhile is not None:
            await meanwhile()
    return rows


def as_rows(records: list[LogRecordWithDLSN]) -> list[tuple[DLSN, int, int, int, bytes]]:
    """Return records as `scan_all` does."""
    return [(r.dlsn, r.txid, r.sequence_id, r.timestamp_ms, r.payload) for r in records]


@pytest.mark.parametrize("after", [1, 7, 30, 59])
def test_a_scan_goes_on_when_its_ledgers_went(after: int) -> None:
    """It was planned before the merge, and reads the rest from where the records are now."""

    async def body(scene: Scene) -> None:
        snapshot = await scene.log.get_snapshot()
        expected = as_rows(await read_all(scene.log))

        async def merge() -> None:
            assert await scene.merger.merge(scene.log._log)
            await tidy(scene)
            assert forget_ledgers(scene.cluster)

        assert await scan_all(scene, snapshot, after=after, meanwhile=merge) == expected
        assert await scan_all(scene, snapshot) == expected  # all of its ledgers are gone
        assert await scan_all(scene, await scene.log.get_snapshot()) == expected

    on_scene(body)


@pytest.mark.parametrize("position", [0, 1, 25, 59])
def test_a_reader_goes_on_when_its_ledgers_went(position: int) -> None:
    """Wherever it was, it gives each record once, then follows the log."""

    async def body(scene: Scene) -> None:
        expected = await read_all(scene.log)
        other = await scene.cluster.open("reader", config=replace(CONFIG, read_ahead_bytes=1))
        async with await (await other.open_log("clicks")).open_reader() as reader:
            found = await reader.read_bulk(position, until_caught_up=True) if position else []
            assert await scene.merger.merge(scene.log._log)
            await tidy(scene)
            assert forget_ledgers(scene.cluster)
            while len(found) < len(expected):
                found += await reader.read_bulk(10)
        assert found == expected

    on_scene(body)


async def commit(scene: Scene) -> None:
    """Append some more: the head's version changes."""
    for _ in range(5):
        await scene.append()


async def truncate_some(scene: Scene) -> None:
    """Truncate within the segment that is being merged first."""
    await scene.log.truncate(DLSN(1, 9, 1))


async def truncate_all(scene: Scene) -> None:
    """Truncate all that there is: what is merged is about to be removed."""
    await scene.log.truncate((await scene.log.get_snapshot()).end)


async def remove(scene: Scene) -> None:
    """Complete the segment that is being merged, truncate it, and remove its nodes."""
    await write(scene)
    await scene.log.truncate(DLSN(2, 0, 0))
    assert (
        scene.cluster.tree.dump()
        .keys()
        .isdisjoint(
            scene.namespace.log_context.logs.paths_of(scene.log._log).chunk(1, n) for n in range(3)
        )
    )


async def delete(scene: Scene) -> None:
    """Delete the log."""
    await scene.log.delete()


async def create_again(scene: Scene) -> None:
    """Delete the log and make another one of the same name."""
    await scene.log.delete()
    await scene.namespace.create_log("clicks")


async def write(scene: Scene) -> None:
    """Open a writer, which completes the segment in progress, write, and leave it open."""
    writer = await scene.log.open_writer()
    await writer.write(LogRecord(scene.cluster.clocks["driver"].current_ms + 1_000, b"written"))


async def merge_too(scene: Scene) -> None:
    """Have another process merge all of it."""
    other = await scene.cluster.open("other merging", config=CONFIG)
    await merger_of(other).merge(scene.log._log)


async def expire(scene: Scene) -> None:
    """End the merging process's session: its node goes, and others take it for dead."""
    scene.cluster.stores[scene.merging_name].expire()
    context = scene.namespace.log_context
    await settle(context, await list_staged(context, MERGING_IDENTITY))


async def lose_reply(scene: Scene) -> None:
    """Apply the next request, and lose its answer."""
    scene.cluster.stores[scene.merging_name].lose_next_reply(applied=True)


async def lose_request(scene: Scene) -> None:
    """Lose the next request."""
    scene.cluster.stores[scene.merging_name].lose_next_reply(applied=False)


class CrashError(Exception):
    """The merging process dies here."""


async def crash(_: Scene) -> None:
    """Let the merging process die."""
    raise CrashError


CHANGES = (
    commit,
    truncate_some,
    truncate_all,
    remove,
    delete,
    create_again,
    write,
    merge_too,
    expire,
    lose_reply,
    lose_request,
    crash,
)


def expected_after(
    change: Callable[[Scene], Awaitable[None]], before: list[LogRecordWithDLSN]
) -> list[LogRecordWithDLSN]:
    """Return which of the records that were there stay."""
    if change is truncate_some:
        return [record for record in before if record.dlsn >= DLSN(1, 9, 1)]
    return [] if change in (truncate_all, create_again, remove) else before


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_anything_may_happen_at_any_step(change: Callable[[Scene], Awaitable[None]]) -> None:
    """Before requests of a merge in turn; then records, counts and ledgers are right.

    Each change comes before every `STRIDE`th request; together they cover all requests.
    """

    interrupt_at_each(Scene, change, appends=8)


def interrupt_at_each(
    scene: Callable[[MemoryCluster], Scene],
    change: Callable[[Scene], Awaitable[None]],
    *,
    appends: int,
) -> None:
    """Rewrite fresh scenes, each with `change` before another request, until there is none more."""

    async def body(at: int) -> bool:
        async with memory_cluster() as cluster:
            fresh = scene(cluster)
            await fresh.start(appends=appends)
            return await interrupt(fresh, change, at)

    at = 1 + CHANGES.index(change) % STRIDE
    while run_in_own_time(asyncio.wait_for(body(at), TIME_LIMIT_S)):
        at += STRIDE
    assert at > 10


async def interrupt(scene: Scene, change: Callable[[Scene], Awaitable[None]], at: int) -> bool:
    """Rewrite, with `change` before the request number `at`; return whether there was such one."""
    before = await read_all(scene.log)
    key = scene.log._log
    store = scene.store
    store.arm(at, lambda: change(scene))
    try:
        await scene.rewrite(key)
    except CrashError:
        await scene.merging.aclose()
        await scene.open_merging()
    except DLError:
        if change not in (expire, lose_request, lose_reply):
            raise
    was_reached = store.made >= at
    store.disarm()
    for _ in range(2):  # as it is, and once everything is rewritten and swept
        try:
            found = await read_all(await scene.namespace.open_log("clicks"))
        except LogNotFoundError:
            assert change is delete
        else:
            expected = expected_after(change, before) if was_reached else before
            assert found[: len(expected)] == expected
            has_more = was_reached and change in (commit, write, remove)
            assert len(found) > len(expected) if has_more else found == expected
        await scene.rewrite(key)
        await scene.tidy()
    scene.check()
    return was_reached
