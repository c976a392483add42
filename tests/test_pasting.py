"""Blocks can be pasted: those of the first pages at Python's prompt, those of all in a shell."""

from __future__ import annotations

import codeop

import pytest

from tests.fixtures.pages import PAGES as ALL_PAGES, blocks_of

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


def test_a_wait_of_a_shell_ends_with_the_process_that_it_waits_for() -> None:
    """A server that cannot start would leave the reader's shell waiting for ever."""
    shells = [each for page in ALL_PAGES for each in blocks_of(page) if each.language == "bash"]
    waits = [line for each in shells for line in each.text.splitlines() if "; do sleep" in line]
    assert waits
    assert not [line for line in waits if "|| ! kill -0 $!; do" not in line]
