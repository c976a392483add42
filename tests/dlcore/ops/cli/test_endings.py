"""Commands whose output, input or cluster is gone end with a line and a code.

Goal: every command of the tree, with no traceback, within a limit.  Method: one table says how each
is called so that it prints something, and must have all of them; each is run under each of these
faults, in a process of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.base.records import LogRecord
from dlcore.ledger.metadata.values import BookieCookie
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.stored import encode
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.cli.app import EXIT_FAILED
from dlcore.sync import open_namespace
from tests.fixtures.aio import run
from tests.fixtures.forking import LOADED_PYTHON
from tests.fixtures.lengths import sample
from tests.fixtures.shell import leaves, paths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

DLOG = f"{shlex.quote(sys.executable)} -m dlcore.ops.cli"
LIMIT_S = 60
ALL_S = 240
PATIENCE_S = "5"
FULL = "cannot write the output: No space left on device"
LEFT = "cannot write the output: Broken pipe"
SAMPLE = 8
ARGUMENTS = {
    # Rules hold for the proxies of other tests, too; their own tests remove them.
    "acl allow": "--help",
    "acl clear": "--help",
    "acl deny": "--help",
    "acl list": "--json",
    "acl remove": "--help",
    "acl test": "anonymous read",
    "audit verify": "/dev/null",
    "autorecovery pause": "--off",
    "autorecovery run": "",
    "autorecovery status": "",
    "bookie collect": "{bookie} --yes",
    "bookie cookie delete": "{gone} --yes",
    "bookie cookie list": "",
    "bookie decommission": "{gone} --yes",
    "bookie list": "",
    "bookie read-only": "{bookie} --off",
    "bookie run": "--name b --metadata-uri {uri} --data-dir {folder}",
    # It restarts processes of other tests.
    "cluster forget-tier": "s3://b/k --yes",
    "cluster restart": "--help",
    "cluster settings": "--json",
    "cluster tiers": "--json",
    "console": "--address 127.0.0.1:0",
    "debug bundle": "{folder}",
    # It needs an archive, which its own tests make.
    "debug explain": "--help",
    "ledger audit": "--json",
    "ledger check": "{ledger}",
    "ledger list": "",
    "ledger read": "{ledger} --raw",
    "ledger recover": "{ledger}",
    "ledger show": "{ledger}",
    "log cat": "{stream}",
    "log copy": "{log} {fresh}",
    "log count": "{log}",
    "log create": "{new}",
    "log delete": "{fresh} --yes",
    "log dump": "{log}",
    "log inspect": "{log} --json",
    # It needs cold segments, which its own tests have.
    "log fork": "--help",
    "log lag": "{log} 1:0:0",
    "log list": "",
    "log position": "{log} --txid 1",
    "log purge": "{fresh} 1 --yes",
    # It rewrites, and waits for bookies; its own tests do.
    "log redact": "--help",
    "log rename": "{fresh} {new}",
    "log repair": "{fresh} --yes",
    "log reset-txid": "{fresh} 1 --yes",
    "log retention": "{log}",
    "log schema": "{log} --json",
    "log seal": "{fresh} --yes --json",
    "log settings": "{log}",
    "log show": "{log}",
    "log space": "{log}",
    "log subscriptions": "{log} --json",
    # It needs a table, which its own tests have.
    "log table": "--help",
    "log tail": "{log}",
    "log truncate": "{fresh} 1:0:0 --yes",
    "log watch": "{log}",
    "log write": "{fresh}",
    "metadata accept": "--yes",
    "metadata export": "{folder}",
    # It needs an export, which its own tests make.
    "metadata import": "--help",
    "metadata serve": "--data-dir {folder} --port 0",
    "namespace create": "",
    "namespace keys": "",
    "namespace list": "",
    # It needs a ZooKeeper with users, which its own tests have.
    "namespace secure": "--help",
    "namespace show": "",
    "namespace watch": "{log}",
    # These need a proxy of their own, which their own tests have.
    "proxy drain": "--help",
    "proxy list": "--json",
    "proxy release": "--help",
    "proxy run": "",
    "proxy undrain": "--help",
    # It needs an export in a store, which its own tests make.
    "restore": "--help",
    "sandbox": "--bookies 1 --proxies 0 --no-autorecovery",
    "secure init": "{folder} --host a.example --uri {uri}",
    # It needs the folder of a cluster, which its own tests have.
    "secure token": "--help",
    "segment list": "{log}",
    # It needs an endpoint.
    "sql": "--help",
    "staging clean": "--leftovers-days 3 --yes",
    "staging list": "--json",
    "top": "--once --interval 0.1",
    "upgrade check": "--json",
    # All tests would use what it finalizes; its own tests have namespaces of their own.
    "upgrade finalize": "--help",
}
"""How each command is called so that it prints something, of what `World` has."""
WITHOUT_A_CLUSTER = (
    "metadata serve",
    "sandbox",
    "debug bundle",  # which is made for such a cluster
    *(each for each, line in ARGUMENTS.items() if line == "--help"),
)
SAID_BEFORE = (
    "Drop ",
    "Let transaction ids ",
    '{"note": "Seal ',
    "Delete ",
    "Give up ",
    "Forget ",
    "Let the bookies ",
    "20",
)
"""The removed things, and the lines of a service, by their time."""


def run_many(
    wanted: Sequence[tuple[str, list[str]]], folder: Path, uri: str
) -> list[tuple[int, list[str]]]:
    """Run commands with (output, arguments); return their exit codes and lines of errors."""
    folder.mkdir()
    done = subprocess.run(
        [LOADED_PYTHON, "-m", "tests.dlcore.ops.cli.many_commands", str(folder), str(LIMIT_S)],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        timeout=ALL_S,
        env=os.environ | {"DLOG_URI": uri},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, errors.splitlines()) for code, errors in json.loads(done.stdout)]


class World:
    """Arguments of commands on a cluster: things they share, and one for each to spoil."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self.uri = sandbox.uri
        self._folder = folder
        with open_namespace(self.uri) as namespace:
            self._log, self._stream = self.name("log"), self.name("stream")
            for name in (self._log, self._stream):
                namespace.create_log(name)
            with namespace.open_log(self._log) as log, log.open_writer() as writer:
                writer.write(LogRecord(txid=1, payload=b"x"))
                writer.commit()
            with namespace.open_log(self._stream) as log, log.open_stream_writer() as stream:
                stream.write(b"x")
            with namespace.open_log(self._log) as log:
                self._ledger = log.get_log_segments()[0].extents[0].ledger_id
            self._bookie = namespace.get_bookies()[0].bookie.name

    def name(self, kind: str) -> str:
        """Return an unused name."""
        return f"{kind}-{uuid4().hex}"

    def arguments(self, command: str) -> list[str]:
        """Return a command line; what it needs to itself is made."""
        text = f"{command} {ARGUMENTS[command]}"
        values = {
            "uri": self.uri,
            "folder": str(self._folder / self.name("data")),
            "log": self._log,
            "stream": self._stream,
            "ledger": str(self._ledger),
            "bookie": self._bookie,
            "new": self.name("new"),
            "fresh": self.name("fresh"),
            "gone": self.name("gone"),
        }
        if "{fresh}" in text:
            with open_namespace(self.uri) as namespace:
                namespace.create_log(values["fresh"])
        if "{gone}" in text:
            run(self._lose(values["gone"]))
        if command == "bookie run":  # in a namespace of its own: others count their bookies
            values["uri"] = f"{self.uri}-{self.name('endings')}"
            open_namespace(values["uri"], create=True).close()
        return text.format(**values).split()

    async def _lose(self, name: str) -> None:
        """Let the cluster know a bookie that is gone."""
        parsed = parse_uri(self.uri)
        store = await ZooKeeperStore.connect(parsed.servers)
        paths = NamespacePaths(parsed.root)
        cookie = BookieCookie(name=name, incarnation="1" * 32, cluster_id="c", created_ms=1)
        await store.create(paths.cookie(name), encode(cookie))
        await store.aclose()


