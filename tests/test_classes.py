"""A class has one subject: few attributes, and few methods.

Goal: classes do not grow unseen.  Method: read the syntax trees of the packages that are installed,
and count what a class sets on itself, and its methods but for those of Python's own protocols.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dlcore", "bookie", "dlspark")
ATTRIBUTES_MAX = 10
LARGER_MAX = 2
"""Number of classes with more attributes: each holds the state of one protocol, or its parts."""
METHODS_MAX = 25


class Size(NamedTuple):
    """How large a class is."""

    name: str
    path: str
    attributes: int
    methods: int


def sizes() -> Iterator[Size]:
    """Yield the size of each class of the packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield size_of(node, str(path.relative_to(ROOT)))


def size_of(node: ast.ClassDef, path: str) -> Size:
    """Count what a class has; a declaration for each way to call a method is not one more."""
    methods = [
        each
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if not any("overload" in ast.unparse(mark) for mark in each.decorator_list)
    ]
    attributes = {
        each.attr
        for method in methods
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if isinstance(each.value, ast.Name) and each.value.id == "self"
    }
    own = [each for each in methods if not each.name.startswith("__")]
    return Size(node.name, path, len(attributes), len(own))


def test_the_size_of_a_class() -> None:
    """Also of what is unpacked, or set by a statement that has several targets."""
    source = """
class Some:
    def __init__(self, pair, other):
        self.one, (self.two, *self.three) = pair
        self.four = self.five = other.six = 1
        self.one += 1
        with open("a") as self.seven:
            pass

    @overload
    def call(self, each: int) -> int: ...
    @overload
    def call(self, each: str) -> str: ...
    def call(self, each):
        return self.eight

    @property
    def half(self): ...
"""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    assert size_of(node, "some.py") == Size("Some", "some.py", 6, 2)


def test_classes_have_few_attributes() -> None:
    """More than that are several subjects, which a reader would have to tell apart."""
    large = [each for each in sizes() if each.attributes > ATTRIBUTES_MAX]
    assert len(large) <= LARGER_MAX, large


def test_classes_have_few_methods() -> None:
    """More than that are several roles, each of which its users would look for by itself."""
    large = [each for each in sizes() if each.methods > METHODS_MAX]
    assert not large
