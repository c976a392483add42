"""Merging the lanes of a striped range.

Goal: every entry once and in order, at a cost per entry that does not grow with the chunks.
Method: memory bookies behind a client that notes how much of its answers is copied.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.config import LedgerClientConfig
from dlcore.ledger.reading.range_read import RangeReader
from dlcore.ledger.reading.range_read_driver import RangeRead
from dlcore.wire.memory_bookies import MemoryBookie, MemoryBookieClient
from tests.fixtures.aio import run
from tests.fixtures.ledgers import (
    LEDGER_ID,
    bookie,
    frame_of,
    health_of,
    metadata_of,
    quorum_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.wire.frames import EntryFrame

ENTRIES = 5000


class NotingList(list[Any]):
    """Counts the items that slices of it copy."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(key, slice):
            return found
        NotingList.copied += len(found)
        return NotingList(found)


_merged = RangeReader._merged


def noting_merged(self: RangeReader) -> Sequence[EntryFrame]:
    """Note what happens to the chunks that wait for their turn."""
    for lane in self._lanes:
        for index, chunk in enumerate(lane.ready):
            if not isinstance(chunk, NotingList):
                lane.ready[index] = NotingList(chunk)
    return _merged(self)


@pytest.mark.parametrize("first", [0, 3])
def test_lanes_are_merged_without_copying_chunks(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A chunk has thousands of small entries; copying its rest for each one is quadratic."""
    metadata = metadata_of((0, "ABCD"), quorum=quorum_of(4, 2, 2))
    monkeypatch.setattr(NotingList, "copied", 0)
    monkeypatch.setattr(RangeReader, "_merged", noting_merged)

    async def scenario() -> list[int]:
        members = [MemoryBookie(bookie(name)) for name in "ABCD"]
        for entry_id in range(ENTRIES):
            for offset in range(2):
                frame = frame_of(entry_id)
                members[(entry_id + offset) % 4].add_entry(frame, is_recovery=False)
        read = RangeRead(
            MemoryBookieClient(members),
            LedgerClientConfig(),
            health_of(),
            ledger_id=LEDGER_ID,
            ensemble=metadata.last_ensemble,
            quorum=metadata.quorum,
            first_entry_id=first,
            last_entry_id=ENTRIES - 1,
        )
        async with aclosing(read.chunks()) as chunks:
            return [entry.entry_id async for entries in chunks for entry in entries]

    assert run(scenario()) == list(range(first, ENTRIES))
    assert NotingList.copied == 0
