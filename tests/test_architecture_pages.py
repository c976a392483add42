"""Goal: the pages on how dlog works stay short and true.

Method: words are counted, and each name of the code that a page links to is looked up in the file
that the link opens.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from dlcore.base.machines import Machine
from tests.fixtures import machines_page
from tests.fixtures.made_parts import require_as_made
from tests.test_purity import pure_modules

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "architecture").glob("*.md"))
WORDS_MAX = 600


def words_of(page: Path) -> int:
    """Return how many words a reader meets: diagrams, targets of links and signs do not count."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return len(re.findall(r"\S*\w\S*", text))


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
        for package in ("dlcore", "bookie", "dlspark")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^TRANSITIONS = ", path.read_text(encoding="utf-8"), re.M)
    }
    assert found == {module.__name__ for _, module in machines_page.MACHINES}


def test_every_machine_is_pure_and_takes_events() -> None:
    """The other pure modules hold values, and what computes with them."""
    for name, module in machines_page.MACHINES:
        assert module.__name__ in pure_modules()
        machine = getattr(module, name)
        assert issubclass(machine, Machine)
        assert callable(getattr(machine, "handle", None)), name


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
