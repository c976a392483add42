"""Judges the coverage of a test run: ``python -m tests.coverage_check``, after ``pytest --cov``.

Every branch and line of a pure module must have run, and of the branches of all others together
`OTHERS_MIN_PERCENT`.  Only what runs in the tests' own process counts.  Bookies, drivers, workers
of Spark that are processes of their own run unmeasured: most of them are killed, and would show now
more, now less.  The simulation and the model run unmeasured, which would take several times as long
(`tests/fixtures/unmeasured.py`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import coverage

from tests.test_purity import ROOT, path_of, pure_modules

OTHERS_MIN_PERCENT = 92.0


class Shares(NamedTuple):
    """The lines of one file that ran."""

    path: str
    branches: int
    missing_lines: list[int]
    missing_branches: list[str]


def measure() -> list[Shares]:
    """Return what ran of every file, by the data of the last run."""
    data = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    data.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        data.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    return [
        Shares(
            path=str(Path(path).resolve().relative_to(ROOT)),
            branches=found["summary"]["num_branches"],
            missing_lines=found["missing_lines"],
            missing_branches=[
                f"{start} -> {end if end > 0 else 'exit'}"
                for start, end in found["missing_branches"]
            ],
        )
        for path, found in sorted(files.items())
    ]


def pure_files() -> set[str]:
    """Return the paths of pure modules."""
    files: set[str] = set()
    for module in pure_modules():
        path = path_of(module)
        paths = [path] if path.exists() else path.with_suffix("").glob("*.py")
        files.update(str(each.relative_to(ROOT)) for each in paths)
    return files


def main() -> int:
    """Print what is missing; return 1 if it is too much."""
    pure = pure_files()
    shares = measure()
    faults = [
        f"{each.path} is pure and has lines {each.missing_lines} and branches "
        f"[{', '.join(each.missing_branches)}] that no test runs"
        for each in shares
        if each.path in pure and (each.missing_branches or each.missing_lines)
    ]
    unseen = pure - {each.path for each in shares}
    faults += [f"{path} is pure and was not measured" for path in sorted(unseen)]
    others = [each for each in shares if each.path not in pure]
    branches = sum(each.branches for each in others)
    covered = branches - sum(len(each.missing_branches) for each in others)
    percent = 100.0 * covered / max(1, branches)
    if percent < OTHERS_MIN_PERCENT:
        faults.append(
            f"{percent:.1f} % of the branches of modules that are not pure ran, expected at least "
            f"{OTHERS_MIN_PERCENT:.0f} %; least of all "
            + ", ".join(
                f"{each.path} {len(each.missing_branches)} of {each.branches}"
                for each in sorted(others, key=lambda each: -len(each.missing_branches))[:10]
            )
        )
    for fault in faults:
        print(f"coverage: {fault}")
    print(f"coverage: {len(pure)} pure modules; others {percent:.1f} % of {branches} branches")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
