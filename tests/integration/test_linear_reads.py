"""Goal: what was acknowledged to anybody is seen by every read that begins later, by anybody.

Method: one record at a time, each acknowledged and then asked for by each of several ways, none of
which has anything to do with the writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow.flight as flight
import pytest

from dlcore.backends.direct.namespace import open_namespace as open_async
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.sync import open_namespace, open_namespace as open_remote
from tests.fixtures.aio import run
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import proxy_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.backends.direct.log import DirectLog as AsyncManager
    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import DistributedLogManager

pytestmark = pytest.mark.integration

RECORDS = amount(300, sampled=60)


def ways_to_count(log: DistributedLogManager) -> list[Callable[[], int]]:
    """Return ways to tell how many records a log has, each by reads that begin when it is called.

    The log is written an entry per record.
    """

    def read() -> int:
        with log.open_reader(dlsn=DLSN.INITIAL) as reader:
            count = 0
            while records := reader.read_bulk(1000):
                count += len(records)
            return count

    def last() -> int:
        return log.get_last_dlsn().entry_id + 1

    def record() -> int:
        return int(log.get_last_record().payload) + 1

    return [read, last, record, log.get_log_record_count]


def test_direct_reads_see_what_a_proxy_acknowledged(sandbox: Sandbox) -> None:
    """And reads through another proxy; 9 to 24 of 100 of these missed the last record."""
    name = f"linear-{uuid4().hex}"
    with (
        proxy_process(sandbox.uri) as writing,
        proxy_process(sandbox.uri) as reading,
        open_namespace(sandbox.uri) as direct,
        open_remote(writing.location) as remote,
        open_remote(reading.location) as other,
    ):
        direct.create_log(name)
        missed: list[str] = []
        with (
            remote.open_log(name).open_writer() as writer,
            direct.open_log(name) as log,
            other.open_log(name) as far,
            flight.connect(reading.location) as client,
        ):
            ways = [*ways_to_count(log), *ways_to_count(far)]
            for number in range(RECORDS):
                writer.write(LogRecord(0, b"%d" % number))
                writer.flush()
                for count in (ways[1], ways[number % len(ways)]):  # the quickest, and another
                    found = count()
                    if found != number + 1:
                        missed.append(f"{count}: {found} of {number + 1}")
            info = client.get_flight_info(flight.FlightDescriptor.for_path(name))
            rows = sum(client.do_get(each.ticket).read_all().num_rows for each in info.endpoints)
        assert missed == []
        assert rows == RECORDS


def test_reads_see_acknowledged_records(sandbox: Sandbox) -> None:
    """Without a flush or a commit: the future of a record is enough."""
    name = f"linear-{uuid4().hex}"

    async def count(log: AsyncManager, number: int) -> int:
        if number % 2:
            return (await log.get_last_dlsn()).entry_id + 1
        return await log.get_log_record_count()

    async def scenario() -> None:
        async with (
            await open_async(sandbox.uri) as writing,
            await open_async(sandbox.uri) as reading,
        ):
            await writing.create_log(name)
            mine, log = await writing.open_log(name), await reading.open_log(name)
            async with await mine.open_writer() as writer:
                for number in range(RECORDS):
                    await writer.write(LogRecord(number, b"%d" % number))
                    assert await count(log, number) == number + 1

    run(scenario())
