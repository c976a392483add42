"""Reopening a real directory after every kind of damage: cut the torn, refuse the damaged."""

from __future__ import annotations

import asyncio
import shutil
import struct
from typing import TYPE_CHECKING

import crc32c
import pytest

from bookie.disks.real import RealDisk
from bookie.files.format import RECORD_HEADER_BYTES
from bookie.ledger_storage import LedgerStorage
from dlcore.base.errors import BookieStorageError, NoSuchEntryError
from tests.fixtures.lengths import sample
from tests.fixtures.storage import ManualClock, make_frame, read_all, small_config

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

LEDGER = 7
ONE_FILE = small_config(file_bytes_max=2**20)
FIRST = "0000000001.log"
SAMPLE = 20
HEADER_BYTES = 60 + 4  # fixed part and checksum; the first file lists no others
RECORD_BYTES = RECORD_HEADER_BYTES + len(make_frame(LEDGER, 1))


def with_storage(
    directory: Path,
    test: Callable[[LedgerStorage], Awaitable[None]],
    *,
    owner: str = "",
    crash: bool = False,
    small_files: bool = False,
) -> None:
    """Run `test` on the directory's storage; `crash` ends it without closing, as SIGKILL does."""

    async def main() -> None:
        disk = RealDisk(directory)
        try:
            config = small_config() if small_files else ONE_FILE
            storage = await LedgerStorage.open(disk, config, clock=ManualClock(), owner=owner)
            try:
                await test(storage)
            finally:
                if crash:
                    await disk.aclose()
                await storage.aclose()
        finally:
            await disk.aclose()

    asyncio.run(main())


async def add_one_by_one(storage: LedgerStorage, entry_ids: range) -> None:
    """Add entries, each in a batch of its own."""
    for entry_id in entry_ids:
        await storage.writes.add_entry(make_frame(LEDGER, entry_id))


def expect_entries(directory: Path, count: int) -> None:
    """Check that exactly the first `count` entries are there and that writing goes on."""

    async def test(storage: LedgerStorage) -> None:
        frames = await read_all(storage, LEDGER, first=0, last=count - 1)
        assert frames == [make_frame(LEDGER, entry_id) for entry_id in range(count)]
        with pytest.raises(NoSuchEntryError):
            await storage.reads.read_entry(LEDGER, count, fence=False)
        await add_one_by_one(storage, range(count, count + 2))

    with_storage(directory, test, crash=True)

    async def again(storage: LedgerStorage) -> None:
        assert len(await read_all(storage, LEDGER, first=0, last=count + 1)) == count + 2

    with_storage(directory, again, crash=True)


def expect_refusal(directory: Path, *messages: str) -> None:
    """Check that the directory is refused with a message that has all of `messages`."""

    async def test(storage: LedgerStorage) -> None:
        pytest.fail(f"opened {storage}")

    with pytest.raises(BookieStorageError) as caught:
        with_storage(directory, test)
    for message in messages:
        assert message in str(caught.value)


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    """Entries 0 to 4, each of its own batch, in one file that was not closed."""
    directory = tmp_path / "original"
    with_storage(directory, lambda storage: add_one_by_one(storage, range(5)), crash=True)
    assert (directory / FIRST).stat().st_size == HEADER_BYTES + 5 * RECORD_BYTES
    return directory


@pytest.fixture
def many_files(tmp_path: Path) -> Path:
    """Entries 0 to 99 over several sealed files and one that is not."""
    directory = tmp_path / "original"
    with_storage(
        directory,
        lambda storage: add_one_by_one(storage, range(100)),
        crash=True,
        small_files=True,
    )
    assert len(list(directory.glob("*.log"))) >= 3
    return directory


