"""Every kind of damage to the files of a real folder: what was acknowledged is never denied.

Each test takes a folder in which everything was acknowledged and proven durable, changes its files,
and checks by `Acknowledged.check`.  The tail that nothing proves is in test_replay.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from bookie.disks.real import RealDisk
from bookie.files.format import RECORD_HEADER_BYTES
from bookie.ledger_storage import LedgerStorage
from tests.fixtures.acknowledged import Acknowledged, Outcome
from tests.fixtures.lengths import sample
from tests.fixtures.storage import ManualClock, small_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = small_config(file_bytes_max=20_000, batch_bytes_max=8192)
SECTORS = (512, 4096)
SEALED = "0000000002.log"
_WORKERS = 8
SAMPLE = 24
Content = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Stored:
    """Files as they should be, and what they hold."""

    directory: Path
    """Where damaged copies go."""
    content: Content
    promised: Acknowledged

    @property
    def newest(self) -> str:
        """The name of the file that is not sealed."""
        return max(name for name in self.content if name.endswith(".log"))

    @property
    def sealed(self) -> list[str]:
        """The names of the other files."""
        return sorted(name for name in self.content if name.endswith(".log"))[:-1]

    def records_end(self, name: str) -> int:
        """Return where the footer of a sealed file begins."""
        return self.content[name].rindex(b"\xb1\x0c\x06")

    def check(self, damaged: Content) -> Outcome:
        """Put `damaged` into a folder and check."""
        (outcome,) = self.check_all(iter([damaged]))
        return outcome

    def check_all(self, damages: Iterator[Content]) -> list[Outcome]:
        """Check each of `damages`, several at a time: most of the time is waiting for the disk."""
        outcomes: list[Outcome] = []

        async def work(directory: Path) -> None:
            for damaged in damages:
                place(directory, damaged)
                outcomes.append(await self.promised.check(directory, CONFIG))

        async def main() -> None:
            await asyncio.gather(
                *(work(self.directory / f"damaged-{number}") for number in range(_WORKERS))
            )

        asyncio.run(main())
        assert outcomes
        return outcomes


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """Three ledgers over some files, entries of all sizes, a fence and a LAC in each half."""
    promised = Acknowledged()

    async def main() -> None:
        disk = RealDisk(tmp_path / "bookie")
        storage = await LedgerStorage.open(disk, CONFIG, clock=ManualClock())
        for first in range(0, 15, 3):
            await promised.add(storage, 1, range(first, first + 3), 10)
            await promised.add(storage, 2, range(first, first + 2), 900)
            if first == 3:
                await promised.fence(storage, 4)
            await promised.write_lac(storage, 1, first)
            await promised.add(storage, 3, range(first, first + 1), 6000)
        await promised.fence(storage, 2)
        await promised.add(storage, 1, range(15, 18), 300)
        await storage.aclose()
        await disk.aclose()

    asyncio.run(main())
    directory = tmp_path / "bookie"
    content = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
    found = Stored(tmp_path, content, promised)
    assert len(found.sealed) >= 2
    assert found.check(content) == Outcome(is_refused=False, returned=len(promised.entries))
    return found


def place(directory: Path, content: Content) -> None:
    """Make a folder hold these files and no others."""
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    for name, data in content.items():
        (directory / name).write_bytes(data)


def changed(content: Content, name: str, offset: int, data: bytes) -> Content:
    """Return `content` with `data` at a place of a file."""
    old = content[name]
    return {**content, name: old[:offset] + data + old[offset + len(data) :]}


def flipped(content: Content, name: str, places: range) -> Iterator[Content]:
    """Flip each bit of some bytes of a file, one at a time."""
    for offset, bit in sample(itertools.product(places, range(8)), SAMPLE):
        yield changed(content, name, offset, bytes([content[name][offset] ^ 1 << bit]))


def record_offsets(data: bytes) -> list[int]:
    """Return where the records of a file begin."""
    offsets, offset = [], int.from_bytes(data[12:16])
    while offset < len(data):
        offsets.append(offset)
        offset += RECORD_HEADER_BYTES + int.from_bytes(data[offset + 4 : offset + 8])
    return offsets


def test_every_bit_of_file_headers(stored: Stored) -> None:
    """Goal: a file header that changed is refused, whichever bit it was, in any file."""
    for name in (*stored.sealed[:1], stored.newest):
        size = int.from_bytes(stored.content[name][12:16])
        outcomes = stored.check_all(flipped(stored.content, name, range(size)))
        assert all(outcome.is_refused for outcome in outcomes)


def test_every_bit_of_record_headers(stored: Stored) -> None:
    """Goal: a record that cannot be found is not skipped.

    Sealed files are known by their footers, and the header of a record is not needed to read it.
    """
    newest = record_offsets(stored.content[stored.newest])[1]
    header = range(newest, newest + RECORD_HEADER_BYTES)
    outcomes = stored.check_all(flipped(stored.content, stored.newest, header))
    assert all(outcome.is_refused for outcome in outcomes)
    sealed = record_offsets(stored.content[SEALED])[1]
    header = range(sealed, sealed + RECORD_HEADER_BYTES)
    outcomes = stored.check_all(flipped(stored.content, SEALED, header))
    assert all(outcome.returned == len(stored.promised.entries) for outcome in outcomes)


@pytest.mark.parametrize("sector_bytes", SECTORS)
@pytest.mark.parametrize("kind", ["zeros", "ones", "noise", "another"])
def test_every_garbled_sector(stored: Stored, kind: str, sector_bytes: int) -> None:
    """Goal: a sector of any file that was lost, or that holds what belongs elsewhere."""
    noise = random.Random(7).randbytes(sector_bytes)
    elsewhere = stored.content[SEALED][sector_bytes : 2 * sector_bytes]
    sector = {
        "zeros": bytes(sector_bytes),
        "ones": b"\xff" * sector_bytes,
        "noise": noise,
        "another": elsewhere,
    }[kind]

    def damages() -> Iterator[Content]:
        for name in (*stored.sealed, stored.newest):
            size = len(stored.content[name])
            for offset in sample(range(0, size, sector_bytes), SAMPLE // 4):
                yield changed(stored.content, name, offset, sector[: size - offset])

    outcomes = stored.check_all(damages())
    assert any(outcome.is_refused for outcome in outcomes)
    assert any(outcome.unknown for outcome in outcomes)


def test_a_sealed_file_cut_at_every_byte_of_its_footer(stored: Stored) -> None:
    """Goal: a footer is only an index: what is lost of it is made again."""
    start, size = stored.records_end(SEALED), len(stored.content[SEALED])
    outcomes = stored.check_all(
        {**stored.content, SEALED: stored.content[SEALED][:end]}
        for end in sample(range(start, size), SAMPLE)
    )
    assert all(outcome.returned == len(stored.promised.entries) for outcome in outcomes)


def test_every_byte_of_a_footer(stored: Stored) -> None:
    """Goal: the same for a footer that changed."""
    outcomes = stored.check_all(
        changed(stored.content, SEALED, offset, bytes([stored.content[SEALED][offset] ^ 0x21]))
        for offset in sample(range(stored.records_end(SEALED), len(stored.content[SEALED])), SAMPLE)
    )
    assert all(outcome.returned == len(stored.promised.entries) for outcome in outcomes)


def test_a_footer_and_each_record_of_its_file(stored: Stored) -> None:
    """Goal: with the index gone too, a damaged record has the folder refused, or is unknown."""
    data = stored.content[SEALED]
    end = stored.records_end(SEALED)
    cut = {**stored.content, SEALED: data[:end]}
    outcomes = stored.check_all(
        changed(cut, SEALED, offset + at, bytes([data[offset + at] ^ 4]))
        for offset in record_offsets(data[:end])
        for at in (0, 20, RECORD_HEADER_BYTES, RECORD_HEADER_BYTES + 7)
    )
    assert all(outcome.is_refused or outcome.unknown for outcome in outcomes)


def test_a_sealed_file_cut_anywhere_in_its_records(stored: Stored) -> None:
    """Goal: a sealed file that lost acknowledged records is no torn tail."""
    outcomes = stored.check_all(
        {**stored.content, SEALED: stored.content[SEALED][:end]}
        for end in sample(range(0, stored.records_end(SEALED), 61), SAMPLE)
    )
    assert all(outcome.is_refused or outcome.unknown for outcome in outcomes)


def test_files_swapped_or_copied_over_each_other(stored: Stored) -> None:
    """Goal: a file under another's name is not taken for it."""
    names = (*stored.sealed, stored.newest)

    def damages() -> Iterator[Content]:
        for a, b in itertools.permutations(names, 2):
            yield {**stored.content, a: stored.content[b]}
            if a < b:
                yield {**stored.content, a: stored.content[b], b: stored.content[a]}

    assert all(outcome.is_refused for outcome in stored.check_all(damages()))


