"""The recipes for changes name files, modules and targets that exist; so does the map of the code.

Goal: who follows a recipe is not sent to a place that has moved.  Method: what stands in backticks
is looked up, a path below the root, or below the folder whose room the row of a table is.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CONTRIBUTING.md", "docs/recipes.md")
FOLDERS = ("bookie", "dlcore", "dlspark", "deploy", "docs", "tests", "tools")
MADE = ("build/site", "dist", ".venv")
"""Beginnings of paths that commands make."""
_PATH = re.compile(r"[\w.*-]+(/[\w.*{}-]+)+|\w+\.(?:py|md|yml|json)")
_ROOMS = re.compile(r"^\| room of `([\w/]+)`[^\n]*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)


def quoted_in(page: str) -> list[str]:
    """Return what stands in backticks on a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def is_there(path: str) -> bool:
    """Return whether there is such a path in the tree."""
    if not (ROOT / path).suffix:
        return (ROOT / path).exists() or is_there(f"{path}.py")
    return any(ROOT.glob(path)) or any(any((ROOT / each).rglob(path)) for each in FOLDERS)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    """A path may leave out the end of a module, and the folders that its paragraph has named."""
    paths = [each for each in quoted_in(page) if _PATH.fullmatch(each)]
    assert paths
    gone = [each for each in paths if not (each.startswith(MADE) or is_there(each))]
    assert not gone, f"{page} names these paths, which are not there"


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    """Targets of make, modules that Python runs, and tests."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    tests = "".join(each.read_text() for each in (ROOT / "tests").rglob("test_*.py"))
    for each in quoted_in(page):
        words = each.split()
        if words[0] == "make" and len(words) > 1:
            assert words[1] in targets, f"{page}: the Makefile has no target {words[1]}"
        if "-m" in words and words[words.index("-m") + 1] != "pytest":
            module = words[words.index("-m") + 1]
            assert find_spec(module), f"{page}: there is no module {module}"
        if re.fullmatch(r"test_\w+", each):
            assert f"def {each}(" in tests, f"{page}: there is no test {each}"


def test_the_map_has_every_room() -> None:
    """A package that the map leaves out is found by search alone."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for package in (ROOT / "dlcore").glob("*/__init__.py"):
        assert f"\n| `dlcore/{package.parent.name}` |" in text
    rooms = _ROOMS.findall(text)
    assert [folder for folder, _ in rooms] == ["dlcore/ops", "bookie", "tests"]
    for folder, rows in rooms:
        named = {name for row in re.findall(r"^\| ([^|]*)\|", rows, re.M) for name in quoted(row)}
        found = {each.parent.name for each in (ROOT / folder).glob("*/__init__.py")}
        if folder != "tests":
            assert found <= named, f"the table of rooms of {folder} in CONTRIBUTING.md"
        for name in named:
            assert any((ROOT / folder).glob(name)) or (ROOT / folder / f"{name}.py").exists(), (
                f"{folder} has no {name}"
            )


def quoted(text: str) -> list[str]:
    """Return what stands in backticks in a text."""
    return re.findall(r"`([^`]+)`", text)
