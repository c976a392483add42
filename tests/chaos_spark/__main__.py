"""Runs the chaos of Spark: ``python -m tests.chaos_spark --seconds 480 --seed 7``."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys

from tests.chaos.parent import interrupt_at_end_of_stdin
from tests.chaos_spark.hosts import enter_namespaces, run_in_namespaces
from tests.chaos_spark.run import BOTH, WHERE, run_chaos

ONE_MACHINE = "--one-machine"


def main() -> int:
    """Run; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos_spark", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of faults (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="default: one at random")
    parser.add_argument(
        "--where", choices=WHERE, default=BOTH, help="local[2], a cluster, or one after the other"
    )
    parser.add_argument(
        ONE_MACHINE, action="store_true", help="no hosts of their own, even where they can be had"
    )
    parser.add_argument(
        "--watch-parent", action="store_true", help="stop when standard input reaches its end"
    )
    parser.add_argument("--secure", action="store_true", help="with TLS to bookies")
    parser.add_argument("--quiet", action="store_true", help="print the report alone")
    parser.add_argument("--keep", action="store_true", help="keep all data and logs in any case")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what the checker's own connections meet is no news
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed

    def tell(text: str) -> None:
        if not arguments.quiet or "kept in" in text:
            print(text, flush=True)

    if arguments.watch_parent:
        interrupt_at_end_of_stdin()
    tell(f"seed {seed}: starting the cluster")
    run = run_chaos(
        seed,
        seconds=arguments.seconds,
        where=arguments.where,
        tell=tell,
        keeps=arguments.keep,
        is_secure=arguments.secure,
    )
    return run_in_namespaces(run)


if __name__ == "__main__":
    if ONE_MACHINE not in sys.argv:
        enter_namespaces(["-m", "tests.chaos_spark", *sys.argv[1:]])
    sys.exit(main())
