"""From entries to runs: small ones together, each record once, and only what is wanted."""

from __future__ import annotations

from itertools import repeat

import pyarrow as pa
import pytest

from dlcore.base.ids import DLSN
from dlcore.base.proto import flight_pb2 as pb
from dlcore.base.records import EntryPlace
from dlcore.log.entries.body import batch_of
from dlcore.log.reading.entry_rows import EntryRows
from dlcore.proxy.reading.ring import CUT_FACTOR, RUN_BYTES, Fetched, fetched
from dlcore.proxy.reading.rows import RowView, row_bytes_of
from tests.dlcore.flight.test_sending import arrow_message

VIEW = RowView("a", None, ["dlsn", "value"])


def entry(entry_id: int, rows: int, *, first_row: int = 0, size: int = 0) -> EntryRows:
    """Return an entry as a reader gives it, whose payloads have at least this size."""
    payloads = [(b"%d:%d" % (entry_id, slot)).ljust(size) for slot in range(rows)]
    place = EntryPlace(1, entry_id, 0, 0, 5)
    return EntryRows(batch_of(range(rows), payloads), place, first_row, size_bytes=rows * size)


def values(message: bytes | None) -> list[bytes]:
    """Return the records of a message, which are where they say."""
    assert message is not None
    data = pb.FlightData.FromString(message)
    rows = pa.ipc.read_record_batch(arrow_message(data), VIEW.schema).to_pylist()
    found = [bytes(row["value"]).rstrip() for row in rows]
    assert found == [b"%d:%d" % (row["dlsn"]["entry"], row["dlsn"]["slot"]) for row in rows]
    return found


def together(entries: list[EntryRows], bytes_max: int = RUN_BYTES) -> list[Fetched]:
    """Return entries of the log as they go together."""
    return list(fetched(entries, row_bytes=row_bytes_of("a"), sizes=repeat(bytes_max)))


def test_small_entries_go_together() -> None:
    """A large one is a run of its own."""
    fifth = RUN_BYTES // 5
    sizes = [fifth, fifth, fifth, 4 * fifth, 10, 10]
    runs = together([entry(number, 2, size=size) for number, size in enumerate(sizes)])
    assert [len(run.firsts) for run in runs] == [2, 1, 1, 2]
    assert [run.start for run in runs[1:]] == [run.end for run in runs[:-1]]
    assert together([]) == []


@pytest.mark.parametrize("first_row", [0, 7])
def test_an_entry_of_many_small_records_is_cut(first_row: int) -> None:
    """Known sizes of records count: no message is far above its bound."""
    rows, bytes_max = 500, 10_000
    parts = together([entry(3, rows, first_row=first_row), entry(4, 1)], bytes_max)
    got = [each.part(VIEW, DLSN(1, 5, 0)) for each in parts]
    assert max(len(each or b"") for each in got) <= CUT_FACTOR * bytes_max
    wanted = [*(b"3:%d" % slot for slot in range(first_row, rows)), b"4:0"]
    assert [each for message in got for each in values(message)] == wanted
    starts = [DLSN(1, 3, first_row), *(each.end for each in parts[:-1])]
    assert [each.start for each in parts] == starts
    assert parts[-1].end == DLSN(1, 5, 0)


def test_a_long_name_counts_with_each_record() -> None:
    """Every row has it, in UTF-8."""
    log, bytes_max = "ü" * 100, 10_000
    view = RowView(log, None, None)
    parts = fetched([entry(3, 500)], row_bytes=row_bytes_of(log), sizes=repeat(bytes_max))
    sizes = [len(each.part(view, DLSN(1, 4, 0)) or b"") for each in parts]
    assert 0 < max(sizes) <= CUT_FACTOR * bytes_max


def test_a_record_is_whole() -> None:
    """However large it is beside the bound."""
    parts = together([entry(3, 3, size=1000)], 10)
    got = [each.part(VIEW, DLSN(1, 4, 0)) for each in parts]
    assert [values(message) for message in got] == [[b"3:0"], [b"3:1"], [b"3:2"]]


def test_a_run_says_where_its_records_are() -> None:
    """Also the first one, of which some were not wanted."""
    (whole,) = together([entry(3, 4, first_row=2), entry(4, 1)])
    run = whole.run(VIEW)
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
    (whole,) = together([entry(3, 4, first_row=2), entry(4, 1)])
    part = whole.part(VIEW, DLSN(*end))
    if not wanted:
        assert part is None
        return
    assert values(part) == [b"3:2", b"3:3", b"4:0"][:wanted]
    assert b'{"next":"%d:%d:%d"}' % min(end, (1, 5, 0)) in (part or b"")
