"""Reading a partition in a task, when records vanish between planning and reading.

Goal: such a loss is told with its option, or skipped no further than it reaches.  Method: scans
that end early, as those of a truncated log do.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore import sync
from dlcore.errors import AlreadyTruncatedError, DLError, LedgerReadError, LogNotFoundError
from dlcore.ids import DLSN
from dlspark.arrow import WRITE_SCHEMA_WITH_TXID
from dlspark.options import Mode, ReadOptions
from dlspark.planning import DlogPartition
from dlspark.reading import read_rows
from tests.fixtures.snapshots import snapshot_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.sync import ScanBatch, ScanRange

URI = "distributedlog://made-up:1/p"
LOSSES = [AlreadyTruncatedError, LogNotFoundError]


def fail_in(monkeypatch: pytest.MonkeyPatch, lssn: int, error: DLError) -> None:
    """Let every entry hold one record, and the scan of a segment fail after its first entry."""

    def scan(scans: Sequence[ScanRange], *, uri: str, tls: object) -> Iterator[ScanBatch]:
        assert (uri, tls) == (URI, None)
        for part in scans:
            for entry_id in range(part.start.entry_id, part.end.entry_id):
                if (part.lssn, entry_id) == (lssn, 1):
                    raise error
                txid = part.lssn * 10 + entry_id
                yield sync.ScanBatch(
                    batch=pa.record_batch([[txid], [b"x"]], schema=WRITE_SCHEMA_WITH_TXID),
                    lssn=part.lssn,
                    entry_id=entry_id,
                    first_slot=0,
                    sequence_id=0,
                    timestamp_ms=0,
                )

    monkeypatch.setattr(sync, "scan", scan)


def read(*, fail_on_data_loss: bool) -> list[int]:
    """Return the transaction ids of a partition of three segments with three entries each."""
    snapshot = snapshot_of((3,), (3,), (3,))
    partition = DlogPartition(snapshot.scans(DLSN.INITIAL, snapshot.end))
    given = {"uri": URI, "log": "clicks", "failOnDataLoss": str(fail_on_data_loss)}
    batches = read_rows(partition, ReadOptions.parse(given, Mode.BATCH))
    return [txid for batch in batches for txid in batch.column("txid").to_pylist()]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_fails_the_task_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, kind: type[DLError]
) -> None:
    """The error says what was lost, and which option goes on without it."""
    fail_in(monkeypatch, 2, kind("records are gone"))
    with pytest.raises(kind, match=r"records are gone.*failOnDataLoss"):
        read(fail_on_data_loss=True)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_is_accepted_ends_its_range_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[DLError]
) -> None:
    """What was read before stays, the next range is read, and the warning names what is not."""
    fail_in(monkeypatch, 2, kind("records are gone"))
    with caplog.at_level(logging.WARNING):
        assert read(fail_on_data_loss=False) == [10, 11, 12, 20, 30, 31, 32]
    assert len(caplog.records) == 1
    assert "'clicks': the rest of 2:0:0 … 2:3:0" in caplog.text
    assert "records are gone" in caplog.text


def test_a_failed_read_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookies that do not answer fail the task whatever the option says."""
    fail_in(monkeypatch, 2, LedgerReadError("no answer"))
    with pytest.raises(LedgerReadError, match="no answer"):
        read(fail_on_data_loss=False)
