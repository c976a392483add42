"""Bugs of a bookie whose disk is full, put back on purpose."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from unittest.mock import patch

from bookie.config import SpaceConfig
from bookie.files import entry_log as entry_log_module, replay as replay_module
from bookie.files.commit_queue import CommitQueue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from bookie.disks.port import Disk
    from bookie.files.replay import OpenedLog


@contextlib.contextmanager
def a_full_disk_ends_the_log() -> Iterator[None]:
    """A write that finds no room counts as one that failed, whatever was held back for it."""

    async def give_up(_disk: Disk, _size: int, write: Callable[[], Awaitable[object]]) -> object:
        return await write()

    with (
        patch.object(entry_log_module, "write_with_room", give_up),
        patch.object(CommitQueue, "_full", CommitQueue._fail),
    ):
        yield


@contextlib.contextmanager
def a_start_needs_room() -> Iterator[None]:
    """The file to go on in is made, and noted, before anything else."""

    async def prepare(disk: Disk, opened: OpenedLog, *, noted: int) -> OpenedLog:
        del noted
        await replay_module.note_newest(disk, opened.index.number)
        return opened

    with patch.object(replay_module, "_prepare", prepare):
        yield


@contextlib.contextmanager
def nothing_is_held_back_from_others() -> Iterator[None]:
    """The last of the space is kept from oneself only."""
    with patch.object(SpaceConfig, "held_bytes", 0):
        yield


MUTANTS = (
    a_full_disk_ends_the_log,
    a_start_needs_room,
    nothing_is_held_back_from_others,
)
