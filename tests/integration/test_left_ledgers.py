"""Goal: readers miss nothing of a log whose last process closed its ledger without a report.

Method: a writer is killed, and then the process that recovers its log, between the end of the
ledger and that of the segment.  The log is truncated, merged, tiered or redacted meanwhile, or none
of it; then the next writer comes.  Readers are at the end, in the first segment, and new.  None of
them looks again because it waited for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore import LogSettings
from dlcore.backends.direct.namespace import open_namespace
from dlcore.backends.opening import open_namespace as open_any
from dlcore.base.errors import OwnershipAcquireFailedError
from dlcore.base.ids import DLSN
from dlcore.ledger.metadata.values import LedgerState
from dlcore.ops.upkeep.config import MergePolicy, UpkeepConfig
from dlcore.ops.upkeep.merger import LogMerger
from dlcore.ops.upkeep.redactor import LogRedactor
from dlcore.ops.upkeep.tierer import LogTierer
from tests.fixtures.aio import until_async
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.left_worker import CONFIG, PERSONS, SCHEMA, row
from tests.fixtures.lengths import sample

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.api.log import DistributedLogManager
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROWS = 200
TIME_LIMIT_S = 240
UPKEEP = UpkeepConfig(
    merge=MergePolicy(large_weight=100_000, fan_in=2, run_weight_max=200_000, run_extents_max=40),
    merged_grace_s=0,
    tier_grace_s=0,
    leftovers_age_s=0,
)
REDACTED = 1
"""The person whose rows are redacted."""


async def nothing(_: DirectNamespace, __: DirectLog) -> None:
    """Leave the log alone."""


async def truncate(_: DirectNamespace, log: DirectLog) -> None:
    """Truncate it within the ledger that is closed."""
    last = (await log.get_snapshot()).end
    await log.truncate(DLSN(last.lssn, last.entry_id - 2, 0))


async def merge(namespace: DirectNamespace, log: DirectLog) -> None:
    """Merge what is complete."""
    merger = LogMerger(
        namespace.log_context, namespace.staging_owner, policy=UPKEEP.merge, bytes_per_s=1e9
    )
    await merger.merge(log._log)


async def tier(namespace: DirectNamespace, log: DirectLog) -> None:
    """Move what is complete to objects; the old ledgers go at once."""
    tierer = LogTierer(namespace.log_context, namespace.staging_owner, UPKEEP)
    assert await tierer.tier(log._log)


async def redact(namespace: DirectNamespace, log: DirectLog) -> None:
    """Redact the rows of a person, also those in the ledger that is closed."""
    redactor = await LogRedactor.open(
        namespace.log_context,
        namespace.staging_owner,
        log.name,
        f"person = {REDACTED}",
        config=UPKEEP,
        patience_s=0,
    )

    async def is_done() -> bool:
        with contextlib.suppress(OwnershipAcquireFailedError):  # until the dead session is over
            await redactor.redact()
            return True
        return False

    await until_async(is_done)


class Follower:
    """A reader, and the numbers of the rows that it got; None where a row is redacted."""

    def __init__(self, reader: AsyncLogReader) -> None:
        self.reader = reader
        self.numbers: list[int | None] = []

    async def take(self, *, until_caught_up: bool = False) -> bool:
        """Read the next rows; return whether there were any."""
        batch = await self.reader.read_batch(until_caught_up=until_caught_up)
        self.numbers += [] if batch is None else batch.column("number").to_pylist()
        return batch is not None

    async def take_up_to(self, number: int) -> None:
        """Wait for a row."""
        while number not in self.numbers:
            await self.take()


async def read_all(log: DistributedLogManager) -> list[int | None]:
    """Read as far as there is something."""
    async with await log.open_reader() as reader:
        found = Follower(reader)
        while await found.take(until_caught_up=True):
            pass
    return found.numbers


async def killed_writer(uri: str, name: str, first: int) -> int:
    """Let a process write; kill it after some rows.  Return the last acknowledged number."""
    command = [LOADED_PYTHON, "-m", "tests.fixtures.left_worker", uri, name, "write", str(first)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    acknowledged = first
    while acknowledged < first + ROWS:
        acknowledged = int(await process.stdout.readline())
    process.kill()
    rest = (await process.stdout.read()).splitlines(keepends=True)
    await process.wait()
    return max([acknowledged, *(int(each) for each in rest if each.endswith(b"\n"))])


async def killed_recovery(uri: str, log: DirectLog) -> None:
    """Let a process recover the log, up to the end of its ledger."""
    command = [LOADED_PYTHON, "-m", "tests.fixtures.left_worker", uri, log.name, "recover"]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)
    assert await process.wait() == -signal.SIGKILL


async def play(uri: str, proxy: str, between: str, tier_url: str) -> None:
    """Play it all, twice: what one killed process left is found by the next one, which is, too."""
    async with (
        await open_namespace(uri, config=CONFIG) as namespace,
        await open_any(proxy) as remote,
    ):
        name = f"left/{uuid4().hex}"
        settings = LogSettings(tier=tier_url, tier_after_s=0) if between == "tier" else None
        await namespace.create_log(name, config=CONFIG, schema=SCHEMA, settings=settings)
        log = await namespace.open_log(name)
        logs: list[DistributedLogManager] = [log, await remote.open_log(name)]
        last = await killed_writer(uri, name, 0)
        behind = [Follower(await each.open_reader()) for each in logs]
        at_end = [Follower(await each.open_reader()) for each in logs]
        for each in behind:
            await each.take()
        for each in at_end:
            await each.take_up_to(last)
        await killed_recovery(uri, log)
        (extent,) = (await log.get_log_segments())[-1].extents
        assert extent.is_open
        ledger = await namespace.get_ledger(extent.ledger_id)
        assert ledger.state is LedgerState.CLOSED
        for found in [await read_all(each) for each in logs]:
            assert found[: last + 1] == list(range(last + 1))
        await BETWEEN[between](namespace, log)
        news = [Follower(await each.open_reader()) for each in logs]
        async with await log.open_writer() as writer:
            number = 10**6 * PERSONS  # of a person whose rows stay
            await writer.write_batch(row(number))
            for each in (*at_end, *behind, *news):
                await each.take_up_to(number)
        expected = await read_all(log)
        written = [*range(len(at_end[0].numbers) - 1), number]
        for each in at_end:
            assert each.numbers == written
        check(between, expected, written)
        for each in news:
            assert each.numbers == expected
        for each in behind:
            check_behind(between, each.numbers, expected, written)
        for each in (*at_end, *behind, *news):
            await each.reader.aclose()


def check(between: str, found: list[int | None], written: list[int]) -> None:
    """Require that what is read anew is what was written, but for what was removed."""
    if between == "truncate":
        assert found == written[-len(found) :]
        assert len(found) < len(written)
    elif between == "redact":
        assert found == [None if each % PERSONS == REDACTED else each for each in written]
    else:
        assert found == written


def check_behind(
    between: str, found: list[int | None], expected: list[int | None], written: list[int]
) -> None:
    """Require the same of a reader that had begun before."""
    if between == "redact":
        assert all(each in (None, number) for each, number in zip(found, written, strict=True))
    elif between == "truncate":  # which takes what was not fetched yet
        begun = len(found) - len(expected)
        assert found == [*written[:begun], *expected]
    else:
        assert found == written


BETWEEN = {each.__name__: each for each in (nothing, truncate, merge, tier, redact)}


@pytest.mark.parametrize("between", sample([*BETWEEN], 2))
def test_readers_go_on_where_a_ledger_was_closed_and_its_log_was_not(
    sandbox: Sandbox, proxy: ProxyProcess, tmp_path: Path, between: str
) -> None:
    """They have all that was acknowledged, and the first row of the next writer soon."""
    work = play(sandbox.uri, proxy.location, between, f"file://{tmp_path}")
    run_in_own_time(asyncio.wait_for(work, TIME_LIMIT_S))
