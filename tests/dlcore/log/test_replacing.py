"""Appends that take the place of what a log held, over stores and bookies in memory.

Goal: a reader sees the old records or the new ones, never both or neither.  Method: appends of
both kinds in a row, and what the log holds after each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.base.errors import (
    AlreadyTruncatedError,
    AppendAbortedError,
    AppendMismatchError,
    EndOfStreamError,
    LogNotFoundError,
    OwnershipAcquireFailedError,
)
from dlcore.base.ids import DLSN
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog


def test_an_append_that_replaces() -> None:
    """New records in, old ones out, once per version; a plain append follows as ever."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            for txid in range(5):
                await writer.write(record(txid))
        namespace = cluster.namespaces[-1]
        for number, values in enumerate(([b"a", b"b"], [b"c"], [b"d", b"e", b"f"])):
            append = await namespace.begin_append("replacer", number)
            await append.write_batch(log.name, pa.record_batch({"value": values}))
            result = await append.commit(replaces=[log.name])
            assert [r.payload for r in await read_all(log)] == values
            first, _ = result.logs[log.name]
            assert await log.get_first_active_dlsn() == first
        again = await namespace.begin_append("replacer", 2)
        await again.write_batch(log.name, pa.record_batch({"value": [b"x"]}))
        assert (await again.commit(replaces=[log.name])).already_committed
        assert len(await read_all(log)) == 3
        with pytest.raises(AlreadyTruncatedError):
            await log.open_reader(dlsn=DLSN(1, 0, 1))
        more = await namespace.begin_append("replacer", 3)
        await more.write_batch(log.name, pa.record_batch({"value": [b"g"]}))
        await more.commit()
        assert [r.payload for r in await read_all(log)] == [b"d", b"e", b"f", b"g"]

    on_log(body)


def test_an_append_of_nothing_that_replaces() -> None:
    """The log is empty by the transaction of the commit, once per version; what follows is read."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[-1]
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            append = await namespace.begin_append("replacer", 1, lock_timeout_s=0)
            with pytest.raises(OwnershipAcquireFailedError):
                await append.commit(replaces=[log.name])
        assert len(await read_all(log)) == 1
        for version in (1, 2):  # the second finds an empty log
            append = await namespace.begin_append("replacer", version, strict=True)
            result = await append.commit(replaces=[log.name])
            assert (result.committed, result.logs) == (True, {})
            assert await read_all(log) == []
        async with await log.open_writer() as writer:
            await writer.write(record(5))
        again = await namespace.begin_append("replacer", 2, strict=True)
        assert (await again.commit(replaces=[log.name])).already_committed
        assert [r.txid for r in await read_all(log)] == [5]
        await namespace.create_log("other")
        other = await namespace.begin_append("replacer", 2, strict=True)
        with pytest.raises(AppendMismatchError, match="nothing of it to 'other'"):
            await other.commit(replaces=["other"])
        await log.mark_end_of_stream()
        for name, error in ((log.name, EndOfStreamError), ("none", LogNotFoundError)):
            append = await namespace.begin_append("another", 1)
            with pytest.raises(error):
                await append.commit(replaces=[name])

    on_log(body)


def test_a_name_that_means_another_log_by_now() -> None:
    """Neither log is touched when the one that records were staged for is not the one replaced."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[-1]
        async with await log.open_writer() as writer:
            await writer.write(record(1))
        name = log.name
        append = await namespace.begin_append("replacer", 1)
        await append.write_batch(name, pa.record_batch({"value": [b"a"]}))
        await log.rename("elsewhere")
        await namespace.create_log(name)
        with pytest.raises(AppendAbortedError, match="two logs"):
            await append.commit(replaces=[name])
        assert len(await read_all(log)) == 1

    on_log(body)
