"""The site has every page once, its pages are those of the code, and the README is short.

`make site` builds it and refuses links that lead nowhere; what is here needs no generator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import api_document, commands_document, errors_document, figures_document
from tests.fixtures.made_parts import require_as_made
from tests.fixtures.pages import ROOT
from tools.site import pages
from tools.site.notebooks import FOLDER

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

DOORS = ["Home", "Learn", "Do", "Look up", "Understand"]
README_WORDS_MAX = 900
DOCUMENTS = [api_document, commands_document, errors_document, figures_document]
BESIDE_DOCS = {
    "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md",
    "spark-conf/README.md", "tests/CONTRACT.md",
}  # fmt: skip


def test_each_page_is_in_the_navigation_once() -> None:
    """A page without a link is not read: a new one gets a line in `nav` of mkdocs.yml."""
    shown = [*pages.pages_in(pages.settings()["nav"])]
    written = {str(each.relative_to(ROOT)) for each in (ROOT / "docs").rglob("*.md")}
    notebooks = {f"notebooks/{each.stem}.md" for each in FOLDER.glob("*.ipynb")}
    assert len(set(shown)) == len(shown)
    differing = set(shown) ^ (written | notebooks | BESIDE_DOCS)
    assert not differing, "`nav` of mkdocs.yml has a line for each page"


def test_there_are_four_doors() -> None:
    """There is one for each reader: to learn, to do, to look up, to understand."""
    assert [door for each in pages.settings()["nav"] for door in each] == DOORS


def test_all_that_pages_link_to_can_be_gathered(tmp_path: Path) -> None:
    """A link to a folder, which has no page, stops the build."""
    pages.gather(tmp_path)
    shown = pages.pages_in(pages.settings()["nav"])
    assert all((tmp_path / page).is_file() for page in shown)


def test_no_other_server_is_asked() -> None:
    """No fonts are loaded, and each diagram finds Mermaid in the site."""
    assert pages.settings()["theme"]["font"] is False


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_page_is_that_of_the_code(document: ModuleType) -> None:
    """`make pages` was run after the last change."""
    require_as_made(document.DOCUMENT, document.page())


def test_each_error_has_advice() -> None:
    """And no error that is gone."""
    assert errors_document.TO_DO.keys() == {each.__name__ for each in errors_document.classes()}


def test_the_readme_is_short_and_has_one_picture() -> None:
    """The site's pages have the rest."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= README_WORDS_MAX
    assert text.count("```mermaid") + text.count("![") + text.count("<img") == 1
