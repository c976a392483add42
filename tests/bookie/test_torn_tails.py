"""The newest file cut at every byte of its last batches, and within the footer that was to seal it.

Torn records were not acknowledged.  But every record that is whole must be kept: the
crash may have come between the sync and the answer, or after it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bookie.disks.real import RealDisk
from bookie.files.format import (
    RECORD_HEADER_BYTES,
    FileHeader,
    RecordType,
    decode_fence,
    decode_file_header,
    decode_lac,
    owner_digest,
    read_record_header,
)
from bookie.ledger_storage import LedgerStorage
from dlcore.base.errors import NoSuchEntryError, NoSuchLedgerError
from dlcore.wire.frames import decode_frame
from tests.bookie.test_damaged_files import place
from tests.fixtures.acknowledged import Acknowledged
from tests.fixtures.lengths import sample
from tests.fixtures.storage import ManualClock, open_storage, small_config

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = small_config(file_bytes_max=2000, batch_bytes_max=1000)
NEWEST = "0000000002.log"
WORKERS = 8
CUTS = 30
FOOTER_STEP = 7
"""A footer is one record: it is whole or torn, wherever it was cut."""


async def fill(directory: Path, *, life: str = "0" * 32, ledger: int = 1) -> dict[str, bytes]:
    """Fill three files, with batches of entries, fences and LACs; return the first two as they are.

    The second one is whole, footer and all: a crash may have cut it anywhere before the third was
    made.  Other ledgers, counted from `ledger`, give records of the same sizes.
    """
    disk = RealDisk(directory)
    storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock(token=life))
    promised = Acknowledged()
    first = 0
    while len(disk.names()) < 4:  # three logs and the note of the newest
        await promised.add(storage, ledger, range(first, first + 3), 8)
        await promised.fence(storage, ledger + 100 + first)
        await promised.add(storage, ledger + 1, range(first, first + 2), 60)
        await promised.write_lac(storage, ledger + 200 + first, 7)
        first += 3
    await storage.aclose()
    await disk.aclose()
    names = ("0000000001.log", NEWEST)
    return {"newest": b"2", **{name: (directory / name).read_bytes() for name in names}}


def records_of(data: bytes, number: int) -> list[tuple[int, RecordType, memoryview]]:
    """Return (end, type, payload) of the records of a file."""
    view = memoryview(data)
    header: FileHeader = decode_file_header(view, number=number, owner=owner_digest(""))
    found = []
    offset = header.size
    while (record := read_record_header(view, offset, header)) is not None:
        found.append((record.end, record.type, view[offset + RECORD_HEADER_BYTES : record.end]))
        offset = record.end
    return found


def held(records: list[tuple[int, RecordType, memoryview]]) -> Acknowledged:
    """Return what a list of records says."""
    said = Acknowledged()
    for _, kind, payload in records:
        if kind is RecordType.ENTRY:
            frame = decode_frame(payload)
            said.entries[frame.ledger_id, frame.entry_id] = bytes(payload)
        elif kind is RecordType.FENCE:
            said.fenced.add(decode_fence(payload))
        elif kind is RecordType.LAC:
            ledger_id, last_add_confirmed = decode_lac(payload)
            said.last_add_confirmed[ledger_id] = last_add_confirmed
    return said


async def check_absent(directory: Path, lost: set[tuple[int, int]]) -> None:
    """See that what was torn is a proven "no", not unknown: else no ledger could be recovered.

    Nor is anything there of an earlier life.
    """
    disk = RealDisk(directory)
    async with open_storage(disk, CONFIG) as storage:
        assert not {3, 4} & set(storage.core.live_ledgers())
        for ledger_id, entry_id in lost:
            try:
                await storage.reads.read_entry(ledger_id, entry_id, fence=False)
            except (NoSuchEntryError, NoSuchLedgerError):
                continue
            raise AssertionError(f"{ledger_id}:{entry_id} was torn, and is there")
    await disk.aclose()


def test_the_newest_file_is_cut_at_every_byte(tmp_path: Path) -> None:
    """Goal: whole records are kept, torn ones are proven absent, and nothing is ever refused."""

    async def main() -> None:
        content = await fill(tmp_path / "filled")
        older = records_of(content["0000000001.log"], 1)
        records = records_of(content[NEWEST], 2)
        everything = held([*older, *records])
        assert records[-1][1] is RecordType.FOOTER
        assert {kind for _, kind, _ in records[-8:-1]} >= {
            RecordType.ENTRY,
            RecordType.FENCE,
            RecordType.LAC,
        }
        footer = records[-2][0]
        every = [
            *range(records[-9][0], footer + RECORD_HEADER_BYTES),
            *range(footer + RECORD_HEADER_BYTES, len(content[NEWEST]) + 1, FOOTER_STEP),
        ]
        cuts = iter(sample(every, CUTS))

        async def work(directory: Path) -> None:
            for end in cuts:
                place(directory, {**content, NEWEST: content[NEWEST][:end]})
                whole = held([*older, *(record for record in records if record[0] <= end)])
                outcome = await whole.check(directory, CONFIG)
                assert not outcome.is_refused, end
                assert outcome.unknown == 0, end
                await check_absent(directory, everything.entries.keys() - whole.entries.keys())

        await asyncio.gather(*(work(tmp_path / f"cut-{number}") for number in range(WORKERS)))

    asyncio.run(main())


def test_the_newest_file_ends_at_every_byte_in_its_earlier_life(tmp_path: Path) -> None:
    """Goal: of a recycled file only what was written in this life is taken, and nothing refused.

    Method: in its earlier life the file had the same number, and records of the same sizes: each
    one that were taken would be the next one.
    """

    async def main() -> None:
        content = await fill(tmp_path / "filled", life="1" * 32)
        earlier = (await fill(tmp_path / "earlier", life="2" * 32, ledger=3))[NEWEST]
        newer = content[NEWEST]
        older = records_of(content["0000000001.log"], 1)
        records = records_of(newer, 2)
        assert [end for end, _, _ in records] == [end for end, _, _ in records_of(earlier, 2)]
        everything = held([*older, *records])
        cuts = iter(sample(range(records[-6][0], records[-2][0] + RECORD_HEADER_BYTES), CUTS))

        async def work(directory: Path) -> None:
            for cut in cuts:
                recycled = newer[:cut] + earlier[cut:]
                place(directory, {**content, NEWEST: recycled})
                pairs = enumerate(zip(newer, recycled, strict=True))
                same = next(at for at, (new, found) in pairs if new != found)
                whole = held([*older, *(record for record in records if record[0] <= same)])
                outcome = await whole.check(directory, CONFIG)
                assert not outcome.is_refused, cut
                assert outcome.unknown == 0, cut
                await check_absent(directory, everything.entries.keys() - whole.entries.keys())

        await asyncio.gather(*(work(tmp_path / f"cut-{number}") for number in range(WORKERS)))

    asyncio.run(main())
