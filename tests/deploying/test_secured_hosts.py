"""The commands of docs/operating.md for three secured hosts, run as they stand there.

A host is an address of this machine and a mount namespace, in which the installed folder and that
of the data are its own.  Changed are only names of hosts and places; rsync is a copy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.pages import blocks_of
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

WAIT_S = 240.0
RSYNC = 'rsync() { mkdir -p "hosts/${3%%:*}/etc"; cp -a "$2." "hosts/${3%%:*}/etc/"; }\n'
ADDRESSES = {f"node-{number}": f"127.0.0.{number + 1}" for number in (1, 2, 3)}
APART = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
URI = "distributedlog://zk-1:2181/dlog"
ANNOUNCED = {"bookie": "serving on", "proxy": "proxy serving", "autorecovery": "at work"}


class Operator:
    """An operator that follows the page, in a folder."""

    def __init__(self, folder: Path, servers: str, program: Path) -> None:
        self._folder = folder
        self._dlog = f'dlog() {{ {program} "$@"; }}\n'
        self._places = ADDRESSES | {"zk-1:2181": servers, "/etc/dlog": str(folder / "etc")}

    def here(self, text: str) -> str:
        """Return commands for the places of this test."""
        for named, place in self._places.items():
            text = text.replace(named, place)
        data = f"--install-dir {self._folder / 'etc'} --data-dir {self._folder / 'var'}"
        return text.replace(f"--install-dir {self._folder / 'etc'}", data)

    def run(self, commands: str) -> str:
        """Run commands on the operator's machine; return what they print."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._dlog + RSYNC + self.here(commands)],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def service(self, host: str, command: str) -> Iterator[None]:
        """Run a service on a host until the block ends."""
        kind = command.split()[1]
        own = self._folder / "hosts" / ADDRESSES[host]
        for name in ("etc", "var"):
            (own / name).mkdir(parents=True, exist_ok=True)
            (self._folder / name).mkdir(exist_ok=True)
        mounts = [f"mount --bind {own / name} {self._folder / name}" for name in ("etc", "var")]
        start = self.here(command).replace("dlog", f"exec {sys.executable} -m dlcore.ops.cli", 1)
        output = self._folder / f"{host}-{kind}.log"
        with (
            output.open("w") as log,
            subprocess.Popen(
                [*APART, "bash", "-ec", "\n".join((*mounts, start))],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            ) as process,
        ):
            try:
                yield
                process.terminate()
                assert process.wait(WAIT_S) == 0, output.read_text()
            finally:
                process.kill()

    def announces(self, host: str, kind: str) -> bool:
        """Whether a service has logged that it serves."""
        output = (self._folder / f"{host}-{kind}.log").read_text()
        assert "error: " not in output, output
        return ANNOUNCED[kind] in output


def test_three_hosts_serve_whom_they_know(
    tmp_path: Path, zookeeper: EmbeddedZooKeeper, dlog_program: Path
) -> None:
    """All services start; both kinds of clients do their work; the commands may come twice.

    Others are refused at each door: by rules, by ZooKeeper, by bookies.
    """
    setting_up, services, using, ruling = blocks_of("docs/operating.md")
    operator = Operator(tmp_path, zookeeper.servers, dlog_program)
    for _ in range(2):
        operator.run(setting_up.text)
    with ExitStack() as stack:
        for host in ADDRESSES:
            for command in services.text.splitlines():
                stack.enter_context(operator.service(host, command))
        for host in ADDRESSES:
            for kind in ANNOUNCED:
                wait_until(partial(operator.announces, host, kind), timeout_s=WAIT_S)
        admin, report = (
            f"--config cluster/clients/{name}/dlog.toml" for name in ("admin", "report")
        )
        operator.run(f"dlog log create clicks {admin}\necho first | dlog log write clicks {report}")
        for _ in range(2):
            output = operator.run(using.text)
        for address in ADDRESSES.values():
            assert f"{address}:3181" in output
        assert output.splitlines()[-1].startswith("clicks")
        for _ in range(2):
            operator.run(ruling.text)
        dumped = operator.run(f"dlog log dump clicks {admin}").splitlines()
        assert [line.split()[-1] for line in dumped] == ["first", "hello", "hello"]
        dump = "--patience 20 2>&1 || true"
        assert "certificate:report.remote" in operator.run(f"dlog log dump clicks {report} {dump}")
        stranger = operator.run(f"dlog log list --uri {operator.here(URI)} {dump}")
        assert "the node is for another user of ZooKeeper" in stranger
        operator.run(f"sed s,admin/client,report/client, {admin.split()[1]} > thief.toml")
        thief = operator.run(f"dlog log dump clicks --config thief.toml {dump}")
        assert "has the names report, report.remote in subjectAltName is not let in" in thief
    files = [str(each) for each in sorted(tmp_path.glob("hosts/*/var/audit.jsonl"))]
    assert len(files) == 3
    lines = [line for each in files for line in Path(each).read_text().splitlines()]
    assert any("certificate:report.remote" in line and "clicks" in line for line in lines)
    for each in files:
        operator.run(f"dlog audit verify {each}")
