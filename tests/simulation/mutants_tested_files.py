"""Bugs of how a bookie's files lie on the disk, which tests of the disk catch by name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from bookie.disks import real_file as real_file_module
from bookie.disks.folder_calls import Spares
from bookie.disks.real_file import RealFile, RecentBytes, rounded_up
from bookie.files import entry_log as entry_log_module
from bookie.files.format import encode_file_header
from tests.fixtures.memory_disk import DiskOwner, MemoryDisk
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.wire.frames import BytesLike
    from tests.fixtures.memory_folder import Inode


@caught_by("bookie/test_torn_tails.py::test_the_newest_file_ends_at_every_byte_in_its_earlier_life")
def an_earlier_life_is_taken_for_this_one() -> Iterator[None]:
    """All files have one life: whole records of a recycled file follow the last new one."""

    def lifeless(number: int, **about: Any) -> bytes:
        return encode_file_header(number, **{**about, "life": "0" * 32})

    with patch.object(entry_log_module, "encode_file_header", lifeless):
        yield


@caught_by("bookie/test_real_disk.py::test_appends_of_all_sizes_are_read_back_at_once_and_later")
def padding_counts_as_written() -> Iterator[None]:
    """The next append goes behind the zeros that fill the last block."""
    append = RealFile.append

    async def padded(self: RealFile, buffers: Sequence[BytesLike]) -> None:
        await append(self, buffers)
        self._size = rounded_up(self._size)

    with patch.object(RealFile, "append", padded):
        yield


@caught_by("bookie/test_real_disk.py::test_a_short_write_goes_on_aligned")
def a_short_write_is_taken_for_a_whole_one() -> Iterator[None]:
    """The rest of a short write is never written."""

    def once(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> None:
        os.pwritev(descriptor, buffers, offset, flags)

    with patch.object(real_file_module, "write_all", once):
        yield


@caught_by("contracts/test_disk.py::test_a_file_is_not_used_again_while_it_is_read")
def a_file_is_recycled_before_its_last_reader_is_done() -> Iterator[None]:
    """A reader with an open handle is given bytes of another file."""

    def any_spare(self: Spares, in_use: object) -> Any:
        return next(iter(self._sizes), None)

    def never(self: MemoryDisk, inode: Inode) -> bool:
        return False

    with (
        patch.object(Spares, "unused", any_spare),
        patch.object(MemoryDisk, "_is_open", never),
    ):
        yield


@caught_by("bookie/test_memory_disk.py::test_a_recycled_file_has_its_new_header_or_not_its_name")
def the_new_header_is_not_durable_before_the_name() -> Iterator[None]:
    """Power is lost, and a file of an earlier life stands under a new name."""

    async def unsynced(self: MemoryDisk, inode: Inode, owner: DiskOwner) -> None:
        await owner.step()

    with patch.object(MemoryDisk, "sync", unsynced):
        yield


@caught_by("bookie/test_recent_bytes.py::test_it_writes_and_reads_what_a_file_holds")
def what_the_ring_has_overwritten_is_read() -> Iterator[None]:
    """A reader far behind is given newer bytes that took the place of the older ones."""

    read_into = RecentBytes.read_into

    def careless(self: RecentBytes, offset: int, buffers: Sequence[memoryview]) -> bool:
        filled, self._filled = self._filled, 0
        try:
            return read_into(self, offset, buffers)
        finally:
            self._filled = filled

    with patch.object(RecentBytes, "read_into", careless):
        yield
