"""Faults of logs and ledgers are found, on a real cluster in which they are made."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.config import QuorumConfig
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.metadata.values import LogHead, SegmentEnd
from dlcore.metadata.port import ANY_VERSION
from dlcore.metadata.stored import decode, encode
from dlcore.ops.cli.app import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, run
from tests.fixtures.shell import Shell

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from dlcore.log.context import LogContext
    from dlcore.metadata.paths import LogPaths
    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration


def write_segments(shell: Shell, log: str, folder: Path, count: int) -> None:
    """Write segments of two records each."""
    path = folder / "two"
    path.write_bytes(b"a\nb\n")
    for _ in range(count):
        shell.text("log", "write", log, "--file", str(path))


def with_log(uri: str, log: str, work: Callable[[LogContext, LogPaths], Awaitable[None]]) -> None:
    """Do something to the nodes of a log."""

    async def body() -> None:
        async with await open_namespace(uri) as namespace:
            context = namespace.log_context
            await work(context, context.logs.paths_of(await context.logs.find(log)))

    asyncio.run(body())


@pytest.fixture
def log(shell: Shell, log: str) -> Iterator[str]:
    """Take the log's name away at the end: others use the cluster, and the log cannot be read."""
    yield log

    async def forget(context: LogContext, _: LogPaths) -> None:
        await context.store.delete(context.paths.log(log))

    with_log(shell.uri, log, forget)


def findings(shell: Shell, log: str, *arguments: str) -> list[tuple[str, str]]:
    """Return what inspecting a log finds: kinds and details."""
    exit_code, out, err = shell.outcome("--json", "log", "inspect", log, *arguments)
    rows: list[dict[str, Any]] = json.loads(out)
    assert exit_code == (EXIT_FAILED if rows else 0), err
    assert all(row["log"] == log for row in rows)
    return [(row["kind"], row["detail"]) for row in rows]


def test_a_log_that_is_as_it_should_be(shell: Shell, log: str, tmp_path: Path) -> None:
    """Nothing is found, in the metadata and in the entries, nor to repair."""
    write_segments(shell, log, tmp_path, 3)
    assert findings(shell, log) == []
    assert findings(shell, log, "--entries") == []
    exit_code, _, err = shell.outcome("log", "inspect", log)
    assert (exit_code, err) == (0, "nothing is wrong\n")
    assert shell.text("log", "repair", log, "--yes") == f"log {log} needs no repair\n"
    exit_code, _, err = shell.outcome("log", "inspect", "no-such-log")
    assert exit_code == EXIT_FAILED
    assert "no-such-log" in err


def test_missing_and_doubled_segments(shell: Shell, log: str, tmp_path: Path) -> None:
    """A gap, a second segment in progress, one that the head does not know."""
    write_segments(shell, log, tmp_path, 4)

    async def damage(context: LogContext, paths: LogPaths) -> None:
        await context.store.delete(paths.segment(2))
        node = await context.store.get(paths.segment(3))
        assert node is not None
        await context.store.put(paths.segment(3), b"", version=node.version)
        await context.store.create(paths.segment(9), b"")

    with_log(shell.uri, log, damage)
    assert findings(shell, log) == [
        ("gap", "segment 2 of 1 … 4 has no node"),
        ("in-progress", "segment 3 is in progress, and so are later ones"),
        ("leftover", "segment 9 lies outside of 1 … 4"),
    ]
    exit_code, _, _ = shell.outcome("log", "repair", log, "--yes")
    assert exit_code == EXIT_FAILED


def test_counts_that_contradict_each_other(shell: Shell, log: str, tmp_path: Path) -> None:
    """Damage of segments and head, and of entries, which only a read shows."""
    write_segments(shell, log, tmp_path, 2)

    async def miscount(context: LogContext, paths: LogPaths) -> None:
        node = await context.store.get(paths.head)
        assert node is not None
        head = decode(LogHead, node.value, source="head")
        wrong = type(head)(**{
            **{name: getattr(head, name) for name in head.__struct_fields__},
            "next_sequence_id": 7,
            "max_txid": 1,
        })  # fmt: skip
        await context.store.put(paths.head, encode(wrong), version=node.version)

    with_log(shell.uri, log, miscount)
    kinds = findings(shell, log)
    assert ("count", "the head counts 7 records, segments 4") in kinds
    assert any("highest transaction id is 1" in detail for _, detail in kinds)


