"""Reads of entries at known locations: neighbours are read together, each frame is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.files.format import file_name
from dlcore.base.errors import BookieStorageError, DigestMismatchError
from dlcore.wire.frames import EntryFrame, decode_frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bookie.disks.port import DiskFile
    from bookie.files.unsealed import Location

_GAP_BYTES_MAX = 16 * 1024
"""Largest gap between frames that are read together: to copy the gap is cheaper than another call.
"""
_RUN_BYTES_MAX = 4 * 1024 * 1024


async def read_run(
    file: DiskFile, run: Sequence[Location]
) -> list[EntryFrame | BookieStorageError]:
    """Return the verified frame at each location of a run, or the error of that frame.

    If the whole run cannot be read at once, the frames are read singly, to separate the damaged
    ones from the intact ones.
    """
    start = run[0].offset
    try:
        data = await file.read(start, run[-1].offset + run[-1].size - start)
    except BookieStorageError as error:
        if len(run) == 1:
            return [error]
        return [each for location in run for each in await read_run(file, [location])]
    return [
        decode_at(data[location.offset - start :][: location.size], location) for location in run
    ]


def decode_at(frame: memoryview, location: Location) -> EntryFrame | BookieStorageError:
    """Return the frame verified as the entry at `location`, or its error."""
    try:
        return decode_frame(frame, ledger_id=location.ledger_id, entry_id=location.entry_id)
    except DigestMismatchError as error:
        return BookieStorageError(
            f"entry {location.ledger_id}:{location.entry_id} is damaged at offset "
            f"{location.offset} of {file_name(location.file_number)}: {error}"
        )


def runs_of(locations: Sequence[Location]) -> Iterator[list[Location]]:
    """Group neighbours in one file into runs that are read together."""
    run: list[Location] = []
    for location in locations:
        if run and not _belongs(location, run):
            yield run
            run = []
        run.append(location)
    if run:
        yield run


def _belongs(location: Location, run: list[Location]) -> bool:
    last_end = run[-1].offset + run[-1].size
    return (
        location.file_number == run[0].file_number
        and last_end <= location.offset <= last_end + _GAP_BYTES_MAX
        and location.offset + location.size - run[0].offset <= _RUN_BYTES_MAX
    )
