"""The two lists in `pure_modules.toml` leave no pure module out: machines, and values.

A module is pure when neither it nor any module of the project that it imports does I/O, reads a
clock, draws luck or logs, and when nothing in it waits.  import-linter holds those on a list to
that; this finds those that are on none.  A machine takes events, so that the list of machines shows
what decides.  `tests/coverage_check.py` asks more tests of pure ones.
"""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dlcore", "bookie", "dlspark")


def contracts() -> list[dict[str, list[str]]]:
    """Return the import contracts of pure modules: that of machines, and that of values."""
    text = (ROOT / "tests" / "pure_modules.toml").read_text(encoding="utf-8")
    machines, values = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    assert (machines["name"], values["name"]) == (
        "machines do no I/O",
        "values, and what computes with them, do no I/O",
    )
    return [machines, values]


def machine_modules() -> list[str]:
    """Return the pure modules that hold machines."""
    return contracts()[0]["source_modules"]


def value_modules() -> list[str]:
    """Return the other pure modules."""
    return contracts()[1]["source_modules"]


def pure_modules() -> list[str]:
    """Return all pure modules."""
    return machine_modules() + value_modules()


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


def test_the_contracts_name_every_pure_module() -> None:
    """A new one is put on one of the lists, and what is on them is there."""
    forbidden = {tuple(each["forbidden_modules"]) for each in contracts()}
    assert len(forbidden) == 1, "both contracts forbid the same"
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "_pb2" not in path.name and not path.name.startswith("__")
    ]
    pure = {
        each
        for each in modules
        if decides(each) and not is_impure(each, *map(frozenset, forbidden))
    }
    for listed in (machine_modules(), value_modules()):
        assert listed == sorted(set(listed)), "a list is sorted, and names each module once"
    listed = pure_modules()
    assert len(listed) == len(set(listed)), "a module is on one list"
    assert pure - set(listed) == set(), "pure, and not on a list in pure_modules.toml"
    there = {*modules, *(each.rpartition(".")[0] for each in modules)}
    assert set(listed) - there == set(), "on a list, and not there"


def test_machines_take_events_and_values_do_not() -> None:
    """A module with a method `handle` has a machine, of whose shape tests ask more."""
    takes = {each: takes_events(each) for each in pure_modules()}
    assert [each for each in machine_modules() if not takes[each]] == []
    assert [each for each in value_modules() if takes[each]] == []


def takes_events(module: str) -> bool:
    """Return whether a class of a module, or of a package, has a method `handle`."""
    path = path_of(module)
    files = [path] if path.exists() else sorted(path.with_suffix("").glob("*.py"))
    return any(
        isinstance(method, ast.FunctionDef) and method.name == "handle"
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        for method in node.body
    )
