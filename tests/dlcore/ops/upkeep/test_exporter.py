"""Periodic exports in memory: when they are made, what stays, and what a failure leaves."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError, CorruptMetadataError, ObjectStoreError
from dlcore.base.metrics import Durations
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.metrics import RecoveryFigures
from dlcore.ops.backup.in_store import chosen_export
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.dlcore.ops.upkeep.test_tierer import TierScene, on_tier_scene

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PLACE = "s3://bucket/exports"
CONFIG = UpkeepConfig(export=PLACE, export_every_s=60, export_keep=3)


class Exporting:
    """Workers that export the metadata of a scene, and their store."""

    def __init__(self, scene: TierScene) -> None:
        self.scene = scene
        self.figures = RecoveryFigures()
        self.context = scene.merging.log_context
        self.repairs = RepairList(self.context.store, self.context.paths, self.context.clock)

    def worker(self, config: UpkeepConfig = CONFIG) -> LogUpkeep:
        """Return one more worker."""
        return LogUpkeep(self.context, self.scene.merging.staging_owner, config, self.figures)

    def exports(self) -> list[str]:
        """Return the URLs of what is below the place, oldest first."""
        return sorted(each for each in self.scene.objects.stored if each.startswith(PLACE))

    def shown(self) -> dict[str, float]:
        """Return the samples about exports."""
        return {
            each.metric.name.removeprefix("dlog_autorecovery_export_"): float(each.value)
            for each in self.figures.samples()
            if "export" in each.metric.name and not isinstance(each.value, Durations)
        }


def on_exporting(body: Callable[[Exporting], Awaitable[None]]) -> None:
    """Run `body` on a namespace with one log."""

    async def run(scene: TierScene) -> None:
        await body(Exporting(scene))

    on_tier_scene(run, appends=2)


def test_one_is_made_when_it_is_due() -> None:
    """By one of two workers; the oldest go, and what others put there stays."""

    async def body(at: Exporting) -> None:
        first, second = at.worker(), at.worker()
        await at.scene.objects.put_new(f"{PLACE}/metadata/notes.txt", b"not dlog's")
        assert await first.export()
        assert [await each.export() for each in (first, second)] == [False, False]
        made = [at.exports()[0]]
        for number in range(4):
            at.scene.pass_time(50_000)
            assert not await first.export()
            at.scene.pass_time(10_000)
            assert await (first, second)[number % 2].export()
            made += [each for each in at.exports() if each not in made and "notes" not in each]
        assert at.exports() == [*made[-3:], f"{PLACE}/metadata/notes.txt"]
        last = await at.repairs.read_last_export()
        assert last is not None
        assert last.url == made[-1]
        newest = await chosen_export(at.scene.objects, PLACE)
        assert newest.header.exported_ms == last.exported_ms
        assert await chosen_export(at.scene.objects, made[-1]) == newest
        older = await chosen_export(at.scene.objects, made[-2])
        assert older.header.exported_ms < last.exported_ms
        with pytest.raises(ConfigurationError, match=f"no export {made[0]}: .* such as {made[-1]}"):
            await chosen_export(at.scene.objects, made[0])

    on_exporting(body)


def test_a_worker_that_holds_the_lock() -> None:
    """Others leave it to that one, and look again when it is done."""

    async def body(at: Exporting) -> None:
        worker, other = at.worker(), at.worker()
        async with other._lock("export") as is_ours:
            assert is_ours
            assert not await worker.export()
            assert at.exports() == []
        assert await worker.export()

    on_exporting(body)


def test_without_a_place() -> None:
    """Nothing is made, and no age is shown, also after a place was taken back."""

    async def body(at: Exporting) -> None:
        assert at.shown() == {}
        assert await at.worker().export()
        ages = at.shown()
        assert ages.pop("every_seconds") == 60
        assert 0 <= ages.pop("age_seconds") < 30
        assert ages == {}
        at.scene.pass_time(100_000)
        other = at.worker(replace(CONFIG, export_every_s=1000))
        assert not await other.export()
        assert 100 <= at.shown()["age_seconds"] < 130
        assert not await at.worker(UpkeepConfig()).export()
        assert at.shown() == {}
        assert len(at.exports()) == 1
        assert await at.worker(replace(CONFIG, export=f"{PLACE}/other")).export()

    on_exporting(body)


def test_a_store_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """A warning and the status tell; there is no export, and the next try makes one."""

    async def body(at: Exporting) -> None:
        objects, worker = at.scene.objects, at.worker()

        async def refuse(url: str, data: object) -> None:
            raise ObjectStoreError(f"writing {url}: denied")

        real, objects.put_new = objects.put_new, refuse  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING, "dlcore.ops.upkeep.exporter"):
            assert not await worker.export()
        assert "denied; to do: let auto-recovery list, write and delete" in caplog.text
        (trouble,) = await at.repairs.read_troubles()
        assert (trouble.sweep, trouble.count) == ("export", 1)
        assert at.exports() == []
        assert "age_seconds" in at.shown()
        objects.put_new = real  # type: ignore[method-assign]
        assert await worker.export()
        assert await at.repairs.read_troubles() == []
        assert len(at.exports()) == 1

    on_exporting(body)


def test_a_damaged_log_and_a_damaged_export(caplog: pytest.LogCaptureFixture) -> None:
    """The log is named and left out; of a damaged export the one before it is named."""

    async def body(at: Exporting) -> None:
        worker, paths = at.worker(), at.context.paths
        assert await worker.export()
        head = paths.log_of(at.scene.log.log_id).head
        await at.context.store.put(head, b"?", version=-1)
        await at.context.store.put(paths.last_export, b"?", version=-1)
        at.scene.pass_time(1)
        with caplog.at_level(logging.WARNING, "dlcore.ops.upkeep.exporter"):
            assert await worker.export()
        assert "an export is made anew: " in caplog.text
        assert "the export leaves out log clicks, whose metadata are damaged" in caplog.text
        (trouble,) = await at.repairs.read_troubles()
        assert "leaves out log clicks" in trouble.found[0]
        last = await at.repairs.read_last_export()
        assert last is not None
        assert last.left_out == 1
        before, newest = at.exports()
        at.scene.objects.stored[newest] = b"cut"
        with pytest.raises(
            CorruptMetadataError, match=f"{newest} .*; the one before it is {before}"
        ):
            await chosen_export(at.scene.objects, PLACE)
        at.scene.objects.stored[before] = b"cut"
        with pytest.raises(
            CorruptMetadataError, match=r"is no export of metadata, or damaged: [^;]*$"
        ):
            await chosen_export(at.scene.objects, before)
        at.scene.objects.stored.clear()
        with pytest.raises(ConfigurationError, match="there is none beside it"):
            await chosen_export(at.scene.objects, before)

    on_exporting(body)


def test_nothing_is_made_or_deleted_before_a_restore_is_accepted() -> None:
    """A restore that is tried beside the living cluster leaves its exports alone."""

    async def body(at: Exporting) -> None:
        store, paths = at.context.store, at.context.paths
        await store.create(paths.restored, b"", make_parents=True)
        assert not await at.worker().export()
        assert at.exports() == []
        await store.delete(paths.restored)
        assert await at.worker().export()

    on_exporting(body)


@pytest.mark.parametrize(
    ("key", "value"),
    [("export", "s3:/bucket"), ("export_every_s", 0), ("export_keep", 0)],
)
def test_wrong_settings(key: str, value: object) -> None:
    """The error names the setting and its value."""
    with pytest.raises(ConfigurationError, match=f"{key}=.*{value}"):
        UpkeepConfig(**{key: value})  # type: ignore[arg-type]
