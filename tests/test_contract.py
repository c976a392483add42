"""The table of the contract names every row, and only tests that exist.

Goal: a promise of the original that users relied on is either tested here, or left out for a
reason that is written down.  Method: read tests/CONTRACT.md, and the test files as text.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CONTRACT = TESTS / "CONTRACT.md"
ROWS = 61
NOT_HERE = "—:"


def table_rows(heading: str) -> list[list[str]]:
    """Return the cells of each row of the table whose first column has this heading."""
    lines = CONTRACT.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" |")])
    return rows


@cache
def names_of_tests(path: str) -> set[str]:
    """Return the names of the test functions in a file below `tests/`."""
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_")
    }


def named_tests(cell: str) -> list[tuple[str, str]]:
    """Return the (path, name) of each test in a cell, which holds nothing else."""
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
    assert cell == ", ".join(f"`{path}::{name}`" for path, name in found), cell
    return found


def test_every_row_has_a_test_or_a_reason() -> None:
    """Each row stands there once, in order; without a test it says why."""
    rows = table_rows("row")
    assert [row for row, *_ in rows] == [str(number) for number in range(1, ROWS + 1)]
    for row, original, applies, tests in rows:
        assert original, row
        if applies.startswith(NOT_HERE):
            assert len(applies) > len(NOT_HERE) + 10, row
            assert not tests, row
        else:
            assert named_tests(tests), row


def test_every_edge_case_has_a_test() -> None:
    """None is left out."""
    cases = table_rows("case")
    assert cases
    for case, tests in cases:
        assert named_tests(tests), case


def test_every_behaviour_of_sparks_connectors_has_a_test() -> None:
    """And says whose suite asks for it."""
    behaviours = table_rows("behaviour")
    assert behaviours
    for behaviour, asked_by, tests in behaviours:
        assert asked_by, behaviour
        assert named_tests(tests), behaviour


def test_every_test_that_is_named_exists() -> None:
    """A test that is renamed is renamed in the table."""
    tables = {"row": 3, "case": 1, "behaviour": 2}
    cells = [row[place] for heading, place in tables.items() for row in table_rows(heading)]
    missing = [
        f"{path}::{name}"
        for cell in cells
        for path, name in named_tests(cell)
        if not (TESTS / path).is_file() or name not in names_of_tests(path)
    ]
    assert not missing
