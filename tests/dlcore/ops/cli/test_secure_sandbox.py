"""`dlog sandbox --secure` as a user runs it: by the lines that it prints, and without them."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from dlcore import TlsFiles
from dlcore.sync import open_namespace
from tests.fixtures.pages import blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

WAIT_S = 120
DLOG = (sys.executable, "-m", "dlcore.ops.cli")


class Printed(NamedTuple):
    """The lines of a sandbox that tell how to reach it."""

    uri: str
    endpoint: str
    tls: TlsFiles
    spark: dict[str, str]
    export: str


@contextmanager
def secured_sandbox(folder: Path) -> Iterator[Printed]:
    """Run it until the block ends, and read what it prints."""
    command = [*DLOG, "sandbox", "--secure", "--data-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("export "):
                lines.append(process.stdout.readline().rstrip("\n"))
                assert lines[-1], "the sandbox ended"
            python = next(each for each in lines if each.startswith("Python: "))
            spark = next(each for each in lines if each.startswith("Spark: "))
            yield Printed(
                lines[0],
                next(each for each in lines if each.startswith("proxy-1 ")).split()[2].rstrip(","),
                eval(python.removeprefix("Python: tls="), {"TlsFiles": TlsFiles}),
                dict(each.split("=", 1) for each in spark.split()[1:]),
                lines[-1],
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def in_bash(program: Path, printed: Printed, *lines: str) -> str:
    """Return what commands print in a terminal where the printed line was entered."""
    command = f'dlog() {{ "{program}" "$@"; }}'
    script = "\n".join(("set -euo pipefail", printed.export, command, *lines))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(*arguments: str) -> str:
    """Return the error of a command."""
    done = subprocess.run(
        [*DLOG, "--patience", "30", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    (line,) = (each for each in done.stderr.splitlines() if each.startswith("error: "))
    return line


def test_those_are_let_in_who_do_as_it_prints(tmp_path: Path, dlog_program: Path) -> None:
    """Commands and Python, over bookies and proxies; others learn what is missing."""
    with secured_sandbox(tmp_path) as printed:
        through = f"--endpoint {printed.endpoint}"
        in_bash(
            dlog_program,
            printed,
            "dlog log create clicks",
            "echo direct | dlog log write clicks",
            f"echo proxied | dlog log write clicks {through}",
        )
        for option in ("", through):
            dumped = in_bash(dlog_program, printed, f"dlog log dump clicks {option}").split("\n")
            assert [each.split()[-1] for each in dumped if each] == ["direct", "proxied"]
        with (
            open_namespace(printed.uri, tls=printed.tls) as namespace,
            namespace.open_log("clicks") as log,
            log.open_reader() as reader,
        ):
            assert [record.payload for record in reader.read_bulk(2)] == [b"direct", b"proxied"]
        files = (printed.tls.ca, printed.tls.cert, printed.tls.key)
        assert tuple(printed.spark.values()) == files
        assert list(printed.spark) == ["tlsCa", "tlsCert", "tlsKey"]

        as_alice = f"--token-file alice.token {through}"
        output = in_bash(
            dlog_program,
            printed,
            f"cd {tmp_path}",
            "dlog secure token secure --user alice > alice.token",
            "dlog acl allow user:alice read --log clicks",
            f"dlog log dump clicks {as_alice}",
            f"echo denied | dlog log write clicks {as_alice} 2>&1 || true",
        )
        assert "proxied" in output
        assert "user:alice" in output.splitlines()[-1]

        (rules,) = blocks_of("docs/access.md")
        for _ in range(2):  # pasted again it does no harm
            output = in_bash(dlog_program, printed, rules.text)
        assert "deny user:bob read log pay/secret" in output

        dump, ca = ("log", "dump", "clicks"), ("--tls-ca", printed.tls.ca)
        for output, place in (
            ("if a port is of TLS, it closes so: then expected tls_ca", ()),
            ("a server that asks for a certificate closes so: expected cert and key", ca),
        ):
            assert output in refusal(*dump, "--uri", printed.uri, *place)
        for output, place in (
            ("its certificate is not accepted", ()),
            ("it lets no client in without a certificate", ca),
        ):
            assert output in refusal(*dump, "--endpoint", printed.endpoint, *place)

    before = (tmp_path / "secure/ca.key").read_bytes()
    with secured_sandbox(tmp_path) as printed:
        assert "direct" in in_bash(dlog_program, printed, "dlog log dump clicks")
        settings = tomllib.loads((tmp_path / "secure/clients/sandbox/dlog.toml").read_text())
        assert settings["dlog"]["uri"] == printed.uri
    assert (tmp_path / "secure/ca.key").read_bytes() == before
