"""Messages to a proxy are never larger than it says that they may be."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import LogRecordTooLongError, WriteError
from dlcore.base.records import LogRecord
from tests.dlcore.backends.test_writing import payloads, remote
from tests.dlcore.proxy.test_put import records
from tests.fixtures.served_proxies import Proxies, with_proxies

LIMIT = 60_000


def test_a_writer_cuts_what_is_too_large() -> None:
    """All get their positions; a record that nothing can be cut from is refused."""

    async def scenario(served: Proxies) -> None:
        client = await served.start(message_bytes_max=LIMIT)
        _, ready = await client.opened_with("clicks")
        assert ready["message_bytes_max"] == LIMIT
        log = await remote(served)
        async with await log.open_writer() as writer:
            futures = writer.write_bulk(LogRecord(0, b"%1000d" % number) for number in range(450))
            rows = pa.record_batch({"value": [b"%1000d" % number for number in range(450, 1500)]})
            futures.append(writer.write_batch(rows))
            futures.append(writer.write(LogRecord(2**60, bytes(LIMIT - 1000))))
            reply = await asyncio.gather(*futures)
            found = await records(served)
            assert [each.payload for each in found[:-1]] == [b"%1000d" % n for n in range(1500)]
            assert reply == [each.dlsn for each in (*found[:450], *found[-2:])]
        refused = await log.open_writer()
        with pytest.raises(LogRecordTooLongError, match="accepts 60000 bytes at most"):
            await refused.write(LogRecord(2**60, bytes(LIMIT)))
        with pytest.raises(WriteError):
            await refused.flush()
        await refused.aclose()
        with pytest.raises(LogRecordTooLongError, match=r"60\d\d\d bytes that cannot be split"):
            await log.append([LogRecord(2**60, bytes(LIMIT))], expected=found[-1].dlsn)
        assert len(await payloads(served)) == 1501

    with_proxies("clicks")(scenario)


def test_staging_cuts_what_is_too_large() -> None:
    """The same for atomic appends."""

    async def scenario(served: Proxies) -> None:
        await served.start(message_bytes_max=LIMIT)
        async with await open_namespace(served.servers[0].location) as namespace:
            append = await namespace.begin_append("job", 1)
            for first in range(0, 600, 200):
                rows = [b"%1000d" % number for number in range(first, first + 200)]
                await append.write_batch("clicks", pa.record_batch({"value": rows}))
            await append.write_batch("clicks", pa.record_batch({"value": [bytes(LIMIT - 1000)]}))
            assert (await append.commit()).committed
            refused = await namespace.begin_append("job", 2)
            await refused.write_batch("clicks", pa.record_batch({"value": [bytes(LIMIT)]}))
            with pytest.raises(LogRecordTooLongError, match="accepts 60000 bytes at most"):
                await refused.stage()
            await refused.aclose()
        assert (await payloads(served))[:-1] == [b"%1000d" % number for number in range(600)]

    with_proxies("clicks")(scenario)
