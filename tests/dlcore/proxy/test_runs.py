"""From entries to runs: small ones together, each record once, and only what is wanted."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from dlcore.ids import DLSN
from dlcore.log.entries.batches import batch_of
from dlcore.log.reading.rows import EntryRows
from dlcore.proto import flight_pb2 as pb
from dlcore.proxy.reading.rows import RowView
from dlcore.proxy.reading.runs import RUN_BYTES, Fetched, fetched
from dlcore.records import EntryPlace

VIEW = RowView("a", None, ["dlsn", "value"])


def entry(entry_id: int, rows: int, *, first_row: int = 0, size: int = 100) -> EntryRows:
    """Return an entry as a reader gives it."""
    batch = batch_of(range(rows), [b"%d:%d" % (entry_id, slot) for slot in range(rows)])
    return EntryRows(batch, EntryPlace(1, entry_id, 0, 0, 5), first_row, size_bytes=size)


def values(message: bytes | None) -> list[bytes]:
    """Return the records of a message, which are where they say."""
    assert message is not None
    data = pb.FlightData.FromString(message)
    buffer = struct.pack("<iI", -1, len(data.data_header)) + data.data_header + data.data_body
    rows = pa.ipc.read_record_batch(pa.py_buffer(buffer), VIEW.schema).to_pylist()
    for row in rows:
        assert row["value"] == b"%d:%d" % (row["dlsn"]["entry"], row["dlsn"]["slot"])
    return [row["value"] for row in rows]


def test_small_entries_go_together() -> None:
    """A large one is a run of its own."""
    sizes = [RUN_BYTES // 2, RUN_BYTES // 2, 10, RUN_BYTES * 2, 10, 10]
    runs = list(fetched(entry(number, 2, size=size) for number, size in enumerate(sizes)))
    assert [len(run.firsts) for run in runs] == [2, 1, 1, 2]
    assert [run.start for run in runs[1:]] == [run.end for run in runs[:-1]]
    assert list(fetched([])) == []


def test_a_run_says_where_its_records_are() -> None:
    """Also the first one, of which some were not wanted."""
    run = Fetched.of([entry(3, 4, first_row=2), entry(4, 1)]).run(VIEW)
    assert (run.start, run.end, run.row_count) == (DLSN(1, 3, 2), DLSN(1, 5, 0), 3)
    assert values(run.data) == [b"3:2", b"3:3", b"4:0"]
    assert run.size_bytes == len(run.data)
    positions = [(1, 3, 2), (1, 3, 3), (1, 4, 0), (1, 4, 7), (2, 0, 0)]
    assert [run.rows_before(DLSN(*each)) for each in positions] == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("end", "wanted"),
    [((1, 3, 3), 1), ((1, 4, 0), 2), ((1, 5, 0), 3), ((2, 0, 0), 3), ((1, 3, 2), 0)],
)
def test_a_part_ends_where_its_range_does(end: tuple[int, int, int], wanted: int) -> None:
    """Nothing of what follows, and no message without records."""
    part = Fetched.of([entry(3, 4, first_row=2), entry(4, 1)]).part(VIEW, DLSN(*end))
    if not wanted:
        assert part is None
        return
    assert values(part) == [b"3:2", b"3:3", b"4:0"][:wanted]
    assert b'{"next":"%d:%d:%d"}' % min(end, (1, 5, 0)) in (part or b"")
