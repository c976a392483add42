"""The checks of a release: what they find wrong, and how they say it."""

from __future__ import annotations

from importlib.metadata import Distribution, PathDistribution
from typing import TYPE_CHECKING

import pytest

from tools.release_check.parts import NAME, bill_problems, closure
from tools.release_check.twice import differences
from tools.release_check.weaknesses import (
    Explanation,
    read_explanations,
    weakness_problems,
)

if TYPE_CHECKING:
    from pathlib import Path


def installed(folder: Path, name: str, *lines: str) -> Distribution:
    """Return a distribution of version 1 with more lines of metadata."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    text = "\n".join(("Metadata-Version: 2.4", f"Name: {name}", "Version: 1", *lines))
    (info / "METADATA").write_text(text + "\n")
    return PathDistribution(info)


def test_all_that_is_needed_in_turn_is_found(tmp_path: Path) -> None:
    """Extras of the wheel, extras that it asks of others, circles; markers of this system."""
    found = {
        NAME: installed(
            tmp_path,
            NAME,
            "Provides-Extra: more",
            "Requires-Dist: plain>=1",
            "Requires-Dist: other[fast]; extra == 'more'",
            "Requires-Dist: windows; sys_platform == 'win32'",
        ),
        "plain": installed(tmp_path, "plain", "Requires-Dist: Last_One"),
        "other": installed(tmp_path, "other", "Requires-Dist: engine; extra == 'fast'"),
        "engine": installed(tmp_path, "engine", "Requires-Dist: other"),
        "last-one": installed(tmp_path, "last-one", "Requires-Dist: unused; extra == 'x'"),
        "unused": installed(tmp_path, "unused"),
    }
    assert closure(NAME, found) == dict.fromkeys(("plain", "other", "engine", "last-one"), "1")
    del found["engine"]
    with pytest.raises(LookupError, match="engine is needed and not installed"):
        closure(NAME, found)


def test_a_bill_of_materials_is_compared_both_ways() -> None:
    """A part too few, a part too many, another version, the bill of another project."""
    bill = {
        "metadata": {"component": {"name": NAME}},
        "components": [
            {"name": "Same_Part", "version": "1"},
            {"name": "changed", "version": "2"},
            {"name": "stray", "version": "3"},
        ],
    }
    wanted = {"same-part": "1", "changed": "1", "missing": "4"}
    assert bill_problems(bill, wanted) == [
        "changed is 2 in the bill of materials, and 1 is installed",
        "missing 4 is missing in the bill of materials",
        "stray 3 is in the bill of materials, and the wheel does not need it",
    ]
    stranger = {"metadata": {"component": {"name": "stranger"}}, "components": []}
    assert bill_problems(stranger, {}) == [f"the bill of materials is of stranger, expected {NAME}"]


def test_each_weakness_is_explained_and_each_explanation_has_one() -> None:
    """Neither a new weakness nor an explanation without one stays unseen."""
    report = {
        "dependencies": [
            {"name": "one", "vulns": [{"id": "A-1"}, {"id": "A-2"}]},
            {"name": "two", "vulns": []},
            {"name": NAME, "skip_reason": "not found"},
        ]
    }
    explained = [Explanation("one", "A-1", "not used"), Explanation("two", "B-1", "not used")]
    first, second = weakness_problems(report, explained)
    assert first.startswith("one has the weakness A-2: ")
    assert "explains B-1 of two, which is not found" in second


def test_a_service_that_knows_nothing_is_no_success() -> None:
    """A package without a look at it is not a clean one."""
    report = {"dependencies": [{"name": "one", "skip_reason": "not found"}]}
    (problem,) = weakness_problems(report, [])
    assert problem.startswith("the service did not answer for one: ")


def test_explanations_are_whole(tmp_path: Path) -> None:
    """The file of the repository is right; one without a reason is refused."""
    assert all(each.reason for each in read_explanations())
    path = tmp_path / "explained.toml"
    path.write_text('[[explained]]\npackage = "one"\nweakness = "A-1"\nreason = " "\n')
    with pytest.raises(ValueError, match="expected package, reason, weakness, and a reason"):
        read_explanations(path)


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    """One that only one build made, too."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, text in ((first, "a"), (second, "b")):
        folder.mkdir()
        (folder / "same.txt").write_text("same")
        (folder / "other.txt").write_text(text)
    (second / "more.txt").write_text("more")
    found = differences(first, second)
    assert [each.split()[0] for each in found] == ["more.txt", "other.txt"]