def test_each_file_missing(stored: Stored) -> None:
    """Goal: entries of a lost file are unknown."""
    outcomes = stored.check_all(
        {name: data for name, data in stored.content.items() if name != missing}
        for missing in (*stored.sealed, stored.newest)
    )
    assert all(outcome.is_refused for outcome in outcomes)


def test_the_note_of_the_newest_file(stored: Stored) -> None:
    """Goal: whatever happens to the note alone, nothing is lost by it."""
    note = stored.content["newest"]

    def damages() -> Iterator[Content]:
        yield from flipped(stored.content, "newest", range(len(note)))
        yield {**stored.content, "newest": b""}
        yield {**stored.content, "newest": bytes(len(note))}
        yield {name: data for name, data in stored.content.items() if name != "newest"}

    outcomes = stored.check_all(damages())
    assert {outcome.is_refused for outcome in outcomes} == {True, False}


@pytest.mark.parametrize("window_bytes", [64, 777, 5000])
def test_files_are_read_in_windows(
    stored: Stored, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: where one read ends and the next begins changes nothing.

    Method: windows far smaller than a record, and about as long, over intact files, lost footers
    and damage that only a later record proves.
    """
    monkeypatch.setattr("bookie.files.replay._WINDOW_BYTES", window_bytes)
    everything = Outcome(is_refused=False, returned=len(stored.promised.entries))
    assert stored.check(stored.content) == everything
    cut = {name: stored.content[name][: stored.records_end(name)] for name in stored.sealed}
    assert stored.check({**stored.content, **cut}) == everything
    data = stored.content[stored.newest]
    outcomes = stored.check_all(
        changed(stored.content, stored.newest, offset, bytes([data[offset] ^ 2]))
        for record in record_offsets(data)[:-2]
        for offset in (record, record + RECORD_HEADER_BYTES)
    )
    assert all(outcome.is_refused for outcome in outcomes)
