"""Scrubbing and mending in memory: damage is found, and made good where that is proven."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import LedgerReadError, ObjectStoreError
from dlcore.ledger.metadata.values import LedgerMetadata
from dlcore.log.upkeep.staged import drop_merged
from dlcore.metadata.stored import decode
from dlcore.ops.autorecovery.config import AutoRecoveryConfig
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.metrics import RecoveryFigures
from dlcore.ops.autorecovery.repair import LedgerRepairer
from dlcore.ops.autorecovery.values import ScrubProgress
from dlcore.ops.upkeep.mender import ColdMender
from dlcore.ops.upkeep.scrubbing import TRIES_MAX
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.dlcore.ops.upkeep.test_tierer import CONFIG_OF_TIERS, TierScene, on_tier_scene, tidy
from tests.fixtures.memory_namespace import read_all

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from dlcore.base.records import LogRecordWithDLSN

    Body = Callable[["Scrubbed"], Awaitable[None]]

CONFIG = replace(CONFIG_OF_TIERS, scrub_period_s=1000, scrub_bytes_per_s=1e9, scrub_interval_s=10)


class Scrubbed:
    """A tiered log, and the worker that scrubs it."""

    def __init__(self, scene: TierScene, records: list[LogRecordWithDLSN]) -> None:
        self.scene = scene
        self.records = records
        self.objects = scene.objects.stored
        self.figures = RecoveryFigures()
        context, owner = scene.merging.log_context, scene.merging.staging_owner
        self.upkeep = LogUpkeep(context, owner, CONFIG, self.figures)
        self.repairs = RepairList(context.store, context.paths, context.clock)
        ports = scene.merging.ports
        self.repairer = LedgerRepairer(ports, AutoRecoveryConfig(), self.upkeep.mend)

    def ledgers(self) -> list[LedgerMetadata]:
        """Return the cold ledgers that have objects."""
        found = []
        for path, node in self.scene.cluster.tree.dump().items():
            if path.startswith("/dlog/ledgers/") and path.count("/") == 5:
                ledger = decode(LedgerMetadata, node.value, source=path)
                found += [ledger] if ledger.objects else []
        return found

    def some_object(self) -> str:
        """Return the URL of an object that is not the first of its ledger."""
        ledger = max(self.ledgers(), key=lambda each: len(each.objects))
        return f"{ledger.folder}/{ledger.objects[1].name}"

    async def pass_all(self) -> int:
        """Let a whole pass end; return how many objects were damaged."""
        damaged = 0
        for _ in range(120):
            self.scene.pass_time(10_000)
            damaged += await self.upkeep.scrub()
        return damaged

    async def listed(self) -> list[int]:
        """Return the ledgers that are to be repaired."""
        return [each async for each in self.repairs.ledger_ids()]

    async def repair(self) -> str:
        """Repair the first ledger on the list, as a worker does; return why it is not whole."""
        ledger_id, *_ = await self.listed()
        listed = await self.repairs.read(ledger_id)
        assert listed is not None
        outcome = await self.repairer.repair(listed)
        if outcome.is_done:
            assert await self.repairs.remove(listed)
        return outcome.reason

    async def check(self) -> None:
        """Require that all records are read as they were, by a process that knows nothing yet."""
        name = f"reader-{len(self.scene.cluster.namespaces)}"
        fresh = await (await self.scene.cluster.open(name)).open_log("clicks")
        assert await read_all(fresh) == self.records


def on_scrubbed(body: Body) -> None:
    """Run `body` on a log of which two ledgers with several objects are cold."""

    async def run(scene: TierScene) -> None:
        records = await read_all(scene.log)
        assert await scene.tier() > 1
        await body(Scrubbed(scene, records))

    on_tier_scene(run)


def damaged(data: bytes) -> bytes:
    """Return an object with other bytes among its rows; some single ones do not count."""
    return bytes(
        byte ^ (not at % 16 and len(data) < 3 * at < 2 * len(data)) for at, byte in enumerate(data)
    )


def test_a_whole_tier() -> None:
    """All is read once in a period, and nothing is reported."""

    async def body(at: Scrubbed) -> None:
        assert await at.pass_all() == 0
        assert await at.listed() == []
        context = at.scene.merging.log_context
        node = await context.store.get(context.paths.scrub_progress)
        assert node is not None
        progress = decode(ScrubProgress, node.value, source="")
        size_bytes = sum(map(len, at.objects.values()))
        assert size_bytes <= at.figures.cold.scrubbed_bytes <= 2 * size_bytes
        assert progress.damaged == progress.skipped == 0
        assert (await at.repairs.read_troubles()) == []

    on_scrubbed(body)


def test_damaged_objects_are_made_again_of_their_old_ledgers() -> None:
    """They are there within the grace; the damaged ones are swept, and readers notice nothing."""

    async def body(at: Scrubbed) -> None:
        folder = at.some_object().rpartition("/")[0]
        urls = [each for each in at.objects if each.startswith(f"{folder}/")]
        whole = [at.objects[url] for url in urls]
        for url in urls:
            at.objects[url] = damaged(at.objects[url])
        assert await at.pass_all() >= len(urls)
        while await at.listed():
            assert await at.repair() == ""
        assert at.figures.cold.mended_objects == len(urls)
        assert at.figures.cold.damaged_objects >= len(urls)
        named = {f"{each.folder}/{o.name}" for each in at.ledgers() for o in each.objects}
        assert named == at.objects.keys() - set(urls)
        await tidy(at.scene)
        assert sorted(whole) == sorted(at.objects.values())
        await at.check()
        assert await at.pass_all() == 0

    on_scrubbed(body)


def test_a_store_that_takes_nothing_is_no_hole() -> None:
    """The records are there, and the object is made again later."""

    async def body(at: Scrubbed) -> None:
        url = at.some_object()
        at.objects[url] = damaged(at.objects[url])
        assert await at.pass_all() >= 1
        at.scene.objects.failing["put_new"] = ["lost"] * 3
        assert "503" in await at.repair()
        assert at.figures.cold.holes == set()
        assert await at.repair() == ""
        await at.check()

    on_scrubbed(body)


def test_a_missing_object_is_made_again_of_another_one_with_the_same_records() -> None:
    """As a write leaves it whose answer was lost; what only looks like it is not used."""

    async def body(at: Scrubbed) -> None:
        await tidy(at.scene)  # the old ledgers are gone
        url = at.some_object()
        folder = url.rpartition("/")[0]
        others = sorted(each for each in at.objects if each.startswith(f"{folder}/"))
        twin = f"{folder}/99-t-0-1.parquet"
        await at.scene.objects.put_new(twin, at.objects.pop(url))
        await at.scene.objects.put_new(f"{folder}/99-t-0-2.parquet", at.objects[others[0]])
        await at.scene.objects.put_new(f"{folder}/99-t-0-3.parquet", b"PAR1")
        assert await at.pass_all() >= 1
        assert await at.repair() == ""
        await at.check()
        await tidy(at.scene)
        assert twin not in at.objects
        await at.check()

    on_scrubbed(body)


def test_a_hole_is_named_until_the_object_is_back() -> None:
    """The list says which records are lost, of which log, and what was tried."""

    async def body(at: Scrubbed) -> None:
        await tidy(at.scene)
        url = at.some_object()
        kept = at.objects.pop(url)
        assert await at.pass_all() >= 1
        reason = await at.repair()
        (ledger_id,) = await at.listed()
        assert f"of ledger {ledger_id} of log 'clicks' are lost with object {url}" in reason
        assert "on bookies: ledger" in reason
        assert "another object of the folder: entries" in reason
        assert at.figures.cold.holes == {ledger_id}
        await at.scene.objects.put_new(url, damaged(kept))
        reason = await at.repair()
        assert "are lost with object" in reason
        assert "does not exist, or has fewer" not in reason
        at.objects[url] = kept
        assert await at.repair() == ""
        assert at.figures.cold.holes == set()
        await at.check()

    on_scrubbed(body)


def test_a_store_that_is_away_is_no_damage() -> None:
    """Its objects are tried again, then skipped; a repair waits."""

    async def body(at: Scrubbed) -> None:
        async def fail() -> None:
            raise ObjectStoreError("503")

        at.scene.objects.met = fail
        for _ in range(TRIES_MAX - 1):
            at.scene.pass_time(10_000)
            assert await at.upkeep.scrub() == 0
        (trouble,) = await at.repairs.read_troubles()
        assert "503" in trouble.found[0]
        assert await at.listed() == []
        await at.repairs.publish(at.ledgers()[0].ledger_id, missing=())
        assert await at.repair() == "503"
        at.scene.objects.met = None
        assert await at.repair() == ""
        assert await at.pass_all() == 0
        assert await at.repairs.read_troubles() == []

    on_scrubbed(body)


def test_a_reader_goes_on_when_an_object_is_replaced() -> None:
    """It knows the name of the damaged one, which is gone, and looks at the ledger once more."""

    async def body(at: Scrubbed) -> None:
        log = await (await at.scene.cluster.open("reading")).open_log("clicks")
        assert await read_all(log) == at.records
        url = at.some_object()
        at.objects[url] = damaged(at.objects[url])
        assert await at.pass_all() >= 1
        assert await at.repair() == ""
        del at.objects[url]
        assert await read_all(log) == at.records
        (hole,) = [each for each in at.objects if "-1-17" in each]
        del at.objects[hole]
        with pytest.raises(LedgerReadError, match=hole):
            await read_all(log)

    on_scrubbed(body)


def test_an_object_deleted_meanwhile_is_no_damage() -> None:
    """The ledger is gone, or names another object by now."""

    async def body(at: Scrubbed) -> None:
        await tidy(at.scene)
        known = at.ledgers()
        await at.scene.namespace.delete_log("clicks")
        at.objects.clear()
        scrubber = at.upkeep._scrubber

        async def stale(first: int) -> AsyncGenerator[LedgerMetadata, None]:
            for each in known:
                if each.ledger_id >= first:
                    yield each

        scrubber._cold_from = stale  # type: ignore[method-assign]
        await at.upkeep.sweep()
        await drop_merged(at.scene.merging.log_context, grace_ms=0)
        assert not at.ledgers()
        assert await at.pass_all() == 0
        mender = ColdMender(
            at.scene.merging.log_context, at.scene.merging.staging_owner, at.figures.cold
        )
        assert await mender.mend(known[0].ledger_id) == ""
        (hot, *_) = [
            each async for each in at.scene.merging.log_context.ledger_store.list_ledgers()
        ]
        assert await mender.mend(hot) is None

    on_scrubbed(body)
