"""Goal: a grant gives the entries of its ranges, for the time that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.access.capability import Grant, LedgerRight, Verifier, parse
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.metadata.capability_keys import ensure_keys
from tests.dlcore.api.test_namespace import on_namespace

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.scan import ScanRange
    from tests.fixtures.memory_namespace import MemoryCluster


async def ranges_of(namespace: DirectNamespace, entries: int) -> list[ScanRange]:
    """Return ranges of one entry each of a new log."""
    await namespace.create_log("clicks")
    log = await namespace.open_log("clicks")
    async with await log.open_writer() as writer:
        for number in range(entries):
            await writer.write(LogRecord(number, b"a"))
    snapshot = await log.get_snapshot()
    (whole,) = snapshot.scans(DLSN.INITIAL, snapshot.end)
    return whole.split(1)


def test_each_part_gets_what_reads_it_and_no_more() -> None:
    """Entries of the same ledger in another part stay closed; an empty part has nothing."""

    async def body(_: MemoryCluster, namespace: DirectNamespace) -> None:
        ranges = await ranges_of(namespace, 4)
        found = await namespace.grant([ranges[:1], ranges[2:], []], lifetime_s=60)
        (ledger_id,) = ranges[0].ledgers
        first, last = (parse(token) for tokens in found for token in tokens)
        assert first.grants == (Grant.of(ledger_id, LedgerRight.READ, last_entry_id=0),)
        assert last.grants == (
            Grant.of(ledger_id, LedgerRight.READ, first_entry_id=2, last_entry_id=3),
        )
        assert found[2] == ()
        context = namespace.log_context
        now_s = context.clock.now_ms() // 1000
        assert 0 <= now_s + 60 - first.expires_s <= 1
        verifier = Verifier(lambda: now_s)
        ring = await ensure_keys(context.store, context.paths, context.clock)
        verifier.use(key.public_key for key in ring.keys)
        assert verifier.verify(found[0][0]) == first

    on_namespace(body)
