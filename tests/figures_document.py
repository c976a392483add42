"""The table in docs/performance.md of the benchmarks, made of their docstrings.

``python -m tests.figures_document`` writes it anew between its marks; a test compares.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from benchmarks.main import BENCHMARKS, LONG
from tests.fixtures.made_parts import remade

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


def page() -> str:
    """Return the document with the table between its marks made anew."""
    return remade(DOCUMENT.read_text(encoding="utf-8"), {"benchmarks": _table})


def _table() -> str:
    rows = [
        f"| `{name}` | {'only by name' if name in LONG else ''} | {_first(inspect.getdoc(each))} |"
        for name, each in BENCHMARKS.items()
    ]
    return "\n".join(["| `ONLY=` | | what is measured |", "|---|---|---|", *rows, ""])


def _first(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
