"""A paragraph of a page is read at once: the limit of words, and the pages that keep to it.

Blocks of code, tables and headings are no paragraphs, and each item of a list is one.  Targets of
links and signs do not count as words.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORDS_MAX = 110
PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "README", "SECURITY")),
        *ROOT.glob("docs/**/*.md"),
    ]
)
NOT_YET = {"docs/abuse.md", "docs/proxy.md", "docs/wire.md"}
"""Pages with longer paragraphs.  A page leaves this list once it is rewritten; none joins it."""
_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_ENDS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[|#])")


def long_paragraphs(text: str) -> list[str]:
    """Return how the paragraphs begin that have too many words, and how many these are."""
    parts = _ENDS.split(_BLOCK.sub("", text))
    counted = [(words_of(part), part) for part in parts if not part.startswith(("|", "#"))]
    return [f"{words}: {part[:60]}" for words, part in counted if words > WORDS_MAX]


def words_of(part: str) -> int:
    """Return how many words a reader sees."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"\]\([^)]*\)", "]", part)))


def test_paragraphs_are_short() -> None:
    """Of each page that is not in the list of the others."""
    assert PAGES
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    assert texts.keys() >= NOT_YET
    assert not {
        name: long
        for name, text in texts.items()
        if name not in NOT_YET and (long := long_paragraphs(text))
    }


@pytest.mark.parametrize(
    "text",
    [
        "word " * 111,
        "# Title\n\n" + "word " * 111 + "\n\nAnother one.",
        "- one\n- " + "word " * 111,
        "A line.\n" + "word " * 110,
    ],
)
def test_a_long_paragraph_is_found(text: str) -> None:
    """Alone, below a heading, in a list, and over several lines."""
    assert len(long_paragraphs(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "word " * 110,
        "word " * 100 + "\n\n" + "word " * 100,
        "- " + "word " * 100 + "\n- " + "word " * 100,
        "| cell " * 200 + "|\n|---|\n" + "| cell " * 200,
        "```text\n" + "word " * 200 + "\n```",
        "word " * 109 + "[word](a target " + "word " * 20 + ")",
    ],
)
def test_a_short_paragraph_is_let_be(text: str) -> None:
    """Items of a list are counted apart; code, tables and targets of links are not."""
    assert long_paragraphs(text) == []
