"""Known weaknesses of the installed packages, beside those that `explained.toml` explains."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.release_check.parts import NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXPLAINED = Path(__file__).with_name("explained.toml")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a release is made although a package has a known weakness."""

    package: str
    weakness: str
    """Its identity, as pip-audit prints it."""
    reason: str


def read_explanations(path: Path = EXPLAINED) -> list[Explanation]:
    """Return the explanations of a file.

    Raises:
        ValueError: the file is no TOML, or an explanation lacks a key or has another one.
    """
    found = tomllib.loads(path.read_text(encoding="utf-8")).get("explained", [])
    keys = {"package", "weakness", "reason"}
    for each in found:
        if each.keys() != keys or not each["reason"].strip():
            raise ValueError(f"{path}: {each}: expected {', '.join(sorted(keys))}, and a reason")
    return [Explanation(**each) for each in found]


def ask_service(packages: Path) -> Mapping[str, Any]:
    """Return what pip-audit knows of the packages in a folder.

    Raises:
        ConnectionError: the service does not answer.
    """
    tool = [sys.executable, "-m", "pip_audit", "--path", str(packages)]
    done = subprocess.run(
        [*tool, "--format", "json", "--progress-spinner", "off"],
        capture_output=True,
        text=True,
        # pip-audit exits with an error if it finds a weakness, and still prints its report.
        check=False,
    )
    try:
        report: Mapping[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        raise ConnectionError(f"pip-audit has no answer of its service: {lines[-1]}") from error
    return report


def weakness_problems(report: Mapping[str, Any], explanations: Sequence[Explanation]) -> list[str]:
    """Return a sentence for each weakness without explanation, and the reverse.

    A package that the service does not know is a problem as well: it was not examined.
    """
    found, unknown = set(), []
    for each in report["dependencies"]:
        if "skip_reason" not in each:
            found |= {(each["name"], weakness["id"]) for weakness in each["vulns"]}
        elif each["name"] != NAME:  # no index has it before its release
            unknown.append(each["name"])
    explained = {(each.package, each.weakness) for each in explanations}
    problems = [
        f"{package} has the weakness {weakness}: take another version, or explain it in {EXPLAINED}"
        for package, weakness in sorted(found - explained)
    ]
    problems += [
        f"{EXPLAINED} explains {weakness} of {package}, which is not found: remove it"
        for package, weakness in sorted(explained - found)
    ]
    if unknown:
        problems.append(
            f"the service did not answer for {', '.join(unknown)}: try where it can be reached, "
            "or leave this check out with --without-audit"
        )
    return problems
