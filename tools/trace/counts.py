"""Counts of the syntax trees of the product, beside what is aimed at.

- Lines are physical lines of files that are written by hand, blank ones and comments included.
- Attributes of a class are its annotated fields and what its methods assign to `self`; inherited
  ones do not count.
- Methods are the functions in the body of a class, properties included.
- Definitions of the public face are public methods and properties of namespaces, logs, readers,
  writers and ranges, in the async classes, the blocking ones and those of the back ends.  A method
  that overrides an inherited one is not another definition, and a generated one is none.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bookie", "dlcore", "dlspark")
ATTRIBUTES_MAX = 10
METHODS_MAX = 25
FACES = frozenset(
    {"OpenedNamespace", "Namespace", "OpenedLog", "DistributedLogManager", "LogRange"}
    | {"AsyncLogReader", "AsyncLogWriter", "LogReader", "LogWriter"}
)
"""`OpenedNamespace` and `OpenedLog` are the bases of the parts of namespaces and logs."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Class: TypeAlias = tuple[str, ast.ClassDef]
"""A class, and the path of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A count, and what it should be at most."""

    name: str
    value: int
    aim: int
    parts: tuple[str, ...] = ()
    """The counted things, the largest first, if they should be none or few."""


def count(root: Path = ROOT) -> list[Figure]:
    """Read the product below `root`."""
    texts = {
        str(path.relative_to(root)): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
        if "_pb2" not in path.name
    }
    classes = [
        (path, node)
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]
    attributes = {each: len(_attributes(each[1])) for each in classes}
    methods = {each: len(_methods(each[1])) for each in classes}
    return [
        Figure(
            name="lines", value=sum(len(each.splitlines()) for each in texts.values()), aim=60_000
        ),
        _larger("attributes", attributes, ATTRIBUTES_MAX, aim=25),
        _larger("methods", methods, METHODS_MAX, aim=0),
        Figure(name="definitions of the public face by hand", value=_face(classes), aim=130),
        Figure(
            name="packages in dlcore",
            value=sum(1 for _ in (root / "dlcore").glob("*/__init__.py")),
            aim=12,
        ),
    ]


def _larger(things: str, counts: dict[_Class, int], most: int, *, aim: int) -> Figure:
    found = sorted((each for each in counts if counts[each] > most), key=lambda c: -counts[c])
    return Figure(
        name=f"classes of more than {most} {things}",
        value=len(found),
        aim=aim,
        parts=tuple(f"{counts[each]} {each[1].name}, {each[0]}" for each in found),
    )


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, _FUNCTIONS)]


def _attributes(node: ast.ClassDef) -> set[str]:
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    }
    return fields | {
        each.attr
        for method in _methods(node)
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def _face(classes: list[_Class]) -> int:
    """Count what the classes of the public face, and classes derived of them, add."""
    named: dict[str, list[ast.ClassDef]] = {}
    for _, node in classes:
        named.setdefault(node.name, []).append(node)

    def public(node: ast.ClassDef) -> set[str]:
        return {each.name for each in _methods(node) if not each.name.startswith("_")}

    def bases(node: ast.ClassDef) -> list[ast.ClassDef]:
        near = [
            base
            for each in node.bases
            for base in named.get(ast.unparse(each).partition("[")[0], ())
        ]
        return [*near, *(far for base in near for far in bases(base))]

    added = 0
    for _, node in classes:
        inherited = bases(node)
        if FACES & {node.name, *(base.name for base in inherited)}:
            added += len(public(node).difference(*map(public, inherited)))
    return added
