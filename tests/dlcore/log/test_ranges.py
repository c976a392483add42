"""Ranges of a log: by position, transaction id and time, as batches and tables."""

from __future__ import annotations

import random
import sys
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pytest

from dlcore.base.errors import AlreadyTruncatedError, ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace
from dlcore.ledger.reading.reader import LedgerReader
from dlcore.log.entries.batches import read_batch, read_schema
from dlcore.log.reading.ranges import rows_before, timestamp_ms_of
from tests.dlcore.log.test_reader import fill
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.records import LogRecordWithDLSN


def time_of(each: LogRecordWithDLSN) -> datetime:
    """Return when a record was written, in some time zone."""
    return datetime.fromtimestamp(each.timestamp_ms / 1000, timezone(timedelta(hours=3)))


@pytest.mark.parametrize("seed", range(8))
def test_ranges_by_position_transaction_id_and_time(seed: int) -> None:
    """Compared with all records, filtered."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await fill(cluster, log, seed=seed)
        records = await read_all(log)
        rng = random.Random(seed)
        keys: dict[str, Any] = {
            "dlsn": lambda r: r.dlsn,
            "txid": lambda r: r.txid,
            "time": time_of,
        }
        for _ in range(12):
            key = keys[rng.choice(list(keys))]
            low, high = sorted(map(key, rng.choices(records, k=2)))
            bounds = rng.choice([(low, high), (None, high), (low, None), (None, None), (high, low)])
            wanted = [
                r.sequence_id
                for r in records
                if (bounds[0] is None or key(r) >= bounds[0])
                and (bounds[1] is None or key(r) < bounds[1])
            ]
            found = await log.read(*bounds)
            table = await found.to_arrow()
            assert table.schema == found.schema == read_schema()
            assert table["sequence_id"].to_pylist() == wanted
            assert table["value"].to_pylist() == [records[n].payload for n in wanted]
            assert await found.to_arrow() == table  # each use reads again
            assert (found.extent.record_count_estimate > 0) == bool(wanted)
            assert found.extent.is_empty == (not wanted)

    on_log(body)


def test_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the table; without Polars nothing is read, and the error says what to do."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            for txid in range(5):
                await writer.write(record(txid, b"%d" % txid))
        part = await log.read(1, 4)
        pandas = await part.to_pandas()
        assert pandas["value"].tolist() == [b"1", b"2", b"3"]
        assert pandas["dlsn"].struct.field("entry").tolist() == [1, 2, 3]
        frame = await part.to_polars()
        assert frame.equals(pl.from_arrow(await part.to_arrow()))
        monkeypatch.setitem(sys.modules, "polars", None)
        monkeypatch.setattr(part, "to_arrow", None)
        with pytest.raises(ConfigurationError, match="pip install polars"):
            await part.to_polars()

    on_log(body)


def test_a_range_is_what_it_was_when_it_was_made() -> None:
    """Records that come later are not in it; what is truncated under it is an error."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        assert (await (await log.read()).to_arrow()).num_rows == 0
        for _ in range(2):
            async with await log.open_writer() as writer:
                await writer.write(record(max(writer.last_txid, 0) + 1))
        whole = await log.read()
        async with await log.open_writer() as writer:
            await writer.write(record(9))
        assert (await whole.to_arrow())["txid"].to_pylist() == [1, 2]
        assert "'clicks' from 1:0:0 to 2:1:0, about 2 records, 0.0 MB" in repr(whole)
        await log.truncate(DLSN(2, 0, 0))
        with pytest.raises(AlreadyTruncatedError, match="1:0:0 was truncated away"):
            await whole.to_arrow()
        assert (await (await log.read(DLSN.INITIAL)).to_arrow())["txid"].to_pylist() == [2, 9]
        with pytest.raises(AlreadyTruncatedError, match="1:0:1 was truncated away"):
            await log.read(DLSN(1, 0, 1))
        await log.truncate(DLSN(3, 0, 0))
        late = await log.read(DLSN(3, 0, 0))
        async with await log.open_writer() as writer:
            await writer.write(record(10))
        await log.truncate(DLSN(4, 0, 0))
        with pytest.raises(AlreadyTruncatedError, match="3:0:0 was truncated away"):
            await late.to_arrow()

    on_log(body)


def test_nothing_is_read_behind_the_end_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it ends: at a segment's last record, before the next one, within an entry."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        for first in (1, 3, 5):
            async with await log.open_writer() as writer:
                writer.write_bulk([record(first), record(first + 1)])
        opened: set[int] = set()
        read = LedgerReader.read

        def noted(self: LedgerReader, first: int, last: int) -> Any:
            opened.add(self.metadata.ledger_id)
            return read(self, first, last)

        monkeypatch.setattr(LedgerReader, "read", noted)
        for end, txids in [
            (DLSN(1, 0, 1), [1]),
            (DLSN(1, 1, 0), [1, 2]),
            (DLSN(2, 0, 0), [1, 2]),
            (DLSN(2, 0, 1), [1, 2, 3]),
        ]:
            part = await log.read(None, end)
            opened.clear()
            assert (await part.to_arrow())["txid"].to_pylist() == txids
            assert len(opened) == (len(txids) + 1) // 2

    on_log(body)


def test_rows_before_a_position() -> None:
    """All of an entry below it, none of one above, a part of the one that it is in."""
    batch = read_batch(
        pa.record_batch({"txid": [1, 2, 3], "value": [b""] * 3}), EntryPlace(3, 8, 0, 0, 0),
        first_slot=2, log="clicks",
    )  # fmt: skip
    ends = [(3, 9, 0), (4, 0, 0), (3, 8, 3), (3, 8, 2), (3, 8, 1), (3, 8, 99), (3, 7, 9), (2, 9, 9)]
    assert [rows_before(batch, DLSN(*end)).num_rows for end in ends] == [3, 3, 1, 0, 0, 3, 0, 0]


def test_times_are_of_a_zone_and_rounded_up() -> None:
    """A record of the millisecond before is not of the range."""
    assert timestamp_ms_of(datetime(1970, 1, 1, 0, 0, 1, 500, tzinfo=UTC)) == 1001
    assert timestamp_ms_of(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)) == 1000
    assert timestamp_ms_of(datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=UTC)) == 0
    with pytest.raises(ConfigurationError, match="no time zone"):
        timestamp_ms_of(datetime(2020, 1, 1))  # noqa: DTZ001  # what is refused
