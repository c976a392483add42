"""The page about replacing a disk, rehearsed: its commands are run while the log is written.

Commands of `dlog` run as they stand.  For the host's a folder stands for a disk: mounting moves it
into its place, unmounting moves it away.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from dlcore import LogRecord
from dlcore.base.errors import BookieUnavailableError
from dlcore.sync import open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.shell import Shell
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Bookie, Sandbox

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
PAGE = REPOSITORY / "docs" / "replacing-a-disk.md"
NAME, LOG = "bookie-1", "clicks"
WAIT_S = 120.0


def commands_of(heading: str) -> list[str]:
    """Return the commands of a part of the page, a line each."""
    page = PAGE.read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


class Operator:
    """An operator that follows the page, on the host of one bookie."""

    def __init__(self, bookie: Bookie, shell: Shell, aside: Path) -> None:
        self._bookie = bookie
        self._shell = shell
        self._aside = aside
        self._disk: Path | None = None

    def follow(self, heading: str) -> str:
        """Run the commands of a part; return the output of those of `dlog`."""
        return "".join(self._run(line) for line in commands_of(heading))

    def _run(self, line: str) -> str:
        if line.startswith("for "):
            return self.check_all()
        program, *words = shlex.split(line.replace("BOOKIE", NAME))
        if program == "dlog":
            return self._shell.text(*words)
        places = {"/var/lib/dlog/bookie": self._bookie.folder, "/mnt": self._aside / "mnt"}
        match program, words:
            case "systemctl", ["stop", "dlog-bookie"]:
                self._bookie.terminate()
            case "systemctl", ["start", "dlog-bookie"]:
                self._bookie.restart()
            case "mkfs.ext4", ["DEVICE"]:
                self._disk = self._aside / "device"
                (self._disk / "lost+found").mkdir(parents=True)
            case "mount", ["DEVICE", place]:
                assert self._disk is not None
                self._disk = self._disk.rename(places[place])
            case "umount", [place]:
                is_new = places[place] == self._disk
                left = places[place].rename(self._aside / ("device" if is_new else "old"))
                self._disk = left if is_new else self._disk
            case "cp", ["-a", "/var/lib/dlog/bookie/.", "/mnt/"]:
                copied = ["cp", "-a", f"{self._bookie.folder}/.", f"{places['/mnt']}/"]
                subprocess.run(copied, check=True)
            case "chown", ["dlog:", "/var/lib/dlog/bookie"]:
                pass  # all is of one user here
            case _:
                pytest.fail(f"no one here can do {line!r}")
        return ""

    def check_all(self) -> str:
        """Do what the page's last command does; return the ledgers that lack a replica."""
        (line,) = [line for line in commands_of("Over") if line.startswith("for ")]
        assert line.startswith("for ledger in $(dlog ledger list --quiet); do dlog ledger check ")
        ledgers = self._shell.text("ledger", "list", "--quiet").split()
        checked = {each: self._shell.outcome("ledger", "check", each)[0] for each in ledgers}
        return "".join(f"{ledger}\n" for ledger, code in checked.items() if code)


@pytest.fixture
def cluster(fresh_sandbox: Callable[..., Sandbox]) -> Sandbox:
    """One with a log that all three bookies hold."""
    made = fresh_sandbox(
        3,
        autorecovery=True,
        autorecovery_options=["--lost-bookie-delay-s=1", "--poll-interval-s=0.5"],
        bookie_options=("--session-timeout-s=8",),
    )
    with open_namespace(made.uri) as namespace:
        namespace.create_log(LOG)
    write(made, range(100))
    return made


def write(cluster: Sandbox, txids: range) -> None:
    """Write records, in a segment of their own."""
    with open_namespace(cluster.uri) as namespace, namespace.open_log(LOG).open_writer() as writer:
        for txid in txids:
            writer.write(LogRecord(txid, b"%d" % txid))


def require_over(cluster: Sandbox, operator: Operator, shell: Shell) -> None:
    """Require that all is as the page says of the end."""

    def is_over() -> bool:
        status = shell.json("autorecovery", "status")
        return not status["under_replicated"] and operator.follow("Over").count("\n") > 0

    wait_until(is_over, timeout_s=WAIT_S)
    assert {each["state"] for each in shell.json("bookie", "list")} == {"writable"}
    wait_until(lambda: not operator.check_all(), timeout_s=WAIT_S)
    with open_namespace(cluster.uri) as namespace, namespace.open_log(LOG).open_reader() as reader:
        assert [record.txid for record in reader] == list(range(200))


def test_a_disk_that_can_be_read_is_moved(
    cluster: Sandbox, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The bookie is the same one afterwards; nothing was copied by auto-recovery."""
    bookie, shell = cluster.bookies[0], Shell(cluster.uri, capsys)
    operator, before = Operator(bookie, shell, tmp_path), bookie.incarnation
    operator.follow("Before")
    operator.follow("The disk can still be read")
    assert bookie.incarnation == before
    write(cluster, range(100, 200))
    require_over(cluster, operator, shell)
    bookie.terminate()
    shutil.rmtree(bookie.folder)
    (tmp_path / "old").rename(bookie.folder)
    with pytest.raises(BookieUnavailableError, match="is an older copy"):
        bookie.restart()


def test_a_disk_that_is_lost_is_replaced(
    cluster: Sandbox, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The bookie is a new one, and holds copies again; without its step it refuses to start."""
    bookie, shell = cluster.bookies[0], Shell(cluster.uri, capsys)
    operator, before = Operator(bookie, shell, tmp_path), bookie.incarnation
    operator.follow("Before")
    bookie.kill()
    shutil.rmtree(bookie.folder)
    bookie.folder.mkdir()
    with pytest.raises(BookieUnavailableError, match="the data folder is empty, but the cluster"):
        bookie.restart()
    wait_until(lambda: len(shell.json("bookie", "list")) == 2, timeout_s=WAIT_S)
    operator.follow("The disk is lost")
    assert bookie.incarnation != before
    write(cluster, range(100, 200))
    require_over(cluster, operator, shell)
    (cookie,) = [each for each in shell.json("bookie", "cookie", "list") if each["name"] == NAME]
    assert cookie["incarnation"] == bookie.incarnation
