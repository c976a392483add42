"""Searches every scope: ``python -m tests.model``; says how many states, how deep, how fast."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.model import appends, exploring, lacs, producers
from tests.model.scopes import LARGE, SMALL
from tests.model.search import search
from tests.model.system import Protocol


def main() -> int:
    """Search the scopes asked for; return 1 if one broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument(
        "--states", type=int, default=4_000_000, help="per scope at most (default: 4000000)"
    )
    parser.add_argument("--only", default="", help="scopes whose name contains this")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    is_broken = False
    for name, scope in (SMALL | LARGE).items():
        if arguments.only in name:
            result = search(Protocol(scope), states_max=arguments.states)
            is_broken |= bool(result.violation)
            print(f"{name}: {result}", flush=True)
    for name, of_appends in (appends.SMALL | appends.LARGE).items():
        if arguments.only in name:
            model = appends.Model(of_appends)
            found = exploring.search(model, states_max=arguments.states)
            is_broken |= bool(found.violation)
            print(f"appends, {name}: {found}", flush=True)
    for name, of_lacs in (lacs.SMALL | lacs.LARGE).items():
        if arguments.only in name:
            found = exploring.search(lacs.Model(of_lacs), states_max=arguments.states)
            is_broken |= bool(found.violation)
            print(f"lacs, {name}: {found}", flush=True)
    for name, each in (producers.SMALL | producers.LARGE).items():
        if arguments.only in name:
            found = exploring.search(producers.Model(each), states_max=arguments.states)
            is_broken |= bool(found.violation)
            print(f"producers, {name}: {found}", flush=True)
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
