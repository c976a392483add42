"""The connections that the scans of a process share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace, scan_runs
from dlcore.sync.portal import shared_portal
from dlcore.sync.prefetch import CLIENTS_MAX, shared_clients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.reading.scan import ScanRange

RECORDS = 40


def kept() -> int:
    """Return the number of clients that are kept in this process."""
    portal = shared_portal()

    async def count() -> int:
        return len(shared_clients(portal))

    return portal.call(count())


def written(namespace_uri: str) -> Sequence[ScanRange]:
    """Write a segment of several runs; return the one scan of it."""
    name = f"shared/{uuid4().hex}"
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log(name)
        with namespace.open_log(name) as log:
            with log.open_writer() as writer:
                for txid in range(RECORDS):
                    writer.write(LogRecord(txid=txid, payload=bytes(500_000)))
                    writer.flush()
            snapshot = log.get_snapshot()
            return snapshot.scans(snapshot.first, snapshot.end)


@pytest.mark.integration
def test_clients_of_other_tokens_are_closed_once_they_are_many(namespace_uri: str) -> None:
    """Those that a scan uses stay open, however many came after them."""
    scans = written(namespace_uri)
    begun = scan_runs(scans, token="the first")
    first = next(begun)  # no more is fetched before the next one is asked for
    assert first.batch.num_rows < RECORDS
    for number in range(2 * CLIENTS_MAX):
        assert sum(run.batch.num_rows for run in scan_runs(scans, token=f"{number}")) == RECORDS
    assert sum(run.batch.num_rows for run in (first, *begun)) == RECORDS
    end = time.monotonic() + 30
    while kept() > CLIENTS_MAX:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_clients_that_cannot_be_had_fail_the_scan() -> None:
    """The caller does not wait for ever for its records."""
    with pytest.raises(TypeError, match="unhashable"):
        next(scan_runs([], token=["no token"]))  # type: ignore[arg-type]
