"""A driver performs the effects of a machine, and decides nothing.

Goal: no part of a protocol grows beside its machine.  Method: count the lines of code of each
`*_driver.py`: all but imports, docstrings, comments and blank lines.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.test_purity import PACKAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

LINES_MAX = 150


def code_lines(source: str) -> int:
    """Count the lines of code of a module."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        lines: ast.stmt | None = None
        match node:
            case ast.Import() | ast.ImportFrom():
                lines = node
            case (
                ast.Module(body=[ast.Expr(ast.Constant(str())) as text, *_])
                | ast.ClassDef(body=[ast.Expr(ast.Constant(str())) as text, *_])
                | ast.FunctionDef(body=[ast.Expr(ast.Constant(str())) as text, *_])
                | ast.AsyncFunctionDef(body=[ast.Expr(ast.Constant(str())) as text, *_])
            ):
                lines = text
        if lines is not None:
            assert lines.end_lineno is not None
            left_out.update(range(lines.lineno, lines.end_lineno + 1))
    return sum(
        number not in left_out and line.strip() != "" and not line.strip().startswith("#")
        for number, line in enumerate(source.splitlines(), 1)
    )


def drivers() -> list[Path]:
    """Return the modules that run a machine."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*_driver.py"))]


def test_drivers_are_short() -> None:
    """More than that decides something, or is another subject."""
    found = {str(path.relative_to(ROOT)): code_lines(path.read_text("utf-8")) for path in drivers()}
    assert found
    assert {path: lines for path, lines in found.items() if lines > LINES_MAX} == {}


def test_the_lines_of_code_of_a_module() -> None:
    """A statement of several lines counts as such, and texts only if they are values."""
    source = '''
"""About
the module."""

from typing import (
    Any,
)


class Some:
    """About the class."""

    async def call(self) -> Any:
        """About
        the method."""
        # A comment.
        return [  # not a line of its own

            """a text""",
        ]


def call() -> None:
    """About the function."""
    import math
'''
    assert code_lines(source) == 6
