"""Appends that take the place of what a log held, over stores and bookies in memory.

Goal: a reader sees the old records or the new ones, never both or neither.  Method: appends of
both kinds in a row, and what the log holds after each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.errors import AlreadyTruncatedError
from dlcore.ids import DLSN
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.log.manager import DistributedLogManager


def test_an_append_that_replaces() -> None:
    """New records in, old ones out, once per version; a plain append follows as ever."""

    async def body(cluster: MemoryCluster, log: DistributedLogManager) -> None:
        async with await log.open_writer() as writer:
            for txid in range(5):
                await writer.write(record(txid))
        namespace = cluster.namespaces[-1]
        for number, values in enumerate(([b"a", b"b"], [b"c"], [b"d", b"e", b"f"])):
            append = await namespace.begin_append("replacer", number)
            await append.write_batch(log.name, pa.record_batch({"payload": values}))
            result = await append.commit(replaces=True)
            assert [r.payload for r in await read_all(log)] == values
            first, _ = result.logs[log.name]
            assert await log.get_first_active_dlsn() == first
        again = await namespace.begin_append("replacer", 2)
        await again.write_batch(log.name, pa.record_batch({"payload": [b"x"]}))
        assert (await again.commit(replaces=True)).already_committed
        assert len(await read_all(log)) == 3
        with pytest.raises(AlreadyTruncatedError):
            await log.open_reader(dlsn=DLSN(1, 0, 1))
        more = await namespace.begin_append("replacer", 3)
        await more.write_batch(log.name, pa.record_batch({"payload": [b"g"]}))
        await more.commit()
        assert [r.payload for r in await read_all(log)] == [b"d", b"e", b"f", b"g"]

    on_log(body)
