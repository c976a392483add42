"""The verdict of a soak, and what it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos_spark.run import Report
from tests.soak.run import SoakReport
from tests.soak.samples import JUDGED, LEDGERS, Samples
from tests.soak.slopes import Point, Slope

if TYPE_CHECKING:
    from pathlib import Path

STAYS = Slope(level=100, per_hour=0, growth=0, noise=1)
GROWS = Slope(level=100, per_hour=50, growth=50, noise=1)


def report(*failures: str, **slopes: Slope | None) -> SoakReport:
    """Return the report of a run without a wrong record."""
    every: dict[str, Slope | None] = {**dict.fromkeys(JUDGED, STAYS), **slopes}
    return SoakReport(Report(seed=1), 1, 1, 1, every, [*failures])


def test_growth_is_reported_and_fails_the_run() -> None:
    """As a process that broke does; what is only drawn, or too short to say, does not."""
    assert report().is_clean
    assert report(**{LEDGERS: None, "MB of Spark's driver": GROWS}).is_clean
    assert "too short to say" in str(report(**{LEDGERS: None}))
    grown = report(**{LEDGERS: GROWS})
    assert grown.growing == [LEDGERS]
    assert not grown.is_clean
    assert str(grown).count("GROWS") == 1
    assert not report("bookie-1 ended").is_clean


def test_each_point_is_kept_and_drawn(tmp_path: Path) -> None:
    """A table of all, and a picture."""
    samples = Samples()
    samples.series[LEDGERS] += [Point(at, "all", 7 + at) for at in range(3)]
    samples.keep(tmp_path, {LEDGERS: GROWS}, "a title")
    lines = (tmp_path / "soak.csv").read_text().splitlines()
    assert lines == ["series,life,seconds,value", *(f"ledgers,all,{n}.0,{7 + n}" for n in range(3))]
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
