"""The old ledgers and the objects: what is read back, and how long both copies live."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from msgspec.structs import replace as changed

from dlcore.base.errors import LedgerReadError
from dlcore.log.upkeep.staged import drop_merged
from tests.dlcore.ops.upkeep.test_tierer import TierScene, check_objects, on_tier_scene, tidy
from tests.fixtures.memory_objects import MemoryObjects

if TYPE_CHECKING:
    from dlcore.wire.frames import BytesLike


def test_old_ledgers_stay_for_a_grace_of_their_own() -> None:
    """It is longer than that of merges, for reads that were planned before."""

    async def body(scene: TierScene) -> None:
        scene.pass_time()
        assert await scene.tier() > 0
        context = scene.merging.log_context
        scene.pass_time(39_000)
        assert await drop_merged(context, grace_ms=10_000) == 0
        scene.pass_time(2_000)
        assert await drop_merged(context, grace_ms=10_000) > 0

    on_tier_scene(body, appends=4)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.7, 0.9, 0.97, 1.0])
def test_an_object_is_read_back_byte_for_byte(share: float) -> None:
    """Wherever a bit is wrong, in its rows or its footer, it is written again."""

    async def body(scene: TierScene) -> None:
        put_new = MemoryObjects.put_new
        damaged: list[str] = []

        async def damage(self: MemoryObjects, url: str, data: BytesLike) -> None:
            changed = bytearray(data)
            if not damaged:
                damaged.append(url)
                changed[int(share * (len(changed) - 1))] ^= 1
            await put_new(self, url, changed)

        scene.pass_time()
        with patch.object(MemoryObjects, "put_new", damage):
            assert await scene.tier() == 1
        await tidy(scene)
        check_objects(scene.cluster)
        assert damaged[0] not in scene.objects.stored

    on_tier_scene(body, appends=2)


def test_entries_that_no_object_has_are_an_error() -> None:
    """A reader is never given less than the ledger says, and does not try for ever."""

    async def body(scene: TierScene) -> None:
        await scene.tier()
        context = scene.merging.log_context
        (segment,) = await scene.log.get_log_segments()
        ledger = await context.ledger_store.read(segment.extents[0].ledger_id)
        first, second = ledger.metadata.objects
        late = changed(second, first_entry_id=second.first_entry_id + 1)
        for objects, why in (((first,), "is in no object"), ((first, late), "are missing")):
            fewer = changed(ledger.metadata, objects=objects)
            with pytest.raises(LedgerReadError, match=why):
                async for _ in context.cold.read(fewer, 0, fewer.last_entry_id):
                    pass

    on_tier_scene(body)
