"""The command line against a real cluster: each command, its text, its JSON, its failures."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.backends.direct.namespace import open_namespace as open_async_namespace
from dlcore.base.config import LogConfig
from dlcore.base.ids import BookieId
from dlcore.base.records import LogRecord
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.cli.app import EXIT_FAILED, EXIT_TERMINATED, EXIT_USAGE
from dlcore.sync import open_namespace
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lengths import sample
from tests.fixtures.shell import Shell, lines_file
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

WAIT_S = 60


def test_a_log_from_creation_to_deletion(shell: Shell, log: str, tmp_path: Path) -> None:
    """Each step is seen by the commands after it."""
    assert {"log": log} in shell.json("log", "list")
    assert {"log": log} in shell.json("log", "list", log[:12])
    assert shell.text("log", "list", "-q", log) == f"{log}\n"
    assert shell.json("log", "list", "no-such-prefix") == []
    assert shell.json("log", "create", f"/{log}/made")["log"] == f"{log}/made"  # its name
    again = shell.json("log", "create", f"{log}/made", "--if-missing")
    assert again == {"log": f"{log}/made", "created": False}
    assert shell.outcome("log", "create", f"{log}/made")[0] != 0
    shell.text("log", "delete", f"/{log}/made", "--yes")
    shown = shell.json("log", "show", log)
    assert (shown["records"], shown["first_dlsn"], shown["sealed"]) == (0, None, False)

    path = lines_file(tmp_path, b"one", b"", b"\xff\x00", b"four")
    wrote = shell.json("log", "write", log, "--file", path, "--txid", "line-number")
    assert wrote["records"] == 4
    assert shell.text("log", "count", log) == "4\n"
    tail = [json.loads(line) for line in shell.text("log", "tail", log, "--json").splitlines()]
    assert [record["txid"] for record in tail] == [1, 2, 3, 4]
    assert [record["sequence_id"] for record in tail] == [0, 1, 2, 3]
    assert [record.get("value") for record in tail] == ["one", "", None, "four"]
    assert base64.b64decode(tail[2]["value_base64"]) == b"\xff\x00"
    assert tail[-1]["dlsn"] == wrote["last_dlsn"]

    exit_code, _, err = shell.outcome("log", "truncate", log, "9:9:9", "--yes")
    assert exit_code == EXIT_USAGE
    assert "9:9:9 lies past the end" in err
    assert shell.text("log", "count", log) == "4\n"
    shell.text("log", "truncate", log, tail[2]["dlsn"], "--yes")
    shown = shell.json("log", "show", log)
    assert (shown["records"], shown["first_dlsn"]) == (2, tail[2]["dlsn"])
    assert (shown["last_dlsn"], shown["last_txid"]) == (tail[3]["dlsn"], 4)

    shell.text("log", "delete", log, "--yes")
    assert {"log": log} not in shell.json("log", "list")


def test_the_schema_of_a_log(shell: Shell, log: str, sandbox: Sandbox) -> None:
    """Its columns; a log of bytes has none, and a typed one is shown by them."""
    typed = f"{log}/typed"
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(typed, schema=[("id", pa.int64()), ("tags", pa.list_(pa.string()))])
        with namespace.open_log(typed).open_writer() as writer:
            writer.write_batch(pa.record_batch({"id": [1]}))
    assert shell.json("log", "schema", typed) == [
        {"column": "id", "type": "int64"}, {"column": "tags", "type": "list<item: string>"}
    ]  # fmt: skip
    assert shell.json("log", "schema", log) == []
    assert "is one of bytes" in shell.outcome("log", "schema", log)[2]
    assert shell.text("log", "tail", typed).endswith('{"id": 1, "tags": null}\n')


def test_a_typed_log_is_created_by_a_text_or_a_file(shell: Shell, log: str, tmp_path: Path) -> None:
    """The shown schema can be given again; a mistake is named, and nothing created."""
    text, copy = f"{log}/text", f"{log}/copy"
    shell.text("log", "create", text, "--schema", "city string, at timestamp[us, tz=UTC]")
    shown = shell.json("log", "show", text)["schema"]
    assert shown == "city string, at timestamp[us, tz=UTC]"
    assert shell.json("log", "show", log)["schema"] is None
    path = tmp_path / "schema"
    path.write_text(shown)
    shell.text("log", "create", copy, "--schema-file", str(path))
    assert shell.json("log", "schema", copy) == shell.json("log", "schema", text)
    for arguments, output in {
        ("--schema", "city strin"): "column 'city' has the type 'strin', expected one of",
        (
            "--schema",
            "city string",
            "--schema-file",
            str(path),
        ): "give one of --schema and --schema-file",
    }.items():
        exit_code, _, err = shell.outcome("log", "create", f"{log}/wrong", *arguments)
        assert exit_code == EXIT_USAGE
        assert output in err
    assert {"log": f"{log}/wrong"} not in shell.json("log", "list")
    for each in (text, copy):
        shell.text("log", "delete", each, "--yes")


def test_tail_takes_the_end_or_a_start(shell: Shell, log: str, tmp_path: Path) -> None:
    """-n counts from the end; with a start it counts from there.

    Several writers leave several segments, so the start of the tail is looked for across them.
    """
    for first in (1, 41, 81):
        path = lines_file(tmp_path, *(str(n).encode() for n in range(first, first + 40)))
        shell.text("log", "write", log, "--file", path)

    def payloads(*arguments: str) -> list[int]:
        out = shell.text("log", "tail", log, "--json", *arguments)
        return [int(json.loads(line)["value"]) for line in out.splitlines()]

    assert payloads() == list(range(111, 121))
    assert payloads("-n", "40") == list(range(81, 121))
    assert payloads("-n", "41") == list(range(80, 121))
    assert payloads("-n", "1000") == list(range(1, 121))
    assert payloads("-n", "0") == []
    assert payloads("--from-txid", "0", "-n", "3") == [1, 2, 3]
    assert payloads("--from-dlsn", "2:0:0") == list(range(41, 121))


def test_segments_ledgers_and_bookies(shell: Shell, log: str, tmp_path: Path) -> None:
    """From a log down to the bookies that hold it."""
    shell.text("log", "write", log, "--file", lines_file(tmp_path, b"a", b"b"))
    (segment,) = shell.json("segment", "list", log)
    assert (segment["lssn"], segment["state"], segment["records"]) == (1, "completed", 2)
    ledger = shell.json("ledger", "show", str(segment["ledgers"][0]))
    assert (ledger["state"], ledger["ensemble_size"], ledger["ack_quorum"]) == ("closed", 3, 3)
    rows = shell.json("bookie", "list")
    for row in rows:
        assert (row["rack"], row["state"]) == ("/default-rack", "writable")
        assert 0 < row["free_bytes"] < row["total_bytes"]
    bookies = {row["name"] for row in rows}
    assert {text.split("/")[0] for text in ledger["ensembles"][0]["bookies"]} <= bookies
    assert len(bookies) == 4
    exit_code, out, err = shell.outcome("bookie", "collect", rows[0]["name"], "--yes", "--json")
    assert (exit_code, json.loads(out)["bookie"]) == (0, rows[0]["name"])
    assert re.search("it holds [0-9]+ ledgers, and [0-9]+ refer to it", json.loads(err)["note"])
    exit_code, _, err = shell.outcome("bookie", "collect", "no-such-bookie", "--yes")
    assert exit_code == EXIT_USAGE
    assert "how much is unknown, for it is not registered; 0 ledgers refer to it" in err
    assert "no-such-bookie" in err
    header, *lines = shell.text("bookie", "list").splitlines()
    assert header.split() == ["name", "address", "rack", "state", "free", "incarnation"]
    assert all("writable" in line and " GiB" in line for line in lines)


def test_pipes_get_plain_columns(shell: Shell, log: str, tmp_path: Path) -> None:
    """Without a terminal there are no boxes and no colours, and one line per row."""
    shell.text("log", "write", log, "--file", lines_file(tmp_path, b"a"))
    for arguments in (["bookie", "list"], ["segment", "list", log], ["log", "show", log]):
        out = shell.text(*arguments)
        assert out.isascii()
        assert "\x1b" not in out
    assert shell.text("segment", "list", log).splitlines()[0].split()[:2] == ["lssn", "state"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["log", "show", "no-such-log"],
        ["log", "count", "no-such-log"],
        ["log", "tail", "no-such-log"],
        ["log", "write", "no-such-log", "--file", os.devnull],
        ["log", "delete", "no-such-log", "--yes"],
        ["segment", "list", "no-such-log"],
        ["ledger", "show", "999999999"],
    ],
)
def test_failures_are_one_line_and_exit_code_1(shell: Shell, arguments: list[str]) -> None:
    """The line names what is missing."""
    exit_code, out, err = shell.outcome(*arguments)
    assert (exit_code, out) == (EXIT_FAILED, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert arguments[2] in err


def test_creating_twice_and_going_back_in_txid_fail(shell: Shell, log: str, tmp_path: Path) -> None:
    """Refusals change nothing."""
    exit_code, _, err = shell.outcome("log", "create", log)
    assert exit_code == EXIT_FAILED
    assert log in err
    path = lines_file(tmp_path, b"a", b"b")
    shell.text("log", "write", log, "--file", path, "--txid", "line-number")
    exit_code, _, err = shell.outcome("log", "write", log, "--file", path, "--txid", "line-number")
    assert exit_code == EXIT_FAILED
    assert "1" in err
    assert shell.text("log", "count", log) == "2\n"


def test_debug_shows_the_traceback(shell: Shell) -> None:
    """--debug is for those who mend dlog."""
    with pytest.raises(Exception, match="no-such-log"):
        shell.outcome("--debug", "log", "show", "no-such-log")


def dlog_process(uri: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the command as a shell would."""
    return subprocess.Popen(
        [LOADED_PYTHON, "-c", "from dlcore.ops.cli import main; main()", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"DLOG_URI": uri},
    )


