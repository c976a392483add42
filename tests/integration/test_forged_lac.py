"""One forged message to one real bookie: the ledger stays readable, and ends where it ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.config import QuorumConfig
from dlcore.ledger.metadata.values import LedgerState

if TYPE_CHECKING:
    from dlcore.ops.sandbox import Sandbox

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("lac", [10, 10**12])
def test_a_lac_that_a_stranger_wrote_is_no_lac(sandbox: Sandbox, lac: int) -> None:
    """Readers see what was written, and recovery ends the ledger behind it."""

    async def run() -> None:
        async with (
            await open_namespace(sandbox.uri) as writing,
            await open_namespace(sandbox.uri) as other,
        ):
            writer = await writing.ports.ledgers.create_ledger(QuorumConfig())
            for number in range(10):
                await writer.append([b"entry %d" % number])
            await writer.publish_lac()
            stranger = writer.metadata.last_ensemble.bookies[1]
            bookies = other.ports.bookies
            await bookies.write_lac(stranger, ledger_id=writer.ledger_id, last_add_confirmed=lac)
            reader = await other.ports.ledgers.open_ledger(writer.ledger_id)
            assert await reader.read_last_add_confirmed() == 9
            read = [bytes(frame.body) async for frames in reader.read(0, 9) for frame in frames]
            assert read == [b"entry %d" % number for number in range(10)]
            metadata = await other.ports.ledgers.recover_ledger(writer.ledger_id)
            assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, 9)

    asyncio.run(run())
