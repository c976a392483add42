"""Rounds over the logs that may have a tier: what they read, and which tier counts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import pytest

from dlcore.base.background import side_tasks
from dlcore.base.config import LogSettings
from dlcore.base.errors import ConfigurationError, ObjectStoreError
from dlcore.base.isolating import TROUBLES_MAX, Troubles
from dlcore.base.records import LogRecord
from dlcore.metadata import binding
from dlcore.metadata.cluster_settings import ClusterSettingsStore
from dlcore.metadata.port import ANY_VERSION, Put
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.maintenance import Maintenance
from dlcore.ops.autorecovery.metrics import RecoveryFigures
from dlcore.ops.live_settings import require_allowed
from dlcore.ops.upkeep import worker as upkeep_worker
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.tier_rounds import TierRounds
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.dlcore.ops.upkeep.test_tierer import (
    AGE_MS,
    CONFIG_OF_TIERS,
    TIER,
    TierScene,
    is_cold,
    on_tier_scene,
)
from tests.fixtures.aio import until_async

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.log.metadata.values import LogKey
    from dlcore.metadata.cluster_settings import Value
    from dlcore.metadata.port import Versioned
    from dlcore.wire.frames import BytesLike

OTHER = "s3://bucket/others"
OF_ALL = replace(CONFIG_OF_TIERS, tier=OTHER, tier_after_s=AGE_MS / 1000)


class Reads(NamedTuple):
    """The nodes that a worker's session reads, its lists, and its locks."""

    nodes: list[str]
    lists: list[str]
    locks: list[str]

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many of each."""
        return len(self.nodes), len(self.lists), len(self.locks)


@contextmanager
def reads_of(scene: TierScene) -> Iterator[Reads]:
    """Note what the session of the tiering process asks for."""
    store, noted = scene.merging.log_context.store, Reads([], [], [])
    get_many, lists, create = store.get_many, store.get_children_many, store.create

    async def note_nodes(paths: Sequence[str], *, fresh: bool = False) -> list[Versioned | None]:
        noted.nodes.extend(paths)
        return await get_many(paths, fresh=fresh)

    async def note_lists(paths: Sequence[str]) -> list[list[str] | None]:
        noted.lists.append(paths[0])
        return await lists(paths)

    async def note_locks(path: str, *about: bytes, **options: Any) -> None:
        noted.locks.append(path)
        await create(path, *about, **options)

    with (
        patch.object(store, "get_many", note_nodes),
        patch.object(store, "get_children_many", note_lists),
        patch.object(store, "create", note_locks),
    ):
        yield noted


def test_a_quiet_log_costs_nothing_until_something_can_be_due() -> None:
    """Neither a lock nor a read; the list tells of new logs."""

    async def body(scene: TierScene) -> None:
        worker = LogUpkeep.of(scene.merging, CONFIG_OF_TIERS)
        store = scene.merging.log_context.store
        scene.pass_time()
        await store.sync("/")
        assert await worker.tier() > 0
        assert await worker.tier() == 0
        with reads_of(scene) as reads:
            assert await worker.tier() == 0
        assert reads.counts == (0, 1, 0)
        await scene.namespace.create_log("new", settings=LogSettings(tier=TIER))
        await store.sync("/")
        with reads_of(scene) as reads:
            assert await worker.tier() == 0
        assert reads.counts == (3, 1, 0)  # node, head and settings
        scene.pass_time()
        with reads_of(scene) as reads:
            assert await worker.tier() == 0
        assert reads.counts == (4, 1, 0)

    on_tier_scene(body, appends=4)


def test_deleted_logs_are_forgotten() -> None:
    """The memory of a worker is bounded by the logs that there are."""

    async def body(scene: TierScene) -> None:
        worker = LogUpkeep.of(scene.merging, CONFIG_OF_TIERS)
        await scene.merging.log_context.store.sync("/")
        await worker.tier()
        rounds = worker._tiers
        assert rounds._tierer._known.keys() == {scene.log.log_id}
        await scene.log.delete()
        await scene.merging.log_context.store.sync("/")
        assert await worker.tier() == 0  # by the list alone: nothing is due
        assert not rounds._tierer._known
        assert not rounds._visits._logs

    on_tier_scene(body, appends=2)


def test_the_namespace_has_a_tier_for_logs_without_one() -> None:
    """A log's own tier comes first; one that wants none, or is encrypted, stays on bookies."""

    async def body(scene: TierScene) -> None:
        context = scene.namespace.log_context
        names = {
            "own": LogSettings(),
            "stays": LogSettings(tier="none"),
            "secret": LogSettings(encrypted=True),
            "any": LogSettings(),
        }
        for name, settings in names.items():
            await scene.namespace.create_log(name, settings=settings)
            log = await scene.namespace.open_log(name)
            if name != "secret":
                async with await log.open_writer() as writer:
                    await writer.write(LogRecord(1, name.encode()))
                    await writer.mark_end_of_stream()
        await scene.log.rename("renamed")
        scene.pass_time()
        worker = LogUpkeep.of(scene.merging, OF_ALL)
        assert await worker.tier() > 2
        assert await worker.tier() == 0
        assert await is_cold(scene) == [True]
        objects = scene.objects.stored
        for name, tier in (("own", OTHER), ("any", OTHER), ("stays", None), ("secret", None)):
            log = await scene.namespace.open_log(name)
            folders = {
                each
                for each in (TIER, OTHER)
                for url in objects
                if log.log_id in url and url.startswith(f"{each}/{context.cluster_id}/")
            }
            assert folders == ({tier} if tier else set()), name
        assert any(url.startswith(f"{TIER}/") and scene.log.log_id in url for url in objects)

    on_tier_scene(body, appends=2)


