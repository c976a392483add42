"""A reader over many logs through a proxy: the core's own, over readers of the endpoint."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import ConfigurationError, LogNotFoundError, SchemaMismatchError
from dlcore.base.records import LogRecord
from tests.fixtures.served_proxies import Proxies, with_proxies

NAMES = ("x", "y", "z")


def test_many_logs_are_one_sequence() -> None:
    """By transaction id, from positions and from an id, and along the tail up to the seals."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as namespace:
            wanted = []
            logs = [await namespace.open_log(name) for name in NAMES]
            for index, log in enumerate(logs):
                async with await log.open_writer() as writer:
                    for txid in range(index, 30, index + 1):
                        writer.write(LogRecord(txid, b"%d" % txid))
                        wanted.append((txid, log.name))
                    await writer.commit()
            async with await namespace.open_merged_reader(NAMES) as reader:
                found = await reader.read_bulk(7)
                positions = reader.positions
                found += [each async for each in reader]
                assert [(each.record.txid, each.log) for each in found] == sorted(wanted)
                assert all(each.record.payload == b"%d" % each.record.txid for each in found)
                assert await reader.read_bulk(1) == []
                for log in logs:
                    await log.append([LogRecord(40, b"")], expected=await log.get_last_dlsn())
                    await log.mark_end_of_stream()
                assert [each.log async for each in reader.records(follow=True)] == list(NAMES)
            async with await namespace.open_merged_reader(NAMES, positions=positions) as reader:
                assert [each async for each in reader][: len(found) - 7] == found[7:]
            async with await namespace.open_merged_reader(NAMES, txid=9) as reader:
                ids = [each.record.txid async for each in reader]
                assert ids == [*sorted(t for t, _ in wanted if t >= 9), 40, 40, 40]

    with_proxies(*NAMES)(scenario)


def test_logs_that_cannot_be_merged() -> None:
    """It is reported as by the core."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as namespace:
            await namespace.create_log("typed", schema=pa.schema({"km": pa.int32()}))
            for names, error in (
                (["x", "x"], ConfigurationError),
                ([], ConfigurationError),
                (["x", "missing"], LogNotFoundError),
                (["x", "typed"], SchemaMismatchError),
            ):
                with pytest.raises(error):
                    await namespace.open_merged_reader(names)

    with_proxies("x")(scenario)
