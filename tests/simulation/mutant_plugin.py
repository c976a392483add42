"""Pytest with a known bug put back: ``python -m pytest -p tests.simulation.mutant_plugin``.

``--mutant NAME`` opens a mutant of `mutants_tested` before tests are collected, and keeps it open.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.simulation.mutants_tested import TESTED

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the mutant's name."""
    parser.addoption("--mutant", choices=sorted(TESTED), help="a known bug to put back")


def pytest_configure(config: pytest.Config) -> None:
    """Put the bug back until the end."""
    name = config.getoption("--mutant")
    if name is not None:
        mutants = contextlib.ExitStack()
        mutants.enter_context(TESTED[name].apply())
        config.add_cleanup(mutants.close)
