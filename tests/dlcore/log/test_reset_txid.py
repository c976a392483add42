"""A transaction id that nothing can follow ends no log: operators have a way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError, TransactionIdOutOfOrderError
from dlcore.base.ids import TXID_MAX
from dlcore.log.writing.changing import reset_txid
from tests.fixtures.memory_namespace import on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from tests.fixtures.memory_namespace import MemoryCluster


def test_a_log_that_was_emptied_takes_lower_transaction_ids_again() -> None:
    """Not while it holds records, nor while it is written; and only from the given one on."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        context = cluster.namespaces[0].log_context
        key = await context.logs.find("clicks")
        async with await log.open_writer() as writer:
            await writer.write(record(1))
            last = await writer.write(record(TXID_MAX))
            with pytest.raises(ConfigurationError, match="has a writer"):
                await reset_txid(context, key, 0)
        with pytest.raises(ConfigurationError, match="holds records from 1:0:0 to"):
            await reset_txid(context, key, 0)
        async with await log.open_writer() as writer:
            with pytest.raises(TransactionIdOutOfOrderError):
                await writer.write(record(1_700_000_000_000))
        await log.truncate((await context.logs.read(key)).head.end_dlsn)
        for txid in (-1, TXID_MAX + 1, 1.5):
            with pytest.raises(ConfigurationError, match="txid="):
                await reset_txid(context, key, txid)  # type: ignore[arg-type]
        assert await reset_txid(context, key, 7)
        assert not await reset_txid(context, key, 7)
        async with await log.open_writer() as writer:
            with pytest.raises(TransactionIdOutOfOrderError):
                await writer.write(record(6))
        async with await log.open_writer() as writer:
            assert await writer.write(record(8)) > last
        assert [each.txid for each in await read_all(log)] == [8]

    on_log(body)
