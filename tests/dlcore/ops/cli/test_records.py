"""Records in and out of the command line, on a real cluster: framings, formats, positions."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from dlcore import sync
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base import backoff
from dlcore.log.writing import lock
from dlcore.metadata.port import ANY_VERSION
from dlcore.ops.cli.app import EXIT_FAILED, EXIT_USAGE
from dlcore.ops.cli.framing import framed
from tests.fixtures.aio import run
from tests.fixtures.shell import Shell, lines_file

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

ANY_BYTES = [b"one", b"", b"\xff\n\0", b"{x}"]


def dlog(uri: str, *arguments: str, data: bytes = b"") -> bytes:
    """Run the command as a shell would; return its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "dlcore.ops.cli", *arguments],
        input=data,
        capture_output=True,
        env=os.environ | {"DLOG_URI": uri},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_any_bytes_come_back(sandbox: Sandbox, log: str) -> None:
    """Framed in and framed out; the same raw; and all of the input as one record."""
    data = b"".join(map(framed, ANY_BYTES))
    dlog(sandbox.uri, "log", "write", log, "--framed", data=data)
    assert dlog(sandbox.uri, "log", "tail", log, "--framed") == data
    assert dlog(sandbox.uri, "log", "dump", log, "--framed") == data
    raw = dlog(sandbox.uri, "log", "tail", log, "--raw", "--delimiter", "\\x1e")
    assert raw == b"".join(record + b"\x1e" for record in ANY_BYTES)
    dlog(sandbox.uri, "log", "write", log, "--whole", data=b"a\nb\n")
    dlog(sandbox.uri, "log", "write", log, "--delimiter", "\\0", data=b"c\0d\n\0")
    last = dlog(sandbox.uri, "log", "tail", log, "-n", "3", "--framed")
    assert last == b"".join(map(framed, [b"a\nb\n", b"c", b"d\n"]))


def test_formats_and_starts(shell: Shell, log: str, tmp_path: Path) -> None:
    """A line of one's own for each record; positions by transaction id and by time."""
    for number in (1, 2, 3):
        path = tmp_path / "record"
        path.write_bytes(b"%d" % number)
        shell.text("log", "write", log, "--file", str(path))
    path.write_bytes(b"")
    assert shell.text("log", "write", log, "--file", str(path)) == f"wrote 0 records to log {log}\n"
    out = shell.text("log", "tail", log, "--format", "{dlsn} {value_hex} {size:>3}")
    assert out.splitlines() == ["1:0:0 31   1", "2:0:0 32   1", "3:0:0 33   1"]
    escaped = shell.text("log", "tail", log, "-n", "1", "--format", r"{dlsn}\t{size}\n\\n\x")
    assert escaped == "3:0:0\t1\n\\n\\x\n"
    wide = shell.text("log", "tail", log, "-n", "1", "--format", r"{dlsn:\t>7}|{size:03d}")
    assert wide == "\t\t3:0:0|001\n"
    rows = [json.loads(line) for line in shell.text("log", "dump", log, "--json").splitlines()]
    second = rows[1]
    for option in (
        ["--from-txid", str(second["txid"])],
        ["--from-timestamp", str(second["timestamp_ms"])],
        ["--from-dlsn", second["dlsn"]],
    ):
        assert shell.text("log", "tail", log, *option, "--raw").split() == ["2", "3"]
    assert shell.text("log", "tail", log, "--from-timestamp", "-1h", "--raw").split() == [
        "1",
        "2",
        "3",
    ]
    for past in (["--from-dlsn", "9:0:0"], ["--from-timestamp", "2999-01-31T12:00:00Z"]):
        exit_code, out, err = shell.outcome("log", "tail", log, *past)
        assert (exit_code, out) == (0, "")
        assert f"no record of log {log} is at the given start or behind it" in err
    by_txid = shell.json("log", "position", log, "--txid", str(second["txid"]))
    assert (by_txid["dlsn"], by_txid["is_end"]) == (second["dlsn"], False)
    by_time = shell.json("log", "position", log, "--timestamp", str(second["timestamp_ms"]))
    assert by_time["dlsn"] == second["dlsn"]
    late = shell.json("log", "position", log, "--timestamp", "2999-01-31T12:00:00Z")
    assert (late["dlsn"], late["is_end"]) == ("3:1:0", True)
    assert shell.text("log", "position", log, "--timestamp", "1999-01-31") == "1:0:0\n"
    part = shell.text("log", "dump", log, "--from-dlsn", "1:0:0", "--to-dlsn", "3:0:0", "--raw")
    assert part.split() == ["1", "2"]
    assert shell.text("log", "count", log, "2:0:0") == "2\n"
    assert shell.text("log", "count", log, "1:0:0", "2:0:0") == "1\n"


