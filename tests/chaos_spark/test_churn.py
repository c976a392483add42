"""Logs that come and go: whatever is missing was noted before, and nothing that the target held.

Goal: the checker excuses neither too much nor too little.  Method: the churn on a cluster in
memory, with a target that holds the first records of every source and no others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from tests.chaos_spark import churn
from tests.chaos_spark.churn import PREFIX, Churn
from tests.fixtures.aio import run, until
from tests.fixtures.memory_namespace import memory_cluster, read_all

if TYPE_CHECKING:
    import pytest

    from dlcore.backends.direct.namespace import DirectNamespace

HELD = 7
ENOUGH = Counter(created=8, truncated=12, renamed=3, deleted=3)


def test_a_missing_row_was_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over lives with truncations, renamings, deletions, and logs created again."""
    monkeypatch.setattr(churn, "_BATCH_GAP_S", 0.0)
    monkeypatch.setattr(churn, "_PAUSE_S", 0.01)

    async def scenario() -> None:
        async with memory_cluster() as cluster:
            names = count()

            async def open_namespace() -> DirectNamespace:
                return await cluster.open(f"client-{next(names)}")

            async def held() -> dict[str, int]:
                return dict.fromkeys(churned.sources, HELD)

            churned = Churn(7, open_namespace, held)
            task = asyncio.create_task(churned.run())
            while not Counter(churned.asked) >= ENOUGH:
                assert not task.done(), task.result()
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            found: dict[str, set[int]] = {source: set() for source in churned.sources}
            namespace = await open_namespace()
            for name in await namespace.get_logs(PREFIX):
                log = await namespace.open_log(name)
                await log.recover()
                for record in await read_all(log):
                    source, _, number = record.payload.decode().partition(":")
                    found[f"source-{source}"].add(int(number))
        held_numbers = set(range(HELD + 1))
        for source, written in churned.sources.items():
            assert written.acked - found[source] <= written.gone | held_numbers, source
            assert not written.gone & held_numbers, source
        assert any(written.gone for written in churned.sources.values())
        # A lock whose writer was cancelled is given back in the background.
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    run(scenario())