def test_follow_sees_each_line_as_it_is_written(sandbox: Sandbox, log: str) -> None:
    """Two processes: a line piped into one comes out of the other while both keep running."""
    with (
        dlog_process(sandbox.uri, "log", "write", log) as writer,
        dlog_process(sandbox.uri, "log", "tail", log, "-f", "--json") as reader,
    ):
        try:
            assert writer.stdin is not None
            assert reader.stdout is not None
            for text in (b"first", b"second"):
                writer.stdin.write(text + b"\n")
                writer.stdin.flush()
                assert json.loads(reader.stdout.readline())["value"] == text.decode()
            writer.stdin.close()
            assert writer.wait(WAIT_S) == 0
            reader.send_signal(2)
            assert reader.wait(WAIT_S) == 130
        finally:
            for process in (writer, reader):
                process.kill()


def test_a_terminated_writer_writes_what_it_has_read(sandbox: Sandbox, log: str) -> None:
    """SIGTERM ends it with code 143 when that is durable, and its lock is free."""
    with dlog_process(sandbox.uri, "log", "write", log) as writer:
        try:
            assert writer.stdin is not None
            writer.stdin.write(b"first\nsecond\n")
            writer.stdin.flush()
            with open_namespace(sandbox.uri) as namespace, namespace.open_log(log) as manager:
                wait_until(lambda: manager.get_log_record_count() == 2, timeout_s=WAIT_S)
                writer.send_signal(signal.SIGTERM)
                assert writer.wait(WAIT_S) == EXIT_TERMINATED
            with (
                open_namespace(sandbox.uri) as namespace,
                namespace.open_log(log, config=LogConfig(lock_timeout_s=0)) as manager,
                manager.open_writer() as next_writer,
            ):
                next_writer.write(LogRecord(txid=2**60, payload=b"third"))
                next_writer.commit()
                assert manager.get_log_record_count() == 3
        finally:
            writer.kill()


