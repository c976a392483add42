"""The stranger: what it forges is taken by the bookie, or refused for the one right reason."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from dlcore.base.ids import BookieId
from tests.chaos.forger import Forger
from tests.fixtures.served_bookie import BOOKIE, CLUSTER_ID, frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path

LEDGER = 7


def test_a_bookie_believes_what_looks_right(tmp_path: Path) -> None:
    """Entries behind the last one and a LAC are taken; a held entry keeps its bytes."""

    async def scenario() -> None:
        async with serve(tmp_path) as bookie:
            frames = [frame_of(LEDGER, each, lac=each - 1) for each in range(3)]
            for frame in frames:
                await bookie.storage.writes.add_entry(frame)
            port = int(bookie.address.rpartition(":")[2])
            forger = Forger(
                port, BookieId(BOOKIE.name, BOOKIE.incarnation), CLUSTER_ID, random.Random(3)
            )
            await forger.forge([LEDGER])
            assert forger.sent > 4
            reads = bookie.storage.reads
            assert await reads.read_lac(LEDGER, fence=False) > 1
            held = list(reads.list_entries(LEDGER))
            assert held[-1].last_entry_id > 2
            for entry_id in (0, 1):
                assert await reads.read_entry(LEDGER, entry_id, fence=False) == frames[entry_id]

    run(scenario)
