"""Scans join small entries: the same records as of entries that are decoded one by one.

Goal: whatever the entries, their extents and the edges of a range are, both ways give the same.
Method: scans of a ledger that is a list, with chunks of any size, beside chunks of one entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from dlcore.base.errors import InvalidEntryError
from dlcore.base.ids import DLSN
from dlcore.log.entries.body import Compressor, batch_of, encode_entry, move_entry
from dlcore.log.reading.scan import ExtentView, ScanRange
from dlcore.log.reading.scan_driver import by_entry, scan_range
from dlcore.log.reading.scan_run import FIRST_BYTES, GROWTH
from dlcore.log.typed.arrow import columns_of
from dlcore.log.typed.schema import LogSchema
from dlcore.wire.frames import EntryFrame
from tests.dlcore.log.test_scan import ledger
from tests.fixtures.aio import run
from tests.fixtures.lengths import amount

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.ledger.client import LedgerClient
    from dlcore.log.reading.scan import ScanBatch
    from dlcore.log.reading.scan_run import ScanRun

FIRST = pa.schema([("n", pa.int32()), ("word", pa.string())])
LATER = pa.schema([("n", pa.int64()), ("word", pa.string()), ("more", pa.bool_())])
TYPED = LogSchema.first(columns_of(FIRST)).evolved("log", columns_of(LATER))


@dataclass
class Ledger:
    """A client of ledgers with one ledger, whose entries come in chunks of so many."""

    bodies: Sequence[bytes]
    chunk: int
    asked: list[tuple[int, int]] = field(default_factory=list)

    def open_ledger_of(self, metadata: object) -> Ledger:
        """Return the ledger."""
        return self

    async def read(self, first: int, last: int) -> AsyncGenerator[list[EntryFrame], None]:
        """Yield entries, and note what was asked for."""
        self.asked.append((first, last))
        for start in range(first, last + 1, self.chunk):
            ids = range(start, min(start + self.chunk, last + 1))
            bodies = [self.bodies[n] for n in ids]
            yield [
                EntryFrame(1, n, n, 0, memoryview(body), body)
                for n, body in zip(ids, bodies, strict=True)
            ]


def scanned(part: ScanRange, bodies: Sequence[bytes], *, chunk: int) -> list[ScanBatch]:
    """Return the entries of a scan."""

    async def scan() -> list[ScanBatch]:
        client = cast("LedgerClient", Ledger(bodies, chunk))
        return [each async for each in by_entry(scan_range(part, client))]

    return run(scan())


def runs_of(part: ScanRange, source: Ledger) -> list[ScanRun]:
    """Return the runs of a scan."""

    async def scan() -> list[ScanRun]:
        return [each async for each in scan_range(part, cast("LedgerClient", source))]

    return run(scan())


def entry(batch: pa.RecordBatch, number: int, *, schema_id: int = 0, **said: Any) -> bytes:
    """Return an entry of a batch."""
    parts = encode_entry(
        batch,
        first_txid=number,
        last_txid=number + batch.num_rows,
        records_before=10 * number,
        write_time_ms=1000 + 7 * number % 11,
        compressor=Compressor(said.get("compression", "none")),
        schema_id=schema_id,
        stamp=said.get("stamp", b""),
    )
    body = b"".join(parts)
    if said.get("assigned"):
        moved = move_entry(body, records_before=10 * number, floor_ms=0, assigned_txid=900 + number)
        body = b"".join(moved)
    return body


def rows(count: int, number: int, *, later: bool | None) -> pa.RecordBatch:
    """Return some records; `later` says of which version of the schema, None: of a byte log."""
    txids = [number] * count
    if later is None:
        return batch_of(txids, [b"%d" % (number + n) * n for n in range(count)])
    words = [None if n % 3 == 0 else "w" * (n + number) for n in range(count)]
    columns: dict[str, Any] = {"n": [n + number for n in range(count)], "word": words}
    if later:
        columns["more"] = [n % 2 == 0 for n in range(count)]
    schema = pa.schema([("_txid", pa.int64()), *(LATER if later else FIRST)])
    return pa.RecordBatch.from_pydict({"_txid": txids, **columns}, schema=schema)


def part_of(cuts: Sequence[int], start: DLSN, end: DLSN, *, typed: bool, **of: Any) -> ScanRange:
    """Return a range over adjacent extents that begin at these entries of the ledger."""
    extents = tuple(
        ExtentView(
            ledger_id=1,
            first_entry_id=first,
            last_entry_id=after - 1,
            base_entry_id=first + 5,
            start_sequence_id=10_000 * n,
            record_count=after - first,
            size_bytes=of.get("entry_bytes", 100) * (after - first),
            first_txid=500 + n,
            last_txid=500 + n,
            txid_assigned=n % 2 == 1,
            timestamp_floor_ms=1005 if n % 3 == 1 else 0,
        )
        for n, (first, after) in enumerate(pairwise(cuts))
    )
    whole = ScanRange(
        log="log",
        log_id="id",
        lssn=4,
        start=DLSN(4, 0, 0),
        end=DLSN(4, 10_000, 0),
        extents=extents,
        ledgers={1: ledger(1)},
        schema=TYPED if typed else None,
        columns=of.get("columns"),
    )
    return whole.between(start, end)


@settings(max_examples=amount(200, sampled=60))
@given(st.data())
def test_joined_entries_are_those_decoded_one_by_one(data: st.DataObject) -> None:
    """Positions, numbers, times and values, of any entries, extents and edges."""
    typed = data.draw(st.booleans())
    counts = data.draw(st.lists(st.integers(1, 4), min_size=8, max_size=30))
    changed_at = data.draw(st.integers(0, 60)) if typed else 0
    bodies = [
        entry(
            rows(count, number, later=number >= changed_at if typed else None),
            number,
            schema_id=(2 if number >= changed_at else 1) if typed else 0,
            compression=data.draw(st.sampled_from(["none", "none", "lz4"])),
            stamp=data.draw(st.sampled_from([b"", b"", b"x" * 9])),
            assigned=data.draw(st.sampled_from([False, False, True])),
        )
        for number, count in enumerate(counts)
    ]
    inner = data.draw(st.sets(st.integers(1, max(1, len(bodies) - 1)), max_size=4))
    cuts = sorted({0, *inner, len(bodies)})
    first, last = data.draw(st.integers(0, 2)), len(bodies) - data.draw(st.integers(1, 2))
    slot, end_slot = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    columns = data.draw(st.sampled_from([None, frozenset({"n", "value"}), frozenset[str]()]))
    part = part_of(
        cuts,
        DLSN(4, first + 5, slot),
        DLSN(4, last + 5, end_slot),
        typed=typed,
        columns=columns,
    )
    expected = scanned(part, bodies, chunk=1)
    found = scanned(part, bodies, chunk=data.draw(st.integers(5, 30)))
    assert len(found) == len(expected)
    wanted = {"_txid", "txid", *(["value", *LATER.names] if columns is None else columns)}
    for one, other in zip(found, expected, strict=True):
        assert replace(one, batch=None) == replace(other, batch=None)
        names = wanted & set(one.batch.schema.names)
        assert names == wanted & set(other.batch.schema.names)
        for name in names:
            assert one.batch.column(name) == other.batch.column(name)


def test_many_small_entries_are_one_run() -> None:
    """A run has at most 256 KiB; a large entry is alone, and its values are not copied."""
    said: tuple[dict[str, Any], ...] = (
        {},
        {"stamp": b"x" * 9},
        {"compression": "lz4"},
        {"assigned": True},
    )
    small = [entry(rows(3, n, later=None), n, **said[n % 4]) for n in range(300)]
    part = part_of([0, 300], DLSN(4, 5, 0), DLSN(4, 305, 0), typed=False)
    assert [len(each.entry_ids) for each in runs_of(part, Ledger(small, 300))] == [300]
    large = [entry(batch_of([n], [b"x" * 100_000]), n) for n in range(9)]
    part = part_of([0, 9], DLSN(4, 5, 0), DLSN(4, 14, 0), typed=False)
    found = runs_of(part, Ledger(large, 9))
    assert [len(each.entry_ids) for each in found] == [1] * 9
    (end,) = {each.end for each in found[-1:]}
    assert (end, found[-1].end_sequence_id) == (DLSN(4, 13, 1), 81)


BAD = entry(rows(3, 0, later=None), 0)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"short", "shorter than its header"),
        (b"\x09" + BAD[1:], "format 9"),
        (BAD[:4] + b"\0\0\0\7" + BAD[8:], "its header says 7"),
        (BAD[:-40], "does not parse"),
        (BAD[:2] + b"\0\1" + BAD[4:], "an entry of a byte log has schema 1"),
    ],
)
def test_a_bad_entry_among_good_ones_fails_alone(bad: bytes, said: str) -> None:
    """The entries before it are read."""
    bodies = [entry(rows(2, n, later=None), n) for n in range(10)]
    bodies[6] = bad
    part = part_of([0, 10], DLSN(4, 5, 0), DLSN(4, 15, 0), typed=False)
    found: list[int] = []

    async def scan() -> None:
        client = cast("LedgerClient", Ledger(bodies, 10))
        async for each in by_entry(scan_range(part, client)):
            found.extend((each.entry_id,))

    with pytest.raises(InvalidEntryError, match=said):
        run(scan())
    assert found == list(range(5, 11))


def test_the_first_requests_are_small() -> None:
    """Each next one is larger, over the extents of a range; at last all that is left is asked."""
    count = 3000
    body = entry(batch_of([1], [b"x" * 5]), 0)
    cuts = [0, 4, count]
    part = part_of(cuts, DLSN(4, 5, 0), DLSN(4, count + 5, 0), typed=False, entry_bytes=16_384)
    source = Ledger([body] * count, 100)
    assert sum(len(each.entry_ids) for each in runs_of(part, source)) == count
    sizes = [last - first + 1 for first, last in source.asked]
    step = FIRST_BYTES // 16_384
    growing = [step * GROWTH**n for n in range(7)]
    assert sizes == [*growing, count - sum(growing)]
    assert [first for first, _ in source.asked[1:]] == [last + 1 for _, last in source.asked[:-1]]
    huge = part_of([0, 3], DLSN(4, 5, 0), DLSN(4, 8, 0), typed=False, entry_bytes=1 << 20)
    source = Ledger([body] * 3, 1)
    runs_of(huge, source)
    assert source.asked == [(0, 0), (1, 1), (2, 2)]
