"""Entries that are moved to another extent: the same records under a header of their own."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import InvalidEntryError
from dlcore.log.entries.body import (
    Compressor,
    EntryHeader,
    batch_of,
    decode_entry_batch,
    decode_entry_header,
    encode_entry,
    move_entry,
)

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = batch_of([5, 5, 7], [b"a", b"", b"c" * 1000])
HEADER = EntryHeader(
    record_count=3, first_txid=5, last_txid=7, records_before=40, write_time_ms=1_000
)


def entry(compression: str = "none") -> bytes:
    """Return an entry of `BATCH`."""
    parts = encode_entry(
        BATCH,
        first_txid=5,
        last_txid=7,
        records_before=40,
        write_time_ms=1_000,
        compressor=Compressor(compression),
    )
    return b"".join(parts)


def with_header(header: EntryHeader) -> bytes:
    """Return an entry of `BATCH` whose header says something else of its records."""
    parts = move_entry(
        entry(), records_before=header.records_before, floor_ms=0, assigned_txid=None
    )
    head = bytearray(parts[0])
    struct.pack_into(">I", head, 4, header.record_count)
    return bytes(head) + bytes(parts[1])


def decode(body: bytes) -> tuple[EntryHeader, pa.RecordBatch]:
    """Return both halves of an entry."""
    header = decode_entry_header(body)
    return header, decode_entry_batch(body, header)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_moved_entry_holds_the_same_records(compression: str) -> None:
    """Only the place changes, and a floor that the write time reaches already changes nothing."""
    body = entry(compression)
    moved = b"".join(move_entry(body, records_before=2, floor_ms=999, assigned_txid=None))
    header, batch = decode(moved)
    assert header == replace(HEADER, records_before=2, compressed=compression != "none")
    assert batch.equals(BATCH)
    assert len(moved) == len(body)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_columns_that_are_wanted_are_there(compression: str) -> None:
    """A compressed entry has no others; an asked column that it lacks is no error."""
    body = entry(compression)
    header = decode_entry_header(body)
    for columns in (frozenset[str](), frozenset({"more"}), frozenset({"value", "more"})):
        batch = decode_entry_batch(body, header, None, columns)
        names = ["txid", "value"] if "value" in columns or compression == "none" else ["txid"]
        assert batch.equals(BATCH.select(names))
    with pytest.raises(InvalidEntryError, match="does not parse"):
        decode_entry_batch(body[:-60], header, None, frozenset())


def test_facts_of_an_extent_about_entries_are_in_the_entries() -> None:
    """Assigned transaction ids and the floor of the timestamps; also after another move."""
    moved = b"".join(move_entry(entry(), records_before=0, floor_ms=5_000, assigned_txid=9))
    again = b"".join(move_entry(moved, records_before=8, floor_ms=0, assigned_txid=None))
    for body, before in ((moved, 0), (again, 8)):
        header, batch = decode(body)
        assert header == EntryHeader(
            record_count=3,
            first_txid=9,
            last_txid=9,
            records_before=before,
            write_time_ms=5_000,
            txid_assigned=True,
        )
        assert batch.equals(batch_of([9, 9, 9], [b"a", b"", b"c" * 1000]))


def test_flags_that_are_not_known_are_refused() -> None:
    """A later version may mean by them what this one cannot read."""
    body = bytearray(entry())
    body[1] = 8
    with pytest.raises(InvalidEntryError, match="flags 0x8"):
        decode_entry_header(bytes(body))


def test_an_entry_that_is_none_is_refused() -> None:
    """Its checksum held: so it was written like that, by another version or a defect."""
    body = entry()
    with pytest.raises(InvalidEntryError, match="entry body of 10 bytes is shorter than its head"):
        decode_entry_header(body[:10])
    for records, before in ((0, 40), (3, -1)):
        header = replace(HEADER, record_count=records, records_before=before)
        with pytest.raises(InvalidEntryError, match=f"entry with {records} records, {before} be"):
            decode_entry_header(with_header(header))
    with pytest.raises(InvalidEntryError, match="an entry's Arrow batch does not parse"):
        decode_entry_batch(body[:-20], HEADER)
    with pytest.raises(InvalidEntryError, match="has 3 records, its header says 4"):
        decode_entry_batch(body, replace(HEADER, record_count=4))
