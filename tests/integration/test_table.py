"""Goal: no kill and no lost answer puts a record into a table twice, or leaves one out.

Method: workers are processes, killed at each step of theirs, and at each request to an S3 server;
readers of Delta or Iceberg, and of dlog, compare what they see after each.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dlcore import LogConfig, LogSettings, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.ids import DLSN
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.http_relay import http_relay
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.s3 import s3_server
from tests.fixtures.table_readers import own_catalog, table_view
from tests.fixtures.tier_worker import CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.http_relay import HttpRelay
    from tests.fixtures.shell import Shell

pytestmark = pytest.mark.integration

WRITING = LogConfig(quorum=QuorumConfig(), entry_bytes=5_000)
ROWS = 300
STEPS_MAX = 70
STRIDE = amount(1, sampled=12)
REQUESTS_MAX = amount(60, sampled=8)
TIME_LIMIT_S = amount(1700, sampled=280)
BYTES = pa.schema([("txid", pa.int64()), ("value", pa.binary())])
TYPED = pa.schema([("fare", pa.int64()), ("city", pa.string())])


class Logs:
    """Logs with tables, and how much was written to them."""

    def __init__(
        self, namespace: DirectNamespace, tier: str, kind: str, schemas: dict[str, pa.Schema]
    ) -> None:
        self.namespace = namespace
        self.kind = kind
        self.tier = tier
        self.schemas = schemas
        self.written = 0
        self.first = 0
        self.tables = 0

    async def start(self) -> None:
        """Make the logs."""
        settings = LogSettings(tier=self.tier, tier_after_s=0, table=self.kind)
        for name, schema in self.schemas.items():
            if await self.namespace.log_exists(name):
                await self.namespace.delete_log(name)
            typed = None if schema is BYTES else schema
            await self.namespace.create_log(name, config=WRITING, settings=settings, schema=typed)

    async def write(self) -> None:
        """Write a segment to each."""
        numbers = range(self.written, self.written + ROWS)
        for name, schema in self.schemas.items():
            log = await self.namespace.open_log(name, config=WRITING)
            columns = [pa.array(numbers), pa.array([b"%09d" % each * 5 for each in numbers])]
            batch = pa.RecordBatch.from_arrays(columns, names=schema.names).cast(schema)
            async with await log.open_writer() as writer:
                for start in range(0, ROWS, 100):
                    await writer.write_batch(batch.slice(start, 100))
        self.written += ROWS

    async def truncate(self) -> None:
        """Drop the oldest segment of each."""
        for name in self.schemas:
            log = await self.namespace.open_log(name)
            first = (await log.get_log_segments())[0]
            await log.truncate(DLSN(first.lssn + 1, 0, 0))
        self.first += ROWS

    async def check(self, *, whole: bool = False) -> None:
        """Require that each row is in the table or in the log after its end, once and in order."""
        context = self.namespace.log_context
        for name, schema in self.schemas.items():
            log = await self.namespace.open_log(name, config=WRITING)
            key = "sequence_id" if schema is BYTES else "_sequence_id"
            columns = [key, schema.names[0]]
            written = await (await log.read(columns=columns)).to_arrow()
            assert written[key].to_pylist() == list(range(self.first, self.written))
            log_id = (await context.logs.find(name)).log_id
            url = f"{self.tier}/{context.cluster_id}/{log_id}"
            table = table_view(self.kind, url, name)
            if table is None:
                assert not whole
                continue
            self.tables += 1
            rows = table.rows()
            ids = rows["_sequence_id"].to_pylist()
            assert ids == sorted(set(ids))
            boundary = DLSN(*divmod(table.number(), 2**32), 0)
            tail = (await (await log.read(start=boundary, columns=columns)).to_arrow())[key]
            assert [each for each in ids if each >= self.first] + tail.to_pylist() == list(
                range(self.first, self.written)
            )
            value = pc.cast(rows[schema.names[-1]], pa.binary()).to_pylist()
            assert value == [b"%09d" % each * 5 for each in ids]
            if whole:
                assert ids == list(range(self.first, self.written))
                assert table.ids() == ids


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, HttpRelay]]:
    """Run an S3 server behind a relay; yield a place for a tier, and the relay.

    A test that wants a table takes it first: the server of a catalog writes to it, too.
    """
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with http_relay(server.environment["AWS_ENDPOINT_URL"].removeprefix("http://")) as relay:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{relay.address}")
            yield f"{server.url}/tier", relay


@pytest.fixture
def kind(table_kind: str) -> str:
    """Give the setting `table`; worker processes use the same catalog."""
    return table_kind


def snapshots_of(name: str) -> list[int]:
    """Return the ids of the snapshots of an Iceberg table, oldest first."""
    return [each.snapshot_id for each in own_catalog().load_table(("dlog", name)).snapshots()]


async def _work(logs: Logs, step: int) -> asyncio.subprocess.Process:
    """Start a worker, which loads only what its tables need: to load costs more than to work."""
    command = [LOADED_PYTHON, "-m", "tests.fixtures.table_worker", logs.namespace.uri, logs.kind]
    command += [str(step), *logs.schemas]
    return await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)


@pytest.mark.timeout(1800)  # some seconds for each step, with --full
def test_a_worker_that_is_killed_at_each_step(sandbox: Sandbox, tmp_path: Path, kind: str) -> None:
    """Segments come and go meanwhile; in the end both tables have all."""
    tier = f"file://{tmp_path}/tier"
    run_in_own_time(asyncio.wait_for(_kill_at_each_step(sandbox.uri, tier, kind), TIME_LIMIT_S))


async def _kill_at_each_step(uri: str, tier: str, kind: str) -> None:
    async with await open_namespace(uri) as namespace:
        logs = Logs(namespace, tier, kind, {"table-clicks": BYTES, "table-rides": TYPED})
        await logs.start()
        ends = []
        for number, step in enumerate(range(1, STEPS_MAX, STRIDE)):
            await logs.write()
            if number % 3 == 2:
                await logs.truncate()
            ends.append(await (await _work(logs, step)).wait())
            await logs.check()
        assert set(ends) <= {0, -signal.SIGKILL}
        killed = ends.count(-signal.SIGKILL)
        print(f"{kind}: {killed} workers were killed at steps")
        assert killed > len(ends) // 3
        assert await (await _work(logs, 0)).wait() == 0
        await logs.check(whole=True)
        assert logs.tables > 2


@pytest.mark.timeout(1800)
def test_a_worker_that_is_killed_at_each_request_to_s3(
    fresh_sandbox: Callable[..., Sandbox], s3: tuple[str, HttpRelay], kind: str
) -> None:
    """Before the server has it, and after, also in the middle of a commit or a checkpoint."""
    cluster = fresh_sandbox(3)  # it remembers the server, which is gone later
    scenario = _kill_at_each_request(cluster.uri, *s3, kind)
    run_in_own_time(asyncio.wait_for(scenario, TIME_LIMIT_S))


async def _kill_at_each_request(uri: str, tier: str, relay: HttpRelay, kind: str) -> None:
    async with await open_namespace(uri) as namespace:
        logs = Logs(namespace, tier, kind, {"table-killed": TYPED})
        await logs.start()
        ends = []
        for number in range(REQUESTS_MAX):
            await logs.write()
            if number % 5 == 4:
                await logs.truncate()
            worker = await _work(logs, 0)
            # Writes of a round: an object, a commit, which for Iceberg is three of metadata, and
            # now and then a checkpoint.
            at = number // 2 % 4 if kind == "delta" else number // 2 * 2 % 9
            _kill(relay, worker, at=1 + at, after=bool(number % 2))
            ends.append(await worker.wait())
            _let_all_pass(relay)
            await logs.check()
        assert set(ends) <= {0, -signal.SIGKILL}
        killed = ends.count(-signal.SIGKILL)
        print(f"{kind}: {killed} workers were killed at requests")
        assert killed
        assert await (await _work(logs, 0)).wait() == 0
        await logs.check(whole=True)
        assert logs.tables > 1


def _kill(relay: HttpRelay, worker: asyncio.subprocess.Process, *, at: int, after: bool) -> None:
    """Kill a worker at one of its requests that write, before the server has it, or after."""
    count = 0

    def before(method: str, _: str) -> str:
        nonlocal count
        count += method in ("PUT", "POST", "DELETE")
        if count == at and not after:
            worker.kill()
            return "lose"
        return "pass"

    def later(method: str, _: str) -> None:
        if count == at and after and method in ("PUT", "POST", "DELETE"):
            worker.kill()

    relay.before, relay.after = before, later


def _let_all_pass(relay: HttpRelay) -> None:
    relay.before, relay.after = lambda *_: "pass", lambda *_: None


def test_a_store_that_loses_answers(
    fresh_sandbox: Callable[..., Sandbox], s3: tuple[str, HttpRelay], kind: str
) -> None:
    """The library's client sends a request again by itself: the store has a commit, and refuses.

    That commit is this worker's own, and must not be made again as another one.
    """
    cluster = fresh_sandbox(3)  # it remembers the server, which is gone later
    run_in_own_time(asyncio.wait_for(_lose_answers(cluster.uri, *s3, kind), TIME_LIMIT_S))


async def _lose_answers(uri: str, tier: str, relay: HttpRelay, kind: str) -> None:
    async with await open_namespace(uri) as namespace:
        logs = Logs(namespace, tier, kind, {"table-lost": TYPED})
        await logs.start()
        worker = LogUpkeep.of(namespace, CONFIG)
        found = await namespace.log_context.logs.find("table-lost")
        met: list[str] = []
        for fate in ("lose answer", "503", "lose answer", "lose", "lose answer"):
            await logs.write()
            await worker._tiers._tierer.tier(found)
            left = [fate]

            def before(method: str, path: str, left: list[str] = left) -> str:
                if method == "PUT" and path.endswith(".json") and left:
                    met.append(path)
                    return left.pop()
                return "pass"

            relay.before = before
            await worker._tiers._tables.follow(found)
            _let_all_pass(relay)
            await logs.check(whole=True)
        assert len(met) == 5


def test_the_command_shows_the_table_and_its_versions(
    shell: Shell, tmp_path: Path, kind: str
) -> None:
    """Positions for versions, and versions for positions, as the history has them."""
    tier = f"file://{tmp_path}/tier"
    name = "table-shown"

    async def fill() -> None:
        async with await open_namespace(shell.uri) as namespace:
            logs = Logs(namespace, tier, kind, {name: TYPED})
            await logs.start()
            worker = LogUpkeep.of(namespace, CONFIG)
            found = await namespace.log_context.logs.find(name)
            for _ in range(3):
                await logs.write()
                await worker._tiers._tierer.tier(found)
                await worker._tiers._tables.follow(found)
            await logs.write()

    exit_code, _, said = shell.outcome("log", "table", "table-nowhere")
    assert (exit_code, "table-nowhere" in said) == (1, True)
    run_in_own_time(asyncio.wait_for(fill(), TIME_LIMIT_S))
    shown = shell.json("log", "table", name)
    versions = range(3) if kind == "delta" else snapshots_of(name)
    ends = [shell.json("log", "table", name, "--version", str(each))["end"] for each in versions]
    assert [DLSN.parse(each).lssn for each in ends] == [1, 2, 3]
    assert (shown["version"], shown["end"]) == (versions[2], ends[2])
    assert shown["format"] == kind
    assert (shown["records"], shown["records_after"]) == (3 * ROWS, ROWS)
    assert shown["table"].startswith(tier)
    assert shown["files"] >= 3
    assert shown["bytes"] > 0
    assert shell.json("log", "show", name)["table"] == {
        "format": kind,
        "url": shown["table"],
        "version": shown["version"],
        "end": shown["end"],
        "records_after": ROWS,
        "error": None,
    }
    line = f"{kind} version {shown['version']} in {shown['table']}, up to {shown['end']}, {ROWS} "
    assert line in shell.text("log", "show", name)
    for version, end in zip(versions, ends, strict=True):
        assert shell.text("log", "table", name, "--at", end).strip() == str(version)
        assert shell.text("log", "table", name, "--version", str(version)).strip() == end
    assert shell.text("log", "table", name, "--at", "2:0:0").strip() == str(versions[1])
    assert shell.text("log", "table", name, "--at", "1:0:1").strip() == str(versions[0])
    for wrong, why in (
        (["--at", "4:1:0"], "none of its versions has all before 4:1:0"),
        (["--version", "7"], "version 7 of" if kind == "delta" else "no snapshot 7 any more"),
        (["--version", "1", "--at", "1:0:0"], "exclude each other"),
    ):
        exit_code, _, said = shell.outcome("log", "table", name, *wrong)
        assert exit_code > 0
        assert why in said
