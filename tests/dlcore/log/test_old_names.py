"""The names that columns of logs of bytes had at first: taken up to version 0.1, with a warning.

Goal: who goes by an old name gets what it always stood for, and is told, where the call is; nothing
else warns.  Method: the same rows by both names, on logs in memory; warnings are errors in tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlcore.api.schemas import with_old_names
from dlcore.base.errors import ConfigurationError, SchemaMismatchError
from dlcore.base.records import EntryPlace
from dlcore.log.entries.batches import batch_of, byte_log_batch, read_batch
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog

PLACE = EntryPlace(3, 8, 40, 30, 1_700_000_000_123)


def test_a_range_takes_old_names() -> None:
    """As columns, as they were, and in what rows must fulfil; each use warns its caller."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            for txid in range(5):
                await writer.write(record(txid, b"%d" % txid))
        with pytest.warns(DeprecationWarning, match="payload is called value now") as told:
            found = await log.read(columns=["lssn", "entry_id", "slot_id", "txid", "payload"])
        assert [each.filename for each in told] == [__file__]
        assert "entry_id is called dlsn.entry now" in str(told[0].message)
        table = await found.to_arrow()
        assert table.schema == found.schema
        assert table.schema.types == [pa.int64()] * 4 + [pa.binary()]
        positions = (await (await log.read()).to_arrow())["dlsn"].to_pylist()
        parts = zip(*(table[name].to_pylist() for name in table.column_names[:3]), strict=True)
        assert list(parts) == [tuple(each.values()) for each in positions]
        assert table["payload"].to_pylist() == [b"0", b"1", b"2", b"3", b"4"]
        with pytest.warns(DeprecationWarning, match="payload is called value now"):
            some = await log.read(columns=["txid"], where=pc.field("payload") >= b"3")
        assert (await some.to_arrow()).to_pydict() == {"txid": [3, 4]}
        with pytest.raises(
            SchemaMismatchError, match=r"'payloads' is not one of its columns.*value$"
        ):
            await log.read(columns=["payloads"])

    on_log(body)


@pytest.mark.parametrize("kind", [pa.RecordBatch, pa.Table])
def test_rows_get_their_old_names_back(kind: Any) -> None:
    """Batches of a reader and tables; what has no old name stays, the log's name goes."""
    rows = read_batch(batch_of([5, 6], [b"a", b"b"]), PLACE, first_slot=1, log="clicks")
    given = rows if kind is pa.RecordBatch else pa.Table.from_batches([rows])
    with pytest.warns(DeprecationWarning, match="slot_id is called dlsn.slot now") as told:
        old = with_old_names(given)
    assert [each.filename for each in told] == [__file__]
    assert isinstance(old, kind)
    assert old.column("timestamp").type == pa.timestamp("ms", "UTC")
    assert old.drop_columns(["timestamp"]).to_pydict() == {
        "lssn": [3, 3],
        "entry_id": [8, 8],
        "slot_id": [1, 2],
        "txid": [5, 6],
        "sequence_id": [41, 42],
        "payload": [b"a", b"b"],
    }
    assert with_old_names(given.select(["txid"])) == given.select(["txid"])  # nothing to warn of


def test_a_batch_to_write_may_have_the_old_name() -> None:
    """But not both, of which one would be lost without a word."""
    with pytest.warns(DeprecationWarning, match="payload is called value now") as told:
        rows = byte_log_batch(pa.record_batch({"txid": [1], "payload": [b"a"]}))
    assert [each.filename for each in told] == [__file__]
    assert rows == byte_log_batch(pa.record_batch({"txid": [1], "value": [b"a"]}))
    with pytest.raises(ConfigurationError, match="payload is the old name of value"):
        byte_log_batch(pa.record_batch({"txid": [1], "value": [b"a"], "payload": [b"b"]}))
