"""The table in docs/clients-dlcore.md of operations that one back end lacks, made of the classes.

``python -m tests.backends_document`` writes it anew between its marks; a test compares.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.api.log import DistributedLogManager
from dlcore.api.namespace import Namespace
from dlcore.backends.direct.log import DirectLog
from dlcore.backends.direct.namespace import DirectNamespace
from dlcore.backends.flight.log import FlightLog
from dlcore.backends.flight.namespace import FlightNamespace
from dlcore.backends.flight.writing import FlightWriter
from dlcore.log.writing.records_writer import AsyncLogWriter
from dlcore.log.writing.writer import DirectWriter
from tests.fixtures.made_parts import remade

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "clients-dlcore.md"


class Concept(NamedTuple):
    """A class of the public API, and the classes of its back ends."""

    name: str
    face: type[Any]
    direct: type[Any]
    flight: type[Any]


CONCEPTS = (
    Concept("namespace", Namespace, DirectNamespace, FlightNamespace),
    Concept("log", DistributedLogManager, DirectLog, FlightLog),
    Concept("writer", AsyncLogWriter, DirectWriter, FlightWriter),
)


def render(text: str) -> str:
    """Return the document with the table between its marks made anew."""
    return remade(text, {"backends": _table})


def _table() -> str:
    lines = ["| of a | only directly, and in memory | only through proxies |", "|---|---|---|"]
    for each in CONCEPTS:
        direct = [*_lacking(each.face, each.flight), *_arguments(each.flight)]
        proxies = [*_lacking(each.face, each.direct), *_arguments(each.direct)]
        lines.append(f"| {each.name} | {_listed(direct)} | {_listed(proxies)} |")
    return "\n".join([*lines, ""])


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "nothing"


def _lacking(face: type[Any], back_end: type[Any]) -> list[str]:
    """Return the operations that the face refuses, and that the back end does not override."""
    return [
        name
        for name, method in _declared(face)
        if not name.startswith("_") and _refuses(method) and getattr(back_end, name) is method
    ]


def _declared(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a class has of its own, and of the classes of its fields beside its module."""
    folder = kind.__module__.rpartition(".")[0]
    for each in kind.__mro__:
        if each.__module__.rpartition(".")[0] == folder:
            yield from vars(each).items()


def _refuses(method: Any) -> bool:
    function = method.fget if isinstance(method, property) else method
    if not inspect.isfunction(function) or getattr(function, "__isabstractmethod__", False):
        return False
    source = inspect.getsource(function)
    return "raise UnsupportedError(" in source or "self._unsupported(" in source


def _arguments(back_end: type[Any]) -> list[str]:
    """Return the calls with arguments that a back end refuses, such as ``f(x=…)``."""
    found = []
    for name, method in _declared(back_end):
        if not inspect.isfunction(method):
            continue
        for call in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                if call.func.attr == "_unsupported":
                    found.append(str(ast.literal_eval(call.args[0])))
                elif call.func.attr == "_only_over_proxies":
                    argument = re.match(r"f'(\w+)=", ast.unparse(call.args[0]))
                    assert argument is not None, ast.unparse(call)
                    found.append(f"{name.lstrip('_')}({argument[1]}=…)")
    return found


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
