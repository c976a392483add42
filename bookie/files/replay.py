"""Opening the entry log: replay of all records, and removal of an unacknowledged tail.

Any other damage makes the start fail.  The newest file's header names every file that must exist.
A small separate file names the newest file.  Sealed files are known by their footers; a file with a
damaged footer is read from its records.  Only the newest file is always read whole.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from bookie.disks.port import DiskFullError, write_with_room
from bookie.files.format import (
    NOTE_BYTES,
    RECORD_HEADER_BYTES,
    FileHeader,
    Record,
    RecordType,
    decode_file_header,
    encode_file_header,
    file_name,
    file_number,
    find_record_after,
    stated_header_size,
)
from bookie.files.index import (
    FileIndex,
    SealedIndex,
    encode_footer_record,
    read_footer,
)
from bookie.files.records import IntactRecords
from dlcore.base.errors import BookieStorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bookie.disks.port import Disk, DiskFile
    from bookie.files.index import LedgerSummary

    TakeSealed = Callable[[int, Iterator[LedgerSummary]], None]

logger = logging.getLogger(__name__)

_NEWEST_FILE = "newest"
"""Name of the file with the number of the newest file that may hold acknowledged data, as decimal
text."""
_DIGITS_MAX = 20
_HEADER_BYTES = 4096
"""Bytes that are read first: most headers are shorter."""
_WINDOW_BYTES = 4 * 1024 * 1024
"""Bytes that are read at a time, so that no file is in memory whole."""


@dataclass(slots=True, kw_only=True)
class WritePosition:
    """Position of the next record of a file."""

    header: FileHeader
    offset: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """A sealed file as replay found it."""

    number: int
    size: int
    records_end: int
    seed: int
    """Seed of the checksums of the file's records."""
    has_footer: bool = True
    """False if its footer was damaged, and the disk had no space to make it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLog:
    """All files of the directory, and the file to continue writing."""

    sealed: list[SealedFile]
    file: DiskFile | None
    """None if the disk has no space for it yet."""
    content: bytes
    """The bytes to create it with."""
    is_noted: bool
    """Whether it is noted as the newest file."""
    index: FileIndex
    position: WritePosition


@dataclass(slots=True)
class _Replayed:
    """The result of reading one file's records."""

    header: FileHeader
    index: FileIndex
    records_end: int
    sequence: int = 0
    batch_offset: int = 0
    footer: Record | None = None


async def open_entry_log(
    disk: Disk, *, owner: bytes, new_life: Callable[[], str], take_sealed: TakeSealed
) -> OpenedLog:
    """Replay the directory, repair its end, and return the log ready for writing.

    `take_sealed` gets the summaries of each sealed file, oldest file first: all of them at once
    would not fit into memory.

    Raises:
        BookieStorageError: a file is missing, belongs to another bookie, or has damage in
            acknowledged data.
    """
    numbers = [number for name in disk.names() if (number := file_number(name)) is not None]
    newest = max(numbers, default=0)
    noted = await _read_newest(disk)
    if newest < noted:
        raise BookieStorageError(
            f"{file_name(noted)} is missing: it was the newest file, and held acknowledged entries"
        )
    if not numbers:
        opened = _new_file(1, owner=owner, life=new_life(), sealed=[])
        # A data folder holds data from its first start on.
        # Not left to the first write, as on a full disk later: a start with a cookie but no file is
        # refused.
        file = await disk.create(file_name(1), [opened.content])
        return await _prepare(disk, replace(opened, file=file), noted=0)
    file = disk.open(file_name(newest))
    try:
        opened = await _open_with(disk, file, numbers, owner, new_life, take_sealed)
        return await _prepare(disk, opened, noted=noted)
    except BaseException:
        file.close()
        raise


async def _prepare(disk: Disk, opened: OpenedLog, *, noted: int) -> OpenedLog:
    """Create the file to continue in, and note it; on a full disk the writer does this later."""
    number = opened.index.number
    try:
        if opened.file is None:
            create = partial(disk.create, file_name(number), [opened.content])
            opened = replace(opened, file=await write_with_room(disk, len(opened.content), create))
        if number != noted:
            note = partial(note_newest, disk, number)
            await write_with_room(disk, NOTE_BYTES, note)
    except DiskFullError as error:
        logger.warning(
            "the disk is full, nothing can be written yet: %s; to do: free space on the disk; "
            "until then the bookie is read-only",
            error,
        )
        return opened
    return replace(opened, is_noted=True)


