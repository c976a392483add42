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

from dlcore.ops.sandbox.cluster import Sandbox
from tests.blackbox.nemesis import Nemesis
from tests.blackbox.programs import ProgramError, build, build_java, succeed
from tests.fixtures.forking import Forking
from tests.fixtures.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

PROXIES, BOOKIES = 3, 4
ARTIFACTS = Path("artifacts/blackbox")
OPTIONS = ("--idle-release-s=20",)
"""Each history has a log of its own, which no client writes any more afterwards."""
EXIT_INTERRUPTED = 130


def main() -> int:
    """Make histories under faults and check them; return 1 unless all are right."""
    parser = argparse.ArgumentParser(prog="python -m tests.blackbox", description=__doc__)
    parser.add_argument("--histories", type=int, default=50, help="how many (default: 50)")
    parser.add_argument(
        "--java", type=int, help="more of them by clients in Java (default: a fifth as many)"
    )
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
    say("building the programs")
    program, java = str(build(folder)), java_program(arguments, folder)
    histories = [str(folder / f"{name}.jsonl") for name in (["go", "java"] if java else ["go"])]
    say(f"seed {arguments.seed}: starting the cluster")
    with Sandbox(
        BOOKIES,
        free_ports(1 + BOOKIES + PROXIES),
        folder / "cluster",
        zookeeper=True,
        proxies=PROXIES,
        proxy_options=OPTIONS,
    ) as sandbox:
        endpoints = ",".join(each.location for each in sandbox.proxies)
        count, at_once, seed = arguments.histories, arguments.at_once, arguments.seed * 100_000
        makers = [[program, "run", "--endpoints", endpoints, "--out", histories[0]]]
        makers[0] += [f"--histories={count}", f"--at-once={at_once}", f"--seed={seed}"]
        if java:
            at_once = max(1, at_once * arguments.java // max(1, count))
            makers += [
                [*java, endpoints, str(arguments.java), str(at_once), str(seed), histories[1]]
            ]
        nemesis = Nemesis(sandbox, arguments.seed, say)
        with nullcontext() if arguments.calm else nemesis.at_work():
            is_right = succeed(*makers)
    counts = (f"{kind} {count}" for kind, count in sorted(nemesis.counts.items()))
    print("faults:", ", ".join(counts) or "none")
    for failure in nemesis.failures:
        print("the nemesis failed:", failure)
    say("checking")
    is_right &= succeed([program, "check", "--artifacts", str(ARTIFACTS), *histories])
    say("spoiling")
    is_right &= succeed([program, "spoil", *histories])
    return is_right and not nemesis.failures


def java_program(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command of the clients in Java, none if there are to be none."""
    if arguments.java == 0:
        return []
    try:
        command = build_java(folder)
    except ProgramError as error:
        if arguments.java is not None:
            raise
        print(f"without clients in Java: {error}", flush=True)
        return []
    if arguments.java is None:
        arguments.java = max(1, arguments.histories // 5)
    return command


if __name__ == "__main__":
    with closing(Forking()):
        sys.exit(main())
