"""Segments that became cold after an export are found by their objects.

Method: a namespace in memory is exported, tiers more, and is rebuilt out of the older export and
the objects; what an export of later would give is what must come out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from msgspec.structs import replace

from dlcore.base.config import LogSettings
from dlcore.base.ids import DLSN
from dlcore.ops.backup.adopting import FoundObject, adopted
from dlcore.ops.backup.in_store import listed_objects, unnamed_objects
from dlcore.ops.backup.rebuilding import LostRange, rebuilt
from dlcore.ops.upkeep.tier_visits import LogVisits
from tests.dlcore.ops.backup.test_rebuilding import (
    SKIPPED,
    check_goes_on,
    export_of,
    make_segments,
    restore,
)
from tests.dlcore.ops.upkeep.test_tierer import TIER, TierScene, complete, on_tier_scene
from tests.fixtures.memory_namespace import read_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.cold.facts import ObjectFacts
    from dlcore.ops.backup.archive import Export


async def found_since(scene: TierScene, export: Export) -> list[FoundObject]:
    """Return the objects that the export does not name."""
    listed = await listed_objects(scene.objects, export)
    return await unnamed_objects(scene.namespace.log_context.cold, export, listed)


async def write_segments(scene: TierScene, count: int) -> None:
    """Make more segments."""
    for _ in range(count):
        for _ in range(3):
            await scene.append()
        await complete(scene)
    await scene.close_staging()


async def tier_more(scene: TierScene, hot: Sequence[int] = ()) -> list[LogRecordWithDLSN]:
    """Tier what is completed, but for some segments; return all records that are cold."""
    scene.pass_time()
    scene.tierer._known[scene.log.log_id] = LogVisits(settled={*hot})
    await scene.tier()
    segments = await scene.log.get_log_segments()
    cold = {s.lssn for s in segments if all(extent.is_cold for extent in s.extents)}
    return [record for record in await read_all(scene.log) if record.dlsn.lssn in cold]


@pytest.mark.parametrize("before", [(), (1, 2, 3, 4), (2, 3)])
def test_all_that_became_cold_since(before: Sequence[int]) -> None:
    """Known segments, and later ones; nothing is lost."""

    async def body(scene: TierScene) -> None:
        await make_segments(scene, hot=before)
        export = await export_of(scene)
        await write_segments(scene, 2)
        records = await tier_more(scene)
        found = await found_since(scene, export)
        later = adopted(scene.cluster.paths, export, found)
        other, restored = await restore(scene, later)
        assert restored.lost == ()
        assert restored.next_position == DLSN(7 + SKIPPED, 0, 0)
        await check_goes_on(other, restored, records)

    on_tier_scene(body, appends=3)


def test_segments_that_stayed_on_bookies_are_named() -> None:
    """One that the export knows, and one that only the next one's sequence id shows."""

    async def body(scene: TierScene) -> None:
        await make_segments(scene, hot=(2, 4))
        export = await export_of(scene)
        await write_segments(scene, 3)
        records = await tier_more(scene, hot=(2, 6))
        later = adopted(scene.cluster.paths, export, await found_since(scene, export))
        other, restored = await restore(scene, later)
        assert restored.lost == tuple(LostRange(DLSN(n, 0, 0), DLSN(n + 1, 0, 0)) for n in (2, 6))
        await check_goes_on(other, restored, records)

    on_tier_scene(body, appends=3)


@pytest.mark.parametrize("is_more", [True, False])
def test_a_segment_that_was_in_progress(is_more: bool) -> None:
    """It ended later and became cold, or stayed."""

    async def body(scene: TierScene) -> None:
        await make_segments(scene, count=2, hot=(1,))
        for _ in range(12):
            await scene.append()
        export = await export_of(scene)
        await scene.append()
        await complete(scene)
        await scene.close_staging()
        records = await tier_more(scene, hot=() if is_more else (3,))
        later = adopted(scene.cluster.paths, export, await found_since(scene, export))
        other, restored = await restore(scene, later)
        assert restored.lost == (() if is_more else (LostRange(DLSN(3, 0, 0), None),))
        await check_goes_on(other, restored, records)

    on_tier_scene(body, appends=3)


@pytest.mark.parametrize("place", ["first", "last"])
def test_an_object_that_is_not_there(place: str) -> None:
    """The rest of the segment is lost, and named; the rest of the log is not."""

    async def body(scene: TierScene) -> None:
        await scene.close_staging()
        await write_segments(scene, 1)
        export = await export_of(scene)
        records = await tier_more(scene)
        found = await found_since(scene, export)
        of_first = [each for each in found if each.facts.lssn == 1]
        of_first.sort(key=lambda each: each.facts.first_entry)
        assert len(of_first) > 2
        gone = of_first[0 if place == "first" else -1]
        scene.objects.stored.pop(gone.url)
        found.remove(gone)
        other, restored = await restore(scene, adopted(scene.cluster.paths, export, found))
        at = gone.facts.first_entry
        lost = LostRange(DLSN(1, at, 0), DLSN(2, 0, 0))
        assert restored.lost == (lost,)
        kept = [r for r in records if not lost.start <= r.dlsn < DLSN(2, 0, 0)]
        assert 0 < len(kept) < len(records)
        await check_goes_on(other, restored, kept)

    on_tier_scene(body)