async def _open_with(
    disk: Disk,
    file: DiskFile,
    numbers: list[int],
    owner: bytes,
    new_life: Callable[[], str],
    take_sealed: TakeSealed,
) -> OpenedLog:
    """Replay the directory, starting from its newest file."""
    newest = max(numbers)
    replayed = await _replay_newest(disk, file, newest, owner)
    deleted = set(replayed.index.deleted_files)
    live = {
        number: end for number, end in replayed.header.live_files.items() if number not in deleted
    }
    # A lost file must not be answered with "no such entry".
    missing = sorted(live.keys() - set(numbers))
    if missing:
        raise BookieStorageError(
            f"{file_name(missing[0])} is missing: {file_name(newest)} says it holds live entries"
        )
    sealed = [
        await _open_sealed(disk, number, live[number], owner, take_sealed)
        for number in sorted(live)
    ]
    # Logged as garbage here, or in an earlier file, after which this header lacks them.
    garbage = [number for number in numbers if number != newest and number not in live]
    if replayed.footer is not None:
        # The crash came before the space behind the footer was cut off.
        if file.size > replayed.footer.end:
            await file.truncate(replayed.footer.end)
        # The crash may have come before the footer was synced: it may be in the page cache only.
        await _write_again(file, replayed.records_end)
        take_sealed(newest, replayed.index.summaries())
        sealed.append(
            SealedFile(
                number=newest,
                size=file.size,
                records_end=replayed.records_end,
                seed=replayed.header.seed,
            )
        )
        file.close()
        await _delete_garbage(disk, garbage)
        return _new_file(newest + 1, owner=owner, life=new_life(), sealed=sealed)
    # Before the deletion: the garbage records themselves may be in the last batch.
    await _settle_tail(file, replayed)
    await _delete_garbage(disk, garbage)
    position = WritePosition(
        header=replayed.header, offset=replayed.records_end, sequence=replayed.sequence
    )
    return OpenedLog(
        sealed=sealed,
        file=file,
        content=b"",
        is_noted=False,
        index=replayed.index,
        position=position,
    )


def _new_file(number: int, *, owner: bytes, life: str, sealed: list[SealedFile]) -> OpenedLog:
    """Return a log that continues in a new file, which is created at the first write."""
    live_files = {each.number: each.records_end for each in sealed}
    content = encode_file_header(number, owner=owner, life=life, live_files=live_files)
    header = decode_file_header(memoryview(content), number=number, owner=owner)
    return OpenedLog(
        sealed=sealed,
        file=None,
        content=content,
        is_noted=False,
        index=FileIndex(number),
        position=WritePosition(header=header, offset=header.size, sequence=0),
    )


async def note_newest(disk: Disk, number: int) -> None:
    """Note that file `number` exists, before anything in it is acknowledged.

    The header of a later file names every other file.  The loss of the newest file would be
    unnoticed without this note.
    """
    await disk.write_file(_NEWEST_FILE, b"%d" % number)


async def _read_newest(disk: Disk) -> int:
    """Return the number that was noted last, 0 if there is none."""
    text = await disk.read_file(_NEWEST_FILE)
    if text is None:
        return 0
    # Python refuses to convert a text of thousands of digits.
    if not text.isdigit() or len(text) > _DIGITS_MAX:
        raise BookieStorageError(f"{_NEWEST_FILE}: {text[:20]!r}, expected the number of a file")
    return int(text)


async def read_header(file: DiskFile) -> memoryview:
    """Return the file's header, not verified, perhaps with further bytes behind it.

    Raises:
        BookieStorageError: it cannot be read.
    """
    view = await file.read(0, min(_HEADER_BYTES, file.size))
    size = stated_header_size(view)
    return view if size <= len(view) else await file.read(0, min(size, file.size))


async def _delete_garbage(disk: Disk, numbers: list[int]) -> None:
    """Finish deletions that a crash interrupted.

    The files were logged as garbage before.  That record must be durable now, not only readable.
    """
    if numbers:
        logger.info("deleting garbage left by a crash files=%s", numbers)
        await disk.recycle([file_name(number) for number in numbers])


async def _settle_tail(file: DiskFile, replayed: _Replayed) -> None:
    """Cut the tail that was never acknowledged, and make the last batch durable.

    The space allocated ahead is cut as well: otherwise records of a torn batch could remain there,
    and new records could lead up to them.  The last batch may be in the page cache only, see
    `_write_again`.
    """
    if file.size > replayed.records_end:
        logger.info(
            "cutting off bytes behind the last record file=%s offset=%d bytes=%d",
            file.name,
            replayed.records_end,
            file.size - replayed.records_end,
        )
        await file.truncate(replayed.records_end)
    # A file without records has no batch; its header was durable before it got its name.
    if replayed.batch_offset:
        await _write_again(file, replayed.batch_offset)


async def _write_again(file: DiskFile, offset: int) -> None:
    """Make the file durable from `offset` on, whatever an earlier sync reported.

    After a failed sync and the end of the process, pages may look written that are not on the disk.
    Another sync would not write them.
    """
    await file.rewrite(offset, await file.read(offset, file.size - offset))


