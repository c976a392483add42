"""Checks histories of clients that share no code with dlog: ``python -m tests.blackbox``."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.sandbox.cluster import Sandbox
from tests.blackbox.nemesis import Nemesis
from tests.blackbox.programs import ProgramError, build, succeeds
from tests.fixtures.forking import Forking
from tests.fixtures.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

PROXIES, BOOKIES = 3, 4
ARTIFACTS = Path("artifacts/blackbox")
OPTIONS = ("--idle-release-s=20",)
"""Each history has a log of its own, which nobody writes any more afterwards."""
EXIT_INTERRUPTED = 130


def main() -> int:
    """Make histories under faults and check them; return 1 unless all are right."""
    parser = argparse.ArgumentParser(prog="python -m tests.blackbox", description=__doc__)
    parser.add_argument("--histories", type=int, default=50, help="how many (default: 50)")
    parser.add_argument("--at-once", type=int, default=32, help="at a time (default: 32)")
    parser.add_argument("--seed", type=int, help="default: one at random")
    parser.add_argument("--calm", action="store_true", help="break nothing")
    parser.add_argument("--quiet", action="store_true", help="print the counts alone")
    parser.add_argument("--keep", action="store_true", help="keep all data and logs in any case")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = secrets.randbelow(1_000_000)
    folder = Path(tempfile.mkdtemp(prefix="dlog-blackbox-"))
    began_s = time.monotonic()

    def say(text: str) -> None:
        if not arguments.quiet:
            print(f"{time.monotonic() - began_s:7.1f} s  {text}", flush=True)

    is_right = False
    try:
        is_right = run(arguments, folder, say)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        shutil.rmtree(folder)
        return EXIT_INTERRUPTED
    except ProgramError as error:
        print(f"error: {error}", file=sys.stderr)
    if is_right and not arguments.keep:
        shutil.rmtree(folder)
    else:
        print(f"seed {arguments.seed}: its histories and the cluster's logs are in {folder}")
    return int(not is_right)


def run(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> bool:
    """Make histories on a cluster of its own, and judge them; return whether all are right."""
    say("building the program")
    program = str(build(folder))
    histories = str(folder / "go.jsonl")
    say(f"seed {arguments.seed}: starting the cluster")
    with Sandbox(
        BOOKIES,
        free_ports(1 + BOOKIES + PROXIES),
        folder / "cluster",
        proxies=PROXIES,
        proxy_options=OPTIONS,
    ) as sandbox:
        nemesis = Nemesis(sandbox, arguments.seed, say)
        with nullcontext() if arguments.calm else nemesis.at_work():
            is_right = succeeds(
                [
                    *(program, "run", "--out", histories, "--seed", str(arguments.seed * 100_000)),
                    *("--endpoints", ",".join(each.location for each in sandbox.proxies)),
                    *("--histories", str(arguments.histories)),
                    *("--at-once", str(arguments.at_once)),
                ]
            )
    counts = (f"{kind} {count}" for kind, count in sorted(nemesis.counts.items()))
    print("faults:", ", ".join(counts) or "none")
    for failure in nemesis.failures:
        print("the nemesis failed:", failure)
    say("checking")
    is_right &= succeeds([program, "check", "--artifacts", str(ARTIFACTS), histories])
    say("spoiling")
    is_right &= succeeds([program, "spoil", histories])
    return is_right and not nemesis.failures


if __name__ == "__main__":
    with closing(Forking()):
        sys.exit(main())
