"""Checks a release: two builds of the same bytes, its bill of materials, known weaknesses.

`python -m tools.release_check [--out FOLDER] [--without-audit]`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tools.release_check import parts, weaknesses
from tools.release_check.twice import ELSEWHERE, HERE, build_from_copy, differences

ROOT = Path(__file__).resolve().parent.parent.parent
BILL = "bill-of-materials.cdx.json"


def main() -> int:
    """Check, print each problem, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make release-check", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files")
    parser.add_argument("--without-audit", action="store_true", help="leave known weaknesses out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlog-release-") as made:
        problems = check(Path(made), arguments.out, audits=not arguments.without_audit)
    for problem in problems:
        _tell(f"error: {problem}")
    if not problems:
        left_out = ", known weaknesses left out" if arguments.without_audit else ""
        _tell(f"the release is ready in {arguments.out}{left_out}")
    return 1 if problems else 0


def check(folder: Path, out: Path, *, audits: bool) -> list[str]:
    """Check in `folder`, write the files of the release to `out`, and return the problems."""
    _tell("building twice")
    first = build_from_copy(ROOT, folder / "first", HERE)
    problems = differences(first, build_from_copy(ROOT, folder / "second", ELSEWHERE))
    (wheel,) = first.glob("*.whl")
    _tell("installing the wheel with all extras")
    environment = folder / "environment"
    packages = parts.install(wheel, environment)
    bill = first / BILL
    parts.write_bill(environment, ROOT, bill)
    problems += parts.bill_problems(json.loads(bill.read_text()), parts.needed(packages))
    if audits:
        _tell("asking for known weaknesses")
        problems += _audit(packages)
    shutil.copytree(first, out, dirs_exist_ok=True)
    return problems


def _audit(packages: Path) -> list[str]:
    try:
        report = weaknesses.ask_service(packages)
    except ConnectionError as error:
        return [f"{error}; --without-audit leaves it out"]
    return weaknesses.weakness_problems(report, weaknesses.read_explanations())


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
