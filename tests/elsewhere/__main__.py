"""Runs make on other Pythons or in other places: ``python -m tests.elsewhere pythons``."""

from __future__ import annotations

import argparse
import sys

from tests.elsewhere.debian import ROOT
from tests.elsewhere.places import PLACES
from tests.elsewhere.pythons import LEFT_OUT, SUPPORTED, Interpreter, find
from tests.elsewhere.running import Outcome, run, run_place, words_for

LOGS = ROOT / "artifacts" / "elsewhere"
WORKS = ("demo", "test")
"""The default work."""
WHOLE = "tests"


def main() -> int:
    """Run what was asked for; return 1 unless all of it passed or was skipped with its reason."""
    parser = argparse.ArgumentParser(prog="python -m tests.elsewhere", description=__doc__)
    parser.add_argument("kind", choices=("pythons", "places"))
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a version such as 3.14, a place's name"
    )
    parser.add_argument(
        "--work", action="append", choices=(*WORKS, "coverage"), help="default: demo and test"
    )
    parser.add_argument("--tests", help="for pytest, instead of all, or of those of the place")
    parser.add_argument(
        "--differing", action="store_true", help="only tests that a Python may make fail"
    )
    parser.add_argument("--whole", action="store_true", help="run all tests in each place")
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    arguments = parser.parse_args()
    names = SUPPORTED if arguments.kind == "pythons" else tuple(each.name for each in PLACES)
    chosen = arguments.only or list(names)
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"--only {', '.join(unknown)}: there are {', '.join(names)}")
    if arguments.list:
        print("\n".join(names))
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    works = arguments.work or list(WORKS)
    outcomes = []
    if arguments.kind == "pythons":
        for version in chosen:
            chosen_tests = [arguments.tests or "", *(LEFT_OUT if arguments.differing else ())]
            outcomes += _on(find(version), works, " ".join(chosen_tests).strip())
    else:
        for place in PLACES:
            if place.name in chosen:
                tests = arguments.tests or (WHOLE if arguments.whole else place.tests)
                outcomes += run_place(place, works, tests, LOGS)
    return _tell(outcomes)


def _on(interpreter: Interpreter, works: list[str], tests: str) -> list[Outcome]:
    """Run make with one Python; without it, it fails, for it is promised that dlog runs there."""
    if interpreter.problem:
        return [Outcome(str(interpreter), work, "FAILED", "not run", 0) for work in works]
    outcomes = []
    for work in works:
        words = words_for(work, tests)
        log = LOGS / f"python-{interpreter.version}-{work}.log"
        outcomes.append(run(str(interpreter), work, interpreter.make(*words), log))
    return outcomes


def _tell(outcomes: list[Outcome]) -> int:
    print("\n".join(map(str, outcomes)))
    counts = dict.fromkeys(("passed", "FAILED", "skipped"), 0)
    for outcome in outcomes:
        counts[outcome.status] += 1
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["FAILED"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