def test_a_tier_of_the_namespace_waits_for_its_feature(caplog: pytest.LogCaptureFixture) -> None:
    """Earlier releases do not read what is cold; logs with a tier of their own go on."""

    async def body(scene: TierScene) -> None:
        await scene.namespace.create_log("any")
        log = await scene.namespace.open_log("any")
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(1, b"1"))
            await writer.mark_end_of_stream()
        scene.pass_time()
        worker = LogUpkeep.of(scene.merging, OF_ALL)
        with patch.object(binding.ClusterFeatures, "has", return_value=False):
            assert await worker.tier() == 1
        assert "dlog upgrade finalize" in caplog.text
        assert await is_cold(scene) == [True]
        assert await worker.tier() == 1

    on_tier_scene(body, appends=2)


def test_settings_of_the_cluster_may_have_the_tier() -> None:
    """They are checked as any other, and live."""

    async def body(scene: TierScene) -> None:
        context = scene.namespace.log_context
        settings = ClusterSettingsStore(context.store, context.paths)
        tier: dict[tuple[str, str], Value | None] = {
            ("autorecovery", "tier"): OTHER,
            ("autorecovery", "tier_after_s"): 5.0,
        }
        tables = await settings.change(tier, require_allowed)
        assert tables == {"autorecovery": {"tier": OTHER, "tier_after_s": 5.0}}
        with pytest.raises(ConfigurationError, match=r"tier='bucket'.*s3://bucket/folder"):
            await settings.change({("autorecovery", "tier"): "bucket"}, require_allowed)

    on_tier_scene(body, appends=1)
    with pytest.raises(ConfigurationError, match="tier_after_s"):
        UpkeepConfig(tier_after_s=-1)


async def tiered_log(scene: TierScene, name: str, after_s: float) -> DirectLog:
    """Return a new log whose segments wait so long."""
    settings = LogSettings(tier=TIER, tier_after_s=after_s)
    await scene.namespace.create_log(name, settings=settings)
    return await scene.namespace.open_log(name)


async def complete_segment(log: DirectLog) -> None:
    """Write a record and complete its segment."""
    async with await log.open_writer() as writer:
        await writer.write(LogRecord(writer.last_txid + 1, b"1"))


async def cold_segments(log: DirectLog) -> list[bool]:
    """Return of each segment whether it is cold."""
    return [each.extents[0].is_cold for each in await log.get_log_segments()]


async def tiered_soon(scene: TierScene, log: DirectLog, *, segments: int) -> None:
    """Complete the first segments of a log, and wait each time until all are cold."""
    for count in range(1, segments + 1):
        await complete_segment(log)
        scene.pass_time(1)

        async def are_cold(count: int = count) -> bool:
            return await cold_segments(log) == [True] * count

        await until_async(are_cold)


