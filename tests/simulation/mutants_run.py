"""Runs the simulation, or a named test, against every mutant: `make mutants`.

Prints which checker caught each one, under which focus and after how many seeds, and how many each
checker caught; then which test caught each of those that the simulation leaves out.  Exits with 1
if a mutant survives.  A bug of safety counts as caught only by a checker of safety, and a test must
fail with its mutant, in a process of its own, and pass without.  Seeds and checkers are kept in
`mutants_found.json`, where the next run and the tests begin to search.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.checkers import INVARIANTS, LIVE
from tests.simulation.mutants import BUGS_OF_LIVENESS, MUTANTS, focus_of, focused
from tests.simulation.mutants_tested import TESTED
from tests.simulation.workload import run_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).parents[2]
FOUND_FILE = Path(__file__).with_name("mutants_found.json")
SEEDS_MAX = 3000
BROKEN_AFTER = 20
"""Seeds of which each ends with an error of Python: the mutant does not fit the code any more."""
_TEST_TIMEOUT_S = 60
_FAILED = 1
"""How pytest exits when a test failed, and not when anything else went wrong."""


class Finding(NamedTuple):
    """The result of one mutant."""

    name: str
    seed: int | None
    """The first seed that caught it; None: it survived."""
    invariant: str
    """The one that caught it; if it survived, why its search ended early, or nothing."""
    tried: int
    seconds: float


class Found(NamedTuple):
    """The check that caught a mutant last time."""

    seed: int
    invariant: str


def known() -> dict[str, Found]:
    """Return what caught mutants last time."""
    found = json.loads(FOUND_FILE.read_text(encoding="utf-8"))
    return {name: Found(*each) for name, each in found.items()}


def is_caught_by_its_test(name: str) -> bool:
    """Run a mutant's test against it, in a process of its own."""
    return _run_tests([TESTED[name].test], "--mutant", name) == _FAILED


def tests_pass_without(names: Iterable[str]) -> bool:
    """Run the tests of mutants without any, all in one process."""
    return _run_tests(sorted({TESTED[name].test for name in names})) == 0


def _run_tests(tests: Sequence[str], *options: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--full", "--no-header"]
    command += ["-p", "no:cacheprovider", "-p", "tests.simulation.mutant_plugin"]
    command += [f"--timeout={_TEST_TIMEOUT_S}"]
    return subprocess.run(
        [*command, *options, *tests],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    ).returncode


def find(name: str, seeds: Iterable[int]) -> Finding:
    """Search `seeds` for one that catches the mutant, and that passes without it."""
    logging.disable(logging.CRITICAL)
    began = time.perf_counter()
    tried = errors = 0
    for seed in seeds:
        tried += 1
        invariant = _caught_by(name, seed)
        if _counts(name, invariant) and _passes_without(name, seed):
            return Finding(name, seed, invariant, tried, time.perf_counter() - began)
        errors += invariant not in ("", *INVARIANTS)
        if errors == tried == BROKEN_AFTER:
            return Finding(name, None, f"BROKEN {invariant}", tried, time.perf_counter() - began)
    return Finding(name, None, "", tried, time.perf_counter() - began)


def _counts(name: str, invariant: str) -> bool:
    return invariant in INVARIANTS and (invariant != LIVE or name in BUGS_OF_LIVENESS)


def _caught_by(name: str, seed: int) -> str:
    with MUTANTS[name]():
        try:
            return run_seed(seed).invariant
        except Exception as error:  # noqa: BLE001  # a mutant may break anything
            return type(error).__name__


def _passes_without(name: str, seed: int) -> bool:
    with focused(focus_of(name)):
        return run_seed(seed).failure is None


def _keep(found: dict[str, Found]) -> None:
    kept = {name: found[name] for name in sorted(found) if name in MUTANTS}
    lines = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in kept.items()]
    FOUND_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _order(name: str, found: Mapping[str, Found], seeds_max: int) -> list[int]:
    """Return the seeds to search: first the one that caught it last time."""
    noted = [found[name].seed] if name in found else []
    return [*noted, *(seed for seed in range(seeds_max) if seed not in noted)]


def _simulate(names: Sequence[str], *, seeds_max: int, jobs: int) -> list[str]:
    """Search for seeds that catch the mutants; print them, and return those that survive."""
    width = max(map(len, names), default=0)
    survivors = []
    catches = dict.fromkeys(INVARIANTS, 0)
    found = known()
    print(f"{'mutant':<{width}}  {'caught by':<39} {'seeds':>5} {'s':>6}  focus")
    with ProcessPoolExecutor(jobs) as pool:
        searches = [pool.submit(find, name, _order(name, found, seeds_max)) for name in names]
        for search in as_completed(searches):
            name, seed, invariant, tried, seconds = search.result()
            caught = invariant or "SURVIVED"
            print(
                f"{name:<{width}}  {caught:<39} {tried:>5} {seconds:>6.1f}  {focus_of(name)}",
                flush=True,
            )
            if seed is None:
                survivors.append(name)
            else:
                found[name] = Found(seed, invariant)
                catches[invariant] += 1
                _keep(found)
    print()
    for invariant, count in catches.items():
        print(f"{invariant:<39} caught {count:>2}")
    print()
    return survivors


def _test(names: Sequence[str], *, jobs: int) -> list[str]:
    """Run the test of each mutant; print what came of it, and return those that survive."""
    width = max(map(len, names), default=0)
    survivors = []
    print(f"{'mutant':<{width}}  caught by test")
    with ThreadPoolExecutor(jobs) as pool:
        for name, is_caught in zip(names, pool.map(is_caught_by_its_test, names), strict=True):
            test = TESTED[name].test
            print(f"{name:<{width}}  {test if is_caught else f'SURVIVED {test}'}", flush=True)
            if not is_caught:
                survivors.append(name)
    if names and not tests_pass_without(names):
        print("some of these tests fail without a mutant, so that they prove nothing")
        survivors.append("the tests themselves")
    print()
    return survivors


def main() -> int:
    """Run the mutants asked for; return 1 if one survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants_run")
    parser.add_argument("--seeds-max", type=int, default=SEEDS_MAX, help="per mutant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument(
        "--only", default="", help="mutants whose name contains one of these, parted by commas"
    )
    arguments = parser.parse_args()
    parts = arguments.only.split(",")

    def wanted(names: Iterable[str]) -> list[str]:
        return sorted(each for each in names if any(part in each for part in parts))

    began = time.perf_counter()
    simulated, tested = wanted(MUTANTS), wanted(TESTED)
    survivors = _simulate(simulated, seeds_max=arguments.seeds_max, jobs=arguments.jobs)
    survivors += _test(tested, jobs=arguments.jobs)
    took_s = time.perf_counter() - began
    count = len(simulated) + len(tested)
    print(
        f"{count - len(survivors)} of {count} caught in {took_s:.0f} s: "
        f"{len(simulated)} are for the simulation, {len(tested)} for a named test"
    )
    if survivors:
        print(f"survived: {', '.join(survivors)}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