def in_bash(dlog: str, script: str, uri: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose `dlog` is this command; it may not take long."""
    return subprocess.run(
        ["bash", "-c", f'dlog() {{ {dlog} "$@"; }}; {script}'],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"DLOG_URI": uri},
        check=False,
    )


def test_no_command_is_forgotten() -> None:
    """The author of a command says here how it is called."""
    differing = set(leaves()) ^ set(ARGUMENTS)
    assert not differing, "ARGUMENTS of this file needs a line for each command, and no other"


def test_help_without_an_output(tmp_path: Path) -> None:
    """The help of the command, of each group and of each of their commands."""
    asked = ["--version", *(f"{path} --help" for path in paths())]
    wanted = [("full", each.split()) for each in asked] + [("left", ["--help"])]
    for (output, arguments), (code, lines) in zip(
        wanted, run_many(wanted, tmp_path / "errors", ""), strict=True
    ):
        expected = [f"error: {FULL}"] if output == "full" else []
        assert (code, lines) == (EXIT_FAILED, expected), arguments


@pytest.mark.integration
def test_outputs_that_are_gone(sandbox: Sandbox, tmp_path: Path) -> None:
    """A full disk is reported, a reader that left is not; neither leaves a traceback."""
    world = World(sandbox, tmp_path)
    wanted = [("full", world.arguments(each)) for each in sample(ARGUMENTS, 2 * SAMPLE)]
    wanted += [("left", world.arguments(each)) for each in sample(ARGUMENTS, SAMPLE)]
    outcomes = run_many(wanted, tmp_path / "errors", sandbox.uri)
    for (output, arguments), (code, lines) in zip(wanted, outcomes, strict=True):
        assert code == EXIT_FAILED, (arguments, lines)
        # A command that destroys has said what will go.
        left = [line for line in lines if not line.startswith(SAID_BEFORE)]
        if output == "left":
            # A bookie does not end in silence.
            assert left == [] or left == [f"bookie b failed: {LEFT}"], arguments
            continue
        assert len(left) == 1, (arguments, left)
        (line,) = left
        assert FULL in line, arguments
        if "--json" in arguments:
            assert json.loads(line)["kind"] == "OSError"


@pytest.mark.integration
def test_a_reader_that_leaves_in_the_middle(
    sandbox: Sandbox, dlog_program: Path, tmp_path: Path
) -> None:
    """As `head` does; and a command that has no output and no input at all."""
    log = World(sandbox, tmp_path).name("long")
    path = tmp_path / "records"
    path.write_bytes((b"x" * 200 + b"\n") * 5000)
    forked = shlex.quote(str(dlog_program))
    script = f"dlog log create {log} && dlog log write {log} --file {path}"
    made = in_bash(forked, script, sandbox.uri)
    assert made.returncode == 0, made.stderr
    for command in (f"log dump {log} --raw", f"log tail {log} -n 5000 --json"):
        script = f"dlog {command} | head -n 1; exit ${{PIPESTATUS[0]}}"
        done = in_bash(forked, script, sandbox.uri)
        assert done.returncode == EXIT_FAILED
        assert done.stderr == ""
        assert len(done.stdout.splitlines()) == 1
    assert in_bash(DLOG, "dlog log list >&- <&-", sandbox.uri).returncode in (0, EXIT_FAILED)


@pytest.mark.integration
def test_a_cluster_that_does_not_answer(
    fresh_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """Each command ends within its patience, with one line that names the namespace's servers."""
    sandbox = fresh_sandbox(3)
    world = World(sandbox, tmp_path)
    commands = sample([each for each in ARGUMENTS if each not in WITHOUT_A_CLUSTER], SAMPLE)
    wanted = [("kept", ["--patience", PATIENCE_S, *world.arguments(each)]) for each in commands]
    (bookie, *_) = sandbox.bookies
    for each in sandbox.bookies:
        each.kill()
    ((code, lines),) = run_many(
        [("kept", world.arguments("log tail"))], tmp_path / "tail", sandbox.uri
    )
    assert code == EXIT_FAILED
    (line,) = [each for each in lines if each.startswith("error: ")]
    assert bookie.name in line
    for how in (sandbox.metadata_server.pause, sandbox.metadata_server.kill):
        how()
        outcomes = run_many(wanted, tmp_path / how.__name__, sandbox.uri)
        for (_, arguments), (code, lines) in zip(wanted, outcomes, strict=True):
            assert code == EXIT_FAILED, (arguments, lines)
            assert "Traceback (most recent call last):" not in lines, (arguments, lines)
            begins = ("error: ", '{"error": ', "bookie b failed: ")
            assert lines[-1].startswith(begins), arguments
            assert sandbox.metadata_server.servers in lines[-1], arguments
