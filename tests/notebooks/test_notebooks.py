"""Each notebook runs once from top to bottom, as its reader runs it, and shows what that gave."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.java import java_options_in
from tests.fixtures.lengths import sample

if TYPE_CHECKING:
    from nbformat import NotebookNode

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(600)]

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PUBLIC_MODULES = {"dlcore", "dlcore.sync", "dlcore.ops.sandbox", "dlspark", "pyspark.sql"}
CELL_TIMEOUT_S = 280
SAMPLE = 1
_FILES = (("tlsCa", "ca"), ("tlsCert", "cert"), ("tlsKey", "key"))
_KEYWORDS = ", ".join(f"{option}=sandbox.tls.{name}" for option, name in _FILES)
_QUOTED = ", ".join(f"{option}={{sandbox.tls.{name}!r}}" for option, name in _FILES)
_IN_SQL = ", ".join(f"{option} '{{sandbox.tls.{name}}}'" for option, name in _FILES)
SECURED = {
    "Sandbox(": "Sandbox(secure=True, ",
    "open_namespace(sandbox.uri)": "open_namespace(sandbox.uri, tls=sandbox.tls)",
    "options(uri=sandbox.uri": f"options({_KEYWORDS}, uri=sandbox.uri",
    'option("uri", sandbox.uri)': f"options({_KEYWORDS}, uri=sandbox.uri)",
    "dlspark.table(spark, sandbox.uri": f"dlspark.table({_KEYWORDS}, spark=spark, uri=sandbox.uri",
    'options = {"uri": sandbox.uri': f'options = {{**dict({_KEYWORDS}), "uri": sandbox.uri',
    "options(uri={sandbox.uri!r}": f"options({_QUOTED}, uri={{sandbox.uri!r}}",
    "OPTIONS (uri ": f"OPTIONS ({_IN_SQL}, uri ",
}
"""The changes of a reader to run a notebook on a secured cluster."""
DIRECT = [path for path in NOTEBOOKS if "proxies" not in path.stem]
"""Those that reach bookies; Arrow's own client, as for proxies, has no dlog between it and TLS."""


def load(path: Path) -> NotebookNode:
    """Read a notebook."""
    from tools.site import notebooks  # late, as below: each worker would load it to find the tests

    return notebooks.load(path)


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks() -> None:
    """A wrong folder would let everything pass."""
    assert "01_write_and_tail" in {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", sample(NOTEBOOKS, SAMPLE), ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell succeeds in a fresh kernel."""
    monkeypatch.setenv("JDK_JAVA_OPTIONS", java_options_in(tmp_path))
    require_it_runs(load(path))


@pytest.mark.prove
@pytest.mark.parametrize("path", DIRECT, ids=lambda path: path.stem)
def test_it_runs_on_a_secured_cluster(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files of a client, and else the same cells."""
    monkeypatch.setenv("JDK_JAVA_OPTIONS", java_options_in(tmp_path))
    notebook = load(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for plain, secured in SECURED.items():
                cell.source = cell.source.replace(plain, secured)
    require_it_runs(notebook)


def require_it_runs(notebook: NotebookNode) -> None:
    """Run all cells in a fresh kernel."""
    from nbclient import NotebookClient

    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": "."}})
    client.execute()
    assert all(
        output.output_type != "error"
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


@each_notebook
def test_it_says_first_what_it_shows_and_has_the_outputs_of_its_code(path: Path) -> None:
    """The first cell is text; `make docs` was run after the last change of the code."""
    import nbformat

    from tools.site.notebooks import is_fresh

    notebook = load(path)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert is_fresh(notebook), "run: python -m tools.site.notebooks"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", "it tells of the machine, and not of dlog"


def test_a_plot_is_shown() -> None:
    """A reader of the notebook on the web sees how the job falls behind and catches up."""
    notebook = load(FOLDER / "04_stream_and_plot.ipynb")
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in each for each in data) == 1


def test_outputs_of_other_code_are_not_fresh() -> None:
    """A changed cell is enough; a changed text is none."""
    from tools.site.notebooks import is_fresh

    notebook = load(NOTEBOOKS[0])
    notebook.cells[0].source += " More text."
    assert is_fresh(notebook)
    notebook.cells[1].source += "\n"
    assert not is_fresh(notebook)


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
