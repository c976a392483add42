"""The tables of methods and actions in docs, made of the tables that clients and proxies use.

``python -m tests.flight_document`` writes them anew between their marks; a test compares.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dlcore.flight import entrances
from dlcore.flight.actions import ACTIONS, COMMON_ERRORS
from dlcore.flight.entrances import METHODS
from dlcore.flight.put import PutTarget
from dlcore.flight.statuses import code_of
from dlcore.flight.tickets import Ticket
from tests.fixtures.made_parts import remade

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlcore.base.errors import DLError
    from dlcore.flight.actions import Action
    from dlcore.flight.entrances import Part

_DOCS = Path(__file__).resolve().parents[1] / "docs"
DOCUMENTS = (_DOCS / "proxy.md", _DOCS / "proxy-actions.md")


def render(text: str) -> str:
    """Return a document with the tables between its marks made anew."""
    parts: dict[str, Callable[[], str]] = {
        "methods": _methods,
        "actions": _table,
        "ticket": partial(_explained, Ticket),
        "command": partial(_explained, PutTarget),
    }
    return remade(text, parts)


def _methods() -> str:
    lines = ["| method | body | answer | right | errors |", "|---|---|---|---|---|"]
    lines += [
        f"| `{each.name}` | {_parts(each.body)} | {_parts(each.answer)} | {each.right} | "
        f"{_errors(each.errors)} |"
        for each in METHODS
    ]
    common = _errors(entrances.COMMON_ERRORS)
    return "\n".join([*lines, "", f"Every method may also fail with: {common}.", ""])


def _parts(parts: Iterable[Part]) -> str:
    return "; ".join(
        each.text if each.fields is None else f"{each.text}: {_fields(each.fields)}"
        for each in parts
    )


def _explained(kind: type[msgspec.Struct]) -> str:
    """Return a table of the fields of a struct, with the meanings in its docstring."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2]
    found = re.findall(r"^    (\w+): ((?:.|\n(?!    \w+: ))+)", text, re.MULTILINE)
    meanings = {name: " ".join(meaning.split()) for name, meaning in found}
    named = [name for name in kind.__struct_encode_fields__ if name in meanings]
    assert len(named) == len(meanings), kind
    rows = [f"| `{name}` | {meanings[name]} |" for name in named]
    return "\n".join(["| field | meaning |", "|---|---|", *rows, ""])


def _table() -> str:
    lines = [
        "| action | body | answer | right | what it does | errors |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(action) for action in ACTIONS]
    common = _errors(COMMON_ERRORS)
    return "\n".join([*lines, "", f"Every action may also fail with: {common}.", ""])


def _row(action: Action[Any, Any]) -> str:
    body, answer = _fields(action.request), _fields(action.answer)
    text = " ".join(each for each in (action.text, action.details) if each)
    right, errors = action.needs.text, _errors(action.errors)
    return f"| `{action.name}` | {body} | {answer} | {right} | {text} | {errors} |"


def _fields(kind: type[msgspec.Struct]) -> str:
    fields = msgspec.structs.fields(kind)
    names = [f"`{each.encode_name}`" for each in fields if each.required]
    names += [f"[`{each.encode_name}`]" for each in fields if not each.required]
    return ", ".join(names) or "`{}`"


def _errors(kinds: Iterable[type[DLError]]) -> str:
    by_code: dict[str, list[str]] = {}
    for kind in kinds:
        by_code.setdefault(code_of(kind.__new__(kind)), []).append(f"`{kind.__name__}`")
    return "; ".join(f"{code}: {', '.join(names)}" for code, names in by_code.items())


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(render(document.read_text(encoding="utf-8")), encoding="utf-8")
