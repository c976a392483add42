"""The metrics of a bookie, its checks, and its trial, on a storage in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bookie.config import SpaceConfig
from bookie.disks.port import try_disk
from bookie.serving.metrics import METRICS, checks, samples
from bookie.serving.reads_in_progress import ReadBudget
from dlcore.base.errors import BookieOverloadedError, BookieReadOnlyError, BookieStorageError
from dlcore.base.health import Readiness
from dlcore.base.metrics import Durations
from tests.fixtures.aio import run
from tests.fixtures.memory_disk import MemoryDisk
from tests.fixtures.storage import ManualClock, make_frame, open_storage, small_config

if TYPE_CHECKING:
    from bookie.ledger_storage import LedgerStorage


def values_of(storage: LedgerStorage, *, connections: int = 0) -> dict[str, float]:
    """Return the present values by name; of a histogram the count."""
    reads = ReadBudget(1, on_wait=lambda: None)
    reads.sent_bytes = 7
    return {
        each.metric.name: each.value.count if isinstance(each.value, Durations) else each.value
        for each in samples(storage, range(connections), reads)
    }


def test_written_and_refused_bytes_are_counted() -> None:
    """Each metric has a sample; adds and their syncs are in the histograms."""

    async def scenario() -> None:
        clock = ManualClock()
        config = replace(small_config(), in_flight_bytes_max=3000)
        async with open_storage(MemoryDisk(), config, clock=clock) as storage:
            stop = storage.followers.watch(1, lambda: None)
            first = storage.writes.add_entry(make_frame(1, 0, b"x" * 2500))
            with pytest.raises(BookieOverloadedError):
                await storage.writes.add_entry(make_frame(1, 1, b"x" * 2500))
            pending = values_of(storage)
            await first
            clock.now += 5000
            found = values_of(storage, connections=2)
            assert found.keys() == {each.name for each in METRICS}
            assert pending["dlog_bookie_pending_add_bytes"] > 2500
            assert found["dlog_bookie_pending_add_bytes"] == 0
            assert found["dlog_bookie_added_bytes_total"] > 2500
            assert found["dlog_bookie_overloaded_total"] == 1
            assert found["dlog_bookie_ledgers"] == 1
            assert found["dlog_bookie_read_bytes_total"] == 7
            assert found["dlog_bookie_followers"] == 1
            assert found["dlog_bookie_connections"] == 2
            assert found["dlog_bookie_scrub_age_seconds"] == 5
            assert found["dlog_bookie_add_seconds"] == found["dlog_bookie_sync_seconds"] == 1
            await storage.upkeep.scrub()
            assert values_of(storage)["dlog_bookie_scrub_age_seconds"] == 0
            stop()
            assert not len(storage.followers)

    run(scenario())


def test_a_full_disk_is_a_check_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The check has the state that the bookie's registration has, and says how much lacks."""

    async def scenario() -> None:
        disk = MemoryDisk()
        space = SpaceConfig(
            read_only_below_bytes=2**50, writable_above_bytes=2**50, minimum_bytes=0
        )
        async with open_storage(disk, small_config(space=space)) as storage:
            found = Readiness.of(checks(storage)).reasons
            assert found["disk"] is None
            shortage = f"memory has {disk.space().free_bytes} free bytes"
            assert (found["space"] or "").startswith(f"the bookie is read-only: {shortage}")
            assert shortage in caplog.text  # it is so from the start, without a change
            with pytest.raises(BookieReadOnlyError):
                await storage.writes.add_entry(make_frame(1, 0))
            values = values_of(storage)
            assert values["dlog_bookie_writable"] == 0
            assert values["dlog_bookie_disk_full_total"] == 1

    run(scenario())


def test_a_failed_disk_is_a_check_that_fails() -> None:
    """Nothing is accepted any more then."""

    async def scenario() -> None:
        async with open_storage(MemoryDisk()) as storage:
            assert Readiness.of(checks(storage)).is_ready
            storage.status.note_failed(BookieStorageError("torn"))
            assert Readiness.of(checks(storage)).reasons["disk"] is not None
            assert values_of(storage)["dlog_bookie_failed"] == 1

    run(scenario())


def test_a_trial_leaves_one_small_file() -> None:
    """However often it is made; and it fails if the disk gives back something else."""

    class Forgetful(MemoryDisk):
        async def read_file(self, name: str) -> bytes | None:
            return b"other" if name == "trial" else await super().read_file(name)

    async def scenario() -> None:
        disk, clock = MemoryDisk(), ManualClock()
        for _ in range(3):
            await try_disk(disk, "trial", clock.new_token)
        assert disk.names() == ["trial"]
        async with open_storage(disk) as storage:
            assert storage.status.stats().ledger_count == 0
        with pytest.raises(BookieStorageError, match="other"):
            await try_disk(Forgetful(), "trial", clock.new_token)

    run(scenario())
