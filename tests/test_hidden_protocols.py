"""No protocol hides in the flags of a class that also performs it.

Goal: the next protocol becomes a machine, whose states have names and whose branches are all tried,
before it has grown in a class that waits.  Method: count the flags of each class in a module that
waits.  A flag is an attribute that is True or False, or is None at times and is compared with None,
or an `asyncio.Event` that is set or cleared; and it changes after `__init__`.  Three of them make
eight states, and nothing says which of those occur.  `KNOWN` gives a reason for each such class.
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
    "bookie/disks/real_file.py Capabilities": "a value that is found out once and then kept",
    "bookie/serving/service.py BookieService": "two timers, of which each call checks its own",
    "dlcore/backends/flight/staging.py FlightStagingWriter": (
        "the call and its answer come and go together; schema and close are the caller's order"
    ),
    "dlcore/ledger/metadata/registry.py BookieRegistry": (
        "a cache and its one reading; a call that waits for a change takes the event of then"
    ),
    "dlcore/log/reading/watching.py LogWatch": (
        "an end that is final, beside the one look of `NameLooks`, which decides"
    ),
    "dlcore/log/writing/writer.py Pump": (
        "the sleep and the alarm of a driver; `LogAppender` decides what is done"
    ),
    "dlcore/metadata/zookeeper_session.py ZooKeeperSession": (
        "a close that is final, beside what the client of ZooKeeper tells of its connection"
    ),
    "dlcore/ops/autorecovery/runner.py PausableRunner": (
        "one loop reads the node, and sets the gate and the figure to the same"
    ),
    "dlcore/ops/sandbox/cluster.py Sandbox": (
        "resources that are taken in one order and given back in the other"
    ),
    "dlcore/proxy/callers.py Stay": (
        "it ends once; the timers only bring the end, and a message on its way delays it"
    ),
    "dlcore/proxy/reading/following.py FollowedLog": (
        "it ends once, by the end of the log or an error; the event tells readers of either"
    ),
    "dlcore/proxy/reading/serving.py Relief": "two timers, of which each call checks its own",
    "dlcore/proxy/writing/forwarding.py Relay": (
        "it ends once; the others tell whether a write is on its way then, and whether one was late"
    ),
    "dlcore/wire/connection.py Connection": (
        "a socket, and events for callers; `ClientSession` decides"
    ),
}
"""The classes with more flags, each with the reason why it is no machine."""


def flags_of(node: ast.ClassDef) -> set[str]:
    """Return the flags of a class that change after its `__init__`."""
    bools, nones, others = set[str](), set[str](), set[str]()
    events, assigned, called = set[str](), set[str](), set[tuple[str, str]]()
    for method in node.body:
        params = bool_parameters(method)
        for name, value in assignments(method):
            if is_bool(value, bools, params):
                bools.add(name)
            elif value is not None and ast.unparse(value) == "asyncio.Event()":
                events.add(name)
            (nones if is_none(value) else others).add(name)
            if not is_init(method):
                assigned.add(name)
        called |= calls(method)
    turned = {name for name, method in called if method in ("set", "clear")}
    optionals = (nones & others & asked_for_none(node)) - bools
    return ((bools | optionals) & assigned) | (events & turned)


def assignments(method: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the attributes of `self` that are assigned, and their values.

    A field of a dataclass is one, with its default; `|=` and `&=` assign what they combine with.
    """
    if isinstance(method, ast.AnnAssign) and isinstance(method.target, ast.Name):
        is_flag = ast.unparse(method.annotation) == "bool"
        yield method.target.id, ast.Constant(False) if is_flag else method.value
    for node in ast.walk(method):
        match node:
            case ast.Assign(targets, value):
                for target in targets:
                    yield from parts_of(target, value)
            case ast.AnnAssign(target, _, value):
                yield from parts_of(target, value)
            case ast.AugAssign(target, ast.BitOr() | ast.BitAnd(), value):
                yield from parts_of(target, value)


