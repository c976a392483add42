"""Unconfirmed entries of a bookie are never seen by a follower through a proxy."""

from __future__ import annotations

import asyncio

import pytest

from dlcore.base.errors import DLError
from dlcore.base.ids import DLSN
from dlcore.proxy.reading.delivery import Deliveries, Reading
from dlcore.proxy.reading.following import FollowedLogs
from dlcore.proxy.reading.kept import KeptMessages
from dlcore.proxy.reading.outgoing import Outgoing
from dlcore.proxy.reading.ring import RingBudget
from dlcore.proxy.reading.rows import RowView
from tests.dlcore.proxy.test_runs import values
from tests.fixtures.aio import until
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import TIME_LIMIT_S, memory_cluster, record


def test_an_entry_that_was_never_confirmed_is_never_sent() -> None:
    """One bookie has it; its writer and that bookie are gone before another writer goes on."""

    async def scenario() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("writer")
            await namespace.create_log("clicks")
            log = await namespace.open_log("clicks")
            writer = await log.open_writer()
            await writer.write(record(1, b"0:0"))
            (segment,) = await log.get_log_segments()
            ledger = segment.extents[-1].ledger_id
            holder = next(each for each in cluster.bookies if each.entries(ledger))
            others = [each for each in cluster.bookies if each is not holder]
            for bookie in others:
                bookie.stop()
            lost = writer.write(record(2, b"1:0"))
            await until(lambda: 1 in holder.entries(ledger))
            await writer.abort()
            with pytest.raises(DLError):
                await lost
            for bookie in others:
                bookie.start()

            got: list[bytes] = []

            async def send(message: bytes) -> None:
                got.extend(values(message))

            read = await (await cluster.open("proxy")).open_log("clicks")
            reading = Reading(
                log=read,
                view=RowView("clicks", None, ["dlsn", "value"]),
                start=DLSN.INITIAL,
                end=DLSN(2, 1, 0),
                known_end=(await read.get_snapshot()).end,
                follow=True,
            )
            followed = FollowedLogs(RingBudget(1 << 20))
            deliveries = Deliveries(followed, Outgoing(1 << 20), KeptMessages(0), catching_up_max=1)
            delivering = asyncio.create_task(deliveries.deliver(reading, send))
            await until(lambda: bool(got) or delivering.done())

            holder.stop()
            async with await (await cluster.open("next")).open_log("clicks") as log:
                async with await log.open_writer() as writer:
                    await writer.write(record(3, b"0:0"))
                await delivering
            assert got == [b"0:0", b"0:0"]

    run_in_own_time(asyncio.wait_for(scenario(), TIME_LIMIT_S))
