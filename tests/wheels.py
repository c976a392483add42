"""The machines that dependencies have wheels for: ``python -m tests.wheels`` prints the table.

It asks the package index by pip, which takes minutes, and is no test: it needs a network.
docs/platforms.md holds what it printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = {
    "Linux aarch64": ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"),
    "macOS arm64": ("macosx_14_0_arm64",),
}
"""The platforms that pip may take for each: glibc 2.28 or later, macOS 14 or later."""
_SOURCE_ONLY = ("pyspark",)
"""Packages that have no wheel for any machine, for they have no compiled parts of their own."""


def requirements() -> list[Requirement]:
    """Return the dependencies at run time, with those of all extras."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.name not in {project["name"], *_SOURCE_ONLY}]


def wheels(wanted: list[Requirement], python: str, platforms: tuple[str, ...]) -> dict[str, str]:
    """Return the newest version of each package that has a wheel there, and no other package."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--only-binary=:all:", "--ignore-installed", "--target", folder]
        command += ["--report", str(report), "--python-version", python]
        command += [word for each in platforms for word in ("--platform", each)]
        ended = subprocess.run(
            [*command, *map(str, wanted)], capture_output=True, text=True, check=False
        )
        if ended.returncode == 0:
            installed = json.loads(report.read_text(encoding="utf-8"))["install"]
            assert all(
                urlsplit(each["download_info"]["url"]).path.endswith(".whl") for each in installed
            )
            return {each["metadata"]["name"]: each["metadata"]["version"] for each in installed}
    if len(wanted) > 1:
        found: dict[str, str] = {}
        for each in wanted:
            found |= wheels([each], python, platforms)
        return found
    if "No matching distribution found" not in ended.stderr:
        raise RuntimeError(f"pip could not ask for {wanted[0]}: {ended.stderr}")
    return {}


def main() -> None:
    """Print the table."""
    wanted = requirements()
    found = {
        (machine, python): wheels(wanted, python, platforms)
        for machine, platforms in MACHINES.items()
        for python in PYTHONS
    }
    print(f"| package | {' | '.join(MACHINES)} |")
    print("|---" * (1 + len(MACHINES)) + "|")
    for each in sorted(wanted, key=lambda requirement: requirement.name):
        cells = [_cell(each.name, machine, found) for machine in MACHINES]
        print(f"| `{each.name}` | {' | '.join(cells)} |")


def _cell(package: str, machine: str, found: Mapping[tuple[str, str], dict[str, str]]) -> str:
    """Return each version that is the newest for a Python, with these Pythons."""
    by_version: dict[str, list[str]] = {}
    for python in PYTHONS:
        version = found[machine, python].get(package, "none")
        by_version.setdefault(version, []).append(python)
    if len(by_version) == 1:
        return next(iter(by_version))
    return "; ".join(f"{version} ({', '.join(pythons)})" for version, pythons in by_version.items())


if __name__ == "__main__":
    main()
