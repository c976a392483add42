"""The pages of the site: which there are, and how they get where the generator reads them.

They lie there as they lie in the tree, beside the files that they link to, so that each link of the
tree is one of the site.  A notebook becomes a page with its outputs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "mkdocs.yml"
MERMAID = "docs/mermaid.min.js"
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_WIDE = re.compile(r"^```mermaid\n(?:sequenceDiagram|graph LR\n  subgraph).*?^```$", re.M | re.S)
_LINK = re.compile(r"""(?:\]\(|(?:src|srcset)=")(?![a-z]+:|#)([^)"#]+)""")


class _Loader(yaml.SafeLoader):
    """Reads settings that name functions; the functions are not loaded."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda _, name, __: name)


def settings() -> dict[str, Any]:
    """Return what mkdocs.yml says."""
    values: dict[str, Any] = yaml.load(SETTINGS.read_text(encoding="utf-8"), _Loader)
    return values


def pages_in(nav: Any) -> Iterator[str]:
    """Yield the pages of the navigation, in its order."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(each)


def source_of(page: str) -> Path:
    """Return the file of the tree from which a page is made."""
    path = ROOT / page
    return path.with_suffix(".ipynb") if page.startswith("notebooks/") else path


def gather(folder: Path) -> None:
    """Fill a folder with the pages and what they link to.

    Raises:
        FileNotFoundError: a page, or what it links to, is not there.
        IsADirectoryError: a page links to a folder, which a site cannot show.
    """
    values = settings()
    pages = [*pages_in(values["nav"])]
    files = {ROOT / each for each in values["extra_css"]}
    for page in pages:
        source, target = source_of(page), folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            text = _from_notebook(source, target)
        else:
            text = source.read_text(encoding="utf-8")
            files |= {source.parent / each for each in _LINK.findall(_FENCE.sub("", text))}
        text = re.sub(r"(\]\([^):]*)\.ipynb\)", r"\1.md)", text)
        # These diagrams are too wide for the column of text, and get a style that lets them scroll.
        text = _WIDE.sub(r'<div class="wide" markdown>\n\n\g<0>\n\n</div>', text)
        if "\n```mermaid" in text:
            up = "../" * page.count("/")
            text += f'\n<script src="{up}{MERMAID}"></script>\n'
        target.write_text(text, encoding="utf-8")
    for file in {each.resolve() for each in files} - {source_of(each) for each in pages}:
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _from_notebook(source: Path, target: Path) -> str:
    """Return a notebook as a page; its pictures lie beside the page."""
    from nbconvert import MarkdownExporter  # late: most tests need only what is above

    resources = {"unique_key": target.stem, "output_files_dir": f"{target.stem}_files"}
    exporter: Any = MarkdownExporter
    text, made = exporter().from_filename(str(source), resources=resources)
    for name, content in made["outputs"].items():
        path = target.parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return str(text)
