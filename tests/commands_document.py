"""docs/commands.md, made of the commands.

``python -m tests.commands_document`` writes it; a test compares.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlcore.ops.cli.app import SECTIONS, dlog
from tests.fixtures.shell import leaves

if TYPE_CHECKING:
    from collections.abc import Iterable

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
_HEAD = """# Commands

Generated from the code by `make pages`.

`dlog --help` lists the groups, and each command has `--help`. Exit codes: 0 done, 1 the operation
failed, 2 the command line was wrong, 130 interrupted, 143 terminated. A failure is one line on
standard error, with `--json` an object ([errors](errors.md)).
"""
_COMMON = """## Options of every command

They stand before or after the command; those of `dlog bookie run` are
[settings of bookies](configuration.md#bookies) alone.

"""


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for title, groups in SECTIONS.items():
        parts.append(f"## {title}\n")
        named = [each for group in groups for each in leaves() if each.split()[0] == group]
        parts += [_command(name) for name in named]
    return "\n".join([*parts, _COMMON + _options(dlog)])


def found(name: str) -> click.Command:
    """Return a command by its words."""
    command: click.Command = dlog
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def _command(name: str) -> str:
    command = found(name)
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    first, *others = textwrap.dedent(f"    {command.help}").strip().split("\n\n")
    parts = [f"### dlog {name}", _plain(first), f"`dlog {name} {usage}`"]
    parts += map(_plain, others)
    example = (command.epilog or "").removeprefix("Example: ")
    if example:
        parts.append(f"Example: `{example}`")
    options = _options(command, without={each.name for each in dlog.params})
    return "\n\n".join([*parts, *filter(None, [options])]) + "\n"


def _options(command: click.Command, without: Iterable[str | None] = ()) -> str:
    """Return a table of the options of a command, empty if it has none of its own."""
    context = click.Context(command)
    records = [
        each.get_help_record(context)
        for each in command.params
        if isinstance(each, click.Option) and each.name not in without
    ]
    rows = [
        f"| `{_cell(names)}` | {_cell(_plain(text))} |" for names, text in filter(None, records)
    ]
    return "\n".join(["| option | meaning |", "|---|---|", *rows, ""]) if rows else ""


def _plain(text: str) -> str:
    """Return a text of help as Markdown: on one line, its signs shown as they are."""
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"(?<!`)([<>*_{}])(?!`)", r"\\\1", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