def test_metadata_that_counts_other_records_than_the_entries(
    shell: Shell, log: str, tmp_path: Path
) -> None:
    """It is found by reading them."""
    write_segments(shell, log, tmp_path, 1)

    async def miscount(context: LogContext, paths: LogPaths) -> None:
        node = await context.store.get(paths.segment(1))
        assert node is not None
        end = decode(SegmentEnd, node.value, source="segment")
        packed = list(end.packed)
        packed[4] += 1  # record_count of the only extent
        wrong = SegmentEnd(
            created_ms=end.created_ms,
            completed_ms=end.completed_ms,
            start_sequence_id=end.start_sequence_id,
            chunk_count=end.chunk_count,
            chunked=end.chunked,
            packed=tuple(packed),
        )
        await context.store.put(paths.segment(1), encode(wrong), version=node.version)

    with_log(shell.uri, log, miscount)
    (*_, last) = findings(shell, log, "--entries")
    assert last[0] == "entry"
    assert "hold 2 records, its metadata says 3" in last[1]
    assert all(kind != "entry" for kind, _ in findings(shell, log))


def test_the_rest_of_a_dead_writer_and_a_crashed_truncation_is_repaired(
    shell: Shell, log: str, tmp_path: Path
) -> None:
    """Its segment is recovered; what is truncated is removed; everything is readable after."""
    write_segments(shell, log, tmp_path, 3)

    async def leave(context: LogContext, paths: LogPaths) -> None:
        async with await open_namespace(shell.uri) as namespace:
            manager = await namespace.open_log(log)
            writer = await manager.open_writer()
            await writer.write(LogRecord(txid=2**60, payload=b"last"))
        node = await context.store.get(paths.head)
        assert node is not None
        head = decode(LogHead, node.value, source="head")
        moved = type(head)(**{
            **{name: getattr(head, name) for name in head.__struct_fields__},
            "first_active": (3, 0, 0),
        })  # fmt: skip
        await context.store.put(paths.head, encode(moved), version=node.version)

    with_log(shell.uri, log, leave)
    kinds = [kind for kind, _ in findings(shell, log)]
    assert kinds == ["writer", "leftover"]
    exit_code, out, err = shell.outcome("log", "repair", log, "--yes")
    assert (exit_code, out) == (0, f"repaired log {log}: recover, remove\n")
    assert "no writer owns the log" in err
    assert findings(shell, log, "--entries") == []
    assert shell.text("log", "tail", log, "--raw").split() == ["a", "b", "last"]


def test_space_by_log_and_by_group(shell: Shell, log: str, tmp_path: Path) -> None:
    """Bytes of records, and what they take on all bookies; sums of groups."""
    write_segments(shell, log, tmp_path, 2)
    (row,) = shell.json("log", "space", log)
    assert (row["log"], row["logs"], row["segments"], row["records"]) == (log, 1, 2, 4)
    assert row["stored_bytes"] == 3 * row["bytes"] > 0
    shell.text("log", "create", f"{log}/other")
    (group,) = shell.json("log", "space", log, "--group-by", "^([^/]+)/")
    assert (group["log"], group["logs"], group["records"]) == ("cli", 2, 4)
    (others,) = shell.json("log", "space", log, "--group-by", "nothing")
    assert others["log"] == "(others)"
    *each, total = shell.json("log", "space", log, "--total")
    assert ([row["log"] for row in each], total["log"]) == ([log, f"{log}/other"], "(total)")
    assert (total["logs"], total["records"]) == (2, 4)
    assert total["stored_bytes"] == sum(row["stored_bytes"] for row in each)
    (none,) = shell.json("log", "space", f"{log}/none", "--total")
    assert (none["log"], none["logs"]) == ("(total)", 0)
    exit_code, _, err = shell.outcome("log", "space", "--group-by", "(")
    assert exit_code == EXIT_USAGE
    assert "'('" in err


def test_lag_of_a_position(shell: Shell, log: str, tmp_path: Path) -> None:
    """In records, bytes and time; none at the end."""
    write_segments(shell, log, tmp_path, 2)
    behind = shell.json("log", "lag", log, "1:0:1")
    assert (behind["records_behind"], behind["truncated"]) == (3, False)
    assert behind["bytes_behind"] > 0
    assert 0 <= behind["seconds_behind"] < 3600
    ahead = shell.json("log", "lag", log, behind["end"])
    assert (ahead["records_behind"], ahead["seconds_behind"]) == (0, 0.0)
    shell.text("log", "truncate", log, "2:0:0", "--yes")
    assert shell.json("log", "lag", log, "1:0:1")["truncated"]
    assert shell.text("log", "lag", log, "1:0:1").splitlines()[-1].split() == ["truncated", "yes"]