def test_entries_of_a_log_and_of_its_ledger(shell: Shell, log: str, tmp_path: Path) -> None:
    """The same entries from both ends."""
    path = tmp_path / "records"
    path.write_bytes(b"a\nb\nc\n")
    shell.text("log", "write", log, "--file", str(path), "--txid", "line-number")
    out = shell.text("log", "dump", log, "--entries", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert sum(row["records"] for row in rows) == 3
    assert (rows[0]["dlsn"], rows[0]["first_txid"], rows[-1]["last_txid"]) == ("1:0:0", 1, 3)
    ledger_id = str(rows[0]["ledger"])
    entries = [
        json.loads(line) for line in shell.text("ledger", "read", ledger_id, "--json").splitlines()
    ]
    assert [(e["entry"], e["records"], e["bytes"]) for e in entries] == [
        (row["entry"], row["records"], row["bytes"]) for row in rows
    ]
    header, *lines = shell.text("ledger", "read", ledger_id).splitlines()
    assert header.split() == ["entry", "bytes", "lac", "records", "txids"]
    assert len(lines) == len(rows)
    assert shell.text("log", "dump", log, "--entries").splitlines()[1].startswith("1:0:0")
    (listed,) = shell.json("ledger", "list", "--from", ledger_id, "-n", "1")
    assert (listed["ledger"], listed["state"]) == (int(ledger_id), "closed")


def test_a_damaged_ledger_hides_no_other(
    shell: Shell, log: str, tmp_path: Path, namespace_uri: str
) -> None:
    """It is shown beside them."""
    path = lines_file(tmp_path, b"a")
    for _ in range(2):
        shell.text("log", "write", log, "--file", path)
    first, second = (row["ledgers"][0] for row in shell.json("segment", "list", log))

    async def damage() -> None:
        async with await open_namespace(namespace_uri) as namespace:
            context = namespace.log_context
            await context.store.put(context.paths.ledger(first), b"x", version=ANY_VERSION)

    run(damage())
    try:
        asked = ("ledger", "list", "--from", str(first))
        exit_code, out, err = shell.outcome("--json", *asked)
        assert exit_code == EXIT_FAILED
        assert [row["ledger"] for row in json.loads(out)] == [second]
        assert json.loads(err)["kind"] == "CorruptMetadataError"
        assert f"ledger {first}: LedgerMetadata at " in json.loads(err)["error"]
        exit_code, out, err = shell.outcome(*asked)
        assert (exit_code, len(out.splitlines())) == (EXIT_FAILED, 2)
        assert err.startswith(f"error: ledger {first}: ")
    finally:
        shell.text("log", "delete", log, "--yes")


def test_a_sealed_log_takes_nothing_more(shell: Shell, log: str, tmp_path: Path) -> None:
    """Readers see its end, writers get an error."""
    path = tmp_path / "records"
    path.write_bytes(b"a\n")
    shell.text("log", "write", log, "--file", str(path))
    exit_code, out, err = shell.outcome("log", "seal", log, "--yes")
    assert (exit_code, out) == (0, f"sealed log {log}\n")
    assert f"Seal log {log}: nothing can be written" in err
    assert shell.json("log", "show", log)["sealed"]
    assert shell.text("log", "tail", log, "-f", "--raw") == "a\n"
    exit_code, _, err = shell.outcome("--json", "log", "write", log, "--file", str(path))
    assert exit_code == EXIT_FAILED
    assert json.loads(err)["kind"] == "EndOfStreamError"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["log", "tail", "c", "--raw", "--framed"], "one of --format, --raw"),
        (["log", "tail", "c", "--raw", "--json"], "one of --format, --raw"),
        (["log", "tail", "c", "--delimiter", ","], "give both"),
        (["log", "tail", "c", "--format", "{offset}"], "no field 'offset', expected dlsn, txid"),
        (["log", "tail", "c", "--format", "{dlsn"], "--format '{dlsn'"),
        (["log", "tail", "c", "--format", "{dlsn:>>>}"], "--format"),
        (["log", "tail", "c", "--format", "{txid:{width}}"], "--format '{txid:{width}}'"),
        (["log", "tail", "c", "--from-timestamp", "noon"], "'noon' is no time"),
        (["log", "tail", "c", "--from-timestamp", "1", "--from-txid", "1"], "one of --from-dlsn"),
        (["log", "dump", "c", "--entries", "--raw"], "--entries shows no records"),
        (["log", "write", "c", "--framed", "--whole"], "give one of"),
        (["log", "write", "c", "--delimiter", ""], "at least one character"),
        (["log", "position", "c"], "--txid and --timestamp"),
        (["log", "position", "c", "--txid", "1", "--timestamp", "1"], "--txid and --timestamp"),
        (["ledger", "read", "1", "--raw", "--json"], "one of --raw and --json"),
    ],
)
def test_options_that_contradict_each_other(
    shell: Shell, arguments: list[str], complaint: str
) -> None:
    """They are named, and nothing is done."""
    exit_code, out, err = shell.outcome(*arguments)
    assert (exit_code, out) == (EXIT_USAGE, "")
    assert complaint in err


def test_a_writer_of_a_log_that_another_has_learns_of_it(
    shell: Shell, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the answer, while the command waits; it goes on once the other one is done."""
    reported = threading.Event()

    def note(_: logging.LogRecord) -> bool:
        reported.set()
        return True

    with (
        sync.open_namespace(shell.uri) as namespace,
        namespace.open_log(log) as manager,
        monkeypatch.context() as patch,
    ):
        writer = manager.open_writer()

        def close() -> None:
            reported.wait(60)
            writer.close()

        patch.setattr(backoff, "REPORTED_AFTER_S", 0.1)
        patch.setattr(lock.logger, "filters", [note])
        patch.setattr(logging.getLogger(), "handlers", [])  # as in a program
        closing = threading.Thread(target=close)
        closing.start()
        path = lines_file(tmp_path, b"mine")
        exit_code, out, err = shell.outcome("log", "write", log, "--file", path)
        closing.join()
    assert (exit_code, out.startswith("wrote 1 record")) == (0, True)
    owner = rf"log '{log}' is owned by \S+:{os.getpid()} since \S+Z, this client itself"
    assert re.fullmatch(rf"{owner}; waiting for 20 s more; to do: .+\n", err)