async def _open_sealed(
    disk: Disk, number: int, records_end: int, owner: bytes, take_sealed: TakeSealed
) -> SealedFile:
    file = disk.open(file_name(number))
    try:
        header = decode_file_header(await read_header(file), number=number, owner=owner)
        index: SealedIndex | FileIndex | None = await _read_footer(disk, file, header, records_end)
        has_footer = True
        if index is None:
            logger.warning(
                "writing a damaged footer again file=%s; to do: nothing, but replace the disk if "
                "this comes again",
                file.name,
            )
            replayed = await _replay_sealed(disk, file, header, records_end)
            has_footer = await _make_footer(disk, file, replayed)
            index = replayed.index
        take_sealed(number, index.summaries())
        return SealedFile(
            number=number,
            size=file.size,
            records_end=records_end,
            seed=header.seed,
            has_footer=has_footer,
        )
    finally:
        file.close()


async def _make_footer(disk: Disk, file: DiskFile, replayed: _Replayed) -> bool:
    """Write the footer that the records give; return False if the disk has no space for it."""
    end = replayed.records_end
    # The damaged footer is of no use, and its length may differ from that of the new one.
    await file.truncate(end)
    footer = encode_footer_record(
        replayed.index, replayed.header, offset=end, sequence=replayed.sequence
    )
    data = b"".join(footer)
    try:
        await write_with_room(disk, len(data), partial(file.rewrite, end, data))
    except DiskFullError as error:
        logger.warning(
            "%s stays without its footer for now: %s; to do: free space on the disk; until then "
            "starts take longer",
            file.name,
            error,
        )
        return False
    return True


async def _read_footer(
    disk: Disk, file: DiskFile, header: FileHeader, records_end: int
) -> SealedIndex | None:
    """Return the file's footer; None if it is damaged."""
    try:
        data = await file.read(records_end, max(0, file.size - records_end))
    except BookieStorageError as error:
        logger.warning(
            "a footer cannot be read: %s; to do: nothing, it is made again; replace the disk if "
            "this comes again",
            error,
        )
        return None
    return await disk.compute(
        read_footer, data, offset=records_end, number=header.number, seed=header.seed
    )


async def _replay_sealed(
    disk: Disk, file: DiskFile, header: FileHeader, records_end: int
) -> _Replayed:
    """Read a sealed file's records, all of which were acknowledged."""
    replayed = await _replay(disk, file, header, records_end)
    # The newest file's header says where the records end, so no torn tail is possible here.
    if replayed.records_end != records_end:
        raise BookieStorageError(
            f"{file.name}: its footer and its record at offset {replayed.records_end} are "
            "damaged; the file was sealed, so this was acknowledged data"
        )
    return replayed


async def _replay_newest(disk: Disk, file: DiskFile, number: int, owner: bytes) -> _Replayed:
    """Read the newest file's records up to its torn tail, if there is one."""
    header = decode_file_header(await read_header(file), number=number, owner=owner)
    replayed = await _replay(disk, file, header, file.size)
    if replayed.footer is None and replayed.records_end < file.size:
        proof = await _find_proof(disk, file, replayed)
        if proof is not None:
            raise BookieStorageError(
                f"{file.name}: the record at offset {replayed.records_end} is damaged; the "
                f"one at offset {proof.offset} was written after it had been acknowledged"
            )
    return replayed


async def _find_proof(disk: Disk, file: DiskFile, replayed: _Replayed) -> Record | None:
    """Return a record that proves that the unreadable place was durable."""
    # A record cannot prove its own place, and the one at this place is unreadable.
    start = replayed.records_end + 1
    while start < file.size:
        view = await file.read(start, min(_WINDOW_BYTES, file.size - start))
        proof = await disk.compute(
            find_record_after, view, start, replayed.records_end, replayed.header
        )
        if proof is not None:
            return proof
        # Windows overlap by less than a header, so that each header is whole in one of them.
        start += max(1, len(view) - RECORD_HEADER_BYTES + 1)
    return None


async def _replay(disk: Disk, file: DiskFile, header: FileHeader, end: int) -> _Replayed:
    """Read records up to `end`, to the footer, or to the first torn or damaged record."""
    replayed = _Replayed(header, FileIndex(header.number), records_end=header.size)
    size = _WINDOW_BYTES
    while size and replayed.records_end < end:
        start = replayed.records_end
        view = await file.read(start, min(size, end - start))
        size = await disk.compute(_replay_window, replayed, view, end)
    return replayed


def _replay_window(replayed: _Replayed, view: memoryview, end: int) -> int:
    """Take the records in `view`; return how many bytes to read next, 0 for no more."""
    records = IntactRecords(view, replayed.records_end, replayed.header, end=end)
    for each in records:
        if each.record.sequence != replayed.sequence:
            return 0
        if each.record.type is RecordType.FOOTER:
            replayed.footer = each.record
            return 0
        each.take_into(replayed.index)
        replayed.records_end = each.record.end
        replayed.sequence += 1
        replayed.batch_offset = each.record.batch_offset
    # A record larger than the window gets a window of its own size.
    return records.cut_bytes and max(_WINDOW_BYTES, records.cut_bytes)
