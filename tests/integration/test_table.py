"""Goal: no kill and no lost answer puts a record into a table twice, or leaves one out.

Method: workers are processes, killed at each request to an S3 server; readers of Delta or Iceberg,
and of dlog, compare what they see after each.  `tests/spark/test_table.py` kills at each step.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.backends.direct import namespace as namespaces
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.ids import DLSN
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.http_relay import http_relay
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.s3 import s3_server
from tests.fixtures.table_logs import ROWS, TYPED, Logs, work_on
from tests.fixtures.table_readers import own_catalog
from tests.fixtures.tier_worker import CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.http_relay import HttpRelay
    from tests.fixtures.shell import Shell

pytestmark = pytest.mark.integration

REQUESTS_MAX = amount(60, sampled=8)
TIME_LIMIT_S = amount(1700, sampled=280)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, HttpRelay]]:
    """Run an S3 server behind a relay; yield a place for a tier, and the relay.

    A test that wants a table takes it first: the server of a catalog writes to it, too.
    """
    with s3_server(tmp_path / "s3") as server:
        print(f"the server is {server.program}")
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
            worker = await work_on(logs, 0)
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
        assert await (await work_on(logs, 0)).wait() == 0
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
    shell: Shell, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
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
    opened = []

    async def counted(*arguments: Any, **options: Any) -> DirectNamespace:
        opened.append(arguments)
        return await open_namespace(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(namespaces, "open_namespace", counted)
        assert line in shell.text("log", "show", name)
    assert len(opened) == 1
    for version, end in zip(versions, ends, strict=True):
        assert shell.text("log", "table", name, "--at", end).strip() == str(version)
        assert shell.text("log", "table", name, "--version", str(version)).strip() == end
    assert shell.text("log", "table", name, "--at", "2:0:0").strip() == str(versions[1])
    assert shell.text("log", "table", name, "--at", "1:0:1").strip() == str(versions[0])
    for wrong, why in (
        (["--at", "4:1:0"], "none of its versions has all before 4:1:0"),
        (["--version", "7"], "version 7 of the table in"),
        (["--version", "1", "--at", "1:0:0"], "exclude each other"),
    ):
        exit_code, _, said = shell.outcome("log", "table", name, *wrong)
        assert exit_code > 0
        assert why in said
