"""Runs the simulation: ``python -m tests.simulation --seeds N``, or ``--seed n`` with its trace."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.simulation.workload import run_seed


def main() -> int:
    """Run the seeds asked for; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--seed", type=int, help="run this one only and print its trace")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a failure")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if arguments.seed is not None:
        run = run_seed(arguments.seed)
        print("\n".join(run.trace) if run.failure is None else run.explain())
        return int(run.failure is not None)
    began = time.perf_counter()
    failed: list[int] = []
    acks = steps = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        run = run_seed(seed)
        acks += run.acks
        steps += run.steps
        if run.failure is not None:
            failed.append(seed)
            print(f"seed {seed} failed: {type(run.failure).__name__}: {run.failure}")
            if not arguments.keep_going:
                print(run.explain())
                break
    took = time.perf_counter() - began
    print(f"{arguments.seeds} seeds, {acks} acks, {steps} steps, {took:.1f} s, failed: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
