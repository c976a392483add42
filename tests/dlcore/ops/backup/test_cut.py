"""The consistent copy of metadata: as of one transaction, out of readings that saw many.

Goal: whatever the readings saw of a namespace in use, its copy has the logs and commits of one
moment, counts extents right, and a cluster that is made of it reads the records of that moment.
Method: logs are written, appended to together, truncated, merged, renamed and deleted in memory,
and the tree is kept after each transaction.  By seeds, each reading takes each node from any tree
of its time; the copy is compared with the tree of its moment, and made a namespace again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from msgspec.structs import replace as changed

from dlcore.base.config import LogSettings
from dlcore.log.metadata.values import (
    Chunk,
    LogHead,
    LogMetadata,
    SegmentEnd,
    StagedLedger,
    StoredSettings,
)
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.log.upkeep.staged import drop_merged, list_staged, settle, settle_abandoned
from dlcore.metadata.binding import read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.port import Versioned
from dlcore.metadata.stored import decode, encode
from dlcore.ops.backup.archive import Export, ExportHeader
from dlcore.ops.backup.cut import NotKnownError, anchors_at, copy_of, moment_of
from dlcore.ops.backup.importing import import_namespace
from dlcore.ops.inspection import audit_ledgers, inspect_log
from dlcore.ops.upkeep.config import MergePolicy
from dlcore.ops.upkeep.merger import LogMerger
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.memory_namespace import (
    CONFIG,
    ManualClock,
    MemoryCluster,
    read_all,
    record,
)
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.metadata.port import Op
    from dlcore.ops.backup.cut import Copy, Reading
    from dlcore.wire.memory_bookies import MemoryBookie

PATHS = NamespacePaths("/dlog")
SMALL = replace(CONFIG, segment_bytes_max=3_000, entry_bytes=1_000)
POLICY = MergePolicy(
    large_weight=1_000_000,
    fan_in=4,
    run_weight_max=4_000_000,
    run_extents_max=100,
    run_ledgers_max=50,
)
LOGS = ("clicks", "views", "orders")
TIME_LIMIT_S = 120
HEAD = f"{PATHS.heads}/00/log"
HEADER = ExportHeader(
    root="/dlog", cluster_id="c", exported_ms=1, release="1", moment=1, logs=1, ledgers=1
)


class KeptTree(SimulatedTree):
    """A tree that keeps what it was after each transaction, by the transaction's number."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, dict[str, Versioned]] = {}

    def _apply(self, ops: Sequence[Op], session: int) -> None:
        super()._apply(ops, session)
        self.kept[len(self.kept) + 1] = {
            path: node for path, node in self.dump().items() if path != "/" and not node.session
        }


async def live(cluster: MemoryCluster) -> None:
    """Do everything to some logs that changes their metadata."""
    namespace = await cluster.open("driver", config=SMALL)
    for name in (*LOGS, "gone", "before"):
        await namespace.create_log(name)
    version = 0
    for turn in range(3):
        task = await cluster.open(f"task-{turn}", config=SMALL)
        writer = await task.open_staging_writer(identity="job")
        for _ in range(9):
            version += 1
            for number, name in enumerate((*LOGS, "gone")):
                rows = [b"%d-%d" % (version, number)] * (1 + version % 3)
                await writer.write_batch(name, pa.record_batch({"value": rows}))
            append = await namespace.begin_append("job", version)
            assert (await append.commit(await writer.stage())).committed
        await namespace.log_context.tidier.settled()
        await task.aclose()
        await settle(namespace.log_context, await list_staged(namespace.log_context, "job"))
        await _change(cluster, namespace, turn)


async def _change(cluster: MemoryCluster, namespace: DirectNamespace, turn: int) -> None:
    context = namespace.log_context
    merger = LogMerger(context, namespace.staging_owner, policy=POLICY, bytes_per_s=1e9)
    async with await namespace.open_log("clicks", config=SMALL) as log:
        async with await log.open_writer() as writer:
            await writer.write(record(cluster.clocks["driver"].now_ms() + 10_000, b"x" * 500))
        await log.update_settings(retention_s=None if turn == 1 else 1e6)
        await log.move_subscription("reader", dlsn=(await read_all(log))[turn].dlsn)
    await merger.merge(await context.logs.find("views"))
    async with await namespace.open_log("orders", config=SMALL) as log:
        await log.truncate((await read_all(log))[-3].dlsn)
        await namespace.log_context.tidier.settled()
    if turn == 1:
        await namespace.rename_log("before", "later")
        await namespace.delete_log("gone")
        await namespace.log_context.tidier.settled()
        await namespace.create_log("gone")


