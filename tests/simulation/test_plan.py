"""The schedules of the simulation reach the layers above ledgers as often as its page says."""

from __future__ import annotations

import random

from tests.simulation.plan import draw_plan

PLANS = 3000


def test_shares_of_what_takes_part() -> None:
    """Shares of all plans: logs in half, proxies in a third, the sink's queries in a fifth."""
    plans = [draw_plan(random.Random(seed)) for seed in range(PLANS)]
    shares = {
        "is_encrypted": 1 / 8,
        "has_logs": 1 / 2,
        "has_proxies": 1 / 3,
        "has_sinks": 1 / 5,
        "has_wire": 1 / 2,
    }
    shares |= dict.fromkeys(("has_consumers", "has_remotes"), 1 / 6)
    shares |= dict.fromkeys(("has_life", "has_types"), 1 / 12)
    shares["kept_down"] = 0.08
    shares["has_tables"] = 0.075
    for what, share in shares.items():
        found = sum(bool(getattr(plan, what)) for plan in plans) / PLANS
        assert abs(found - share) < 0.03, f"{what} in {found:.2f} of the plans, not {share:.2f}"
