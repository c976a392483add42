"""Each request names its ledger, its entries, and the rights that it needs."""

from __future__ import annotations

import numpy as np
import pytest

from dlcore.base.access.capability import ID_MAX, LedgerRight, Reach
from dlcore.wire.digest import frame_parts
from dlcore.wire.frames import FrameRun
from dlcore.wire.messages import (
    Follow,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Request,
    WriteLac,
)
from dlcore.wire.reaches import reach_of, reach_of_add, reach_of_adds
from tests.fixtures.served_bookie import frame_of

READ, ADD = LedgerRight.READ, LedgerRight.ADD
FENCE, RECOVER = LedgerRight.READ | LedgerRight.FENCE, LedgerRight.ADD | LedgerRight.RECOVER


@pytest.mark.parametrize(
    ("request_", "first", "last", "rights"),
    [
        (ReadEntries(1, 7, 3, 9, 2, 1, 1), 3, 9, READ),
        (ReadEntry(1, 7, 3, fence=False), 3, 3, READ),
        (ReadEntry(1, 7, 3, fence=True), 3, 3, FENCE),
        (Follow(1, 7, 3, 1), 3, ID_MAX, READ),
        (ReadLac(1, 7, fence=False), ID_MAX, -1, READ),
        (ReadLac(1, 7, fence=True), ID_MAX, -1, FENCE),
        (ReadHeld(1, 7), ID_MAX, -1, READ),
        (WriteLac(1, 7, 4), ID_MAX, -1, ADD),
    ],
)
def test_requests(request_: Request, first: int, last: int, rights: LedgerRight) -> None:
    """All of the entries that an answer may bring, and none where it brings none."""
    assert reach_of(request_) == Reach(7, first, last, int(rights))


def test_adds() -> None:
    """By the ids in the frame, whole or in parts; of recovery they need another right."""
    frame = frame_of(7, 3)
    parts = frame_parts(ledger_id=7, entry_id=3, last_add_confirmed=-1, ledger_bytes=1, body=[b"x"])
    for each in (frame, memoryview(frame), parts):
        assert reach_of_add(each, is_recovery=False) == Reach(7, 3, 3, int(ADD))
    assert reach_of_add(frame, is_recovery=True) == Reach(7, 3, 3, int(RECOVER))


@pytest.mark.parametrize("is_run", [False, True])
def test_adds_of_one_message(is_run: bool) -> None:
    """For one ledger they reach from the first to the last, in any order; for several, not."""

    def reach(*ids: tuple[int, int]) -> Reach | None:
        frames = [frame_of(ledger_id, entry_id, b"x" * entry_id) for ledger_id, entry_id in ids]
        sizes = np.array([len(each) for each in frames])
        run = FrameRun.of_sizes(memoryview(b"".join(frames)), sizes)
        return reach_of_adds(run if is_run else frames, is_recovery=False)

    assert reach((7, 3)) == Reach(7, 3, 3, int(ADD))
    assert reach((7, 4), (7, 9), (7, 2)) == Reach(7, 2, 9, int(ADD))
    assert reach((7, 4), (8, 5)) is None
    assert reach((2**63 - 1, 4)) == Reach(2**63 - 1, 4, 4, int(ADD))
    whole = reach_of_adds([frame_of(7, 3)], is_recovery=True)
    assert whole == Reach(7, 3, 3, int(RECOVER))
