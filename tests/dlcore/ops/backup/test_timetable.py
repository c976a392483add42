"""An export is made when the last one is old enough, and the oldest go."""

from __future__ import annotations

import pytest

from dlcore.ops.autorecovery.values import LastExport
from dlcore.ops.backup.timetable import ExportName, age_ms_of, is_due, name_of, outdated

PLACE = "s3://bucket/folder"
NOW_MS = 2_000_000_000_000


def name(age_s: int, *, moment: int = 1, cluster_id: str = "c") -> ExportName:
    """Return the name of an export of some age."""
    return ExportName(NOW_MS - age_s * 1000, moment, cluster_id, PLACE)


def last(age_s: int, *, url: str | None = None) -> LastExport:
    """Return what is noted of an export of some age."""
    return LastExport(url=url or name(age_s).url, exported_ms=NOW_MS - age_s * 1000)


def test_names() -> None:
    """A URL has the parts that it was made of; other URLs are no names."""
    assert name(5).url == f"{PLACE}/metadata/c/001999999995000-1.dlog"
    assert name_of(name(5).url) == name(5)
    for other in (PLACE, f"{PLACE}/metadata/notes.txt", name(5).url + "#1", name(5).url[1:-1]):
        assert name_of(other) is None


@pytest.mark.parametrize(
    ("known", "due"),
    [
        (None, True),
        (last(0), False),
        (last(59), False),
        (last(60), True),
        (last(-59), False),  # the clock of another host is ahead
        (last(-60), True),  # a clock went back
        (last(0, url="s3://other/metadata/c/001999999995000-1.dlog"), True),
        (last(0, url="s3://bucket/folder/strange"), True),
    ],
)
def test_due(known: LastExport | None, *, due: bool) -> None:
    """It is due once it is a minute old, or if there is none at the place that is set now."""
    assert is_due(age_ms_of(known, PLACE, NOW_MS), every_s=60) == due


def test_old_ones() -> None:
    """The newest stay, beside the one just made, and those of other clusters."""
    names = [name(age) for age in (50, 10, 30, 20, 40)]
    other = name(90, cluster_id="other")
    assert outdated([*names, other], name(10), keep=3) == [name(50), name(40)]
    assert outdated(names, name(10), keep=5) == []
    assert outdated([], name(10), keep=1) == []
    assert outdated(names, name(10), keep=1) == [name(50), name(40), name(30), name(20)]
    # A clock went back: those that look newer stay before older ones, and so does the new one.
    assert outdated(names, name(50), keep=2) == [name(40), name(30), name(20)]
    same = [name(10, moment=2), name(10, moment=12)]
    assert outdated(same, name(5), keep=2) == [name(10, moment=2)]
