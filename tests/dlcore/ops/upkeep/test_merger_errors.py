"""Merges that must not happen: what is stored contradicts itself, or cannot be read or written.

Goal: the error says so, every record stays where it was, and no ledger is left over.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlcore.base.errors import (
    CorruptMetadataError,
    LedgerReadError,
    LogNotFoundError,
    MetadataConnectionError,
)
from dlcore.log.metadata.values import LogKey
from dlcore.metadata import attempts
from dlcore.ops.upkeep import merger
from tests.dlcore.ops.upkeep.test_merger import (
    Scene,
    as_rows,
    check_ledgers,
    on_scene,
    referred,
    stored_ledgers,
    tidy,
)
from tests.fixtures.memory_namespace import read_all


async def require_refused(scene: Scene, error: type[Exception], match: str) -> None:
    """Merge, which must fail; then nothing has changed and nothing is left."""
    extents = await scene.extent_counts()
    with pytest.raises(error, match=match):
        await scene.merger.merge(scene.log._log)
    assert await scene.extent_counts() == extents
    await scene.merger._drop_unused()
    await tidy(scene)
    counts = referred(scene.cluster)
    assert len(stored_ledgers(scene.cluster).keys() - counts.keys()) <= 2


@pytest.mark.parametrize("by", [1, -1])
def test_an_extent_with_another_number_of_records(by: int) -> None:
    """Merged, all that follows it would have other sequence ids."""

    async def body(scene: Scene) -> None:
        (segment, *_) = await scene.log.get_log_segments()
        first, *others = segment.extents
        wrong = replace(first, record_count=first.record_count + by)
        ledger = await scene.merger._create_ledger(scene.log._log)
        with pytest.raises(CorruptMetadataError, match=r"hold \d+ records, their metadata says"):
            await scene.merger._copy(ledger, [wrong, *others])
        await ledger.abandon()

    on_scene(body)


def test_an_extent_that_begins_in_the_middle_of_another() -> None:
    """Its first entry says how many records are before it."""

    async def body(scene: Scene) -> None:
        assert await scene.merger.merge(scene.log._log) > 0
        (segment, *_) = await scene.log.get_log_segments()
        merged = max(segment.extents, key=lambda extent: extent.entry_count)
        wrong = replace(merged, first_entry_id=merged.first_entry_id + 1)
        ledger = await scene.merger._create_ledger(scene.log._log)
        with pytest.raises(CorruptMetadataError, match=r"counts \d+ records before it, expected 0"):
            await scene.merger._copy(ledger, [wrong])
        await ledger.abandon()

    on_scene(body)


def test_an_extent_whose_ledger_is_not_registered() -> None:
    """The ledger could not be counted off, and would stay for ever or go under other extents."""

    async def body(scene: Scene) -> None:
        ledger_id = min(referred(scene.cluster))
        path = scene.cluster.paths.staged_ledger(ledger_id)
        await scene.cluster.stores["driver"].delete(path)
        match = f"ledger {ledger_id} of an extent is not registered"
        await require_refused(scene, CorruptMetadataError, match)

    on_scene(body)


def test_entries_that_no_bookie_has() -> None:
    """Nothing happened to the log that would explain it; what can be merged later, is."""

    async def body(scene: Scene) -> None:
        before = await read_all(scene.log)
        ledger_id = min(referred(scene.cluster))
        taken = [bookie.entries(ledger_id) for bookie in scene.cluster.bookies]
        kept = [dict(entries) for entries in taken]
        for entries in taken:
            entries.clear()
        await require_refused(scene, LedgerReadError, "ledger")
        for entries, stored in zip(taken, kept, strict=True):
            entries.update(stored)
        assert await scene.merger.merge(scene.log._log) > 0
        assert await read_all(scene.log) == before
        await tidy(scene)
        check_ledgers(scene.cluster)

    on_scene(body)


def test_a_log_that_has_the_name_of_another() -> None:
    """Merging the one that is gone neither fails nor touches the new one."""

    async def body(scene: Scene) -> None:
        gone = LogKey(name="clicks", log_id="0" * 32)
        assert await scene.merger.merge(gone) == 0
        counts = await scene.extent_counts()
        with pytest.raises(LogNotFoundError, match="was deleted; if there is one"):
            await scene.merger._create_ledger(gone)
        assert await scene.extent_counts() == counts
        check_ledgers(scene.cluster)

    on_scene(body, appends=8)


def test_a_swap_that_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up with an error, and the copy goes; the extents are merged another time."""
    monkeypatch.setattr(attempts, "ATTEMPTS_MAX", 3)

    async def body(scene: Scene) -> None:
        before = await read_all(scene.log)
        store = scene.cluster.stores["driver"]
        path = scene.cluster.paths.log_of(scene.log._log.log_id).head

        async def touch() -> None:
            # Another process changes the head between each look and the swap.
            node = await store.get(path)
            assert node is not None
            await store.put(path, node.value, version=node.version)

        scene.store.before_each("multi", touch)
        with pytest.raises(MetadataConnectionError, match="3 attempts to swap"):
            await scene.merger.merge(scene.log._log)
        scene.store.disarm()
        assert await scene.merger.merge(scene.log._log) > 0
        assert await read_all(scene.log) == before
        await tidy(scene)
        check_ledgers(scene.cluster)

    on_scene(body)


def test_more_bytes_than_may_be_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for in between; a bookie that fails meanwhile loses nothing."""
    monkeypatch.setattr(merger, "_IN_FLIGHT_BYTES_MAX", 200)

    async def body(scene: Scene) -> None:
        before = as_rows(await read_all(scene.log))
        scene.cluster.bookies[0].stop()
        assert await scene.merger.merge(scene.log._log) > 0
        assert as_rows(await read_all(scene.log)) == before
        await tidy(scene)
        check_ledgers(scene.cluster)

    on_scene(body)
