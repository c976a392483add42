"""Proxies that serve as many calls as they may: others are asked, or these again, after a pause."""

from __future__ import annotations

import asyncio

import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import ProxyUnavailableError
from dlcore.base.records import LogRecord
from tests.dlcore.backends.test_writing import payloads, remote
from tests.fixtures.served_proxies import Proxies, with_proxies


def test_another_proxy_is_asked() -> None:
    """By writers, readers, and for all else."""

    async def scenario(served: Proxies) -> None:
        full = await served.start(calls_max=1)
        await full.act("drain")  # so that the other one owns the log
        await served.start()
        call = full.follow("clicks")
        await call.read()
        log = await remote(served)
        async with await log.open_writer() as writer:
            assert await writer.write(LogRecord(0, b"0"))
        assert await log.append([LogRecord(1, b"1")], expected=writer.last_dlsn)
        assert await log.get_log_record_count() == 2
        async with await log.open_reader() as reader:
            assert [each.payload async for each in reader.records()] == [b"0", b"1"]
        call.cancel()

    with_proxies("clicks")(scenario)


def test_one_that_is_alone_is_asked_again() -> None:
    """Until there is room, or for as long as the client is patient, which is logged."""

    async def scenario(served: Proxies) -> None:
        full = await served.start(calls_max=1)
        log = await remote(served)
        async with await open_namespace(served.servers[0].location, patience_s=0.2) as impatient:
            call = full.follow("clicks")
            await call.read()
            with pytest.raises(ProxyUnavailableError, match="is at its limit of calls"):
                await impatient.open_log("clicks")
            opening = asyncio.create_task(log.open_writer())
            await asyncio.wait([opening], timeout=0.1)
            assert not opening.done()
            call.cancel()
            async with await opening as writer:
                await writer.write(LogRecord(0, b"0"))
        assert await payloads(served) == [b"0"]

    with_proxies("clicks")(scenario)