def test_logs_that_do_not_wait_are_tiered_between_rounds() -> None:
    """Those alone are looked at, without a list; nothing is locked where nothing is due."""

    async def body(scene: TierScene) -> None:
        worker = LogUpkeep.of(scene.merging, replace(CONFIG_OF_TIERS, tier_interval_s=60))
        store, troubles = scene.merging.log_context.store, Troubles()
        soon, late = [await tiered_log(scene, name, s) for name, s in (("soon", 0), ("late", 60))]
        await store.sync("/")
        await worker.tier()
        with reads_of(scene) as reads:
            assert await worker._tiers.tier_early(troubles) == 0
        assert (reads.counts, reads.locks) == ((2, 0, 0), [])  # head and settings
        for log in (soon, late):
            await complete_segment(log)
        scene.pass_time()
        await store.sync("/")
        with reads_of(scene) as reads:
            assert await worker._tiers.tier_early(troubles) == 1
        assert not reads.lists
        assert await cold_segments(soon) == [True]
        assert await cold_segments(late) == [False]
        assert await worker.tier() == 1
        assert await cold_segments(late) == [True]
        assert troubles.count == 0

    on_tier_scene(body, appends=1)


def test_a_worker_tiers_between_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment goes to the tier though the next round is far away; each round lists once."""
    monkeypatch.setattr(upkeep_worker, "_EARLY_S", 0.01)

    async def body(scene: TierScene) -> None:
        worker = LogUpkeep.of(scene.merging, replace(CONFIG_OF_TIERS, tier_interval_s=10_000))
        log = await tiered_log(scene, "soon", 0)

        await scene.merging.log_context.store.sync("/")
        with reads_of(scene) as reads:
            async with side_tasks() as tasks:
                tasks.start(worker._tier_now_and_then())
                await tiered_soon(scene, log, segments=2)
        assert len(reads.lists) == 1

    on_tier_scene(body, appends=1)


def test_after_a_failure_the_next_round_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is away is not asked each few seconds, and is reported once in a round."""
    monkeypatch.setattr(upkeep_worker, "_EARLY_S", 0.01)

    async def body(scene: TierScene) -> None:
        worker = LogUpkeep.of(scene.merging, replace(CONFIG_OF_TIERS, tier_interval_s=60))
        log = await tiered_log(scene, "soon", 0)
        await scene.merging.log_context.store.sync("/")
        await worker.tier()
        await complete_segment(log)
        scene.pass_time()
        await scene.merging.log_context.store.sync("/")
        scene.objects.failing["put_new"] = ["lost"] * 9
        lost = scene.objects.failing["put_new"]
        assert await worker._tiers.tier_early(Troubles()) == 0
        left = len(lost)
        assert left < 9
        await worker.tier_early(0.2)
        assert len(lost) == left
        scene.objects.failing.clear()
        await worker.tier()
        assert await cold_segments(log) == [True]

    on_tier_scene(body, appends=1)


def test_figures_have_the_begin_of_a_round_while_it_lasts() -> None:
    """Also when the round fails; work between two rounds is none."""

    async def body(scene: TierScene) -> None:
        figures = RecoveryFigures()
        worker = LogUpkeep.of(scene.merging, CONFIG_OF_TIERS, figures)
        seen: list[bool] = []
        put_new = scene.objects.put_new

        async def watched(url: str, data: BytesLike) -> None:
            seen.append(figures.tiering.round_s is not None)
            await put_new(url, data)

        log = await tiered_log(scene, "watched", 0)
        await complete_segment(log)
        scene.pass_time()
        await scene.merging.log_context.store.sync("/")
        with patch.object(scene.objects, "put_new", watched):
            await worker.tier()
        assert seen
        assert all(seen)
        assert figures.tiering.round_s is None
        with (
            patch.object(TierRounds, "_visit", side_effect=ZeroDivisionError),
            pytest.raises(ZeroDivisionError),
        ):
            await worker.tier()
        assert figures.tiering.round_s is None

    on_tier_scene(body, appends=1)


def test_a_log_whose_objects_are_refused_delays_no_other() -> None:
    """Its folder is full or read-only, say: the others of its tier wait for one round."""

    async def body(scene: TierScene) -> None:
        figures = RecoveryFigures()
        worker = LogUpkeep.of(scene.merging, replace(CONFIG_OF_TIERS, tier_interval_s=60), figures)
        logs = [await tiered_log(scene, name, 0) for name in ("first", "second")]
        for log in logs:
            await complete_segment(log)
        scene.pass_time()
        store = scene.merging.log_context.store
        await store.sync("/")
        put_new = scene.objects.put_new

        async def refuse(url: str, data: BytesLike) -> None:
            if scene.log.log_id in url:
                raise ObjectStoreError(f"writing {url}: Read-only file system")
            await put_new(url, data)

        troubles = Troubles()
        with patch.object(scene.objects, "put_new", refuse):
            for _ in range(2):
                troubles = Troubles()
                await worker._tiers.tier(troubles)
                await store.sync("/")
        assert [await cold_segments(log) for log in logs] == [[True], [True]]
        assert [each.partition(":")[0] for each in troubles.found] == ["tiering log clicks"]
        assert not any(await cold_segments(scene.log))
        assert figures.tiering.tier.logs == 1
        await worker.tier()
        assert await is_cold(scene) == [True]
        assert (figures.tiering.tier.logs, figures.tiering.tier.longest_s) == (0, 0.0)

    on_tier_scene(body, appends=1)


