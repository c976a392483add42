"""Namespaces whose bookies are lost keep the records that are in objects, and their numbers.

Method: a namespace in memory is exported, rebuilt and imported into another one over the same
objects, whose bookies are empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import LogSettings
from dlcore.base.errors import ConfigurationError, CorruptMetadataError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.metadata.paths import NamespacePaths
from dlcore.ops.backup.archive import Export, packed
from dlcore.ops.backup.exporting import export_namespace
from dlcore.ops.backup.importing import import_namespace
from dlcore.ops.backup.in_store import (
    chosen_export,
    listed_objects,
    missing_objects,
    put_export,
    without_objects,
)
from dlcore.ops.backup.rebuilding import LostRange, RebuiltLog, rebuilt
from dlcore.ops.inspection import inspect_log
from dlcore.ops.upkeep.tier_visits import LogVisits
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.dlcore.ops.upkeep.test_forks import write_one
from tests.dlcore.ops.upkeep.test_merger import check_ledgers
from tests.dlcore.ops.upkeep.test_tierer import (
    CONFIG_OF_TIERS,
    TierScene,
    check_objects,
    complete,
    is_cold,
    on_tier_scene,
)
from tests.fixtures.memory_namespace import ManualClock, MemoryCluster, read_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.records import LogRecordWithDLSN

SKIPPED = 3
CLOCK = ManualClock("backup", now_ms=2_000_000_000_000)


async def make_segments(
    scene: TierScene, *, count: int = 4, hot: Sequence[int] = ()
) -> list[LogRecordWithDLSN]:
    """Make segments of a log, and tier all but some; return the records."""
    for _ in range(count - 1):
        for _ in range(3):
            await scene.append()
        await complete(scene)
    await scene.close_staging()
    scene.pass_time()
    scene.tierer._known[scene.log.log_id] = LogVisits(settled={*hot})
    await scene.tier()
    assert await is_cold(scene) == [lssn not in hot for lssn in range(1, count + 1)]
    return await read_all(scene.log)


async def export_of(scene: TierScene) -> Export:
    """Return an export."""
    cluster = scene.cluster
    return (await export_namespace(cluster.tree.connect(), cluster.paths, CLOCK))[0]


async def restore(scene: TierScene, export: Export) -> tuple[MemoryCluster, RebuiltLog]:
    """Return another cluster over the same objects, and the report of the log."""
    made = rebuilt(scene.cluster.paths, export, segments_skipped=SKIPPED)
    assert missing_objects(made.export, await listed_objects(scene.objects, export)) == []
    other = MemoryCluster(seed=1, objects=scene.objects)
    await import_namespace(other.tree.connect(), other.paths, CLOCK, made.export)
    await other.start()
    assert other.cluster_id == scene.cluster.cluster_id
    (log,) = made.logs
    assert log.name == "clicks"
    return other, log


async def check_goes_on(
    other: MemoryCluster, reported: RebuiltLog, kept: list[LogRecordWithDLSN]
) -> None:
    """Require the records at their positions, and that new ones follow with new positions."""
    namespace = await other.open("other")
    log = await namespace.open_log("clicks")
    assert [(r.dlsn, r.txid, r.payload) for r in await read_all(log)] == [
        (r.dlsn, r.txid, r.payload) for r in kept
    ]
    assert reported.records == len(kept)
    assert kept == [] or await log.get_first_dlsn() == kept[0].dlsn
    assert await inspect_log(namespace.log_context, "clicks", reads_entries=True) == []
    async with await log.open_writer() as writer:
        await writer.write(LogRecord(2**60, b"new"))
    *_, last = await read_all(log)
    assert (last.payload, last.dlsn) == (b"new", reported.next_position)
    assert await log.get_log_record_count() == len(kept) + 1
    await LogUpkeep.of(namespace, CONFIG_OF_TIERS).sweep()
    assert len(await read_all(log)) == len(kept) + 1
    await other.aclose()


@pytest.mark.parametrize(
    ("hot", "lost"),
    [
        ((), []),
        ((4,), [LostRange(DLSN(4, 0, 0), DLSN(5, 0, 0))]),
        ((2, 3), [LostRange(DLSN(2, 0, 0), DLSN(4, 0, 0))]),
        ((1, 2), [LostRange(DLSN(1, 0, 0), DLSN(3, 0, 0))]),
        ((1, 3), [LostRange(DLSN(n, 0, 0), DLSN(n + 1, 0, 0)) for n in (1, 3)]),
        ((1, 2, 3, 4), [LostRange(DLSN(1, 0, 0), DLSN(5, 0, 0))]),
    ],
)
def test_segments_that_were_on_bookies(hot: Sequence[int], lost: list[LostRange]) -> None:
    """At the end, in the middle, at the beginning, and all."""

    async def body(scene: TierScene) -> None:
        records = await make_segments(scene, hot=hot)
        other, restored = await restore(scene, await export_of(scene))
        assert restored.lost == tuple(lost)
        assert restored.next_position == DLSN(5 + SKIPPED, 0, 0)
        kept = [record for record in records if record.dlsn.lssn not in hot]
        await check_goes_on(other, restored, kept)

    on_tier_scene(body, appends=3)


def test_a_segment_in_progress_and_one_that_is_partly_cold() -> None:
    """The first has chunks, of which all is lost; of the other one the beginning stays."""

    async def body(scene: TierScene) -> None:
        await scene.close_staging()
        scene.pass_time()
        assert await scene.tier() == 2
        records = await read_all(scene.log)
        for _ in range(12):
            await scene.append()
        export = await export_of(scene)
        other, restored = await restore(scene, export)
        assert restored.lost == (LostRange(DLSN(2, 0, 0), None),)
        assert str(restored.lost[0]) == "2:0:0 and all after it"
        await check_goes_on(other, restored, records)
        (segment,) = [s for s in await scene.log.get_log_segments() if s.lssn == 1]
        gone = scene.cluster.paths.ledger(segment.extents[-1].ledger_id)
        nodes = {p: v for p, v in export.nodes.items() if f"/dlog{p}" != gone}
        other, restored = await restore(scene, Export(export.header, nodes))
        entries = segment.extents[0].entry_count
        assert restored.lost == (LostRange(DLSN(1, entries, 0), None),)
        kept = [record for record in records if record.dlsn < DLSN(1, entries, 0)]
        assert 0 < len(kept) < len(records)
        await check_goes_on(other, restored, kept)

    on_tier_scene(body)


def test_truncated_renamed_and_sealed_logs() -> None:
    """Truncated records stay so; a sealed log takes no more; a name is the present one."""

    async def body(scene: TierScene) -> None:
        records = await make_segments(scene, hot=(4,))
        await scene.log.truncate(DLSN(2, 1, 0))
        await scene.log.mark_end_of_stream()
        await scene.namespace.rename_log("clicks", "old")
        made = rebuilt(scene.cluster.paths, await export_of(scene))
        assert [log.name for log in made.logs] == ["old"]
        other = MemoryCluster(seed=1, objects=scene.objects)
        await import_namespace(other.tree.connect(), other.paths, CLOCK, made.export)
        await other.start()
        log = await (await other.open("other")).open_log("old")
        kept = [r for r in records if DLSN(2, 1, 0) <= r.dlsn < DLSN(4, 0, 0)]
        assert await read_all(log) == kept
        assert await log.is_end_of_stream_marked()
        check_ledgers(other)
        await other.aclose()

    on_tier_scene(body, appends=3)


def test_logs_without_records() -> None:
    """Never written, and all truncated: they begin after all numbers that may have been given."""

    async def body(scene: TierScene) -> None:
        await scene.log.truncate((await scene.log.get_snapshot()).end)
        await scene.namespace.create_log("empty")
        made = rebuilt(scene.cluster.paths, await export_of(scene), segments_skipped=SKIPPED)
        assert made.logs == (
            RebuiltLog("clicks", 0, (), DLSN(2 + SKIPPED, 0, 0)),
            RebuiltLog("empty", 0, (), DLSN(1 + SKIPPED, 0, 0)),
        )
        other = MemoryCluster(seed=1, objects=scene.objects)
        await import_namespace(other.tree.connect(), other.paths, CLOCK, made.export)
        await other.start()
        scene.namespace = await other.open("other")
        for found in made.logs:
            await write_one_in(scene, found)
        await other.aclose()

    on_tier_scene(body, appends=3)


async def write_one_in(scene: TierScene, log: RebuiltLog) -> None:
    """Write a record, and require its position."""
    await write_one(scene, log.name)
    (record,) = await read_all(await scene.namespace.open_log(log.name))
    assert record.dlsn == log.next_position


def test_forks_share_their_objects_again() -> None:
    """Counts are those of the extents that remain, and each of the two is deleted by itself."""

    async def body(scene: TierScene) -> None:
        records = await make_segments(scene)
        await scene.namespace.fork_log("clicks", "test", at=DLSN(3, 2, 0))
        # The first segment is truncated, and still stored; the restored log leaves it out.
        await scene.log.update_settings(retention_s=1e6, explicit_truncation=True)
        await scene.log.truncate(DLSN(2, 0, 0))
        await scene.namespace.log_context.tidier.settled()
        export = await export_of(scene)
        made = rebuilt(scene.cluster.paths, export, segments_skipped=SKIPPED)
        other = MemoryCluster(seed=1, objects=scene.objects)
        await import_namespace(other.tree.connect(), other.paths, CLOCK, made.export)
        await other.start()
        check_ledgers(other, filled=0)
        namespace = await other.open("other")
        await namespace.delete_log("clicks")
        await namespace.log_context.store.delete(other.paths.restored)
        clock = other.clocks["other"]
        clock.current_ms = scene.objects.now_ms = scene.objects.now_ms + 10**9
        await LogUpkeep.of(namespace, CONFIG_OF_TIERS).sweep()
        found = await read_all(await namespace.open_log("test"))
        assert found == [record for record in records if record.dlsn < DLSN(3, 2, 0)]
        check_objects(other)
        await other.aclose()

    on_tier_scene(body, appends=3)


def test_damaged_exports() -> None:
    """The error names the node."""
    paths = NamespacePaths("/dlog")

    async def body(scene: TierScene) -> None:
        export = await export_of(scene)
        head = scene.cluster.paths.log_of(scene.log.log_id).head
        nodes = {**export.nodes, head.removeprefix("/dlog"): b"damaged"}
        with pytest.raises(CorruptMetadataError, match=head):
            rebuilt(paths, Export(export.header, nodes))

    on_tier_scene(body, appends=2)


def test_the_chosen_export_in_a_store() -> None:
    """By time; of one cluster, which is chosen if there are several; without keys."""

    async def body(scene: TierScene) -> None:
        objects, url = scene.objects, "s3://bucket/exports"
        with pytest.raises(ConfigurationError, match="no export below s3://bucket/exports/meta"):
            await chosen_export(objects, url)
        export = await export_of(scene)
        keys = {**export.nodes, "/capability-keys": b"secret"}
        CLOCK.current_ms += 1
        later = await export_of(scene)
        await put_export(objects, url, later)
        at = await put_export(objects, f"{url}/", Export(export.header, keys))
        assert b"secret" not in objects.stored[at]
        await objects.put_new(f"{url}/metadata/notes.txt", b"not dlog's")
        assert await chosen_export(objects, url) == later
        cluster_id = export.header.cluster_id
        await objects.put_new(f"{url}/metadata/more/{'9' * 15}-1.dlog", packed(export))
        with pytest.raises(ConfigurationError, match=r"of 2 clusters, .*more.* by --cluster"):
            await chosen_export(objects, url)
        assert await chosen_export(objects, url, cluster_id=cluster_id) == later
        with pytest.raises(ConfigurationError, match="no export of cluster none"):
            await chosen_export(objects, url, cluster_id="none")

    on_tier_scene(body, appends=2)


def test_objects_that_are_missing_or_cut() -> None:
    """They are found by one list."""

    async def body(scene: TierScene) -> None:
        await make_segments(scene)
        # A log that opted out of a tier for all names no store.
        await scene.namespace.create_log("hot", settings=LogSettings(tier="none"))
        export = await export_of(scene)
        first, second, *_ = sorted(scene.objects.stored)
        scene.objects.stored[first] = scene.objects.stored[first][:-1]
        del scene.objects.stored[second]
        listed = await listed_objects(scene.objects, export)
        assert missing_objects(export, listed) == [first, second]

    on_tier_scene(body, appends=3)


def test_records_of_missing_objects_are_lost() -> None:
    """Those of their segments from there on; the other segments stay."""

    async def body(scene: TierScene) -> None:
        records = await make_segments(scene)
        export = await export_of(scene)
        (segment,) = [s for s in await scene.log.get_log_segments() if s.lssn == 2]
        gone = f"/{segment.extents[0].ledger_id}-"
        missing = [url for url in scene.objects.stored if gone in url]
        assert missing
        for url in missing:
            del scene.objects.stored[url]
        other, restored = await restore(scene, without_objects(export, missing))
        assert restored.lost == (LostRange(DLSN(2, 0, 0), DLSN(3, 0, 0)),)
        await check_goes_on(other, restored, [r for r in records if r.dlsn.lssn != 2])

    on_tier_scene(body, appends=3)
