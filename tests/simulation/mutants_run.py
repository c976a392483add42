"""Runs the simulation against every mutant: ``python -m tests.simulation.mutants_run``.

Prints which checker caught each one, under which focus and after how many seeds, and how many each
checker caught; exits with 1 if a mutant survives.  A bug of safety counts as caught only by a
checker of safety.  The seeds are kept in `mutants_found.json`, where the tests begin to search.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.checkers import INVARIANTS, LIVE
from tests.simulation.mutants import BUGS_OF_LIVENESS, MUTANTS, focus_of, focused
from tests.simulation.workload import run_seed

if TYPE_CHECKING:
    from collections.abc import Iterable

FOUND_FILE = Path(__file__).with_name("mutants_found.json")
SEEDS_MAX = 3000


class Finding(NamedTuple):
    """What became of one mutant."""

    name: str
    seed: int | None
    """The first seed that caught it; None: it survived."""
    invariant: str
    tried: int
    seconds: float


def known_seeds() -> dict[str, int]:
    """Return the seeds that caught mutants last time."""
    if not FOUND_FILE.exists():
        return {}
    found: dict[str, int] = json.loads(FOUND_FILE.read_text(encoding="utf-8"))
    return found


def find(name: str, seeds: Iterable[int]) -> Finding:
    """Search `seeds` for one that catches the mutant, and that passes without it."""
    logging.disable(logging.CRITICAL)
    began = time.perf_counter()
    tried = 0
    for seed in seeds:
        tried += 1
        invariant = _caught_by(name, seed)
        if _counts(name, invariant) and _passes_without(name, seed):
            return Finding(name, seed, invariant, tried, time.perf_counter() - began)
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


def _keep(found: dict[str, int]) -> None:
    kept = {name: found[name] for name in sorted(found) if name in MUTANTS}
    FOUND_FILE.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


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
    names = sorted(each for each in MUTANTS if any(part in each for part in parts))
    width = max(map(len, names), default=0)
    survivors = []
    catches = dict.fromkeys(INVARIANTS, 0)
    began = time.perf_counter()
    found = known_seeds()
    print(f"{'mutant':<{width}}  {'caught by':<39} {'seeds':>5} {'s':>6}  focus")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        searches = [pool.submit(find, name, range(arguments.seeds_max)) for name in names]
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
                found[name] = seed
                catches[invariant] += 1
                _keep(found)
    print()
    for invariant, count in catches.items():
        print(f"{invariant:<39} caught {count:>2}")
    took_s = time.perf_counter() - began
    print(f"{len(names) - len(survivors)} of {len(names)} caught in {took_s:.0f} s")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
