"""The tool that generates the blocking calls, on a small class with each form of method."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tools import make_sync
from tools.make_sync import ROOT, Facade, Output, generate

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = '''
from collections.abc import AsyncGenerator
from typing import TypeVar

LIMIT = 3

class Shelf:
    """A shelf."""

    @property
    def name(self) -> str:
        """Its name."""

    async def put(self, item: str, /, *, place: int | None = None) -> None:
        """Put an item down; see `AsyncBox`.

        Args:
            item: any item.
            place: where.
        """

    async def open_box(self, name: str) -> AsyncBox[str]:
        """Open a box."""

    def items(self, **wanted: object) -> AsyncGenerator[str, None]:
        """Return the items."""

    def count(self) -> int:
        """Return how many there are."""

    async def aclose(self) -> None:
        """Close it."""

    async def _hidden(self) -> None:
        """Not for users."""

class Library(Other, Shelf):
    """Many shelves."""

    async def burn(self) -> None:
        """Lose all."""
'''


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    """The generated code for the shelf."""
    (tmp_path / "shelf.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(make_sync, "ROOT", tmp_path)
    facade = Facade(
        name="ShelfCalls",
        doc="A shelf.",
        source=("shelf.py", "Shelf"),
        twin="_shelf",
        omitted=frozenset({"aclose"}),
    )
    whole = Facade(
        name="LibraryCalls", doc="Shelves.", source=("shelf.py", "Library"), twin="_library"
    )
    return Output(
        path="calls.py",
        opening="Calls.",
        facades=(facade, whole),
        twins={"AsyncBox": "boxes.Box"},
    )


def test_each_form_of_method(output: Output) -> None:
    """The signature stays; results with a blocking twin are wrapped."""
    text = generate(output)
    for expected in (
        "from boxes import Box\n",
        "    from shelf import Shelf as AsyncShelf\n",
        "    _shelf: AsyncShelf\n",
        "    @property\n    def name(self) -> str:\n",
        "        return self._shelf.name\n",
        "    def put(self, item: str, /, *, place: int | None=None) -> None:\n",
        "        Args:\n            item: any item.\n            place: where.\n",
        "see `Box`.",
        "\n        self._call(self._shelf.put(item, place=place))\n",
        "    def open_box(self, name: str) -> Box[str]:\n",
        "        return Box(self._portal, self._call(self._shelf.open_box(name)))\n",
        "    def items(self, **wanted: object) -> Iterator[str]:\n",
        "        return iterate(self._portal, self._shelf.items(**wanted))\n",
        "        return self._call_on_loop(lambda: self._shelf.count())\n",
    ):
        assert expected in text
    for left_out in ("aclose", "_hidden"):
        assert left_out not in text


def test_bases_follow_those_of_the_async_class(output: Output) -> None:
    """Calls that a base of the async class declares are in the base of the blocking one, once."""
    shelf, library = generate(output).split("class LibraryCalls(ShelfCalls):\n")
    assert "class ShelfCalls(Blocking):\n" in shelf
    assert "def burn(self)" in library
    assert "    _library: AsyncLibrary\n" in library
    for inherited in ("__repr__", "def put"):
        assert shelf.count(inherited) == 1
        assert inherited not in library


def test_the_files_of_the_repository_are_as_generated() -> None:
    """A changed async method, or an edited generated file, fails here and in `make sync-check`."""
    command = [sys.executable, "-m", "tools.make_sync", "--check"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_file_fails_the_check(
    output: Output,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message names the file and the command that mends it."""
    monkeypatch.setattr(make_sync, "OUTPUTS", (output,))
    monkeypatch.setattr(sys, "argv", ["make_sync", "--check"])
    assert make_sync.main() == 1
    assert "error: calls.py is stale; run: make sync" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["make_sync"])
    assert make_sync.main() == 0
    monkeypatch.setattr(sys, "argv", ["make_sync", "--check"])
    assert make_sync.main() == 0
    (tmp_path / "calls.py").write_text("changed", encoding="utf-8")
    assert make_sync.main() == 1
