"""Goal: small extents are merged under everyday work.  Method: real processes that are killed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore import LogConfig, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.backends.scanning import scan
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

CONFIG = LogConfig(quorum=QuorumConfig(), segment_bytes_max=1_000_000)
QUICK = ("--upkeep-interval-s=0.3", "--sweep-interval-s=0.6", "--merged-grace-s=0.2")
APPENDS = amount(400, sampled=140)
KILLS = amount(8, sampled=2)
ROWS = 5
UNMERGED_MAX = 90
"""A log asks for its upkeep every 64 extents; some lie in the head, some after the last merge."""
LEDGERS_MAX = 30
TIME_LIMIT_S = 300
_OLD_S = 1.0
"""Longer than the grace of the workers."""


class Work:
    """Micro-batches of two tasks, while a reader follows and scans go over older snapshots."""

    def __init__(self, namespace: DirectNamespace, log: DirectLog) -> None:
        self._namespace = namespace
        self._log = log
        self.payloads: list[bytes] = []
        self.tailed: list[bytes] = []
        self.scans = 0

    async def append_all(self, kill: Callable[[], None]) -> None:
        """Append everything, and kill the worker now and then."""
        namespace = self._namespace
        async with (
            await namespace.open_staging_writer(identity="query") as one,
            await namespace.open_staging_writer(identity="query") as other,
        ):
            for number in range(APPENDS):
                writer = one if number % 2 else other
                rows = [b"%07d" % (number * ROWS + row) * 40 for row in range(ROWS)]
                self.payloads += rows
                await writer.write_batch("clicks", pa.record_batch({"value": rows}))
                append = await namespace.begin_append("query", number)
                assert (await append.commit(await writer.stage())).committed
                if number % (APPENDS // KILLS) == APPENDS // KILLS - 1:
                    await asyncio.to_thread(kill)

    async def tail(self) -> None:
        """Follow the log from its beginning."""
        async with await self._log.open_reader() as reader:
            while True:
                self.tailed += [record.payload for record in await reader.read_bulk(100)]

    async def scan_late(self) -> None:
        """Take snapshots, and read them when their ledgers may be gone."""
        while True:
            snapshot = await self._log.get_snapshot()
            await asyncio.sleep(_OLD_S)
            found = await self.scan(snapshot)
            assert found == self.payloads[: len(found)]
            self.scans += 1

    async def scan(self, snapshot: LogSnapshot) -> list[bytes]:
        """Return the payloads of a snapshot."""
        scans = snapshot.scans(snapshot.first, snapshot.end)
        return [
            payload
            async for batch in scan(scans, uri=self._namespace.uri)
            for payload in batch.batch.column(1).to_pylist()
        ]

    async def extents_and_ledgers(self) -> tuple[int, int]:
        """Return how many extents the log has, and how many ledgers there are."""
        segments = await self._log.get_log_segments()
        listed = self._namespace.ports.ledger_store.list_ledgers()
        return sum(len(s.extents) for s in segments), len([each async for each in listed])


def test_micro_batches_are_merged_by_workers_that_are_killed(
    fresh_sandbox: Callable[..., Sandbox],
) -> None:
    """Readers and scans see every record once, in order, and in the end there are few ledgers."""
    sandbox = fresh_sandbox(3, autorecovery=True, autorecovery_options=QUICK)
    run_in_own_time(asyncio.wait_for(run(sandbox), TIME_LIMIT_S))


async def run(sandbox: Sandbox) -> None:
    """Work, kill, wait until all is merged, compare."""
    worker = sandbox.autorecovery
    assert worker is not None

    def kill() -> None:
        worker.kill()
        worker.restart()

    async with await open_namespace(sandbox.uri, config=CONFIG) as namespace:
        await namespace.create_log("clicks")
        log = await namespace.open_log("clicks")
        work = Work(namespace, log)
        readers = [asyncio.create_task(each) for each in (work.tail(), work.scan_late())]
        await work.append_all(kill)
        extents, ledgers = await work.extents_and_ledgers()
        while (
            extents > UNMERGED_MAX
            or ledgers > LEDGERS_MAX
            or len(work.tailed) < APPENDS * ROWS
            or not work.scans
        ):
            failed = [each for each in readers if each.done()]
            assert not failed, failed[0].exception()
            await asyncio.sleep(0.2)
            extents, ledgers = await work.extents_and_ledgers()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        assert work.tailed == work.payloads
        assert await work.scan(await log.get_snapshot()) == work.payloads
