"""The list in `pure_modules.toml` leaves no pure module out.

A module is pure when neither it nor any module of the project that it imports does I/O, reads a
clock, draws luck or logs, and when nothing in it waits.  import-linter holds those on the list to
that; this finds those that are not on it.  `tests/coverage_check.py` asks more tests of pure ones.
"""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dlcore", "bookie", "dlspark")


def contract() -> dict[str, list[str]]:
    """Return the import contract of pure modules."""
    text = (ROOT / "tests" / "pure_modules.toml").read_text(encoding="utf-8")
    (found,) = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    return dict(found)


def pure_modules() -> list[str]:
    """Return the modules that are pure, and packages of such, as the contract lists them."""
    return contract()["source_modules"]


def path_of(module: str) -> Path:
    """Return a module's file."""
    return ROOT / (module.replace(".", "/") + ".py")


@cache
def imports_of(module: str) -> frozenset[str]:
    """Return what a module imports at run time, as modules and as names of modules."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                visit(node.orelse)
            else:
                visit([each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)])

    visit(ast.parse(path_of(module).read_text(encoding="utf-8")).body)
    return frozenset(found)


def is_impure(module: str, forbidden: frozenset[str]) -> bool:
    """Return whether a module imports what is forbidden, itself or through others."""
    seen, ahead = {module}, [module]
    while ahead:
        for each in imports_of(ahead.pop()):
            package = each.split(".")[0]
            if package in forbidden:
                return True
            if package in PACKAGES and each not in seen and path_of(each).exists():
                seen.add(each)
                ahead.append(each)
    return False


def decides(module: str) -> bool:
    """Return whether there is anything to run in a module, and nothing in it waits."""
    nodes = list(ast.walk(ast.parse(path_of(module).read_text(encoding="utf-8"))))
    waits = any(isinstance(node, ast.AsyncFunctionDef) for node in nodes)
    return not waits and any(isinstance(node, ast.FunctionDef) for node in nodes)


def test_the_contract_names_every_pure_module() -> None:
    """A new machine is put on the list, and what is on it is there."""
    forbidden = frozenset(contract()["forbidden_modules"])
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "_pb2" not in path.name and not path.name.startswith("__")
    ]
    pure = {each for each in modules if decides(each) and not is_impure(each, forbidden)}
    listed = pure_modules()
    assert listed == sorted(set(listed)), "the list is sorted, and names each module once"
    assert pure - set(listed) == set(), "pure, and not on the list in pure_modules.toml"
    there = {*modules, *(each.rpartition(".")[0] for each in modules)}
    assert set(listed) - there == set(), "on the list, and not there"
