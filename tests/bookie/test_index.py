"""The two indexes of a file hold exactly what was put in, compared with a dict."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings, strategies as st

from bookie.files.format import RECORD_HEADER_BYTES, decode_file_header, encode_file_header
from bookie.files.index import (
    FileIndex,
    LedgerSummary,
    SealedIndex,
    encode_footer_record,
    read_footer,
)
from dlcore.base.errors import BookieStorageError
from tests.fixtures.lengths import amount

OWNER = b"o" * 16
HEADER = decode_file_header(
    memoryview(encode_file_header(3, owner=OWNER, life="1" * 32, live_files={})),
    number=3,
    owner=OWNER,
)

entries = st.dictionaries(
    st.tuples(st.integers(0, 4), st.integers(0, 40)),
    st.tuples(st.integers(0, 2**31), st.integers(48, 2**29), st.integers(-1, 50)),
    max_size=60,
)


def fill(
    index: FileIndex, model: dict[tuple[int, int], tuple[int, int, int]], fenced: set[int]
) -> None:
    """Put everything of the model into the index."""
    for (ledger_id, entry_id), (offset, size, lac) in model.items():
        index.add_entry(
            ledger_id=ledger_id,
            entry_id=entry_id,
            offset=offset,
            size=size,
            last_add_confirmed=lac,
        )
    for ledger_id in fenced:
        index.note_fence(ledger_id)


@settings(max_examples=amount(150, sampled=50))
@given(
    entries, st.sets(st.integers(0, 6)), st.integers(0, 5), st.integers(0, 40), st.integers(0, 20)
)
def test_both_indexes_answer_as_a_dict_does(
    model: dict[tuple[int, int], tuple[int, int, int]],
    fenced: set[int],
    ledger_id: int,
    first: int,
    count: int,
) -> None:
    """Goal: order of insertion does not matter, and sealing changes no answer."""
    index = FileIndex(3)
    fill(index, model, fenced)
    index.deleted_files.extend([1, 2])
    record = b"".join(encode_footer_record(index, HEADER, offset=101, sequence=7))
    sealed = read_footer(memoryview(record), offset=101, number=HEADER.number, seed=HEADER.seed)
    assert sealed is not None
    assert sealed.deleted_files == [1, 2]
    known = {ledger for ledger, _ in model} | fenced
    expected_entries = [
        (entry_id, offset, size)
        for (ledger, entry_id), (offset, size, _) in sorted(model.items())
        if ledger == ledger_id and first <= entry_id <= first + 15
    ][:count]
    for each in (index, sealed):
        found = each.entries(ledger_id)
        assert (found is None) == (ledger_id not in known)
        if found is not None:
            assert list(found.between(first, first + 15, count)) == expected_entries
        assert sorted(each.summaries()) == sorted(summarise(model, known, fenced))


def summarise(
    model: dict[tuple[int, int], tuple[int, int, int]], known: set[int], fenced: set[int]
) -> list[LedgerSummary]:
    """The dumb twin of `summaries`."""
    summaries = []
    for ledger_id in known:
        ids = [entry_id for ledger, entry_id in model if ledger == ledger_id]
        mine = [each for (ledger, _), each in model.items() if ledger == ledger_id]
        summaries.append(
            LedgerSummary(
                ledger_id,
                min(ids, default=0),
                max(ids, default=-1),
                max((lac for _, _, lac in mine), default=-1),
                ledger_id in fenced,
                sum(RECORD_HEADER_BYTES + size for _, size, _ in mine),
            )
        )
    return summaries


@pytest.mark.parametrize("offset", range(96, 104))
def test_columns_are_aligned_in_the_file(offset: int) -> None:
    """Goal: numpy searches the mapped columns in place; an unaligned one would be copied."""
    index = FileIndex(3)
    fill(index, {(1, 2): (5, 60, 1), (9, 4): (6, 61, 1)}, set())
    file = bytes(offset) + b"".join(encode_footer_record(index, HEADER, offset=offset, sequence=0))
    sealed = read_footer(
        memoryview(file)[offset:], offset=offset, number=HEADER.number, seed=HEADER.seed
    )
    assert sealed is not None
    found = sealed.entries(9)
    assert found is not None
    start = file.find((4).to_bytes(8, "little"), offset)
    assert start % 8 == 0
    assert list(found.between(0, 100, 10)) == [(4, 6, 61)]


def read_at_100(record: bytes | bytearray) -> SealedIndex | None:
    """Read a footer that lies at offset 100."""
    return read_footer(memoryview(record), offset=100, number=HEADER.number, seed=HEADER.seed)


def test_every_flipped_byte_of_a_footer_is_noticed() -> None:
    """Goal: a footer is whole or not a footer."""
    index = FileIndex(3)
    fill(index, {(1, 2): (5, 60, 1), (9, 4): (6, 61, 1)}, {9})
    record = bytearray(b"".join(encode_footer_record(index, HEADER, offset=100, sequence=0)))
    for position in range(len(record)):
        record[position] ^= 0x40
        assert read_at_100(record) is None, position
        record[position] ^= 0x40
    assert read_at_100(record) is not None
    for size in range(len(record)):
        assert (
            read_footer(
                memoryview(record)[:size], offset=100, number=HEADER.number, seed=HEADER.seed
            )
            is None
        )


def test_a_footer_that_contradicts_itself_is_refused() -> None:
    """Goal: counts are checked against the bytes, also those that this bookie wrote."""
    footer = FileIndex(3).encode_footer()
    assert list(SealedIndex(memoryview(footer)).summaries()) == []
    with pytest.raises(BookieStorageError, match="too short"):
        SealedIndex(memoryview(footer[:10]))
    with pytest.raises(BookieStorageError, match="magic"):
        SealedIndex(memoryview(b"X" + footer[1:]))
    with pytest.raises(BookieStorageError, match="shorter than its own counts"):
        SealedIndex(memoryview(footer[:8] + b"\x05" + footer[9:]))


def test_memory_per_entry_is_bounded() -> None:
    """Goal: 100,000 entries of the file being written cost little more than 16 bytes each."""
    tracemalloc.start()
    try:
        index = FileIndex(1)
        for position in range(100_000):
            index.add_entry(
                ledger_id=position % 10,
                entry_id=position // 10,
                offset=position * 100,
                size=100,
                last_add_confirmed=-1,
            )
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 100_000 * 24


def test_memory_per_ledger_is_bounded() -> None:
    """Goal: a ledger with a few entries in the file being written costs little more than these."""
    tracemalloc.start()
    try:
        index = FileIndex(1)
        for position in range(30_000):
            index.add_entry(
                ledger_id=10_000 + position % 10_000,
                entry_id=1000 + position // 10_000,
                offset=position * 100,
                size=100,
                last_add_confirmed=1000,
            )
            index.note_lac(10_000 + position % 10_000, 1000 + position // 10_000)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 10_000 * 250


def test_both_copies_of_an_entry_are_found_the_newer_one_last() -> None:
    """Goal: a copy written because the first one was damaged is never cut off by the count."""
    index = FileIndex(3)
    for entry_id, offset in ((1, 10), (2, 20), (3, 30), (2, 40)):
        index.add_entry(ledger_id=1, entry_id=entry_id, offset=offset, size=5, last_add_confirmed=0)
    record = b"".join(encode_footer_record(index, HEADER, offset=100, sequence=0))
    sealed = read_at_100(record)
    assert sealed is not None
    for each in (index, sealed):
        found = each.entries(1)
        assert found is not None
        assert list(found.between(2, 2, 1)) == [(2, 20, 5), (2, 40, 5)]
        assert list(found.between(0, 9, 2)) == [(1, 10, 5), (2, 20, 5), (2, 40, 5)]
        assert list(found.between(0, 9, 4)) == [(1, 10, 5), (2, 20, 5), (2, 40, 5), (3, 30, 5)]
        assert list(found.between(0, 9, 1)) == [(1, 10, 5)]
    assert sealed.columns().offsets.tolist() == [10, 20, 40, 30]
    assert sealed.columns().ledger_ids.tolist() == [1, 1, 1, 1]


def test_compaction_finds_ledgers_rows_and_columns_of_each_other() -> None:
    """Each ledger's part of the columns is its own, also one that has no entry."""
    index = FileIndex(3)
    fill(index, {(9, 4): (60, 61, 1), (1, 2): (50, 51, 0), (9, 5): (70, 71, 4)}, {5})
    index.note_lac(7, 12)
    sealed = read_at_100(b"".join(encode_footer_record(index, HEADER, offset=100, sequence=0)))
    assert sealed is not None
    assert sealed.ledger_ids() == [1, 5, 7, 9]
    parts = {ledger_id: (part.start, part.stop) for ledger_id, part in sealed.ledger_rows()}
    assert parts == {1: (0, 1), 5: (1, 1), 7: (1, 1), 9: (1, 3)}
    for columns, order in ((sealed.columns(), [1, 9, 9]), (index.columns(), [9, 9, 1])):
        assert columns.ledger_ids.tolist() == order
        rows = zip(*(column.tolist() for column in columns), strict=True)
        assert sorted(rows) == [(1, 2, 50, 51), (9, 4, 60, 61), (9, 5, 70, 71)]
    assert [index.last_add_confirmed(each) for each in (1, 5, 7, 8, 9)] == [0, -1, 12, -1, 4]
    assert [index.is_fenced(each) for each in (1, 5, 7, 8)] == [False, True, False, False]