def test_the_end_of_a_segment_that_the_export_does_not_know() -> None:
    """It lacks by the next one's sequence id; a ledger of a dead worker reaches less far."""

    async def body(scene: TierScene) -> None:
        await make_segments(scene, count=1)
        export = await export_of(scene)
        for _ in range(30):
            await scene.append()
        await complete(scene)
        await write_segments(scene, 1)
        records = await tier_more(scene)
        found = await found_since(scene, export)
        of_second = [each for each in found if each.facts.lssn == 2]
        of_second.sort(key=lambda each: each.facts.first_entry)
        assert len(of_second) > 2
        folder = of_second[0].url.rpartition("/")[0]
        short = of_second[0]._replace(url=f"{folder}/999-dead-0-1.parquet")
        whole = adopted(scene.cluster.paths, export, [short, *found])
        other, restored = await restore(scene, whole)
        assert restored.lost == ()
        await check_goes_on(other, restored, records)
        gone = of_second[-1]
        found.remove(gone)
        other, restored = await restore(scene, adopted(scene.cluster.paths, export, found))
        lost = LostRange(DLSN(2, gone.facts.first_entry, 0), DLSN(3, 0, 0))
        assert restored.lost == (lost,)
        kept = [r for r in records if not lost.start <= r.dlsn < DLSN(3, 0, 0)]
        await check_goes_on(other, restored, kept)

    on_tier_scene(body, appends=3)


def test_leftovers_are_no_second_copy() -> None:
    """Objects that were written twice, of another cluster, truncated ones, and of other names."""

    async def body(scene: TierScene) -> None:
        await scene.close_staging()
        await write_segments(scene, 2)
        await scene.log.truncate(DLSN(2, 0, 0))
        await scene.namespace.log_context.tidier.settled()
        export = await export_of(scene)
        scene.objects.failing = {"put_new": ["answer lost"]}
        records = await tier_more(scene)
        found = await found_since(scene, export)
        foreign = [
            each._replace(facts=_changed(each, cluster_id="other"), url=each.url + "2")
            for each in found
        ]
        truncated = [each._replace(facts=_changed(each, lssn=1)) for each in found]
        odd = [each._replace(url=f"{each.url}/notes.txt") for each in found]
        schema = [each._replace(facts=_changed(each, schema_id=7)) for each in found]
        unknown = [each._replace(facts=_changed(each, log_id="unknown")) for each in found]
        found = [*foreign, *truncated, *odd, *schema, *unknown, *found]
        other, restored = await restore(scene, adopted(scene.cluster.paths, export, found))
        assert restored.lost == ()
        await check_goes_on(other, restored, records)
        none = adopted(scene.cluster.paths, export, [*odd, *truncated])
        assert none == export

    on_tier_scene(body, appends=3)


def _changed(found: FoundObject, **changes: object) -> ObjectFacts:
    return replace(found.facts, **changes)


def test_versions_of_a_schema_that_the_export_does_not_know() -> None:
    """Their objects cannot be read by the schema of then, and are left out."""

    async def body(scene: TierScene) -> None:
        first = pa.schema([("city", pa.string())])
        settings = LogSettings(tier=TIER, tier_after_s=0)
        await scene.namespace.create_log("rides", schema=first, settings=settings)
        log = await scene.namespace.open_log("rides")

        async def write(columns: dict[str, list[object]], schema: pa.Schema) -> None:
            async with await log.open_writer() as writer:
                await writer.write_batch(pa.RecordBatch.from_pydict(columns, schema))

        await write({"city": ["Bern"]}, first)
        await make_segments(scene, count=2)  # it notes the tier
        export = await export_of(scene)
        more = first.append(pa.field("fare", pa.float64()))
        await log.update_schema(more)
        await write({"city": ["Genf"], "fare": [1.0]}, more)
        scene.pass_time()
        assert await scene.tierer.tier(log._log) == 2
        found = await found_since(scene, export)
        assert [each.facts.schema_id for each in found] == [1, 2]
        later = adopted(scene.cluster.paths, export, found)
        restored = rebuilt(scene.cluster.paths, later, segments_skipped=SKIPPED)
        assert {log.name: (log.records, log.lost) for log in restored.logs}["rides"] == (1, ())

    on_tier_scene(body, appends=3)
