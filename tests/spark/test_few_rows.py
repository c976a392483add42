"""A query that wants a few rows reads little of a large log.

Goal: `limit`, `show`, `first` and `isEmpty` cost about the same on a log of any size, and planning
reads no record.  Method: the bytes that the bookies of a cluster say they have sent.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from dlcore import LogConfig
from dlcore.ops.sandbox.cluster import Sandbox
from dlcore.sync import open_namespace, scan_runs
from tests.fixtures.operators import PORT, scraped, url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from dlcore.sync import Namespace

pytestmark = [pytest.mark.spark, pytest.mark.integration]

KIB, MIB = 1 << 10, 1 << 20
LOG_BYTES = 48 * MIB
ENTRIES_OF = LogConfig(entry_bytes=16 * KIB)


class Bookies:
    """The bytes that the bookies of a cluster have sent to readers."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._urls = [url_of(bookie.log_path) for bookie in sandbox.bookies]

    def sent_by(self, action: Callable[[], object]) -> int:
        """Return the bytes that the bookies sent meanwhile."""
        before = self._sent()
        action()
        return self._sent() - before

    def _sent(self) -> int:
        return int(sum(scraped(url)["dlog_bookie_read_bytes_total"][()] for url in self._urls))


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Namespace, Bookies]]:
    """A cluster that tells what it sends, with the log `large`, which is still open."""
    with (
        Sandbox(
            3,
            data_dir=tmp_path_factory.mktemp("few"),
            autorecovery=False,
            bookie_options=PORT,
        ) as sandbox,
        open_namespace(sandbox.uri) as opened,
    ):
        opened.create_log("large", config=ENTRIES_OF)
        with opened.open_log("large", config=ENTRIES_OF) as log, log.open_writer() as writer:
            for number in range(LOG_BYTES // MIB):
                rows = {"txid": np.full(1024, number), "value": [os.urandom(KIB)] * 1024}
                writer.write_batch(pa.record_batch(rows))
            writer.flush()
            yield opened, Bookies(sandbox)


@pytest.fixture
def frame(spark: SparkSession, namespace: tuple[Namespace, Bookies]) -> DataFrame:
    """The whole log."""
    return spark.read.format("dlog").options(uri=namespace[0].uri, log="large").load()


def test_planning_reads_no_record(frame: DataFrame, namespace: tuple[Namespace, Bookies]) -> None:
    """It looks at the last entry of an open segment."""
    assert namespace[1].sent_by(frame.rdd.getNumPartitions) < 64 * KIB


def test_the_first_run_of_a_scan_costs_little(namespace: tuple[Namespace, Bookies]) -> None:
    """A reader that takes one run and ends has read two small requests."""
    opened, bookies = namespace
    snapshot = opened.get_snapshots(["large"], fresh=True)["large"]
    assert snapshot is not None
    runs = scan_runs(snapshot.scans(snapshot.first, snapshot.end), uri=opened.uri)
    assert bookies.sent_by(lambda: next(runs)) < MIB
    rest: list[int] = []
    sent = bookies.sent_by(lambda: rest.extend(run.batch.num_rows for run in runs))
    assert sum(rest) > LOG_BYTES // KIB - 1024
    assert sent > LOG_BYTES - MIB


@pytest.mark.parametrize(
    "action",
    [
        lambda frame: frame.limit(5).collect(),
        lambda frame: frame.show(),
        lambda frame: frame.first(),
        lambda frame: frame.isEmpty(),
    ],
    ids=["limit", "show", "first", "isEmpty"],
)
def test_a_few_rows_cost_little(
    frame: DataFrame,
    namespace: tuple[Namespace, Bookies],
    action: Callable[[DataFrame], object],
) -> None:
    """Where Spark ends the worker late, that fills the sockets, and fetches as much ahead.

    Together that is about 16 MiB, and no more on a larger log.
    """
    assert namespace[1].sent_by(lambda: action(frame)) < LOG_BYTES // 2
