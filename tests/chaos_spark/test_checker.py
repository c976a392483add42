"""The checker of the chaos of Spark: each broken promise is seen, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos_spark.checker import EXAMPLES_MAX, Written, judge

if TYPE_CHECKING:
    from collections import Counter

    from tests.chaos_spark.checker import Channel

SOURCES = {"s": Written(6, {0, 1, 3, 5}), "t": Written(2, {0, 1})}
WHOLE = [("s", 0), ("t", 0), ("s", 1), ("s", 3), ("t", 1), ("s", 5)]


def counts_of(channels: dict[str, Channel]) -> Counter[str]:
    """Return what is wrong."""
    return judge(SOURCES, channels).counts


def test_a_whole_channel() -> None:
    """Sources may interleave; numbers that were not acknowledged may be there, in all channels."""
    verdict = judge(SOURCES, {"one": [WHOLE], "two": [WHOLE]})
    assert verdict.is_clean
    assert verdict.checked == 2 * len(WHOLE)
    with_more = [*WHOLE[:3], ("s", 2), *WHOLE[3:]]
    assert not counts_of({"one": [with_more], "two": [with_more]})


def test_a_channel_of_several_logs() -> None:
    """Each log has its own order; together they hold every record once."""
    even = [each for each in WHOLE if each[1] % 2 == 0]
    odd = [each for each in WHOLE if each[1] % 2]
    assert not counts_of({"one": [WHOLE], "two": [odd, even]})
    assert counts_of({"two": [WHOLE, even]}) == {"doubled": len(even)}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (WHOLE[:-1], {"lost": 1}),
        ([], {"lost": 6}),
        ([*WHOLE, ("s", 5)], {"doubled": 1}),
        ([*WHOLE, ("s", 1)], {"doubled": 1, "out of order": 1}),
        ([WHOLE[2], *WHOLE[:2], *WHOLE[3:]], {"out of order": 1}),
        ([*WHOLE, ("s", 6)], {"never written": 1}),
        ([*WHOLE, ("u", 0)], {"never written": 1}),
    ],
)
def test_broken_promises(records: list[tuple[str, int]], expected: dict[str, int]) -> None:
    """One channel, one thing wrong."""
    assert counts_of({"one": [records]}) == expected


@pytest.mark.parametrize(
    ("records", "excused", "expected"),
    [
        (WHOLE, 0, {}),
        ([each for each in WHOLE if each != ("s", 1)], 1, {}),
        ([("t", 0), ("t", 1), ("s", 5)], 3, {}),
        ([("s", 0), ("s", 1), ("s", 3), ("t", 1), ("s", 5)], 0, {"lost": 1}),
        ([each for each in WHOLE if each[0] == "t"], 3, {"lost": 1}),
        ([("s", 1), *WHOLE], 0, {"doubled": 1, "out of order": 1}),
        ([("s", 3), ("t", 0), ("s", 1), ("t", 1), ("s", 5)], 1, {"out of order": 1}),
    ],
)
def test_truncated_rows_may_be_missing(
    records: list[tuple[str, int]], excused: int, expected: dict[str, int]
) -> None:
    """It alone, and not in place of another; what is there is there once and in order."""
    sources = {"s": Written(6, {0, 1, 3, 5}, gone={0, 1, 2, 3}), "t": Written(2, {0, 1})}
    verdict = judge(sources, {"one": [records]})
    assert verdict.counts == expected
    assert verdict.excused == excused


def test_channels_that_differ() -> None:
    """An unacknowledged record is in all channels or in none."""
    with_more = [*WHOLE[:3], ("s", 2), *WHOLE[3:]]
    assert counts_of({"one": [with_more], "two": [WHOLE]}) == {"not in every channel": 1}


def test_examples_are_bounded() -> None:
    """The counts are not."""
    falling = [("s", number) for number in range(999, -1, -1)]
    verdict = judge({"s": Written(1000, set(range(1000)))}, {"one": [falling]})
    assert verdict.counts == {"out of order": 999}
    assert len(verdict.examples) == EXAMPLES_MAX
    assert "out of order 999" in str(verdict)
