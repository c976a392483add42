"""Bugs of a bookie's disk half, put back on purpose: syncs, names, rolling, replay, damage."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.files import replay as replay_module
from bookie.files.commit_queue import Step, Write
from bookie.files.entry_log import EntryLog, GroupCommit
from bookie.files.index import FileIndex
from bookie.membership.identity import COOKIE_FILE, establish_identity
from dlcore.base.errors import BookieStorageError
from dlcore.ledger.metadata.values import BookieCookie
from dlcore.metadata.stored import decode
from tests.fixtures.memory_disk import DiskOwner, MemoryDisk, MemoryFile
from tests.fixtures.memory_folder import Inode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bookie.disks.port import Disk
    from bookie.files.index import LedgerSummary, SealedIndex
    from bookie.files.replay import OpenedLog, TakeSealed
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore
    from dlcore.wire.frames import BytesLike


@contextlib.contextmanager
def failed_syncs_are_tried_again() -> Iterator[None]:
    """Section 4.2: the second fsync succeeds, and what the first one lost stays lost."""
    append = MemoryFile.append

    async def stubborn(self: MemoryFile, buffers: Sequence[BytesLike]) -> None:
        try:
            await append(self, buffers)
        except BookieStorageError as error:
            if "cannot sync" not in str(error):
                raise
            await self._disk.sync(self.inode, self._owner)

    with patch.object(MemoryFile, "append", stubborn):
        yield


@contextlib.contextmanager
def directories_are_not_synced() -> Iterator[None]:
    """Section 3.4 (c): a new file's name may vanish with the power, whatever the file holds."""

    async def place(self: MemoryDisk, name: str, data: bytes) -> None:
        owner = self.owner
        inode = Inode()
        await self.write(inode, 0, data, owner)
        self.folder.put(name, inode, None)
        await owner.step()

    with patch.object(MemoryDisk, "_place", place):
        yield


@contextlib.contextmanager
def a_file_that_is_full_is_not_synced() -> Iterator[None]:
    """Section 3.4 (a): across a roll adds are answered before the old file is synced."""
    write = GroupCommit._write
    sync = MemoryDisk.sync
    full: list[Any] = []

    async def lazy_sync(self: MemoryDisk, inode: Inode, owner: DiskOwner) -> None:
        if inode in full:
            full.remove(inode)
            await owner.step()
            return
        await sync(self, inode, owner)

    async def lazy_write(self: GroupCommit, work: Write) -> None:
        if work.step is Step.BATCH and work.file is not self._files.current:
            full.append(work.file.file.inode)  # type: ignore[union-attr]  # of a MemoryFile
        await write(self, work)

    with (
        patch.object(MemoryDisk, "sync", lazy_sync),
        patch.object(GroupCommit, "_write", lazy_write),
    ):
        yield


@contextlib.contextmanager
def marks_are_not_written() -> Iterator[None]:
    """Section 4.3: nothing proves that the last batch was durable, so damage looks like a crash."""

    def forget(self: EntryLog) -> None:
        self.is_marked = True

    with patch.object(EntryLog, "append_mark", forget):
        yield


@contextlib.contextmanager
def damage_is_taken_for_a_torn_tail() -> Iterator[None]:
    """#2220, `skipReplayJournalInvalidRecord`: replay ends at the first record that is damaged."""
    with patch.object(replay_module, "find_record_after", lambda *_: None):
        yield


@contextlib.contextmanager
def a_damaged_footer_is_read_as_empty() -> Iterator[None]:
    """Section 4.4: a sealed file whose index is damaged counts as one without entries."""
    read = replay_module._read_footer

    async def lenient(*about: Any) -> SealedIndex | FileIndex:
        return await read(*about) or FileIndex(0)

    with patch.object(replay_module, "_read_footer", lenient):
        yield


@contextlib.contextmanager
def replay_takes_one_sealed_file() -> Iterator[None]:
    """BOOKKEEPER-636: what lies in older files is not found again after a restart."""

    async def forgetful(disk: Disk, *, take_sealed: TakeSealed, **about: Any) -> OpenedLog:
        taken: dict[int, list[LedgerSummary]] = {}

        def take_later(number: int, summaries: Iterable[LedgerSummary]) -> None:
            taken[number] = list(summaries)

        opened = await replay_module.open_entry_log(disk, take_sealed=take_later, **about)
        for sealed in opened.sealed[-1:]:
            take_sealed(sealed.number, iter(taken[sealed.number]))
        return replace(opened, sealed=opened.sealed[-1:])

    with patch("bookie.ledger_storage.open_entry_log", forgetful):
        yield


@contextlib.contextmanager
def the_last_batch_is_not_written_again() -> Iterator[None]:
    """ "Can Applications Recover from fsync Failures?": replay believes the page cache."""

    async def believe(*_: Any) -> None:
        """Leave the file as it is."""

    with patch.object(replay_module, "_write_again", believe):
        yield


@contextlib.contextmanager
def an_empty_disk_keeps_the_identity() -> Iterator[None]:
    """#2612, #4812: a bookie whose disk was replaced starts as the one it was."""

    async def trusting(
        disk: Disk, store: MetadataStore, paths: NamespacePaths, *, name: str, **about: Any
    ) -> BookieCookie:
        node = await store.get(paths.cookie(name))
        if node is not None and not disk.names():
            await disk.write_file(COOKIE_FILE, node.value)
            return decode(BookieCookie, node.value, source=paths.cookie(name))
        return await establish_identity(disk, store, paths, name=name, **about)

    with patch("tests.simulation.processes.establish_identity", trusting):
        yield


MUTANTS = (
    a_damaged_footer_is_read_as_empty,
    a_file_that_is_full_is_not_synced,
    an_empty_disk_keeps_the_identity,
    damage_is_taken_for_a_torn_tail,
    directories_are_not_synced,
    failed_syncs_are_tried_again,
    marks_are_not_written,
    replay_takes_one_sealed_file,
    the_last_batch_is_not_written_again,
)
