"""The loss of power that tests play: it takes back what was not synced, and nothing else."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import TYPE_CHECKING

import pytest

from bookie.disks import real as real_disk
from bookie.disks.real import RealDisk
from tests.fixtures.disk_changes import (
    Created,
    NamesSynced,
    Removed,
    Renamed,
    Resized,
    Synced,
    Unsynced,
    Wrote,
)
from tests.fixtures.lengths import sample
from tests.fixtures.power import SECTOR_BYTES, STASH, Journal, lose, take_power

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.disk_changes import DiskEvent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it watches the calls of Linux")
SEEDS = range(200)


def after(*events: DiskEvent) -> Unsynced:
    """Return what is not synced after some events."""
    unsynced = Unsynced()
    for event in events:
        unsynced.handle(event)
    return unsynced


def test_synced_changes_stay() -> None:
    """Whatever chance says."""
    unsynced = after(
        Created("", "1.log", 1), NamesSynced(""), Wrote(1, 0, 5, 0, b""), Synced(1), Synced(2)
    )
    for seed in SEEDS:
        loss = lose(unsynced, random.Random(seed))
        assert (loss.contents, loss.ends, loss.names) == ([], [], [])


def test_sectors_and_ends_are_lost_each_by_itself() -> None:
    """All of them, none, and any: a torn write."""
    before = bytes(range(256)) * 8
    unsynced = after(Wrote(1, 0, 4 * SECTOR_BYTES, 2048, before), Resized(1, 2048, 9000))
    losses = [lose(unsynced, random.Random(seed)) for seed in SEEDS]
    lost = {tuple(offset // SECTOR_BYTES for _, offset, _ in each.contents) for each in losses}
    assert {(), (0, 1, 2, 3)} < lost
    assert len(lost) > 8
    for loss in losses:
        for _, offset, data in loss.contents:
            assert data == before[offset : offset + SECTOR_BYTES]
    assert {tuple(end for _, end, _, _ in each.ends) for each in losses} >= {(), (2048,)}


def test_a_sector_that_survived_is_not_taken_back_by_an_earlier_write() -> None:
    """It has the bytes of one of its writes since the sync, or those before."""
    unsynced = after(Wrote(1, 0, 3, 3, b"old"), Wrote(1, 0, 3, 3, b"mid"))
    found = {
        tuple(data for _, _, data in lose(unsynced, random.Random(seed)).contents) for seed in SEEDS
    }
    assert found == {(), (b"mid",), (b"mid", b"old")}


def test_the_latest_changes_of_a_folder_are_lost() -> None:
    """The metadata of file systems has an order."""
    changes = (Created("", "a", 1), Renamed("", "a", "b", 1), Removed("", "c", 2))
    found = {tuple(lose(after(*changes), random.Random(seed)).names) for seed in SEEDS}
    assert found == {changes[:kept:-1] if kept >= 0 else changes[::-1] for kept in range(-1, 3)}


@pytest.mark.parametrize("seed", sample(range(6), 2))
@pytest.mark.parametrize("can_allocate", [True, False])
def test_a_disk_that_syncs_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, can_allocate: bool
) -> None:
    """After operations that were completed, whatever they were."""
    folder = used_folder(tmp_path, monkeypatch, can_allocate=can_allocate)
    take_power(folder, tmp_path / "journal", random.Random(seed))
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".log")
    assert names == ["1.log", "3.log"]
    assert (folder / "1.log").read_bytes()[:16] == b"one appended" + b"over"
    assert (folder / "3.log").read_bytes()[:5] == b"three"
    assert (folder / "note").read_bytes() == b"new note"
    assert list((folder / STASH).iterdir()) == []


def test_a_disk_that_does_not_sync_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the loss of power would prove nothing."""
    for name in (
        *("real_file.sync_data", "real_file.sync_file", "real.sync_directory"),
        "folder_calls.sync_file",
    ):
        monkeypatch.setattr(f"bookie.disks.{name}", lambda *_: None)
    folder = used_folder(tmp_path, monkeypatch, can_allocate=False)

    class AllIsLost(random.Random):
        def random(self) -> float:
            return 0.0

    take_power(folder, tmp_path / "journal", AllIsLost())
    assert {path.name for path in folder.iterdir()} == {STASH}


def used_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, can_allocate: bool) -> Path:
    """Return a folder in which each kind of change was made, with the journal of all of them."""
    if not can_allocate:
        monkeypatch.setattr(real_disk, "capabilities", lambda _: (False, False))
    folder = tmp_path / "data"
    folder.mkdir()

    async def main() -> None:
        with monkeypatch.context() as patches:
            Journal(tmp_path / "journal", folder).watch(folder, patches.setattr)
            disk = RealDisk(folder)
            one = await disk.create("1.log", [b"one"])
            await one.append([b" appended"])
            await one.rewrite(one.size, b"over and behind")
            await one.truncate(16)
            two = await disk.create("2.log", [b"two"])
            await two.append([b"x" * 5000])
            two.close()
            await disk.recycle(["2.log"])
            await disk.create("3.log", [b"three"])
            await disk.write_file("note", b"note")
            await disk.write_file("note", b"new note")
            await disk.write_file("gone", b"")
            await disk.delete(["gone"])
        await disk.aclose()

    asyncio.run(main())
    return folder
