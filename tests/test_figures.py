"""A figure of the benchmarks beside its limits: medians of rounds, without the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.figures import Figure, Target, measure
from benchmarks.main import PEERS, Times, names_of, others_share, table_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def rounds(*values: float) -> Callable[[], float]:
    """Return what gives these values, one after the other."""
    given = iter(values)
    return lambda: next(given)


@pytest.mark.parametrize(("is_rate", "limit", "ratio"), [(True, 4.0, 0.5), (False, 8.0, 0.25)])
def test_the_strictest_of_several_limits_counts(
    *, is_rate: bool, limit: float, ratio: float
) -> None:
    """The lowest rate, or the longest time; the others are shown beside it."""
    target = Target(ratio=0.4, is_rate=is_rate)
    figure = measure(
        name="writes",
        unit="MB/s",
        target=target,
        value=rounds(100.0, 1.0, 2.0, 9.0),
        limit={"disk": rounds(0.0, 3.0, 4.0, 70.0), "servers": rounds(0.0, 8.0, 8.0, 8.0)},
        rounds=3,
    )
    assert (figure.value, figure.limit, figure.ratio) == (2.0, limit, ratio)
    assert target.is_met_by(figure.ratio)
    assert figure.notes == ["writes: limits disk 4.0 MB/s, servers 8.0 MB/s"]
    assert figure.as_json()["limits"] == {"disk": 4.0, "servers": 8.0}


def test_one_limit_and_cpu() -> None:
    """One limit has its column, and CPU a note."""
    target = Target(ratio=1.5, is_rate=False)
    value, limit = rounds(9.0, 3.0), rounds(9.0, 2.0)
    figure = measure(name="t", unit="ms", target=target, value=value, limit=limit, rounds=1)
    assert (figure.limit, figure.ratio, figure.notes) == (2.0, 1.5, [])
    costs = {"client": 1.0, "bookies": 2.5}
    figure = Figure(name="c", unit="s", value=1, limit=1, target=target, cpu_s_per_gb=costs)
    assert figure.notes == ["c: CPU s/GB client 1.0, bookies 2.5"]


def test_a_figure_without_a_target_is_shown_and_not_judged() -> None:
    """Its row says nothing of what to reach."""
    targets = [None, Target(ratio=1.5, is_rate=False)]
    table = table_of(
        [Figure(name="f", unit="s", value=2, limit=1, target=each) for each in targets]
    )
    assert [list(column.cells) for column in table.columns][-2:] == [["", "<= 1.5"], ["", "no"]]


def test_no_kafka_is_started_unless_asked_for() -> None:
    """By name, or by the name of them all."""
    assert not {*names_of(None)} & {*PEERS}
    assert names_of("peers") == [*PEERS]
    assert names_of("peers_read") == ["peers_read"]


def test_times_are_expected_as_they_were(tmp_path: Path) -> None:
    """Nothing is promised for a system on which nothing ran here."""
    times = Times(tmp_path / "times.json")
    assert times.expected(["a"]) == "never run on this machine"
    times.note("a", 12.34)
    again = Times(tmp_path / "times.json")
    assert again.expected(["a"]) == "about 12 s by their last runs"
    assert again.expected(["a", "b"]) == "about 12 s by their last runs, and 1 that never ran here"


def test_the_share_that_others_take() -> None:
    """It is a share, whatever runs beside this test."""
    assert 0.0 <= others_share() <= 1.0
