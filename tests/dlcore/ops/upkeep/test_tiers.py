"""The tiers that a cluster remembers: each is tried, and one that nothing uses can be forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import (
    ConfigurationError,
    CorruptMetadataError,
    ObjectStoreError,
    UnsupportedError,
)
from dlcore.metadata.cluster_settings import ClusterSettingsStore
from dlcore.metadata.port import ANY_VERSION
from dlcore.ops.upkeep.tiers import KnownTier, forget_tier, known_tiers
from tests.dlcore.ops.upkeep.test_merger import forget_ledgers
from tests.dlcore.ops.upkeep.test_tierer import TIER, TierScene, complete, on_tier_scene, tidy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.log.cold.objects import ListedObject


def test_a_tier_that_does_not_answer_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: an operator sees which tier is gone, and the others."""

    async def body(scene: TierScene) -> None:
        await scene.tier()
        context = scene.namespace.log_context
        assert await known_tiers(context) == [KnownTier(TIER)]

        async def refuse(url: str) -> AsyncGenerator[Sequence[ListedObject], None]:
            if url.startswith(TIER):
                raise ObjectStoreError(f"listing {url}: there is no such bucket")
            yield ()

        monkeypatch.setattr(scene.objects, "list_below", refuse)
        (known,) = await known_tiers(context)
        assert known.url == TIER
        assert "there is no such bucket" in known.problem

    on_tier_scene(body)


def test_a_tier_is_forgotten_once_nothing_uses_it() -> None:
    """Method: settings of the cluster, settings of a log, and a ledger name it, in turn."""

    async def body(scene: TierScene) -> None:
        await scene.tier()
        context = scene.namespace.log_context
        with pytest.raises(ConfigurationError, match=f"no segment ever went there, .* {TIER}$"):
            await forget_tier(context, "s3://bucket")
        cluster = ClusterSettingsStore(context.store, context.paths)
        for value in (TIER, None):
            await cluster.change({("autorecovery", "tier"): value}, lambda *_: None)
            named = "autorecovery.tier" if value else "tier` of log 'clicks'"
            with pytest.raises(UnsupportedError, match=named):
                await forget_tier(context, TIER)
        await scene.log.update_settings(tier=None)
        with pytest.raises(UnsupportedError, match=r"ledger \d+ of log 'clicks' has its entries"):
            await forget_tier(context, TIER)
        await scene.log.delete()
        await tidy(scene)
        forget_ledgers(scene.cluster)
        await forget_tier(context, TIER)
        assert await known_tiers(context) == []

    on_tier_scene(body)


def test_a_tier_is_not_forgotten_while_a_ledger_is_damaged() -> None:
    """Goal: it is unknown where the entries of that ledger are."""

    async def body(scene: TierScene) -> None:
        await scene.tier()
        context = scene.namespace.log_context
        await scene.log.update_settings(tier=None)
        async for ledger_id in context.ledger_store.list_ledgers():
            await context.store.put(context.paths.ledger(ledger_id), b"{", version=ANY_VERSION)
        with pytest.raises(CorruptMetadataError):
            await forget_tier(context, TIER)

    on_tier_scene(body)


def test_a_segment_that_goes_there_makes_the_tier_known_again() -> None:
    """Goal: a worker that went there before the tier was forgotten says so again."""

    async def body(scene: TierScene) -> None:
        await scene.tier()
        context = scene.namespace.log_context
        await context.store.delete(context.paths.tier(TIER))
        await scene.append()
        await complete(scene)
        scene.pass_time()
        assert await scene.tier() == 1
        assert await known_tiers(context) == [KnownTier(TIER)]

    on_tier_scene(body)
