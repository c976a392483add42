"""Runs notebooks and keeps what they print and draw, so that a reader on the web sees it.

`python -m tools.site.notebooks` runs those whose code changed since their outputs were made, and
with ``--all`` each of them.  The outputs are in the notebooks: the same ones are shown by a forge,
by an editor and by the site, and they change only with the code, which keeps differences small.  A
digest of the code stands beside them, by which a test knows outputs of other code.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
CELL_TIMEOUT_S = 280
_DIGEST = "outputs_of"


def main() -> None:
    """Run what has to be run."""
    parser = argparse.ArgumentParser(prog="python -m tools.site.notebooks", description=__doc__)
    parser.add_argument("--all", action="store_true", help="run also those whose code is the same")
    every = parser.parse_args().all
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = load(path)
        if every or not is_fresh(notebook):
            sys.stdout.write(f"running {path.name}\n")
            run(notebook, path.parent)
            nbformat.write(notebook, path)  # type: ignore[no-untyped-call]  # nbformat is


def load(path: Path) -> NotebookNode:
    """Read a notebook."""
    notebook: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def digest_of(notebook: NotebookNode) -> str:
    """Return the digest of the code of all cells."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\n".join(cells).encode()).hexdigest()


def is_fresh(notebook: NotebookNode) -> bool:
    """Return whether the outputs are those of the code beside them."""
    return bool(notebook.metadata.get(_DIGEST) == digest_of(notebook))


def run(notebook: NotebookNode, folder: Path) -> None:
    """Run all cells in a fresh kernel, and keep what a reader should see of the outputs.

    Text on standard error, such as Spark's warnings about this machine, and the time at which a
    cell ran are left out.
    """
    from nbclient import NotebookClient  # late: the tests only need what is above

    metadata = dict(notebook.metadata)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.metadata.clear()
    notebook.metadata.update(metadata, **{_DIGEST: digest_of(notebook)})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]


if __name__ == "__main__":
    main()