@pytest.mark.parametrize("dies", sample(["bookies", "everything"], 1))
def test_following_ends_with_an_error_when_the_cluster_is_gone(
    dies: str, fresh_sandbox: Callable[..., Sandbox]
) -> None:
    """It shows what there is, says which part does not answer, and ends with code 1."""
    sandbox = fresh_sandbox()
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log("clicks")
        with namespace.open_log("clicks") as log, log.open_writer() as writer:
            writer.write(LogRecord(txid=1, payload=b"first"))
            writer.commit()
            command = ["log", "tail", "clicks", "-f", "--unavailable-timeout", "5", "--json"]
            with dlog_process(sandbox.uri, *command) as reader:
                try:
                    assert reader.stdout is not None
                    assert reader.stderr is not None
                    assert json.loads(reader.stdout.readline())["value"] == "first"
                    # At once: it tells what it has heard nothing of when the first is due.
                    ends = [bookie.pid for bookie in sandbox.bookies]
                    if dies == "everything":
                        ends.append(sandbox.metadata_server.pid)
                    for pid in ends:
                        os.kill(pid, signal.SIGKILL)
                    assert reader.wait(WAIT_S) == EXIT_FAILED
                    error = reader.stderr.read().decode()
                finally:
                    reader.kill()
            writer.abort()
    lost = {
        "bookies": "the bookies that it follows",
        "everything": "ZooKeeper and the bookies that it follows",
    }
    # Beside warnings that were logged: of a session that is lost, too.
    (output,) = [output for output in map(json.loads, error.splitlines()) if "exit_code" in output]
    assert f"has heard nothing of {lost[dies]} for 5 s" in output["error"]
    assert output["exit_code"] == EXIT_FAILED


