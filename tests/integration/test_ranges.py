"""Ranges of a log on a real cluster, as tables and frames, and as streams that others scan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.reading.reader import DirectReader
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.sync import DistributedLogManager

COUNT = 40_000


@pytest.fixture(scope="module")
def log(namespace_uri: str) -> Iterator[DistributedLogManager]:
    """Yield a log of some entries in two segments, with transaction ids from 0."""
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log("ranges")
        with namespace.open_log("ranges") as manager:
            for first in (0, COUNT // 2):
                with manager.open_writer() as writer:
                    txids = list(range(first, first + COUNT // 2))
                    payloads = [b"%d" % txid for txid in txids]
                    writer.write_batch(pa.record_batch({"txid": txids, "value": payloads}))
            yield manager


def test_no_batch_is_empty(log: DistributedLogManager) -> None:
    """Nor where the range ends between two segments, and its reader behind the first one."""
    part = log.read(None, DLSN(2, 0, 0))
    assert [batch.num_rows for batch in part if not batch.num_rows] == []
    assert part.to_arrow().num_rows == COUNT // 2


def test_streams_that_others_scan(log: DistributedLogManager) -> None:
    """DuckDB and Polars take the range as it is; a query of a few rows does not read all."""
    rows = log.read()
    query = "select count(*), min(txid), max(sequence_id) from rows where txid >= 100"
    assert duckdb.execute(query).fetchall() == [(COUNT - 100, 100, COUNT - 1)]
    assert duckdb.execute("select value from rows limit 1").fetchall() == [(b"0",)]
    lazy = pl.scan_arrow_c_stream(rows)
    assert lazy.select(pl.col("txid").sum()).collect().item() == sum(range(COUNT))
    reader = pa.RecordBatchReader.from_stream(rows)
    assert 0 < reader.read_next_batch().num_rows < COUNT
    reader.close()


def test_polars_that_is_not_there(
    log: DistributedLogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigurationError, match="pip install polars"):
        log.read().to_polars()


def test_a_range_is_waited_for(namespace_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not see yet what was readable when the range was made sees it soon."""
    name = "ranges/waited"
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log(name)
        with namespace.open_log(name).open_writer() as writer:
            writer.write_bulk(LogRecord(txid, b"%d" % txid) for txid in range(10, 20))
    expected = [b"%d" % txid for txid in range(10, 20)]
    is_behind = True
    adding = DirectReader._add

    async def add(self: DirectReader, *, non_blocking: bool, until_caught_up: bool) -> Any:
        """Give nothing until a caller waits for it."""
        nonlocal is_behind
        if is_behind and (non_blocking or until_caught_up):
            return None
        is_behind = False
        return await adding(self, non_blocking=non_blocking, until_caught_up=until_caught_up)

    monkeypatch.setattr(DirectReader, "_add", add)
    uses: list[Callable[[Any], list[bytes]]] = [
        lambda found: found.to_arrow()["value"].to_pylist(),
        lambda found: list(found.to_pandas()["value"]),
        lambda found: found.to_polars()["value"].to_list(),
        lambda found: pa.RecordBatchReader.from_stream(found).read_all()["value"].to_pylist(),
        lambda found: [each for batch in found for each in batch["value"].to_pylist()],
    ]
    with open_namespace(namespace_uri) as namespace, namespace.open_log(name) as log:
        for use in uses:
            is_behind = True
            assert use(log.read()) == expected