def parts_of(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the attributes of `self` in a target, each with its part of the value."""
    match target, value:
        case ast.Attribute(ast.Name("self"), name), _:
            yield name, value
        case ast.Tuple(targets), ast.Tuple(values) if len(targets) == len(values):
            for each, part in zip(targets, values, strict=True):
                yield from parts_of(each, part)
        case ast.Tuple(targets), _:
            for each in targets:
                yield from parts_of(each, ast.Constant(...))


def asked_for_none(node: ast.ClassDef) -> set[str]:
    """Return the attributes of `self` that are compared with None, except in assertions."""
    asserted = {
        id(part)
        for each in ast.walk(node)
        if isinstance(each, ast.Assert)
        for part in ast.walk(each)
    }
    found = set()
    for each in ast.walk(node):
        match each:
            case ast.Compare(
                ast.Attribute(ast.Name("self"), name), [ast.Is() | ast.IsNot()], [value]
            ) if is_none(value) and id(each) not in asserted:
                found.add(name)
    return found


def bool_parameters(method: ast.stmt) -> set[str]:
    """Return the parameters of a method that are True or False."""
    if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {
        each.arg
        for each in (*method.args.args, *method.args.kwonlyargs)
        if each.annotation is not None and ast.unparse(each.annotation) == "bool"
    }


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


def is_bool(value: ast.expr | None, bools: set[str], params: set[str]) -> bool:
    """Whether a value is surely True or False; `bools` are attributes of `self` that are."""
    match value:
        case ast.Constant(bool()) | ast.Compare() | ast.UnaryOp(ast.Not()):
            return True
        case ast.Call(ast.Name("bool" | "any" | "all" | "isinstance")):
            return True
        case ast.BoolOp(_, values):
            return all(is_bool(each, bools, params) for each in values)
        case ast.BinOp(left, ast.BitOr() | ast.BitAnd(), right):
            return is_bool(left, bools, params) and is_bool(right, bools, params)
        case ast.IfExp(_, body, orelse):
            return is_bool(body, bools, params) and is_bool(orelse, bools, params)
        case ast.Attribute(ast.Name("self"), name):
            return name in bools
        case ast.Name(name):
            return name in params
    return False


def is_none(value: ast.expr | None) -> bool:
    """Whether a value is None."""
    return isinstance(value, ast.Constant) and value.value is None


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
    assert found == set(KNOWN)


_MAKES = "def end(self):\n    self._task = None"


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("def end(self):\n    self._is_over = True", {"_is_over"}),
        ("def end(self):\n    self._is_over = self.a = not self._is_late", {"_is_over", "a"}),
        ("def __init__(self):\n    self._is_late = False", set()),
        ("def end(self):\n    self._is_late = self._count > 3", {"_is_late"}),
        ("def end(self):\n    self._count = 3", set()),
        ("def end(self):\n    self._ending.set()\n    return self._ending.is_set()", {"_ending"}),
        (
            "async def end(self):\n    self._ending.set()\n    await self._ending.wait()",
            {"_ending"},
        ),
        ("async def end(self):\n    await self._ending.wait()", set()),
        ("def end(self):\n    self._is_over, self._count = True, 3", {"_is_over"}),
        ("def end(self):\n    self._is_over |= self._count > 3", {"_is_over"}),
        ("def end(self, late: bool):\n    self._is_late = late or self._count > 3", {"_is_late"}),
        ("def end(self, late: int):\n    self._late = late or 3", set()),
        ("def end(self, late):\n    self._is_late = bool(late)", {"_is_late"}),
        ("is_late: bool = False\ndef end(self, late):\n    self.is_late = late", {"is_late"}),
        (f"{_MAKES}\n    if self._task is None:\n        self._task = object()", {"_task"}),
        (f"{_MAKES}\n    assert self._task is not None\n    self._task = object()", set()),
        (f"{_MAKES}\n    self._task = object()", set()),
        ("def end(self):\n    if self._task is None:\n        self._task = object()", set()),
    ],
)
def test_a_flag_is_found(method: str, flags: set[str]) -> None:
    """It changes, and to yes or no, or to something and nothing; then it is asked for."""
    init = "def __init__(self):\n    self._ending = asyncio.Event()"
    body = "\n".join(f"    {line}" for line in f"{init}\n{method}".splitlines())
    (node,) = ast.parse(f"class Stream:\n{body}").body
    assert isinstance(node, ast.ClassDef)
    assert flags_of(node) == flags