def test_a_store_that_refuses_all_is_reported_with_the_logs_that_wait() -> None:
    """It is asked for one log in a round, each time for another; deleted logs are forgotten."""

    async def body(scene: TierScene) -> None:
        figures = RecoveryFigures()
        worker = LogUpkeep.of(scene.merging, replace(OF_ALL, tier_interval_s=60), figures)
        for name in ("first", "second"):
            await complete_segment(await tiered_log(scene, name, 0))
        scene.pass_time()
        await scene.merging.log_context.store.sync("/")
        asked = []
        for _ in range(3):
            troubles = Troubles()
            scene.objects.failing["put_new"] = ["lost"] * 99
            await worker._tiers.tier(troubles)
            log, others = troubles.found
            assert others.startswith(f"2 more logs wait: ObjectStoreError: {TIER} failed before")
            asked.append(log.partition(":")[0].removeprefix("tiering log "))
            assert figures.tiering.tier.logs == 3
        assert sorted(asked) == ["clicks", "first", "second"]
        assert figures.tiering.tier.errors == {"ObjectStoreError": 3}
        assert figures.tiering.tier.longest_s > 0
        await (await scene.namespace.open_log("first")).delete()
        second = await scene.namespace.open_log("second")
        await second.update_settings(tier="none")
        await scene.merging.log_context.store.sync("/")
        await worker.tier()
        assert figures.tiering.tier.logs == 1

    on_tier_scene(body, appends=1)


def test_a_log_that_fails_between_rounds_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings are damaged; segments of another log still go to the tier, one by one."""
    monkeypatch.setattr(upkeep_worker, "_EARLY_S", 0.01)

    async def body(scene: TierScene) -> None:
        worker = LogUpkeep.of(scene.merging, replace(CONFIG_OF_TIERS, tier_interval_s=10_000))
        failing, log = await tiered_log(scene, "failing", 0), await tiered_log(scene, "other", 0)
        context = scene.merging.log_context
        await context.store.sync("/")
        await worker.tier()
        paths = context.logs.paths_of(failing._log)
        await context.store.multi([Put(paths.settings, b"damaged", ANY_VERSION)])

        async with side_tasks() as tasks:
            tasks.start(worker.tier_early(10_000))
            await tiered_soon(scene, log, segments=3)

    on_tier_scene(body, appends=1)


def test_workers_do_not_hide_what_another_one_left_out() -> None:
    """Each has a part of the logs; the node that all shared in 0.2.0 goes."""

    async def body(scene: TierScene) -> None:
        first, context = scene.merging, scene.merging.log_context
        before = Troubles()
        before.note("of another release", ObjectStoreError("lost"))
        repairs = RepairList(context.store, context.paths, context.clock)
        await repairs.tell("tiers", before)
        scene.objects.failing["put_new"] = ["lost"] * 99
        await LogUpkeep.of(first, CONFIG_OF_TIERS).tier()
        await scene.open_merging()
        lock = context.paths.upkeep_lock(scene.log.log_id)
        await scene.namespace.log_context.store.create(lock, b"another", ephemeral=True)
        worker = LogUpkeep.of(scene.merging, CONFIG_OF_TIERS)
        await worker.tier()
        maintenance = Maintenance(scene.namespace.ports)
        (text,) = (await maintenance.read_status()).left_out
        assert text.startswith("tiering log clicks: ObjectStoreError: ")
        with patch.object(TierRounds, "_visit", note_many):
            await worker.tier()
        status = await maintenance.read_status()
        assert status.left_out.count(text) == 1
        assert len(status.left_out) == 1 + TROUBLES_MAX + 1
        assert status.left_out[-1] == "5 more, which the logs of auto-recovery name"
        await first.aclose()
        await worker.tier()
        assert (await maintenance.read_status()).left_out == []

    on_tier_scene(body, appends=1)


async def note_many(
    _: TierRounds, due: Sequence[tuple[str, LogKey]], troubles: Troubles, *, is_early: bool
) -> int:
    """Fail for many logs."""
    for number in range(TROUBLES_MAX + 5):
        troubles.note(f"log {number}", ObjectStoreError("lost"))
    return 0