def test_subscribers_and_their_lag(shell: Shell, log: str, tmp_path: Path) -> None:
    """Each is shown with how far behind it is, and may be forgotten."""
    write_segments(shell, log, tmp_path, 2)
    assert shell.json("log", "subscriptions", log) == shell.json("log", "lag", log) == []
    exit_code, _, err = shell.outcome("log", "truncate", log, "--read", "--yes")
    assert exit_code == EXIT_USAGE
    assert "has no subscribers" in err

    async def subscribe(context: LogContext, _: LogPaths) -> None:
        async with await open_namespace(shell.uri) as namespace:
            manager = await namespace.open_log(log)
            for name in ("ann", "bob"):
                await manager.move_subscription(name, dlsn=DLSN(2, 0, 0))

    with_log(shell.uri, log, subscribe)
    rows = shell.json("log", "subscriptions", log)
    assert [(row["subscriber"], row["dlsn"]) for row in rows] == [
        ("ann", "2:0:0"), ("bob", "2:0:0"),
    ]  # fmt: skip
    lags = shell.json("log", "lag", log)
    assert [(row["subscriber"], row["records_behind"]) for row in lags] == [("ann", 2), ("bob", 2)]
    shell.text("log", "truncate", log, "--read", "--yes")
    assert shell.json("log", "show", log)["records"] == 2
    exit_code, _, err = shell.outcome("log", "subscriptions", log, "--delete", "ann", "--yes")
    assert exit_code == 0
    assert "ann reads log" in err
    assert [row["subscriber"] for row in shell.json("log", "subscriptions", log)] == ["bob"]
    exit_code, _, err = shell.outcome("log", "subscriptions", log, "--delete", "eve", "--yes")
    assert exit_code == EXIT_USAGE
    assert "subscriber='eve': expected one of ['bob']" in err


def test_a_damaged_ledger_hides_nothing_else(shell: Shell, log: str, tmp_path: Path) -> None:
    """It is named with its segment, and so is what is wrong with others."""
    write_segments(shell, log, tmp_path, 2)
    first, second = (row["ledgers"][0] for row in shell.json("segment", "list", log))

    async def damage(context: LogContext, _: LogPaths) -> None:
        path = context.paths.ledger(first)
        node = await context.store.get(path)
        assert node is not None
        kept.append(node.value)
        await context.store.put(path, b"{}", version=ANY_VERSION)

    async def repair(context: LogContext, _: LogPaths) -> None:
        await context.store.put(context.paths.ledger(first), kept[0], version=ANY_VERSION)

    async def delete(context: LogContext, _: LogPaths) -> None:
        await context.store.delete(context.paths.ledger(second))

    kept: list[bytes] = []
    with_log(shell.uri, log, delete)
    with_log(shell.uri, log, damage)
    damaged, missing = findings(shell, log)
    with_log(shell.uri, log, repair)  # for others look at all ledgers here
    assert damaged[0] == "ledger"
    assert damaged[1].startswith(f"segment 1: its ledger {first} is damaged: ")
    assert missing == ("ledger", f"segment 2: its ledger {second} does not exist")


def audit(shell: Shell) -> dict[int, str]:
    """Return what an audit finds wrong: ledgers and what is wrong with them."""
    exit_code, out, err = shell.outcome("--json", "ledger", "audit")
    rows = json.loads(out)
    assert exit_code == (EXIT_FAILED if rows else 0), err
    return {row["ledger"]: row["problem"] for row in rows}


