"""Goal: the ledgers before the first kept position go, also from a segment that stays.

Method: one segment of extents with a ledger each, on real bookies.  The rest is read through
the core, a proxy and the command line from each kept position, before and after; a process that
truncates is killed at each of its steps, and a worker finishes what it has begun.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore import LogConfig, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace as open_direct
from dlcore.base.errors import AlreadyTruncatedError
from dlcore.base.ids import DLSN
from dlcore.log.upkeep.requests import ask_for_upkeep
from dlcore.ops.upkeep.config import MergePolicy, UpkeepConfig
from dlcore.ops.upkeep.worker import LogUpkeep
from dlcore.sync import open_namespace, scan
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import sample
from tests.fixtures.proxies import proxy_thread
from tests.fixtures.shell import Shell
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import DistributedLogManager, LogReader, LogSnapshot, Namespace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

LOG = "clicks"
READ_AHEAD_BYTES = 30_000
"""Less than an entry has: a reader has not fetched all when the log is truncated."""
CONFIG = LogConfig(quorum=QuorumConfig(), read_ahead_bytes=READ_AHEAD_BYTES)
EXTENTS, ROWS = 30, 3
STARTS = 8
ROW_BYTES = 10_000
MIDDLE = DLSN(1, 12, 1)
# A file for each entry, so that nothing of a deleted ledger stays.
BOOKIES = ("--garbage-age-ms=0", "--garbage-interval-s=1", "--file-bytes-max=100000")
STEPS_MAX = 12
UPKEEP = UpkeepConfig(
    merge=MergePolicy(
        large_weight=4_000,
        fan_in=1_000,
        run_weight_max=4_000_000,
        run_extents_max=1_000,
        run_ledgers_max=1_000,
    )
)
"""Nothing is merged: all extents of a completed segment move into one node."""
END_S = 60

Row = tuple[DLSN, int, int, str]


def append(namespace: Namespace, numbers: Iterable[int]) -> None:
    """Append an extent of one entry, in a ledger of its own, for each number."""
    for number in numbers:
        values = [random.Random(number).randbytes(ROW_BYTES).hex().encode() for _ in range(ROWS)]
        with namespace.begin_append("job", number) as staged:
            staged.write_batch(LOG, pa.record_batch({"value": values}))
            assert staged.commit().committed


def read(
    log: DistributedLogManager, start: DLSN | None = None, *, ignore_truncation: bool = False
) -> list[Row]:
    """Return the records from a position on."""
    # Proxies do not have the option.
    options: dict[str, Any] = {"ignore_truncation": True} if ignore_truncation else {}
    with log.open_reader(dlsn=start, **options) as reader:
        found = reader.read_bulk(10_000)
    return [(each.dlsn, each.txid, each.sequence_id, each.payload.decode()) for each in found]


def read_on(reader: LogReader, count: int) -> None:
    """Read so many records."""
    for _ in range(count):
        assert reader.read_next() is not None


def dumped(shell: Shell, start: DLSN) -> list[Row]:
    """Return the records that the command shows."""
    lines = shell.text("log", "dump", LOG, "--from-dlsn", str(start), "--json").splitlines()
    found = [json.loads(line) for line in lines]
    return [
        (DLSN.parse(each["dlsn"]), each["txid"], each["sequence_id"], each["value"])
        for each in found
    ]


class Scene:
    """A log, and its readers of all kinds, which are opened before anything is removed."""

    def __init__(self, shell: Shell, core: Namespace, remote: Namespace) -> None:
        self.shell = shell
        self.uri = shell.uri
        self.readers = [core.open_log(LOG), remote.open_log(LOG)]
        self.every = read(self.readers[0])

    def kept(self, first: DLSN) -> list[Row]:
        """Return the records that are not below a position."""
        return [row for row in self.every if row[0] >= first]

    def check(self, first: DLSN, *, is_removed: bool = True) -> None:
        """All of them read the same from each kept position, and nothing from before."""
        kept = self.kept(first)
        for log in self.readers:
            assert read(log) == kept
            for number in sample(range(len(kept)), STARTS):
                assert read(log, kept[number][0]) == kept[number:]
            with pytest.raises(AlreadyTruncatedError, match=f"the first one left is at {first}"):
                read(log, DLSN(1, 1, 0))
        for dlsn in (first, kept[len(kept) // 2][0], kept[-1][0]):
            assert dumped(self.shell, dlsn) == [row for row in kept if row[0] >= dlsn]
        code, _, output = self.shell.outcome("log", "dump", LOG, "--from-dlsn", "1:1:0")
        assert code != 0
        assert f"the first one left is at {first}" in output
        assert self.shell.text("log", "count", LOG) == f"{len(kept)}\n"
        _, output, _ = self.shell.outcome("log", "inspect", LOG, "--entries", "--json")
        found = [each["kind"] for each in json.loads(output)]
        assert found == ([] if is_removed else ["leftover"]), output
        assert self.shell.json("ledger", "audit") == []

    def ledgers(self) -> int:
        """Return how many ledgers there are."""
        return len(self.shell.text("ledger", "list", "--quiet").split())


def test_the_rest_of_a_segment_is_read_as_before(
    fresh_sandbox: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str]
) -> None:
    """While it is in progress, after it is completed, and after a crash at any step."""
    uri = fresh_sandbox(3, bookie_options=BOOKIES).uri
    shell = Shell(uri, capsys)
    with open_namespace(uri, config=CONFIG) as core, proxy_thread(uri) as proxy:
        core.create_log(LOG)
        append(core, range(1, EXTENTS + 1))
        with open_namespace(proxy.server.location) as remote:
            scene = Scene(shell, core, remote)
            assert len(scene.every) == EXTENTS * ROWS
            assert scene.ledgers() == EXTENTS
            _truncate_in_progress(scene)
            shell.text("log", "seal", LOG, "--yes")
            assert shell.json("segment", "list", LOG)[0]["state"] == "completed"
            _kill_at_each_step(scene)


def _truncate_in_progress(scene: Scene) -> None:
    """A reader of freed records gets an error that says so; the other records stay."""
    log = scene.readers[0]
    snapshot = log.get_snapshot()
    with log.open_reader(dlsn=DLSN(1, 2, 0)) as early:
        assert early.read_next() is not None
        scene.shell.text("log", "truncate", LOG, str(MIDDLE), "--yes")
        assert scene.ledgers() == EXTENTS - MIDDLE.entry_id
        wait_until(lambda: _is_refused(snapshot, scene.uri), timeout_s=END_S)
        with pytest.raises(AlreadyTruncatedError, match=f"the first one left is at {MIDDLE}"):
            read_on(early, MIDDLE.entry_id * ROWS)
    scene.check(MIDDLE)
    assert read(log, DLSN.INITIAL, ignore_truncation=True) == scene.kept(DLSN(1, 12, 0))


def _is_refused(snapshot: LogSnapshot, uri: str) -> bool:
    """Return whether a range that was planned before is refused, because bookies freed it."""
    try:
        assert sum(len(each.batch) for each in scan(snapshot.scans(DLSN.INITIAL, MIDDLE), uri=uri))
    except AlreadyTruncatedError:
        return True
    return False


def _kill_at_each_step(scene: Scene) -> None:
    ends = []
    for step in range(1, STEPS_MAX):
        before = scene.ledgers()
        first = DLSN(1, MIDDLE.entry_id + step, 2)
        command = [LOADED_PYTHON, "-m", "tests.fixtures.truncate_worker"]
        command += [scene.uri, str(step), LOG, str(first)]
        ends.append(subprocess.run(command, check=False, timeout=END_S).returncode)
        is_truncated = scene.readers[0].get_first_dlsn() == first
        left = EXTENTS - first.entry_id
        assert scene.ledgers() == (left if step >= 4 else before)
        assert is_truncated == (step > 1)
        if is_truncated:
            scene.check(first, is_removed=step >= 4)
        run_in_own_time(asyncio.wait_for(_upkeep(scene.uri), END_S))
        assert scene.ledgers() == (left if is_truncated else before)
        if ends[-1] == 0:
            break
    assert set(ends) == {0, -signal.SIGKILL}
    assert len(ends) == 5  # two transactions, each with a moment before and one after it
    scene.check(first)


async def _upkeep(uri: str) -> None:
    async with await open_direct(uri) as namespace:
        context = namespace.log_context
        await ask_for_upkeep(context, {await context.logs.find(LOG): 1})
        await LogUpkeep.of(namespace, UPKEEP).serve()
