"""When the next entry starts another segment."""

from __future__ import annotations

import pytest

from dlcore.log.writing.rolling import RollingPolicy

POLICY = RollingPolicy(size_bytes_max=1_000, age_max_ms=60_000)


@pytest.mark.parametrize(
    ("size_bytes", "age_ms", "rolls"),
    [(999, 59_999, False), (1_000, 0, True), (0, 60_000, True), (5_000, 90_000, True)],
)
def test_whichever_bound_is_reached_first(size_bytes: int, age_ms: int, rolls: bool) -> None:
    """The entry that reaches it is still in the old segment."""
    assert POLICY.should_roll(size_bytes=size_bytes, age_ms=age_ms) == rolls
