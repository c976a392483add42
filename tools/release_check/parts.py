"""The bill of materials beside that which the wheel needs by its own metadata."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution, distributions
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

NAME = "distributed-dlog"
"""The name of our wheel."""


def install(wheel: Path, environment: Path) -> Path:
    """Make an environment with the wheel and all its extras, and nothing else.

    Return the folder of its packages.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
    """
    # Without pip, which the wheel does not need, and which the bill would list.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    # First alone: the names of its extras are in the metadata of the installed wheel.
    subprocess.run([*pip, "--no-deps", wheel], check=True)
    extras = ",".join(_found(packages)[NAME].metadata.get_all("Provides-Extra") or ())
    subprocess.run([*pip, f"{wheel}[{extras}]"], check=True)
    return packages


def write_bill(environment: Path, root: Path, bill: Path) -> None:
    """Write the bill of materials of an environment: CycloneDX in JSON."""
    tool = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    project = ["--pyproject", str(root / "pyproject.toml"), "--mc-type", "library"]
    subprocess.run(
        [*tool, *project, "--output-file", str(bill), str(environment / "bin" / "python")],
        check=True,
    )


def needed(packages: Path) -> dict[str, str]:
    """Return the versions of all that our wheel needs, by name, with what that needs in turn.

    It is for this Python and this system, with all extras of the wheel.

    Raises:
        LookupError: a distribution is needed and not installed.
    """
    return closure(NAME, _found(packages))


def _found(packages: Path) -> dict[str, Distribution]:
    found = distributions(path=[str(packages)])
    return {canonicalize_name(each.metadata["Name"]): each for each in found}


def closure(name: str, found: Mapping[str, Distribution]) -> dict[str, str]:
    """Return the versions of all that the distribution `name` needs, with all of its extras.

    Raises:
        LookupError: a distribution is needed and not among those that were `found`.
    """
    extras = frozenset(found[name].metadata.get_all("Provides-Extra") or ())
    open_ = [(name, extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_:
        wanted = open_.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        if wanted[0] not in found:
            raise LookupError(f"{wanted[0]} is needed and not installed")
        open_ += _requirements(found[wanted[0]].requires or (), wanted[1])
    return {each: found[each].version for each, _ in seen if each != name}


def _requirements(
    texts: Iterable[str], extras: frozenset[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def bill_problems(bill: Mapping[str, Any], wanted: Mapping[str, str]) -> list[str]:
    """Return a sentence for each part that a bill of materials lacks, or has without need."""
    listed: dict[str, str] = {
        canonicalize_name(each["name"]): each["version"] for each in bill["components"]
    }
    root = bill["metadata"]["component"]["name"]
    found = [] if root == NAME else [f"the bill of materials is of {root}, expected {NAME}"]
    for name in sorted({*listed, *wanted}):
        has, needs = listed.get(name), wanted.get(name)
        if has is None:
            found.append(f"{name} {needs} is missing in the bill of materials")
        elif needs is None:
            found.append(
                f"{name} {has} is in the bill of materials, and the wheel does not need it"
            )
        elif has != needs:
            found.append(f"{name} is {has} in the bill of materials, and {needs} is installed")
    return found
