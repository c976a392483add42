"""Runs the simulation: ``python -m tests.simulation --seeds N``, or ``--seed n`` with its trace."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import AbstractContextManager, nullcontext

from tests.simulation.mutants import FOCUSES, MUTANTS, focused
from tests.simulation.runner import run_many
from tests.simulation.workload import run_seed


def main() -> int:
    """Run the seeds asked for; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--seed", type=int, help="run this one only and print its trace")
    parser.add_argument(
        "--focus", choices=sorted(FOCUSES), metavar="FOCUS", help="plans of this focus (mutants.py)"
    )
    parser.add_argument(
        "--mutant",
        choices=sorted(MUTANTS),
        metavar="MUTANT",
        help="with --seed: with this bug (mutants.py), under its focus",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    parser.add_argument("--learn", action="store_true", help="keep new transitions as known ones")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.seed is not None:
        with _changed(arguments):
            run = run_seed(arguments.seed)
        print("\n".join(run.trace) if run.failure is None else run.explain())
        return int(run.failure is not None)
    return run_many(
        range(arguments.first, arguments.first + arguments.seeds),
        jobs=arguments.jobs,
        keep_going=arguments.keep_going,
        learns=arguments.learn,
        focus=arguments.focus,
    )


def _changed(arguments: argparse.Namespace) -> AbstractContextManager[None]:
    """Return what the one seed is run under: nothing, as `--seeds` runs it, if nothing is asked."""
    if arguments.mutant:
        return MUTANTS[arguments.mutant]()
    return focused(arguments.focus) if arguments.focus else nullcontext()


if __name__ == "__main__":
    sys.exit(main())
