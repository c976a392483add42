"""No protocol hides in the flags of a class that also performs it.

Goal: the next protocol becomes a machine, whose states have names and whose branches are all tried,
before it has grown in a class that waits.  Method: count the flags of each class in a module that
waits.  A flag is an attribute that is True or False, or an `asyncio.Event` that is asked whether it
is set; and it changes after `__init__`.  Three of them make eight states, and nothing says which of
those occur.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.test_purity import PACKAGES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS_MAX = 2
KNOWN = {
    # It ends once; the others tell whether a write is on its way then, and whether one came late.
    "dlcore/proxy/writing/forwarding.py Relay",
}
"""The classes with more flags, each with the reason why it is no machine."""


def flags_of(node: ast.ClassDef) -> set[str]:
    """Return the flags of a class that change after its `__init__`."""
    bools, events, assigned, called = set[str](), set[str](), set[str](), set[tuple[str, str]]()
    for method in node.body:
        for name, value in assignments(method):
            if is_bool(value):
                bools.add(name)
            elif value is not None and ast.unparse(value) == "asyncio.Event()":
                events.add(name)
            if not is_init(method):
                assigned.add(name)
        called |= calls(method)
    asked = {name for name, method in called if method == "is_set"}
    turned = {name for name, method in called if method in ("set", "clear")}
    return (bools & assigned) | (events & asked & turned)


def assignments(method: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the attributes of `self` that are assigned, and their values."""
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets, value):
                pass
            case ast.AnnAssign(target, _, value):
                targets = [target]
            case _:
                continue
        for each in targets:
            match each:
                case ast.Attribute(ast.Name("self"), name):
                    yield name, value


def calls(method: ast.stmt) -> set[tuple[str, str]]:
    """Return the calls of methods of attributes of `self`."""
    return {
        (node.func.value.attr, node.func.attr)
        for node in ast.walk(method)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and ast.unparse(node.func.value.value) == "self"
    }


def is_bool(value: ast.expr | None) -> bool:
    """Whether a value is surely True or False."""
    match value:
        case ast.Constant(bool()) | ast.Compare() | ast.UnaryOp(ast.Not()):
            return True
    return False


def is_init(node: ast.stmt) -> bool:
    """Whether it is the constructor."""
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def waits(tree: ast.Module) -> bool:
    """Whether a module waits, or calls what does."""
    return any(
        isinstance(node, ast.AsyncFunctionDef)
        or (isinstance(node, ast.Import) and node.names[0].name == "asyncio")
        for node in ast.walk(tree)
    )


def test_flags_make_no_protocol() -> None:
    """A class with more of them is a machine in a module that does not wait, or is known."""
    found = {
        f"{path.relative_to(ROOT)} {node.name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if waits(tree := ast.parse(path.read_text(encoding="utf-8")))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and len(flags_of(node)) > FLAGS_MAX
    }
    assert found == KNOWN


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("def end(self):\n    self._is_over = True", {"_is_over"}),
        ("def end(self):\n    self._is_over = self.a = not self._is_late", {"_is_over", "a"}),
        ("def __init__(self):\n    self._is_late = False", set()),
        ("def end(self):\n    self._is_late = self._count > 3", {"_is_late"}),
        ("def end(self):\n    self._count = 3", set()),
        ("def end(self):\n    self._ending.set()\n    return self._ending.is_set()", {"_ending"}),
        ("async def end(self):\n    self._ending.set()\n    await self._ending.wait()", set()),
    ],
)
def test_a_flag_is_found(method: str, flags: set[str]) -> None:
    """It changes, and to yes or no; an event on which others only wait decides nothing."""
    init = "def __init__(self):\n    self._ending = asyncio.Event()"
    body = "\n".join(f"    {line}" for line in f"{init}\n{method}".splitlines())
    (node,) = ast.parse(f"class Stream:\n{body}").body
    assert isinstance(node, ast.ClassDef)
    assert flags_of(node) == flags
