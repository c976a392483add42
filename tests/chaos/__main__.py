"""Runs the chaos: ``python -m tests.chaos --seconds 600 --seed 7``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.chaos.disks import enter_mount_namespace
from tests.chaos.parent import interrupt_at_end_of_stdin
from tests.chaos.plan import CHANGE_RELEASE, FINALIZE, KINDS, MIXED_KINDS
from tests.chaos.run import plan_of, run_chaos
from tests.fixtures.forking import Forking
from tests.upgrade.releases import LAST, commit_of

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_INTERRUPTED = 130


def main() -> int:
    """Run the seeds asked for; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of faults (default: 60)")
    parser.add_argument("--seed", type=int, action="append", help="default: one at random")
    parser.add_argument("--plan", action="store_true", help="print the plan and do nothing")
    parser.add_argument(
        "--watch-parent", action="store_true", help="stop when standard input reaches its end"
    )
    parser.add_argument("--quiet", action="store_true", help="print the reports alone")
    parser.add_argument("--keep", action="store_true", help="keep all data and logs in any case")
    parser.add_argument(
        "--producers", type=int, help="that write through proxies (default: 4 … 100, by --seconds)"
    )
    parser.add_argument("--secure", action="store_true", help="with TLS between all processes")
    parser.add_argument(
        "--mixed", action="store_true", help=f"with processes of {LAST}, until they are all changed"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=MIXED_KINDS[:-1],
        metavar="KIND",
        help=f"of {', '.join(MIXED_KINDS[:-1])}",
    )
    arguments = parser.parse_args()
    kinds = _kinds(parser, arguments)
    logging.disable(logging.CRITICAL)  # what the checker's own connections meet is no news
    if arguments.watch_parent:
        interrupt_at_end_of_stdin()
    seeds = arguments.seed or [secrets.randbelow(1_000_000)]
    has_failed = False
    for seed in seeds:
        if arguments.plan:
            print("\n".join(map(str, plan_of(seed, arguments.seconds, kinds))))
            continue
        if not arguments.quiet:
            print(f"seed {seed}: starting the cluster", flush=True)
        tell = _say_nothing if arguments.quiet else _say
        run = run_chaos(
            seed,
            seconds=arguments.seconds,
            tell=tell,
            kinds=kinds,
            keeps=arguments.keep,
            producers=arguments.producers,
            is_secure=arguments.secure,
            last=LAST if arguments.mixed else None,
        )
        try:
            report = asyncio.run(run)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            return EXIT_INTERRUPTED
        print(report, flush=True)
        has_failed |= not report.is_clean
    return int(has_failed)


def _kinds(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Sequence[str]:
    """Return the kinds of faults asked for; end the program if they cannot be had."""
    if not arguments.mixed:
        if CHANGE_RELEASE in (arguments.only or ()):
            parser.error(f"{CHANGE_RELEASE!r} needs --mixed")
        return arguments.only or KINDS
    try:
        commit_of(LAST)
    except pytest.skip.Exception as missing:
        parser.error(str(missing))
    return (*(arguments.only or KINDS), CHANGE_RELEASE, FINALIZE)


def _say(text: str) -> None:
    print(text, flush=True)


def _say_nothing(text: str) -> None:
    if "kept in" in text:
        _say(text)


if __name__ == "__main__":
    enter_mount_namespace(["-m", "tests.chaos", *sys.argv[1:]])
    with closing(Forking()):
        sys.exit(main())
