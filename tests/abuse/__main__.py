"""Measures what strangers cost: ``python -m tests.abuse``; ``--only ping`` chooses one.

Each attack goes against the only bookie of a cluster, or its only proxy, from a process of its
own, while an honest client writes a record after the other.  Printed are the memory of that server
at rest, at its highest under the attack, and afterwards, and how long the honest records took.
With ``--stranger`` the cluster is secured, and the attacker is none whom it knows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING

from dlcore import LogConfig, LogRecord, QuorumConfig, open_namespace
from dlcore.backends.direct.namespace import open_namespace as open_direct
from dlcore.base.errors import DLError
from dlcore.ops.sandbox.cluster import Sandbox
from tests.abuse.attacks import (
    ATTACKS,
    ATTACKS_ON_PROXY,
    LARGE_ENTRY_ID,
    LOG,
    Target,
    large_add,
)
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.certificates import Authority
from tests.fixtures.resident import resident_kb

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from dlcore import DistributedLogManager
    from dlcore.base.access.tls import TlsFiles

STRANGERS = ("clear", "no-certificate", "foreign")
_REST_S = 5.0
_LOOK_S = 0.1
_LARGE_RECORDS, _LARGE_BYTES = 128, 1_000_000


@dataclass
class Seen:
    """The figures of one phase."""

    rss_mib: list[float] = field(default_factory=list)
    waits_ms: list[float] = field(default_factory=list)
    failed: int = 0

    def text(self) -> str:
        """Return it for a table."""
        tail = quantiles(self.waits_ms, n=100)[98] if len(self.waits_ms) > 1 else float("nan")
        middle = median(self.waits_ms) if self.waits_ms else float("nan")
        return (
            f"{max(self.rss_mib):.0f} MiB | {middle:.1f} ms, {tail:.1f} ms of {len(self.waits_ms)}"
            + (f", {self.failed} failed" if self.failed else "")
        )


async def watch(pid: int, log: DistributedLogManager, seconds: float) -> Seen:
    """Write one record after the other for so long, and look at the memory."""
    seen = Seen()

    async def look() -> None:
        while True:
            seen.rss_mib.append(resident_kb(pid) / 1024)
            await asyncio.sleep(_LOOK_S)

    looking = asyncio.create_task(look())
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            async with await log.open_writer() as writer:
                while (begun_s := time.monotonic()) < end_s:
                    await writer.write(LogRecord(0, b"x" * 100))
                    seen.waits_ms.append((time.monotonic() - begun_s) * 1000)
        except DLError as error:
            print(f"an honest record failed: {error}", file=sys.stderr, flush=True)
            seen.failed += 1
    looking.cancel()
    return seen


@contextlib.contextmanager
def attacker(name: str, target: list[str], *, niceness: int) -> Iterator[None]:
    """Let a stranger attack meanwhile."""
    command = ["nice", "-n", str(niceness), sys.executable, "-m", "tests.abuse.attacks", name]
    command += target
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=REPOSITORY) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def honest(
    sandbox: Sandbox,
) -> AsyncGenerator[tuple[DistributedLogManager, list[str]], None]:
    """Yield a log, and what a stranger may know of a ledger of it and of its bookie."""
    (bookie,) = sandbox.bookies
    async with await open_direct(sandbox.uri, tls=sandbox.tls) as namespace:
        one = QuorumConfig(1, 1, 1)
        await namespace.create_log(LOG, config=LogConfig(quorum=one))
        log = await namespace.open_log(LOG)
        async with await log.open_writer() as writer:
            await writer.write(LogRecord(0, b"first"))
            (segment,) = await log.get_log_segments()
            addresses = [
                bookie.address,
                str(segment.extents[0].ledger_id),
                f"{bookie.name}/{bookie.incarnation}",
                namespace.log_context.cluster_id,
            ]
            await give_large(addresses, sandbox.tls)
        yield log, addresses


async def give_large(addresses: list[str], tls: TlsFiles | None) -> None:
    """Add the entry that is asked for."""
    target = Target(addresses[0], int(addresses[1]), addresses[2], addresses[3], tls)
    writer = await target.connect()
    writer.write(large_add(target.ledger_id, LARGE_ENTRY_ID))
    await writer.drain()
    await asyncio.sleep(1.0)
    writer.transport.abort()


async def fill(log: DistributedLogManager) -> None:
    """Write what readers are sent."""
    async with await log.open_writer() as writer:
        for _ in range(_LARGE_RECORDS):
            await writer.write(LogRecord(0, bytes(_LARGE_BYTES)))


def stranger_to(sandbox: Sandbox, kind: str) -> list[str]:
    """Return the files of a stranger: none, an authority's, or those of another authority."""
    if not sandbox.tls or kind == "clear":
        return []
    if kind == "no-certificate":
        return [sandbox.tls.ca]
    foreign = Authority(sandbox.data_dir / "strangers").issue("127.0.0.1.client")
    return [sandbox.tls.ca, foreign.cert, foreign.key]


async def measure(
    name: str, *, seconds: float, after_s: float, niceness: int, stranger: str | None
) -> None:
    """Run one attack, and print its row."""
    is_on_proxy = name in ATTACKS_ON_PROXY
    with Sandbox(
        bookies=1, autorecovery=False, proxies=int(is_on_proxy), secure=stranger is not None
    ) as sandbox:
        async with contextlib.AsyncExitStack() as stack:
            log, addresses = await stack.enter_async_context(honest(sandbox))
            pid = sandbox.bookies[0].pid
            if is_on_proxy:
                (proxy,) = sandbox.proxies
                pid, addresses[0] = proxy.pid, proxy.location.partition("://")[2]
                opening = await open_namespace(proxy.location, tls=sandbox.tls)
                log = await (await stack.enter_async_context(opening)).open_log(LOG)
                await fill(log)
            rest = await watch(pid, log, _REST_S)
            files = stranger_to(sandbox, stranger) if stranger else []
            with attacker(name, [*addresses, *files], niceness=niceness):
                during = await watch(pid, log, seconds)
            after = await watch(pid, log, _REST_S)
            await asyncio.sleep(after_s)
            late_mib = resident_kb(pid) / 1024
    row = (f"`{name}`", rest.text(), during.text(), after.text(), f"{late_mib:.0f} MiB")
    print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Run the attacks that are asked for."""
    every = [*ATTACKS, *ATTACKS_ON_PROXY]
    parser = argparse.ArgumentParser(prog="python -m tests.abuse", description=__doc__)
    parser.add_argument("--only", action="append", choices=every, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=20, help="of each attack (default: 20)")
    parser.add_argument("--after-s", type=float, default=65, help="until memory is looked at")
    parser.add_argument(
        "--niceness",
        type=int,
        default=0,
        help="of the attacker; 19: as if it had other cores than the server (default: 0)",
    )
    parser.add_argument(
        "--stranger", choices=STRANGERS, help="of a secured cluster: what it connects with"
    )
    arguments = parser.parse_args()
    print("| attack | at rest: memory, p50, p99 | under it | just after | memory later |")
    print("|---|---|---|---|---|")
    for name in arguments.only or every:
        asyncio.run(
            measure(
                name,
                seconds=arguments.seconds,
                after_s=arguments.after_s,
                niceness=arguments.niceness,
                stranger=arguments.stranger,
            )
        )


if __name__ == "__main__":
    main()