def test_the_tail_is_cut_at_every_byte(one_file: Path, tmp_path: Path) -> None:
    """Goal: whatever part of the last two records reached the disk, what is whole is kept.

    Method: the file is cut at every length from the end of record 2 on.
    """
    content = (one_file / FIRST).read_bytes()
    for size in sample(range(HEADER_BYTES + 3 * RECORD_BYTES, len(content) + 1), SAMPLE):
        directory = tmp_path / "cut"
        directory.mkdir()
        (directory / FIRST).write_bytes(content[:size])
        expect_entries(directory, (size - HEADER_BYTES) // RECORD_BYTES)
        shutil.rmtree(directory)


def test_a_torn_tail_of_zeros_or_garbage_is_cut(one_file: Path, tmp_path: Path) -> None:
    """Goal: a file may have grown without its bytes, or hold what was there before."""
    content = (one_file / FIRST).read_bytes()
    start = HEADER_BYTES + 4 * RECORD_BYTES
    for tail in (bytes(5000), b"\xb1\x0c" * 2000, content[:start]):
        directory = tmp_path / "torn"
        directory.mkdir()
        (directory / FIRST).write_bytes(content[:start] + tail)
        expect_entries(directory, 4)
        shutil.rmtree(directory)


def test_every_flipped_byte_before_the_last_batch_is_refused(
    one_file: Path, tmp_path: Path
) -> None:
    """Goal: damage to acknowledged data is noticed wherever it is, and named, never skipped.

    Method: each byte of the file header and of the first four records is flipped.
    """
    content = bytearray((one_file / FIRST).read_bytes())
    directory = tmp_path / "flipped"
    directory.mkdir()
    for position in sample(range(HEADER_BYTES + 4 * RECORD_BYTES), 2 * SAMPLE):
        content[position] ^= 0x10
        (directory / FIRST).write_bytes(content)
        content[position] ^= 0x10
        if position < HEADER_BYTES:
            expect_refusal(directory, FIRST)
        else:
            record = (position - HEADER_BYTES) // RECORD_BYTES
            offset = HEADER_BYTES + record * RECORD_BYTES
            expect_refusal(directory, FIRST, f"offset {offset} is damaged")
    expect_unchanged = bytes(content)
    (directory / FIRST).write_bytes(expect_unchanged)
    expect_entries(directory, 5)


def test_every_flipped_byte_of_the_last_batch_is_noticed(one_file: Path, tmp_path: Path) -> None:
    """Goal: nothing proves the last batch acknowledged; it is cut, never served damaged."""
    content = bytearray((one_file / FIRST).read_bytes())
    directory = tmp_path / "flipped"
    for position in sample(range(HEADER_BYTES + 4 * RECORD_BYTES, len(content)), SAMPLE):
        directory.mkdir()
        content[position] ^= 0x10
        (directory / FIRST).write_bytes(content)
        content[position] ^= 0x10
        expect_entries(directory, 4)
        shutil.rmtree(directory)


def test_a_closed_storage_proves_its_last_batch(tmp_path: Path) -> None:
    """Goal: after a clean stop damage to the very last entry is refused too."""
    with_storage(tmp_path, lambda storage: add_one_by_one(storage, range(3)))
    content = bytearray((tmp_path / FIRST).read_bytes())
    content[HEADER_BYTES + 3 * RECORD_BYTES - 1] ^= 1
    (tmp_path / FIRST).write_bytes(content)
    expect_refusal(tmp_path, f"offset {HEADER_BYTES + 2 * RECORD_BYTES} is damaged")


@pytest.mark.parametrize("sector", [bytes(512), b"\xff" * 512])
def test_a_garbled_sector_before_valid_data_is_refused(many_files: Path, sector: bytes) -> None:
    """Goal: the same on whole sectors, in the newest file."""

    async def add_more(storage: LedgerStorage) -> None:
        await add_one_by_one(storage, range(100, 120))

    with_storage(many_files, add_more, crash=True)
    newest = sorted(many_files.glob("*.log"))[-1]
    content = bytearray(newest.read_bytes())
    assert len(content) > 1536
    content[512:1024] = sector
    newest.write_bytes(content)
    expect_refusal(many_files, newest.name, "is damaged")


def test_records_of_one_torn_batch_do_not_prove_each_other(tmp_path: Path) -> None:
    """Goal: a power cut may lose the first page of a batch and keep the second; that is no damage.

    Method: three entries in one batch; the first record is wiped, the others are intact.
    """

    async def add(storage: LedgerStorage) -> None:
        await add_one_by_one(storage, range(2))
        await asyncio.gather(
            *(storage.writes.add_entry(make_frame(LEDGER, e)) for e in range(2, 5))
        )

    with_storage(tmp_path, add, crash=True)
    content = bytearray((tmp_path / FIRST).read_bytes())
    start = HEADER_BYTES + 2 * RECORD_BYTES
    content[start : start + 20] = bytes(20)
    (tmp_path / FIRST).write_bytes(content)
    expect_entries(tmp_path, 2)


def test_damaged_footers_are_made_again(many_files: Path) -> None:
    """Goal: the records are the truth.  Method: each sealed file is damaged in its own way."""
    damages: list[Callable[[bytes], bytes]] = [
        lambda content: content[:-1],
        lambda content: content[:-100] + bytes(100),
        lambda content: content + b"more",
        lambda content: content[: content.index(b"FOOT")] + b"foot",
    ]
    sealed = sorted(many_files.glob("*.log"))[:-1]
    originals = [path.read_bytes() for path in sealed]
    for path, damage in zip(sealed, damages * len(sealed), strict=False):
        path.write_bytes(damage(path.read_bytes()))
    expect_entries(many_files, 100)
    assert [path.read_bytes() for path in sealed] == originals


def test_damage_in_a_sealed_file_is_an_error_on_read_and_never_a_no(many_files: Path) -> None:
    """Goal: a flipped byte of a sealed body: unknown for that entry, all others are served."""
    path = many_files / FIRST
    content = bytearray(path.read_bytes())
    position = content.index(b"ledger 7 entry 3")
    content[position] ^= 1
    path.write_bytes(content)

    async def test(storage: LedgerStorage) -> None:
        with pytest.raises(BookieStorageError, match=f"entry 7:3 is damaged at offset .* {FIRST}"):
            await storage.reads.read_entry(LEDGER, 3, fence=False)
        with pytest.raises(BookieStorageError, match="entry 7:3 is damaged"):
            await read_all(storage, LEDGER, first=0, last=5)
        assert len(await read_all(storage, LEDGER, first=4, last=99)) == 96

    with_storage(many_files, test)


def test_damaged_records_and_a_damaged_footer_together_are_refused(many_files: Path) -> None:
    """Goal: a footer is not made from what is left."""
    path = many_files / FIRST
    content = bytearray(path.read_bytes())
    content[content.index(b"ledger 7 entry 3")] ^= 1
    path.write_bytes(content[:-1])
    expect_refusal(many_files, FIRST, "was sealed, so this was acknowledged")


def test_a_missing_file_is_refused(many_files: Path) -> None:
    """Goal: entries of a lost file are unknown, not absent."""
    (many_files / "0000000002.log").unlink()
    expect_refusal(many_files, "0000000002.log is missing")


def test_files_of_another_bookie_are_refused(tmp_path: Path) -> None:
    """Goal: a directory mounted at the wrong bookie is noticed before anything is written."""

    async def nothing(_: LedgerStorage) -> None:
        return

    with_storage(tmp_path, nothing, owner="cluster/one")
    with_storage(tmp_path, nothing, owner="cluster/one")
    with pytest.raises(BookieStorageError, match="another bookie"):
        with_storage(tmp_path, nothing, owner="cluster/two")


def test_a_file_under_another_name_is_refused(many_files: Path) -> None:
    """Goal: names and headers agree."""
    (many_files / "0000000002.log").rename(many_files / "0000000777.log")
    expect_refusal(many_files, "0000000777.log: its header says it is file 2")


def forge(path: Path, record: int, offset: int, value: bytes) -> None:
    """Change a record's header and make its checksum right again."""
    content = bytearray(path.read_bytes())
    (seed,) = struct.unpack_from(">I", content, HEADER_BYTES - 4)
    start = HEADER_BYTES + record * RECORD_BYTES
    content[start + offset : start + offset + len(value)] = value
    end = start + RECORD_HEADER_BYTES - 4
    struct.pack_into(">I", content, end, crc32c.crc32c(bytes(content[start:end]), seed))
    path.write_bytes(content)


def test_a_record_type_of_the_future_is_refused(one_file: Path) -> None:
    """Goal: an intact record that this version cannot read is neither cut nor skipped."""
    forge(one_file / FIRST, 0, 2, b"\x63")
    expect_refusal(one_file, f"offset {HEADER_BYTES} has the unknown type 99")


def test_a_record_out_of_sequence_is_damage(one_file: Path) -> None:
    """Goal: a record that went missing between two intact ones is noticed."""
    forge(one_file / FIRST, 1, 8, (2).to_bytes(8, "big"))
    expect_refusal(one_file, f"offset {HEADER_BYTES + RECORD_BYTES} is damaged")


def test_another_intact_frame_in_the_place_of_one_is_damage(one_file: Path) -> None:
    """Goal: a misdirected write, whole in itself, does not pass for what was written there."""
    content = bytearray((one_file / FIRST).read_bytes())
    start = HEADER_BYTES + RECORD_BYTES + RECORD_HEADER_BYTES
    content[start : HEADER_BYTES + 2 * RECORD_BYTES] = make_frame(LEDGER, 9)
    (one_file / FIRST).write_bytes(content)
    expect_refusal(one_file, f"offset {HEADER_BYTES + RECORD_BYTES} is damaged")


def test_an_empty_or_foreign_file_is_refused(tmp_path: Path) -> None:
    """Goal: a log file appears whole by renaming, so an incomplete header is damage."""
    for content in (b"", b"short", b"x" * 200):
        (tmp_path / FIRST).write_bytes(content)
        expect_refusal(tmp_path, FIRST)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """Goal: the cookie, notes of an administrator, names that only look like ours."""
    for name in ("cookie", "1.log", "²²²²²²²²²².log", "0000000001.log.bak", "notes.txt"):
        (tmp_path / name).write_bytes(b"mine")
    with_storage(tmp_path, lambda storage: add_one_by_one(storage, range(2)))
    assert (tmp_path / "1.log").read_bytes() == b"mine"
    expect_entries(tmp_path, 2)


@pytest.mark.parametrize("small_files", [False, True])
def test_the_newest_file_is_missed(tmp_path: Path, small_files: bool) -> None:
    """Goal: no file may go unnoticed, the one that no other names neither, nor the only one."""

    async def fill(storage: LedgerStorage) -> None:
        await add_one_by_one(storage, range(100))

    with_storage(tmp_path, fill, crash=True, small_files=small_files)
    newest = max(tmp_path.glob("*.log"))
    newest.unlink()
    expect_refusal(tmp_path, f"{newest.name} is missing", "the newest")


def test_a_damaged_note_of_the_newest_file_is_refused(one_file: Path) -> None:
    """Goal: what cannot be read is not taken for "none"."""
    (one_file / "newest").write_bytes(b"1?")
    expect_refusal(one_file, "newest", "1?")
    (one_file / "newest").write_bytes(b"1" * 5000)
    expect_refusal(one_file, "newest", "1111")


def test_a_directory_without_the_note_gets_it(one_file: Path) -> None:
    """Goal: a crash right after a file was made leaves a directory that opens, and is complete."""
    (one_file / "newest").unlink()
    expect_entries(one_file, 5)
    (one_file / FIRST).unlink()
    expect_refusal(one_file, FIRST, "missing")
