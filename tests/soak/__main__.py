"""Runs a soak: ``python -m tests.soak --hours 2 --seed 7``."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from pathlib import Path

from tests.chaos_spark.hosts import enter_namespaces, run_in_namespaces
from tests.soak.run import run_soak


def main() -> int:
    """Run; return 1 if a promise was broken, or something grows without end."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=2, help="of faults (default: 2)")
    parser.add_argument("--seed", type=int, default=None, help="default: one at random")
    parser.add_argument(
        "--out", type=Path, default=Path("artifacts/soak"), help="for soak.csv and soak.png"
    )
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what the checker's own connections meet is no news
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed {seed}: starting the cluster", flush=True)

    def tell(text: str) -> None:
        print(text, flush=True)

    soak = run_soak(seed, seconds=arguments.hours * 3600, out=arguments.out, tell=tell)
    return run_in_namespaces(soak)


if __name__ == "__main__":
    enter_namespaces(["-m", "tests.soak", *sys.argv[1:]])
    sys.exit(main())
