"""Bugs of what a bookie makes durable, each sync left out once: tests of the disk's contract.

The simulation knows syncs from the disk in memory alone.  Here they are those of the real disk, and
of the bookie on top of it, whose calls of the kernel are noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.disks import (
    folder_calls as folder_calls_module,
    real as real_disk_module,
    real_file as real_file_module,
)
from bookie.disks.real import RealDisk
from bookie.disks.real_file import RealFile
from bookie.files.commit_queue import Event, MakeFooter, Step, Write
from bookie.files.entry_log import GroupCommit
from bookie.storage.writes import Writes
from tests.simulation.mutants_storage import answered_before_it_is_written
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path


_APPENDS = "bookie/test_synced_disk.py::test_appends_are_durable"
_FILES = "bookie/test_synced_disk.py::test_changes_of_a_file_are_durable"
_NAMES = "bookie/test_synced_disk.py::test_names_are_durable"
_FOLDERS = "bookie/test_synced_disk.py::test_a_new_folder_is_durable_and_so_are_those_that_it_is_in"
_BOOKIE = "bookie/test_synced_bookie.py::test_no_answer_comes_before_its_bytes_are_durable"


def nothing(*_: object) -> None:
    """Sync nothing."""


def within(method: str, sync: str) -> Callable[[Any], Any]:
    """Return a patch for a method of the disk that leaves out a sync while it runs."""

    def leave_out(owner: Any) -> Any:
        real = getattr(owner, method)

        def call(*about: Any, **more: Any) -> Any:
            with patch.object(sys.modules[owner.__module__], sync, nothing):
                return real(*about, **more)

        return patch.object(owner, method, call)

    return leave_out


@contextlib.contextmanager
def not_flushed_by(*callers: str) -> Iterator[None]:
    """Leave out flushes of the log that functions of these names wait for."""
    flush = GroupCommit.flush

    async def none() -> None:
        """Wait for nothing."""

    def flush_or_not(self: GroupCommit) -> Awaitable[None]:
        return none() if sys._getframe(1).f_code.co_name in callers else flush(self)

    with patch.object(GroupCommit, "flush", flush_or_not):
        yield


@caught_by(_APPENDS)
def a_direct_append_does_not_sync() -> Iterator[None]:
    """The device has the bytes of a direct write in its cache, and the file's end nowhere."""
    write_all = real_file_module.write_all

    def plain(descriptor: int, buffers: Sequence[memoryview], at: int, _flags: int = 0) -> None:
        write_all(descriptor, buffers, at)

    with patch.object(real_file_module, "write_all", plain):
        yield


@caught_by(_APPENDS)
def an_append_through_the_page_cache_does_not_sync() -> Iterator[None]:
    """The bytes are in memory alone."""
    with within("_append", "sync_data")(RealFile):
        yield


@caught_by(_FILES)
def what_is_written_over_is_not_synced() -> Iterator[None]:
    """Replay writes the last batch again, for a sync before may have failed."""
    with within("_rewrite", "sync_data")(RealFile):
        yield


@caught_by(_FILES)
def a_cut_is_not_synced() -> Iterator[None]:
    """A torn tail that was cut is there again, and what follows it leads up to it."""
    with within("_truncate", "sync_file")(RealFile):
        yield


@caught_by(_NAMES)
def the_content_of_a_new_file_is_not_synced() -> Iterator[None]:
    """A cookie, or the header of a file, that is empty after a loss of power."""

    def unsynced(path: Path, data: bytes) -> None:
        with patch.object(folder_calls_module, "sync_file", nothing):
            folder_calls_module.write_file(path, data)

    with patch.object(real_disk_module, "write_file", unsynced):
        yield


@caught_by(_NAMES)
def the_name_of_a_new_file_is_not_synced() -> Iterator[None]:
    """Section 3.4 (c): what was acknowledged in it goes with its name."""
    with within("_place", "sync_directory")(RealDisk):
        yield


@caught_by(_NAMES)
def the_new_name_of_a_spare_is_not_synced() -> Iterator[None]:
    """The file has its old name after a loss of power, under which no one looks for it."""
    with within("_create", "sync_directory")(RealDisk):
        yield


@caught_by(_NAMES)
def deletions_are_not_synced() -> Iterator[None]:
    """A provisional cookie is there again."""
    with within("_delete", "sync_directory")(RealDisk):
        yield


@caught_by(_NAMES)
def the_names_of_spares_are_not_synced() -> Iterator[None]:
    """A file is written over that still has the name of an entry log file."""
    with within("_recycle", "sync_directory")(RealDisk):
        yield


@caught_by(_FOLDERS)
def folders_above_the_data_are_not_synced() -> Iterator[None]:
    """The data folder's own name is durable, and that of the new folder which it is in is not."""

    def make_folder(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        folder_calls_module.sync_directory(directory.parent)

    with patch.object(folder_calls_module, "make_folder", make_folder):
        yield


@caught_by(_BOOKIE)
def a_batch_is_answered_while_it_is_written() -> Iterator[None]:
    """Callers that wait get their answer when the write begins."""
    answer_to = GroupCommit._answer_to

    async def write(self: GroupCommit, work: Write | MakeFooter) -> Event:
        if isinstance(work, Write) and work.step is Step.BATCH:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return await answer_to(self, work)

    with answered_before_it_is_written(), patch.object(GroupCommit, "_answer_to", write):
        yield


@caught_by(_BOOKIE)
def an_append_of_the_bookie_does_not_sync() -> Iterator[None]:
    """No test of the disk is asked: the answers themselves show it."""
    pwritev = os.pwritev

    def plain(descriptor: int, buffers: Any, offset: int, _flags: int = 0) -> int:
        return pwritev(descriptor, buffers, offset)

    with (
        patch.object(os, "pwritev", plain),
        within("_append", "sync_data")(RealFile),
    ):
        yield


@caught_by(_BOOKIE)
def a_fence_is_answered_at_once() -> Iterator[None]:
    """#2614: the fence is lost with the power, and the old writer goes on."""
    with not_flushed_by("fence"):
        yield


@caught_by(_BOOKIE)
def a_lac_is_answered_at_once() -> Iterator[None]:
    """An explicit LAC that no one wrote."""
    write_lac = Writes.write_lac

    def early(self: Writes, ledger_id: int, last_add_confirmed: int) -> asyncio.Future[None]:
        write_lac(self, ledger_id, last_add_confirmed)
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    with patch.object(Writes, "write_lac", early):
        yield


@caught_by(_BOOKIE)
def files_are_dropped_before_their_copies_are_durable() -> Iterator[None]:
    """Compaction deletes the only copy that is on disk."""
    with not_flushed_by("_compact", "_write_chunk", "_copy_states", "drop"):
        yield


@caught_by(_BOOKIE)
def files_are_dropped_before_it_is_durable_that_they_are_garbage() -> Iterator[None]:
    """A file is missing after a loss of power, and nothing tells why: the bookie does not start."""
    with not_flushed_by("drop"):
        yield
