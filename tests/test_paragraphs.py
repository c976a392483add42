"""A page is read at once: its paragraphs are short, and its sentences begin with their subjects.

Blocks of code, tables and headings are no paragraphs, and each item of a list is one.  Targets of
links and signs do not count as words.  Sentences are those of paragraphs, items and cells; a
question may begin with its question word.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_tidy import LATE_SUBJECT

ROOT = Path(__file__).resolve().parent.parent
WORDS_MAX = 110
PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "README", "SECURITY")),
        *ROOT.glob("docs/**/*.md"),
    ]
)
A_PERSON = re.compile(r"\b(?:he|him|his|himself)\b.{0,40}", re.I)
_QUESTION = re.compile(r"(?:^|(?<=[.!?] ))(?:What|Who|Whose|Whom)\b[^.!?]*\?")
_MARKS = re.compile(r"^\s*(?:[-*]|\d+\.)? *\**")
_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_ENDS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[|#])")


def long_paragraphs(text: str) -> list[str]:
    """Return how the paragraphs begin that have too many words, and how many these are."""
    parts = _ENDS.split(_BLOCK.sub("", text))
    counted = [(words_of(part), part) for part in parts if not part.startswith(("|", "#"))]
    return [f"{words}: {part[:60]}" for words, part in counted if words > WORDS_MAX]


def unclear_sentences(text: str) -> list[str]:
    """Return the sentences that begin with a pronoun for a noun, or call a client a person."""
    lines = [cell for part in _ENDS.split(_BLOCK.sub("", text)) for cell in part.split(" | ")]
    plain = [" ".join(_MARKS.sub("", each.removeprefix("| ")).split()) for each in lines]
    rules = (LATE_SUBJECT, A_PERSON)
    return [
        found for each in plain for rule in rules for found in rule.findall(_QUESTION.sub("", each))
    ]


def words_of(part: str) -> int:
    """Return how many words a reader sees."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"\]\([^)]*\)", "]", part)))


def test_paragraphs_are_short() -> None:
    """Goal: a reader finds the sentence that answers a question."""
    assert PAGES
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    assert not {name: long for name, text in texts.items() if (long := long_paragraphs(text))}


def test_sentences_begin_with_their_subjects() -> None:
    """Goal: a reader finds the sentence that answers a question."""
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    assert not {
        name: unclear for name, text in texts.items() if (unclear := unclear_sentences(text))
    }


@pytest.mark.parametrize(
    "text",
    [
        "A log. What it holds stays.",
        "A log.\n\nSo it stays.",
        "| a cell | Of a log |\n|---|---|\n",
        "- **Who reads** it knows.",
        "1. Likewise here.",
        "A user, and his name.",
    ],
)
def test_an_unclear_sentence_is_found(text: str) -> None:
    """In paragraphs, cells and items."""
    assert len(unclear_sentences(text)) == 1


@pytest.mark.parametrize(
    "text",
    ["| Who may do what? | see |", "It is late, so it ends.", "```text\nSo it is.\n```"],
)
def test_a_clear_sentence_is_let_be(text: str) -> None:
    """A question, a word within a sentence, and code."""
    assert unclear_sentences(text) == []


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
