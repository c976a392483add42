"""Blocks of the first pages can be pasted at Python's prompt, as these pages say."""

from __future__ import annotations

import codeop

import pytest

from tests.fixtures.pages import blocks_of

PAGES = ("README.md", "docs/learn/python.md", "docs/learn/spark.md")


def paste(text: str) -> None:
    """Compile a text as the prompt of Python 3.11 takes it: line after line.

    Raises: SyntaxError: an indented part is not followed by an empty line.
    """
    compiler, waiting = codeop.CommandCompiler(), list[str]()
    for line in [*text.splitlines(), ""]:
        waiting.append(line)
        if compiler("\n".join(waiting), symbol="single") is not None:
            waiting = []
    assert not waiting


@pytest.mark.parametrize("page", PAGES)
def test_blocks_can_be_pasted(page: str) -> None:
    """A newcomer's first block must not end with a syntax error."""
    blocks = [each for each in blocks_of(page) if each.language == "python"]
    assert blocks
    for block in blocks:
        paste(block.text)


def test_an_indented_part_needs_an_empty_line_after_it() -> None:
    """The check can fail."""
    paste("if True:\n    x = 1\n\ny = 2\n")
    with pytest.raises(SyntaxError):
        paste("if True:\n    x = 1\ny = 2\n")