@cache
def lived() -> tuple[MemoryCluster, dict[int, dict[str, Versioned]]]:
    """Return a cluster that everything was done to, and the tree after each transaction."""
    tree = KeptTree()
    cluster = MemoryCluster(tree=tree)

    async def run() -> None:
        await cluster.start()
        await live(cluster)
        await cluster.aclose()

    run_in_own_time(asyncio.wait_for(run(), TIME_LIMIT_S))
    return cluster, tree.kept


def reading(
    rng: random.Random, kept: dict[int, dict[str, Versioned]], first: int, last: int
) -> dict[str, Versioned]:
    """Return what a reading between two transactions may have seen: each node at any time."""
    seen = {}
    for path in sorted({path for number in range(first, last + 1) for path in kept[number]}):
        node = kept[rng.randint(first, last)].get(path)
        if node is not None:
            seen[path] = node
    return seen


def is_anchor(path: str) -> bool:
    """Return whether a path is that of a head, or of a record of commits."""
    return any(
        path.startswith(f"{above}/") and path.count("/", len(above) + 1) == 1
        for above in (PATHS.heads, PATHS.commits)
    )


def anchors_of(nodes: Reading) -> dict[str, Versioned]:
    """Return the heads and records among nodes."""
    return {path: node for path, node in nodes.items() if is_anchor(path)}


def copied(rng: random.Random, at: int, *, spread: int = 12) -> Copy:
    """Return the copy that readings around a transaction give."""
    _, kept = lived()
    last = max(kept)
    times = sorted(rng.randint(max(1, at - spread), min(last, at + spread)) for _ in range(4))
    before = reading(rng, kept, times[0], times[1])
    early = anchors_of(reading(rng, kept, times[1], times[1]))
    moment = moment_of(before, early)
    late = anchors_of(reading(rng, kept, times[1], times[2]))
    after = reading(rng, kept, times[2], times[3])
    steady = {
        path
        for path, node in anchors_of(kept[times[0]]).items()
        if kept[times[3]].get(path) == node
    }
    anchors = anchors_at(PATHS, early, late, moment)
    copy = copy_of(PATHS, before, anchors, after, moment, steady)
    assert copy.left_out == (), "nothing is damaged"
    return copy


def referred(nodes: dict[str, bytes]) -> Counter[int]:
    """Return how many extents of live logs refer to each ledger."""
    counts: Counter[int] = Counter()
    dead = {
        path
        for path, value in nodes.items()
        if path.startswith(PATHS.heads)
        and path.count("/") == 4
        and decode(LogHead, value, source=path).deleted
    }
    for path, value in nodes.items():
        parts = path.removeprefix(f"{PATHS.heads}/").split("/")
        if not path.startswith(f"{PATHS.heads}/") or not value or len(parts) < 2:
            continue
        if f"{PATHS.heads}/{'/'.join(parts[:2])}" in dead:
            continue
        if len(parts) == 2:
            head = decode(LogHead, value, source=path)
            extents = head.segment.tail if head.segment is not None else ()
        elif len(parts) == 3 and parts[2].isdecimal():
            extents = decode(SegmentEnd, value, source=path).tail
        elif len(parts) == 4 and parts[2].isdecimal():
            extents = decode(Chunk, value, source=path).extents
        else:
            continue
        counts.update(extent.ledger_id for extent in extents)
    return counts


def may_differ(path: str) -> bool:
    """Whether a node may also be as it was a little earlier, or later if it was deleted."""
    return path.endswith("/settings") or "/subscribers" in path or "/retention/" in path


