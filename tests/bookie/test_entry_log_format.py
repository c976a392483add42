"""The framing of entry log files: what comes back, and what is refused by name."""

from __future__ import annotations

import struct

import crc32c
import pytest

from bookie.files.format import (
    RECORD_HEADER_BYTES,
    RecordType,
    decode_fence,
    decode_file_header,
    decode_garbage,
    decode_lac,
    encode_fence,
    encode_file_header,
    encode_garbage,
    encode_lac,
    encode_record_header,
    file_header_bytes,
    file_name,
    file_number,
    find_record_after,
    owner_digest,
    read_record_header,
    stated_header_size,
)
from dlcore.base.errors import BookieStorageError

OWNER = owner_digest("bookie-1")
HEADER = encode_file_header(3, owner=OWNER, life="1" * 32, live_files={1: 100, 2: 200})
DECODED = decode_file_header(memoryview(HEADER), number=3, owner=OWNER)


def patched(at: int, data: bytes) -> bytes:
    """Return the header with other bytes and a checksum that holds."""
    changed = bytearray(HEADER)
    changed[at : at + len(data)] = data
    return bytes(changed[:-4]) + struct.pack(">I", crc32c.crc32c(bytes(changed[:-4])))


def record(offset: int, *, batch_offset: int, kind: int = RecordType.FENCE) -> bytes:
    """Return the header of a record of file 3."""
    return encode_record_header(
        kind,  # type: ignore[arg-type]  # also types that are not known
        payload_bytes=8,
        payload_crc=1,
        sequence=5,
        number=3,
        offset=offset,
        batch_offset=batch_offset,
        seed=DECODED.seed,
    )


def test_names_are_those_of_numbers_and_no_others() -> None:
    """A file beside the log, or one named by hand, is none of it."""
    assert file_number(file_name(17)) == 17
    for name in ("17", file_name(17)[1:], "x" + file_name(17)[1:], file_name(17) + "~"):
        assert file_number(name) is None


def test_a_header_says_what_was_put_in() -> None:
    """With the files that were alive, and its own size before anything is verified."""
    assert (DECODED.number, DECODED.live_files) == (3, {1: 100, 2: 200})
    assert DECODED.size == len(HEADER) == file_header_bytes(2)
    assert stated_header_size(memoryview(HEADER)) == len(HEADER)
    assert stated_header_size(memoryview(HEADER)[:20]) == 0


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEADER[:20], "20 bytes are too few for a file header"),
        (b"garbage!" + HEADER[8:], "not an entry log file, it begins with"),
        (HEADER[:-1], rf"says it has {len(HEADER)} bytes"),
        (HEADER[:-1] + bytes([HEADER[-1] ^ 1]), "its checksum does not match"),
        (patched(8, b"\x00\x63"), "format version 99, expected"),
    ],
)
def test_a_header_that_is_none_is_refused(header: bytes, message: str) -> None:
    """Each refusal names the file and what is wrong."""
    with pytest.raises(BookieStorageError, match=f"^{file_name(3)}: .*{message}"):
        decode_file_header(memoryview(header), number=3, owner=OWNER)


def test_a_file_that_lies_in_another_place_is_refused() -> None:
    """Renamed, or of another bookie: its records are not those that are looked for."""
    with pytest.raises(BookieStorageError, match="its header says it is file 3"):
        decode_file_header(memoryview(HEADER), number=4, owner=OWNER)
    with pytest.raises(BookieStorageError, match="written by another bookie"):
        decode_file_header(memoryview(HEADER), number=3, owner=owner_digest("bookie-2"))


def test_a_record_of_a_newer_version_is_an_error_and_no_damage() -> None:
    """It is intact: cutting it off as a torn tail would lose it."""
    view = memoryview(record(0, batch_offset=0, kind=200))
    with pytest.raises(BookieStorageError, match="offset 0 has the unknown type 200"):
        read_record_header(view, 0, DECODED)


def test_only_a_record_of_a_later_batch_proves_a_place_durable() -> None:
    """The next record after damage is none of its own batch, and none of another life."""
    torn = bytes(RECORD_HEADER_BYTES)
    same_batch = record(RECORD_HEADER_BYTES, batch_offset=0)
    elsewhere = record(0, batch_offset=5_000)  # its offset is not where it lies
    later = record(3 * RECORD_HEADER_BYTES, batch_offset=3 * RECORD_HEADER_BYTES)
    data = torn + same_batch + elsewhere
    assert find_record_after(memoryview(data), 0, 0, DECODED) is None
    found = find_record_after(memoryview(data + later), 0, 0, DECODED)
    assert found is not None
    assert (found.offset, found.batch_offset) == (3 * RECORD_HEADER_BYTES, 3 * RECORD_HEADER_BYTES)
    # The view may begin anywhere behind the place.
    assert find_record_after(memoryview((data + later)[50:]), 50, 0, DECODED) == found


def test_payloads_of_small_records_come_back() -> None:
    """Fences, LACs and garbage."""
    assert decode_fence(encode_fence(2**62)) == 2**62
    assert decode_lac(encode_lac(7, -1)) == (7, -1)
    assert decode_garbage(encode_garbage([])) == ()
    assert decode_garbage(encode_garbage([3, 2**40])) == (3, 2**40)
