"""docs/api.md, made of the public names of the packages.

``python -m tests.api_document`` writes it; a test compares.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dlcore
import dlcore.ops.sandbox
import dlcore.sync
import dlcore.testing
import dlspark

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "api.md"
OWN = ("dlcore", "bookie", "dlspark")
_HEAD = """# Python API

Generated from the code by `make pages`.

`dlcore.sync` blocks, `dlcore` has the same calls for asyncio: there `await` each, and read
`async with` and `async for`. Every call may raise `AlreadyClosedError`, and `MetadataError` or
`BookieError` while the cluster does not answer; the tables name what else
([errors](errors.md)). `help(…)` in Python has all arguments. Names that begin with an underscore,
and modules that are not here, may change with any release. [From Python](python.md) shows how the
calls are used.
"""
MODULES: dict[ModuleType, str] = {
    dlcore.sync: "Namespaces, logs, writers and readers, blocking.",
    dlcore: "The same for asyncio, and values. Names that `dlcore.sync` has, too, are above.",
    dlspark: 'Calls beside `format("dlog")`, which has options for '
    "[reads](spark-read.md#options) and [writes](spark-write.md#options).",
    dlcore.testing: "A cluster in memory, for tests; `dlcore.testing.sync` has the same, blocking.",
    dlcore.ops.sandbox: "A cluster of processes on this machine.",
}


def page() -> str:
    """Return the whole page."""
    parts, shown = [_HEAD], set[str]()
    for module, text in MODULES.items():
        parts.append(f"## {module.__name__}\n\n{text}\n")
        for name in module.__all__:
            twin = name.removeprefix("Async")
            if name not in shown and (twin == name or twin not in shown):
                parts.append(_entry(name, getattr(module, name)))
        shown |= set(module.__all__)
    return "\n".join(parts)


def _entry(name: str, value: Any) -> str:
    """Return a class with its calls and values, or a function."""
    if not inspect.isclass(value):
        return f"### {name}\n\n`{name}{_arguments(value)}`\n\n{_first(value)}{_raised(value)}\n"
    parts = [f"### {name}", _first(value)]
    rows = [f"| {first} | {text} |" for first, text in _members(value)]
    if rows:
        parts.append("\n".join(["| | |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _members(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the public attributes and calls of a class, each with what it is."""
    if issubclass(kind, enum.Enum):
        yield from ((f"`{each.name}`", f"`{each.value}`") for each in kind)
        return
    fields = _fields(kind)
    yield from ((f"`{name}`", f"`{text}`") for name, text in fields.items())
    for name, member in sorted(each for each in _public(kind) if each[0] not in fields):
        if isinstance(member, property):
            yield f"`{name}`", _first(member)
        elif callable(bare := getattr(member, "__func__", member)):
            yield f"`{name}{_arguments(bare)}`", _first(bare) + _raised(bare)


def _fields(kind: type) -> dict[str, str]:
    """Return the values that an object holds, with their types."""
    names = getattr(kind, "__struct_fields__", ())
    if dataclasses.is_dataclass(kind):
        names = tuple(each.name for each in dataclasses.fields(kind))
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found |= inspect.get_annotations(base)
    found = {
        name: re.sub(r"^Annotated\[([^,]+),.*\]$", r"\1", str(each)) for name, each in found.items()
    }
    return {name: found[name].replace("|", "\\|") for name in names}


def _public(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class and its own bases define, the nearest definition of each name."""
    seen = set[str]()
    for base in kind.__mro__:
        if base.__module__.split(".")[0] not in OWN:
            continue
        for name, member in vars(base).items():
            if not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


def _arguments(function: Any) -> str:
    """Return the names and defaults of the arguments."""
    signature = inspect.signature(function)
    found = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    return str(inspect.Signature(found)).replace("|", "\\|")


def _first(value: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    first = re.sub(r"``([^`]+)``", r"`\1`", " ".join(first.split()))
    return re.sub(r" ?Raises:.*", "", first).replace("|", "\\|")


def _raised(function: Any) -> str:
    """Return the errors that a docstring names below `Raises:`."""
    found = (inspect.getdoc(function) or "").partition("Raises:")[2]
    names = dict.fromkeys(re.findall(r"\b[A-Z]\w+Error\b", found))
    return f" Raises {', '.join(f'`{each}`' for each in names)}." if names else ""


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