def check(copy: Copy, at: int) -> None:
    """Compare a copy with the tree right after a transaction."""
    _, kept = lived()
    truth = {path: node.value for path, node in kept[at].items()}
    dead = [path for path in truth if path.startswith(PATHS.heads) and path not in copy.nodes]
    for path in dead:
        head = "/".join(path.split("/")[:5])
        if path.count("/") > 3 and head in truth:
            is_dead = decode(LogHead, truth[head], source=head).deleted
            assert is_dead or may_differ(path), path
    for above in (PATHS.heads, PATHS.logs, PATHS.commits, PATHS.retained_logs):
        mine = {p: v for p, v in copy.nodes.items() if p.startswith(f"{above}/")}
        for path, value in mine.items():
            assert may_differ(path) or truth[path] == value, path
    names = {path for path in truth if path.startswith(PATHS.logs) and truth[path]}
    assert names == {
        path for path in copy.nodes if path.startswith(PATHS.logs) and copy.nodes[path]
    }
    counts = referred(dict(copy.nodes))
    assert counts == referred(truth)
    for path in copy.nodes:
        is_listed = path.startswith(f"{PATHS.ledgers}/") and path.count("/") == 5
        assert not is_listed or path in truth, path
    for ledger_id, count in counts.items():
        path = PATHS.staged_ledger(ledger_id)
        if path in truth:
            there = decode(StagedLedger, truth[path], source=path)
            assert there.extents >= count  # those of a deleted log are there, too
        if path in copy.nodes:
            assert decode(StagedLedger, copy.nodes[path], source=path).extents == count
        assert PATHS.ledger(ledger_id) in copy.nodes


def test_a_copy_is_of_one_moment() -> None:
    """By seeds, over readings that saw many moments; most give a copy."""
    _, kept = lived()
    rng = random.Random(7)
    made = 0
    tries = amount(2_000, sampled=60)
    for _ in range(tries):
        try:
            copy = copied(rng, rng.randint(40, max(kept)))
        except NotKnownError:
            continue
        check(copy, copy.moment)
        made += 1
    assert made > tries / 4


def test_one_transaction_later_all_is_known() -> None:
    """Whatever the next transaction changes, creates or removes: the copy is of before it."""
    _, kept = lived()
    for number in range(40, max(kept) - 1):
        before, after = kept[number], kept[number + 1]
        early, late = anchors_of(before), anchors_of(after)
        moment = moment_of(before)
        copy = copy_of(PATHS, before, anchors_at(PATHS, early, late, moment), after, moment)
        assert copy.moment <= number  # a deletion is no change of a node
        check(copy, number)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((1, 3, 5), (1, 3, 5), 5),  # unchanged
        ((1, 3, 5), (1, 4, 10), 10),  # changed before the cut
        ((1, 3, 5), (1, 4, 11), 5),  # changed once after it
        ((1, 3, 5), (1, 5, 12), None),  # changed twice
        ((1, 3, 5), (6, 4, 12), None),  # made anew
        (None, (11, 0, 11), "absent"),  # made after it
        (None, (8, 1, 12), None),
        (None, (8, 1, 10), 10),
        ((1, 3, 5), None, None),  # gone
    ],
)
def test_a_node_at_the_cut(
    old: tuple[int, int, int] | None, new: tuple[int, int, int] | None, expected: int | str | None
) -> None:
    """By creation, version and last change before and after transaction 10."""

    def seen(node: tuple[int, int, int] | None) -> dict[str, Versioned]:
        if node is None:
            return {}
        created, version, changed = node
        value = encode(LogHead())
        return {HEAD: Versioned(value, version, created=created, changed=changed)}

    if expected is None:
        with pytest.raises(NotKnownError, match=f"1 nodes changed meanwhile, such as {HEAD}"):
            anchors_at(PATHS, seen(old), seen(new), 10)
    else:
        found = anchors_at(PATHS, seen(old), seen(new), 10)
        assert {path: node.changed for path, node in found.items()} == (
            {} if expected == "absent" else {HEAD: expected}
        )


def copy_with(changes: Mapping[str, Versioned | None], *, is_steady: bool = False) -> Copy:
    """Return the copy that a tree gives which stays as it is, with changed and missing nodes.

    That the heads did not change meanwhile is known if it `is_steady`.
    """
    _, kept = lived()
    nodes: dict[str, Any] = {**kept[max(kept)], **changes}
    nodes = {path: node for path, node in nodes.items() if node is not None}
    anchors = anchors_of(nodes)
    steady = anchors if is_steady else ()
    return copy_of(PATHS, nodes, anchors, nodes, moment_of(nodes), steady)


