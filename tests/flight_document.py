"""The table of actions in docs/proxy-actions.md, made of the table that clients and proxies use.

``python -m tests.flight_document`` writes it anew between its marks; a test compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dlcore.flight.actions import ACTIONS, COMMON_ERRORS
from dlcore.flight.statuses import code_of
from tests.fixtures.made_parts import remade

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlcore.base.errors import DLError
    from dlcore.flight.actions import Action

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "proxy-actions.md"


def render(text: str) -> str:
    """Return the document with the table between its marks made anew."""
    return remade(text, {"actions": _table})


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
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
