"""Public calls say in their docstrings what they raise.

The rule holds for every public method of the classes that `dlcore`, `dlcore.sync` and a bookie's
entry give to users, if it awaits something, runs its async twin, or raises itself; and every public
function and method of the packages' top modules whose own body raises.  `Raises:` names the errors,
or the call whose errors they are.  A call that ends something (`aclose`) raises only what it says.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import bookie.server
import dlcore
import dlcore.sync

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dlcore", "bookie", "dlspark")
Function = ast.FunctionDef | ast.AsyncFunctionDef
ENDINGS = {"aclose", "close", "abandon", "abort", "finish"}
TWINS = {"_call", "call", "iterate"}
"""The methods by which the blocking face runs async twins."""


def functions_of(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield the public functions of a module, and the public methods of its public classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("_"):
                yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions_of(node.body, f"{node.name}.")


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield what is in a function, and not in one that it defines."""
    ahead: list[ast.AST] = list(function.body)
    while ahead:
        node = ahead.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            ahead += ast.iter_child_nodes(node)


def raises(function: Function) -> bool:
    """Return whether it raises an error of its own: not one that it caught, and no assertion."""
    errors = [node.exc for node in own_nodes(function) if isinstance(node, ast.Raise)]
    named = [ast.unparse(error) for error in errors if isinstance(error, ast.Call)]
    return any(not name.startswith(("AssertionError", "NotImplementedError")) for name in named)


def waits(function: Function) -> bool:
    """Return whether it awaits something, or runs an async twin, or is declared to by a base."""
    if any(ast.unparse(each) == "abstractmethod" for each in function.decorator_list):
        return isinstance(function, ast.AsyncFunctionDef)
    nodes = list(own_nodes(function))
    if any(isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith) for node in nodes):
        return True
    called = (node.func for node in nodes if isinstance(node, ast.Call))
    names = {each.attr if isinstance(each, ast.Attribute) else ast.unparse(each) for each in called}
    return bool(names & TWINS)


def says(function: Function) -> bool:
    """Return whether its docstring tells, in a section or in a sentence."""
    return re.search(r"\b[Rr]aises?\b", ast.get_docstring(function) or "") is not None


def sources() -> list[Path]:
    """Return the top modules of the packages: what users import from, and what they start."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).glob("*.py"))


def exported() -> list[type]:
    """Return the classes that users are given."""
    named = [getattr(module, name) for module in (dlcore, dlcore.sync) for name in module.__all__]
    classes = {each for each in [*named, bookie.server.BookieServer] if inspect.isclass(each)}
    bases = {base for each in classes for base in each.__mro__}
    return sorted(
        (each for each in bases if each.__module__.split(".")[0] in PACKAGES),
        key=lambda each: (each.__module__, each.__qualname__),
    )


@pytest.mark.parametrize("kind", exported(), ids=lambda kind: kind.__qualname__)
def test_each_call_of_a_public_class_says_what_it_raises(kind: type) -> None:
    """If it waits, or raises."""
    path = inspect.getsourcefile(kind)
    assert path is not None
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    silent = [
        f"{name} (line {function.lineno})"
        for name, function in functions_of(tree.body)
        if name.partition(".")[0] == kind.__name__
        if (waits(function) and function.name not in ENDINGS) or raises(function)
        if not says(function)
    ]
    assert silent == [], "the docstring of each says what it raises, after `Raises:`"


def test_each_public_function_that_raises_says_so() -> None:
    """In all packages, by its own body."""
    silent = [
        f"{path.relative_to(ROOT)}:{function.lineno} {name}"
        for path in sources()
        for name, function in functions_of(ast.parse(path.read_text(encoding="utf-8")).body)
        if raises(function)
        if not says(function)
    ]
    assert silent == [], "the docstring of each says what it raises, after `Raises:`"