def below_heads(slashes: int) -> dict[str, Versioned]:
    """Return segments, or chunks, of the last tree that its copy has."""
    _, kept = lived()
    copy = copy_with({})
    return {
        path: kept[max(kept)][path]
        for path in copy.nodes
        if path.startswith(f"{PATHS.heads}/")
        and path.count("/") == slashes
        and path.split("/")[5].isdecimal()
    }


def refused(changes: Mapping[str, Versioned | None]) -> tuple[str, ...]:
    """Return the nodes for which changed nodes ask for other readings.

    If it is known that the heads did not change, the log is left out for the same reason.
    """
    try:
        copy_with(changes)
    except NotKnownError as error:
        paths = error.paths
    else:
        return ()
    (left_out,) = copy_with(changes, is_steady=True).left_out
    assert paths[0] in left_out.reason
    assert "missing, or does not fit" in left_out.reason
    return paths


def with_value(node: Versioned, value: bytes) -> Versioned:
    """Return a node with another value."""
    return replace(node, value=value)


def test_readings_that_do_not_fit_are_taken_again() -> None:
    """A chunk or segment that is missing or does not follow, a log without name, another server."""
    chunks, segments = below_heads(6), below_heads(5)
    ends = {path: node for path, node in segments.items() if node.value}
    assert all(refused({path: None}) == (path,) for path in [*chunks, *ends])
    assert all(refused({path: with_value(node, b"")}) == (path,) for path, node in ends.items())
    moved: set[str] = set()
    for path, node in chunks.items():
        chunk = decode(Chunk, node.value, source=path)
        other = changed(chunk, first_entry_id=chunk.first_entry_id + 1)
        moved.update(refused({path: with_value(node, encode(other))}))
    assert moved & chunks.keys()
    longer: set[str] = set()
    for path, node in ends.items():
        end = decode(SegmentEnd, node.value, source=path)
        long = changed(end, chunked=changed(end.chunked, entries=end.chunked.entries + 1))
        longer.update(refused({path: with_value(node, encode(long))}))
    assert longer & ends.keys()
    _, kept = lived()
    names = [path for path, node in kept[max(kept)].items() if "/logs/" in path and node.value]
    assert all("/heads/" in refused({path: None})[0] for path in names)
    nodes = kept[max(kept)]
    again = nodes | {PATHS.root: replace(nodes[PATHS.root], created=10**9)}
    with pytest.raises(NotKnownError, match=PATHS.root):
        copy_of(PATHS, nodes, anchors_of(nodes), again, moment_of(nodes))


def logs_in(copy: Copy) -> set[str]:
    """Return the names of the logs of a copy."""
    prefix = f"{PATHS.logs}/"
    return {
        decode(LogMetadata, value, source=path).name
        for path, value in copy.nodes.items()
        if path.startswith(prefix) and value
    }


def test_a_damaged_log_is_left_out() -> None:
    """Nothing of it is there, all others are whole, and the reason names the node."""
    whole = copy_with({})
    assert whole.left_out == ()
    chunk, node = next(iter(below_heads(6).items()))
    head = "/".join(chunk.split("/")[:5])
    for path in (chunk, head):
        copy = copy_with({path: with_value(node, b"?")})
        (left_out,) = copy.left_out
        assert path in left_out.reason
        assert logs_in(copy) == logs_in(whole) - {left_out.log}
        assert copy.logs == whole.logs - 1
        assert not [each for each in copy.nodes if each.startswith(head)]
        others = {each for each in whole.nodes if each.startswith(f"{PATHS.heads}/")}
        assert {each for each in others if not each.startswith(head)} <= copy.nodes.keys()
        assert whole.ledgers == copy.ledgers, "what refers to them is not known"


def test_a_damaged_name_is_reported() -> None:
    """By itself, and by the id of the log that has no name then."""
    whole = copy_with({})
    path = next(
        path for path, value in whole.nodes.items() if path.startswith(f"{PATHS.logs}/") and value
    )
    log = decode(LogMetadata, whole.nodes[path], source=path)
    copy = copy_with({path: Versioned(b"?", 0)}, is_steady=True)
    assert [each.log for each in copy.left_out] == sorted([log.name, f"id {log.log_id}"])
    assert logs_in(copy) == logs_in(whole) - {log.name}


