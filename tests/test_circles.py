"""No module imports itself in a circle, imports for the type checker included.

A reader of a module reads its types, so two modules that need each other are one.  import-linter
refuses circles of sibling packages and modules; this counts what a package itself imports, too.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

PACKAGES = ("dlcore", "bookie", "dlspark")


def imports() -> dict[str, set[str]]:
    """Return which modules each module imports, anywhere in it."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    return {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}


def test_there_is_no_circle() -> None:
    """The error names the modules of one."""
    found = imports()
    assert len(found) > 300
    TopologicalSorter(found).prepare()


def test_a_circle_would_be_found() -> None:
    """Two modules that need each other are refused."""
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