def test_staging(shell: Shell) -> None:
    """Staged records are listed until they are committed; old records go, younger ones stay."""
    identity = f"job-{uuid4().hex}"
    shell.text("log", "create", identity)
    with open_namespace(shell.uri) as namespace:
        with namespace.open_staging_writer(identity=identity) as writer:
            writer.write_batch(identity, pa.record_batch({"value": [b"a"]}))
            extents = writer.stage()
            (row,) = [r for r in shell.json("staging", "list") if r["identity"] == identity]
            assert (row["ledger"], row["state"]) == (extents[0].ledger_id, "filled")
        (row,) = [r for r in shell.json("staging", "list") if r["identity"] == identity]
        assert (row["state"], row["extents"]) == ("closed", 0)
        assert identity in shell.text("staging", "list")
        with namespace.begin_append(identity, 1) as append:
            assert append.commit(extents).committed
    assert all(r["identity"] != identity for r in shell.json("staging", "list"))
    assert shell.json("staging", "clean", "--yes")["records"] == 0
    exit_code, out, err = shell.outcome("staging", "clean", "--commits-days", "0", "--yes")
    assert exit_code == 0
    output = re.search("left over 1 days ago: 0 staged.* records .* 0 days old: ([0-9]+)", err)
    assert output is not None
    assert f"removed {output[1]} records of commits" in out
    assert int(output[1]) > 0
    with open_namespace(shell.uri) as namespace, namespace.begin_append(identity, 1) as append:
        assert append.commit([]).committed  # its record is gone


def test_a_ledger_is_looked_at_checked_and_ended(shell: Shell, log: str, tmp_path: Path) -> None:
    """Each of its replicas answers; ending one that is closed changes nothing."""
    shell.text("log", "write", log, "--file", lines_file(tmp_path, b"a", b"b"))
    (segment,) = shell.json("segment", "list", log)
    ledger_id = str(segment["ledgers"][0])
    shown = shell.text("ledger", "show", ledger_id)
    assert "state          closed" in shown
    assert shown.count("bookie-") == 3
    checked = shell.json("ledger", "check", ledger_id)
    assert (checked["state"], checked["replicated"]) == ("closed", True)
    assert [row["state"] for row in checked["replicas"]] == ["holds"] * 3
    table = shell.text("ledger", "check", ledger_id).splitlines()
    assert "replicated  yes" in table
    assert len([line for line in table if " holds" in line]) == 3
    ended = shell.json("ledger", "recover", ledger_id)
    last_entry = checked["replicas"][0]["last_entry"]
    assert ended["last_entry"] == last_entry
    assert shell.text("ledger", "recover", ledger_id) == (
        f"ledger {ledger_id} is closed, its last entry is {last_entry}\n"
    )


def test_a_ledger_that_lost_a_replica_fails_its_check(
    fresh_sandbox: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The bookie that does not answer is named."""
    sandbox = fresh_sandbox(3)
    shell = Shell(sandbox.uri, capsys)
    shell.text("log", "create", "clicks")
    shell.text("log", "write", "clicks", "--file", lines_file(tmp_path, b"a"))
    ledger_id = str(shell.json("segment", "list", "clicks")[0]["ledgers"][0])
    sandbox.bookies[0].kill()
    exit_code, out, _ = shell.outcome("--json", "ledger", "check", ledger_id)
    assert exit_code == EXIT_FAILED
    checked = json.loads(out)
    assert not checked["replicated"]
    states = {row["bookie"].split("/")[0]: row["state"] for row in checked["replicas"]}
    assert states[sandbox.bookies[0].name] == "unknown"
    assert sorted(states.values()) == ["holds", "holds", "unknown"]


def test_auto_recovery_says_what_it_is_at(
    fresh_sandbox: Callable[..., Sandbox], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it is paused, and which ledgers lack replicas, and why."""
    sandbox = fresh_sandbox(1)
    shell = Shell(sandbox.uri, capsys)
    unchecked = {"auditor": None, "paused": False, "last_check": None, "checked_ledgers": None}
    nothing = {"left_out": [], "under_replicated": 0, "ledgers": []}
    scrub = ("scrub_began", "scrubbed_objects", "scrub_bytes_left")
    unscrubbed = dict.fromkeys((*scrub, "damaged_objects", "skipped_objects"))
    unexported = {"export": None, "exported": None}
    known = {**unchecked, **nothing, **unscrubbed, **unexported}
    assert shell.json("autorecovery", "status") == known
    assert "goes on" not in shell.text("autorecovery", "pause")
    assert shell.json("autorecovery", "status")["paused"]
    assert "paused            yes" in shell.text("autorecovery", "status").splitlines()
    assert shell.json("autorecovery", "pause", "--off") == {"paused": False}
    assert not shell.json("autorecovery", "status")["paused"]

    async def publish() -> None:
        async with await open_async_namespace(sandbox.uri) as namespace:
            context = namespace.ports
            repairs = RepairList(context.store, context.paths, context.clock)
            await repairs.publish(17, missing=[BookieId("bookie-9", "f" * 32)])
            found = await repairs.read(17)
            assert found is not None
            await repairs.note_failure(found, "no bookie can take the place")

    asyncio.run(publish())
    (row,) = shell.json("autorecovery", "status")["ledgers"]
    assert (row["ledger"], row["missing"]) == (17, ["bookie-9/ffffffff"])
    text = shell.text("autorecovery", "status")
    assert "under replicated  1" in text.splitlines()
    assert "no bookie can take the place" in text