def test_ledgers_against_logs(
    fresh_sandbox: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ledgers of no log are found and deleted, those in use never; what logs miss is found."""
    shell = Shell(fresh_sandbox(3).uri, capsys)
    shell.text("log", "create", "clicks")
    write_segments(shell, "clicks", tmp_path, 2)
    assert audit(shell) == {}
    first, second = (row["ledgers"][0] for row in shell.json("segment", "list", "clicks"))
    made: list[int] = []

    async def make_orphan(context: LogContext, _: LogPaths) -> None:
        writer = await context.ledgers.create_ledger(QuorumConfig())
        made.append(writer.ledger_id)
        await writer.close()

    with_log(shell.uri, "clicks", make_orphan)
    assert audit(shell) == {made[0]: "orphan"}
    exit_code, _, err = shell.outcome("ledger", "audit", "--delete", "--yes")
    assert (exit_code, err.splitlines()[-1]) == (0, "deleted 1 ledgers")
    assert audit(shell) == {}
    assert shell.text("log", "tail", "clicks", "--raw").split() == ["a", "b"] * 2

    async def delete_ledger(context: LogContext, _: LogPaths) -> None:
        await context.store.delete(context.paths.ledger(first))

    with_log(shell.uri, "clicks", delete_ledger)
    assert audit(shell) == {first: "missing"}
    assert findings(shell, "clicks") == [
        ("ledger", f"segment 1: its ledger {first} does not exist")
    ]

    async def damage(context: LogContext, paths: LogPaths) -> None:
        await context.store.put(paths.segment(2), b"no segment", version=ANY_VERSION)

    with_log(shell.uri, "clicks", damage)
    ((kind, detail),) = findings(shell, "clicks")
    assert (kind, "does not parse" in detail) == ("damage", True)
    exit_code, out, err = shell.outcome("ledger", "audit", "--delete", "--yes")
    assert exit_code == EXIT_FAILED
    assert "damaged" in out
    assert "unknown which ledgers they have" in err
    assert shell.json("ledger", "show", str(second))["state"] == "closed"
    shell.text("log", "create", "other")
    write_segments(shell, "other", tmp_path, 1)
    exit_code, out, err = shell.outcome("--json", "log", "space")
    assert exit_code == EXIT_FAILED
    assert [row["log"] for row in json.loads(out)] == ["other"]
    assert json.loads(err)["kind"] == "CorruptMetadataError"
    assert "log clicks: " in json.loads(err)["error"]
    exit_code, _, err = shell.outcome("log", "delete", "clicks", "--yes")
    assert exit_code == EXIT_FAILED
    assert "--damaged deletes the log as far as it is readable" in err
    exit_code, out, err = shell.outcome("log", "delete", "clicks", "--damaged", "--yes")
    assert (exit_code, out) == (0, "deleted log clicks\n")
    assert "others stay until `dlog ledger audit --delete`" in err
    assert audit(shell) == {second: "orphan"}
    shell.text("ledger", "audit", "--delete", "--yes")
    assert audit(shell) == {}
    exit_code, _, err = shell.outcome("log", "delete", "other", "--damaged", "--yes")
    assert exit_code == EXIT_USAGE
    assert "'other' is not damaged" in err


def test_questions_say_what_will_go(
    shell: Shell, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal anything but yes changes nothing."""
    write_segments(shell, log, tmp_path, 2)

    def say_no(question: str) -> str:
        print(question)  # as `input` does
        return "n"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", say_no)
    for command, reason in {
        f"log delete {log}": f"Delete log {log} with 4 records in 2 segments",
        f"log truncate {log} 2:0:0": f"Drop the 2 records of log {log} before 2:0:0",
        f"log seal {log}": "nothing can be written",
        "staging clean --leftovers-days 3": "3 days ago",
        "bookie collect bookie-1": "bookie bookie-1",
        "bookie decommission bookie-1": "bookie bookie-1 for good, with all that its disk holds of",
        "bookie cookie delete bookie-1": "Forget the disk of bookie bookie-1, which",
    }.items():
        exit_code, _, err = shell.outcome(*command.split())
        assert exit_code == EXIT_INTERRUPTED
        assert reason in err, command
    assert shell.text("log", "count", log) == "4\n"
    assert not shell.json("log", "show", log)["sealed"]


def test_namespaces(shell: Shell) -> None:
    """Made once, found below a path, and shown."""
    servers = shell.uri.rpartition("/")[0]
    made = shell.json("namespace", "create", "--uri", f"{servers}/made/here")
    again = shell.json("namespace", "create", "--uri", f"{servers}/made/here")
    assert made["cluster"] == again["cluster"]
    found = {
        row["path"]: row["cluster"] for row in shell.json("namespace", "list", "--uri", servers)
    }
    assert found["/made/here"] == made["cluster"]
    assert "/dlog" in found
    (below,) = shell.json("namespace", "list", "--uri", f"{servers}/made")
    assert below["path"] == "/made/here"
    shown = shell.json("namespace", "show")
    assert (shown["cluster"], shown["bookies_writable"]) == (found["/dlog"], 4)
    assert run(["namespace", "show", "--uri", f"{servers}/nowhere"]) == EXIT_USAGE


def test_a_replaced_disk(
    fresh_sandbox: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its bookie is refused until the old disk is forgotten; then it starts as a new one."""
    sandbox = fresh_sandbox(3)
    shell = Shell(sandbox.uri, capsys)
    shell.text("log", "create", "clicks")
    write_segments(shell, "clicks", tmp_path, 1)
    bookie = sandbox.bookies[0]
    before = {row["name"]: row for row in shell.json("bookie", "cookie", "list")}
    assert before[bookie.name]["incarnation"] == bookie.incarnation
    exit_code, _, err = shell.outcome("bookie", "cookie", "delete", bookie.name, "--yes")
    assert exit_code == EXIT_FAILED
    assert "stop it first" in err
    bookie.terminate()
    shutil.rmtree(bookie.folder)
    deleted = shell.json("bookie", "cookie", "delete", bookie.name, "--yes")
    assert (deleted["incarnation"], deleted["ledgers"]) == (bookie.incarnation, 1)
    bookie.restart()
    assert bookie.incarnation != deleted["incarnation"]
    after = {row["name"]: row for row in shell.json("bookie", "cookie", "list")}
    assert after[bookie.name]["incarnation"] == bookie.incarnation
    exit_code, _, err = shell.outcome("bookie", "cookie", "delete", "unknown", "--yes")
    assert exit_code == EXIT_USAGE
    assert "'unknown'" in err
