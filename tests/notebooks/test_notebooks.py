"""Each notebook runs once from top to bottom, as its reader runs it, and is kept without output."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.java import java_options_in
from tests.fixtures.lengths import sample

if TYPE_CHECKING:
    import nbformat

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(600)]

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PUBLIC_MODULES = {"dlcore", "dlcore.sync", "dlcore.ops.sandbox", "dlspark", "pyspark.sql"}
CELL_TIMEOUT_S = 280
SAMPLE = 1


def load(path: Path) -> nbformat.NotebookNode:
    """Read a notebook."""
    import nbformat  # late, as below: each worker would load it to find the tests

    notebook: nbformat.NotebookNode
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat is
    return notebook


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks() -> None:
    """A wrong folder would let everything pass."""
    assert "01_write_and_tail" in {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", sample(NOTEBOOKS, SAMPLE), ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell succeeds in a fresh kernel."""
    from nbclient import NotebookClient

    monkeypatch.setenv("JDK_JAVA_OPTIONS", java_options_in(tmp_path))
    notebook = load(path)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": "."}})
    client.execute()
    assert all(
        output.output_type != "error"
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


@each_notebook
def test_it_is_stripped_and_says_first_what_it_shows(path: Path) -> None:
    """Outputs would be noise in every diff; the first cell is text."""
    import nbformat

    notebook = load(path)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


@each_notebook
def test_it_imports_public_names_only(path: Path) -> None:
    """A notebook shows what a user may rely on."""
    notebook = load(path)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    for node in ast.walk(ast.parse(code)):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            package = module.split(".")[0]
            own = package in {"bookie", "dlcore", "dlspark", "pyspark"}
            assert not own or module in PUBLIC_MODULES, module
