"""Goal: no schedule of faults breaks a ledger's promises.  Method: one seed is one whole run.

``python -m tests.simulation --seeds N`` runs more of them, ``--seed n`` replays one with its trace.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlcore.ops.autorecovery.repair import LedgerRepairer
from tests.fixtures.lengths import amount
from tests.simulation import workload
from tests.simulation.loop import LivenessLostError, run
from tests.simulation.plan import draw_usual_plan, with_one_kept_down
from tests.simulation.workload import run_seed

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping

    from dlcore.base.ids import BookieId
    from dlcore.ledger.metadata.values import LedgerMetadata
    from tests.simulation.plan import Plan

SEED_COUNT = amount(400, sampled=3)
SEEDS_PER_TEST = 5
KEPT_DOWN_SEEDS = {False: amount(200, sampled=7), True: amount(40, sampled=2)}
"""Few runs of ledgers get another bookie, and they are short; those of logs are long."""
TRACED_SEEDS = amount(5, sampled=1)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A run logs every fault it makes; the trace tells them better."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, SEED_COUNT, SEEDS_PER_TEST))
def test_promises_hold_under_every_schedule(first: int) -> None:
    """Each seed writes, crashes, recovers, heals and is judged by the checkers."""
    acks = 0
    for seed in range(first, min(first + SEEDS_PER_TEST, SEED_COUNT)):
        result = run_seed(seed)
        assert result.failure is None, result.explain()
        acks += result.acks
    assert acks > 0, "nothing was acknowledged, so nothing was tested"


@pytest.mark.parametrize("has_logs", [False, True])
def test_one_of_three_bookies_may_be_down(
    monkeypatch: pytest.MonkeyPatch, *, has_logs: bool
) -> None:
    """A ledger that begins meanwhile is acknowledged, and gets a third bookie once all are back."""
    joined: list[int] = []
    enlarge = LedgerRepairer._enlarge

    async def noting(
        self: LedgerRepairer, planned: LedgerMetadata, new: Mapping[int, BookieId], lock: str
    ) -> bool:
        has_joined = await enlarge(self, planned, new, lock)
        joined.extend([planned.ledger_id] * has_joined)
        return has_joined

    def plan(rng: random.Random) -> Plan:
        return with_one_kept_down(draw_usual_plan(rng), has_logs=has_logs)

    monkeypatch.setattr(LedgerRepairer, "_enlarge", noting)
    monkeypatch.setattr(workload, "draw_plan", plan)
    acks = 0
    for seed in range(KEPT_DOWN_SEEDS[has_logs]):
        result = run_seed(seed)
        assert result.failure is None, result.explain()
        acks += result.acks
    assert acks > 0 or has_logs  # there each acknowledgement is counted by its log
    assert joined


def test_a_seed_is_one_trace() -> None:
    """The same seed gives the same run, in this process and with another hash seed in another."""
    here = [run_seed(seed).trace for seed in range(TRACED_SEEDS)]
    assert here == [run_seed(seed).trace for seed in range(TRACED_SEEDS)]
    digest = hashlib.sha256(repr(here).encode()).hexdigest()
    script = (
        "import hashlib, logging; logging.disable(logging.CRITICAL);"
        "from tests.simulation.workload import run_seed;"
        f"traces = [run_seed(seed).trace for seed in range({TRACED_SEEDS})];"
        "print(hashlib.sha256(repr(traces).encode()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONHASHSEED": str(hash("other") % 2**32)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest


def test_the_loop_jumps_over_time_and_notices_a_standstill() -> None:
    """An hour takes no time; waiting for nothing, or for too long, fails."""

    async def sleep(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time()

    assert run(sleep(3600.0), seconds_max=4000.0)[0] == pytest.approx(3600.0)
    with pytest.raises(LivenessLostError, match="still at work"):
        run(sleep(3600.0), seconds_max=60.0)

    async def stand_still() -> None:
        await asyncio.Event().wait()

    with pytest.raises(LivenessLostError, match="nothing can happen"):
        run(stand_still())
