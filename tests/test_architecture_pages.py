"""Goal: the pages on how dlog works stay short and true.

Method: words are counted, and each name of the code that a page links to is looked up in the file
that the link opens.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlcore.base.machines import Machine
from tests.fixtures import machines_page
from tests.fixtures.made_parts import require_as_made
from tests.test_purity import PACKAGES, machine_modules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "architecture").glob("*.md"))
WORDS_MAX = 600


def words_of(page: Path) -> int:
    """Return how many words a reader meets: diagrams, targets of links and signs do not count."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return len(re.findall(r"\S*\w\S*", text))


def sources() -> Iterator[Path]:
    """Yield all modules of the product."""
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


@cache
def names_of(file: Path) -> frozenset[str]:
    """Return the functions, classes and methods of a module, methods as `Class.method`."""
    tree = ast.parse(file.read_text())
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    names = set()
    for node in tree.body:
        if isinstance(node, definitions):
            names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{e.name}" for e in node.body if isinstance(e, definitions)}
    return frozenset(names)


def test_the_page_of_machines_is_that_of_the_code() -> None:
    """`make pages` was run after the last change of a table."""
    require_as_made(ROOT / "docs" / "architecture" / "machines.md", machines_page.page())


def test_every_machine_with_a_table_is_on_the_page() -> None:
    """A new table is added to the page's list."""
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sources()
        if re.search(r"^TRANSITIONS = ", path.read_text(encoding="utf-8"), re.M)
    }
    assert found == {module.__name__ for _, module in machines_page.MACHINES}


def test_every_machine_is_on_the_page() -> None:
    """The list of pure modules with machines is that of the page, and their base."""
    listed = {"dlcore.base.machines", *(module.__name__ for _, module in machines_page.MACHINES)}
    assert set(machine_modules()) == listed


def test_all_machines_have_one_shape() -> None:
    """Pure: a table, `handle(event)` and `validate()`.  Parts of them have methods of other names.

    `MetadataService` is the only one without a state of its own: its table is that of each session.
    """
    for name, module in machines_page.MACHINES:
        machine = getattr(module, name)
        assert machine.transitions is module.TRANSITIONS, name
        assert issubclass(machine, Machine) or name == "MetadataService", name
        takers = [each for each in classes_of(module) if "handle" in vars(each)]
        assert takers == [machine], f"only the machine of {module.__name__} takes events"
        assert list(signature(machine.handle).parameters) == ["self", "event"], name
        assert list(signature(machine.validate).parameters) == ["self"], name


def test_every_driver_performs_every_effect_that_there_is() -> None:
    """And a machine handles every event: mypy proves it by `assert_never`."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "handle":
                text = ast.unparse(node)
                passes_on = "match event" not in text and "match effect" not in text
                assert passes_on or "assert_never(" in text, f"{path}: handle"


def classes_of(module: ModuleType) -> list[type]:
    """Return the classes that a module defines."""
    found = [each for each in vars(module).values() if isinstance(each, type)]
    return [each for each in found if each.__module__ == module.__name__]


def test_architecture_names_every_page() -> None:
    """A page without a link to it has no readers."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert PAGES
    for page in PAGES:
        assert f"(docs/architecture/{page.name})" in text
    assert words_of(ROOT / "ARCHITECTURE.md") <= WORDS_MAX


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_has_a_diagram(page: Path) -> None:
    """One idea a page, and a picture of it; the page that is generated is for reference."""
    assert page.stem == "machines" or words_of(page) <= WORDS_MAX
    assert "```mermaid" in page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_the_code_are_where_the_page_says(page: Path) -> None:
    """A function that is renamed or moved takes its page along."""
    for name, target in re.findall(r"\[`([^`]+)`\]\(([^)#]+)\)", page.read_text()):
        file = page.parent / target
        if file.suffix == ".py" and "/" not in name:
            assert name in names_of(file), f"{page.name}: {target} has no {name}"