def test_damage_beside_the_segments_stays_as_it_is() -> None:
    """Settings and staged ledgers are copied; a retention stays listed, and a ledger stays."""
    whole = copy_with({})
    head = next(path for path in whole.nodes if is_anchor(path) and "/heads/" in path)
    settings, damaged = f"{head}/settings", Versioned(b"?", 0)
    copy = copy_with({settings: damaged})
    assert copy.nodes[settings] == b"?"
    assert PATHS.retained_log(head.rpartition("/")[2]) in copy.nodes
    staged = [path for path in whole.nodes if path.endswith("/staged")]
    assert staged
    for path in staged:
        copy = copy_with({path: damaged})
        assert copy.nodes[path] == b"?"
        assert path.removesuffix("/staged") in copy.nodes


def test_a_damaged_head_may_be_removed_meanwhile() -> None:
    """By `dlog log delete --damaged`."""
    head = {HEAD: Versioned(b"?", 0)}
    assert anchors_at(PATHS, head, {}, 5) == {}


def test_nodes_that_go_without_harm() -> None:
    """Old records of commits; a retention is listed only where the settings have one."""
    assert anchors_at(PATHS, {PATHS.commit("job"): Versioned(b"", 0)}, {}, 5) == {}
    head = next(path for path in copy_with({}).nodes if is_anchor(path) and "/heads/" in path)
    settings = encode(StoredSettings(settings=LogSettings(compression="zstd")))
    path = f"{head}/settings"
    assert copy_with({path: Versioned(settings, 0)}).nodes[path] == settings


async def _restored(bookies: list[MemoryBookie], nodes: Mapping[str, bytes]) -> MemoryCluster:
    """Return a cluster with imported metadata and the bookies of another one, which it lists."""
    cluster = MemoryCluster(bookies=bookies)
    store = cluster.tree.connect()
    export = Export(HEADER, {path.removeprefix("/dlog"): value for path, value in nodes.items()})
    await import_namespace(store, PATHS, ManualClock("import"), export)
    cluster.cluster_id = (await read_binding(store, PATHS)).cluster_id
    return cluster


async def _use(cluster: MemoryCluster) -> None:
    """Read all that a restored cluster has, append to it, and delete it: nothing may be left."""
    namespace = await cluster.open("reader", config=SMALL)
    context = namespace.log_context
    await settle_abandoned(context, created_before_ms=2**62)
    audit = await audit_ledgers(context, report=lambda *_: None)
    assert (audit.missing, audit.damaged) == ({}, {})
    for name in await namespace.get_logs():
        async with await namespace.open_log(name, config=SMALL) as log:
            async with await log.open_writer() as writer:  # it recovers what was open
                await writer.write(record(2**50, b"after"))
            assert (await read_all(log))[-1].payload == b"after"
            found = await inspect_log(context, name, reads_entries=True)
            # A truncation was in progress; the next truncation, or a worker, removes what it left.
            assert all(each.detail.startswith("extents of segment") for each in found)
            await remove_truncated(context, await context.logs.read(log._log))
        assert await inspect_log(context, name, reads_entries=True) == []
        await namespace.delete_log(name)
    await namespace.log_context.tidier.settled()
    await drop_merged(context, grace_ms=-1)
    left = await audit_ledgers(context, report=lambda *_: None)
    assert left.ledgers == len(left.orphans)
    assert set(left.orphans) <= set(audit.orphans)


@pytest.mark.parametrize("seed", range(amount(60, sampled=4)))
def test_a_restored_cluster_is_whole(seed: int) -> None:
    """A copy of any moment is whole: nothing is missing, everything can be read, nothing stays."""
    original, kept = lived()
    rng = random.Random(seed)

    async def run() -> None:
        while True:
            try:
                copy = copied(rng, rng.randint(40, max(kept)), spread=3)
            except NotKnownError:
                continue
            break
        cluster = await _restored(original.bookies, copy.nodes)
        await _use(cluster)
        await cluster.aclose()

    run_in_own_time(asyncio.wait_for(run(), TIME_LIMIT_S))
