"""The settings, targets and examples outside the code are true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("place", ["local", "standalone", "kubernetes"])
def test_each_spark_setting_is_explained(place: str) -> None:
    """A comment stands above every setting, and every setting has a name and a value, once."""
    text = (ROOT / "spark-conf" / place / "spark-defaults.conf").read_text()
    lines = text.splitlines()
    settings = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    names = []
    for number in settings:
        assert lines[number - 1].startswith("#"), lines[number]
        name, value = lines[number].split()
        assert name.startswith("spark.")
        assert value
        names.append(name)
    assert len(names) == len(set(names)) > 3


def test_make_help_explains_every_target() -> None:
    """A target that people may run has an explanation, and `make` alone prints it."""
    makefile = (ROOT / "Makefile").read_text()
    explained = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert {
        "help", "install", "demo", "test", "check", "sim", "bench", "proto", "proto-check", "clean",
    } <= explained  # fmt: skip
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in explained:
        assert f"make {target} " in shown


def test_an_environment_whose_python_has_gone_is_made_again(tmp_path: Path) -> None:
    """An upgrade of the system leaves links to a Python that is not there any more."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python, stamp = tmp_path / ".venv" / "bin" / "python", tmp_path / ".venv" / ".installed"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    stamp.touch()
    command = ["make", "--dry-run", "install"]

    def planned() -> str:
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert " -m venv " not in planned()
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert " -m venv " in planned()


def test_links_in_the_documents_lead_somewhere() -> None:
    """Relative links of the documents name files that exist, and headings that these have."""
    for document in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "tests/CONTRACT.md",
    ]:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
            path = document.parent / target if target else document
            assert path.exists(), f"{document.name}: {target}"
            if anchor:
                assert anchor in anchors_of(path), f"{document.name}: {target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
