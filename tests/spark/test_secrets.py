"""Goal: no secret of a job is where others look: not in its files, its output, nor in any process.

Method: a job of a secured cluster, over bookies with capabilities and over a proxy with a token.
While it runs, all processes below this one are read as another program of the host reads them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlcore.base.clock import SystemClock
from dlcore.metadata.capability_keys import ensure_keys
from dlcore.metadata.paths import NamespacePaths, parse_uri
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.ops.sandbox.cluster import ROOT, Sandbox
from dlcore.ops.secure.tokens import signed_token
from dlcore.sync import open_namespace
from tests.fixtures.spark import spark_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spark, pytest.mark.integration]

WAIT_S = 120
FEW_SECRETS = 6


def forms_of(secret: bytes) -> Iterator[bytes]:
    """Yield what a file may have of a secret: as it is, in hex, and in base64 at any place."""
    yield secret
    yield secret.hex().encode()
    for before in range(3):
        # The characters at both ends depend on the bytes beside the secret.
        coded = base64.b64encode(bytes(before) + secret)
        yield coded[4 if before else 0 : -4]


def lines_of_keys(folder: Path) -> Iterator[bytes]:
    """Yield a line of each private key below a folder: PEM writes them in base64."""
    for path in folder.rglob("*.key"):
        yield path.read_bytes().splitlines()[1]


async def capability_secrets(sandbox: Sandbox) -> list[bytes]:
    """Return the private key of capabilities, and the bytes with which each of them begins."""
    store = await ZooKeeperStore.connect(parse_uri(sandbox.uri).servers)
    try:
        ring = await ensure_keys(store, NamespacePaths(ROOT), SystemClock())
    finally:
        await store.aclose()
    (key,) = ring.keys
    return [bytes.fromhex(key.private), ring.signer(SystemClock().now_ms() / 1000).key_id]


def processes_below(root: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield root
    children: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for thread in Path(f"/proc/{root}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # or one of its threads
                children += (thread / "children").read_text().split()
    for child in children:
        yield from processes_below(int(child))


def shown_by(process_id: int) -> bytes:
    """Return the command line and the environment of a process; nothing if it has ended."""
    folder = Path(f"/proc/{process_id}")
    try:
        return (folder / "cmdline").read_bytes() + b"\0" + (folder / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    except PermissionError:
        # Linux 6.18 refuses the environment of a process that has given its memory back and is not
        # gone yet. Its command line is empty then; that of a process that runs never is.
        with suppress(FileNotFoundError, ProcessLookupError):
            assert not (folder / "cmdline").read_bytes(), process_id
        return b""


class Searched:
    """Secrets, and where none of them may be."""

    def __init__(self, secrets: list[bytes]) -> None:
        self._forms = [form for secret in secrets for form in forms_of(secret)]
        self.places: list[str] = []

    def look(self, place: str, content: bytes) -> None:
        """Fail if a secret is there."""
        found = [form for form in self._forms if form in content]
        assert not found, place
        self.places.append(place)

    def look_at_files(self, folder: Path, *, but: tuple[Path, ...]) -> None:
        """Look at the files of a job, and at what servers tell; those of metadata have a key."""
        # `rglob` would fail at a folder that goes meanwhile.
        for path in (Path(at, name) for at, _, names in os.walk(folder) for name in names):
            is_readable = path.suffix in (".log", ".err") or "job" in path.parts
            if is_readable and path.is_file() and not {path, *path.parents} & set(but):
                with suppress(FileNotFoundError):  # Spark's own come and go
                    self.look(str(path), path.read_bytes())

    def look_at_processes(self) -> None:
        """Look at what runs now."""
        for process_id in processes_below(os.getpid()):
            shown = shown_by(process_id)
            if shown:
                self.look(shown.split(b"\0")[0].decode(errors="replace"), shown)


@contextmanager
def running(*arguments: str, output: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a module of Python until the block ends."""
    with (
        output.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=spark_environment(),
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_no_secret_is_where_others_look(tmp_path: Path) -> None:
    """Event logs, checkpoints, local files, output, plans, process lists; and of servers alike."""
    options = ("--tls-client-auth", "or_capability")
    job_folder, token_file = tmp_path / "job", tmp_path / "token"
    job_folder.mkdir()
    with Sandbox(
        3,
        data_dir=tmp_path / "sandbox",
        secure=True,
        proxies=1,
        bookie_options=options,
        autorecovery=False,
    ) as sandbox:
        assert sandbox.tls is not None
        with open_namespace(sandbox.uri, tls=sandbox.tls) as namespace:
            for home in range(2):
                namespace.create_log(f"{home}/clicks")
                namespace.create_log(f"{home}/copy")
        secure = sandbox.data_dir / "secure"
        now_ms = SystemClock().now_ms()
        token, _ = signed_token(
            (secure / "tokens.key").read_bytes(), "alice", now_ms=now_ms, hours=1.0
        )
        token_file.write_text(token)
        secrets = [*lines_of_keys(secure), *asyncio.run(capability_secrets(sandbox))]
        # Its signature; header and claims are known to everybody who knows the user.
        secrets.append(token.rpartition(".")[2].encode())
        assert len(secrets) > FEW_SECRETS
        searched = Searched(secrets)
        (proxy,) = sandbox.proxies
        tls = {
            "tlsCa": sandbox.tls.ca,
            "tlsCert": sandbox.tls.cert,
            "tlsKey": sandbox.tls.key,
        }
        jobs = (
            {"uri": sandbox.uri, "tlsCa": sandbox.tls.ca, "capabilities": "1h"},
            {"endpoint": proxy.location, "tokenFile": str(token_file), **tls},
        )
        command = ("tests.spark.secret_job", str(job_folder), *map(json.dumps, jobs))
        follow = ["dlcore.ops.cli", "--config", str(secure / "clients/sandbox/dlog.toml")]
        follow += ["--endpoint", proxy.location, "--token-file", str(token_file)]
        follow += ["log", "tail", "--follow", "1/clicks"]
        with (
            running(*command, output=tmp_path / "job.err") as job,
            running(*follow, output=tmp_path / "tail.err") as tail,
        ):
            assert job.stdout is not None
            assert tail.stdout is not None
            lines: list[str] = []
            while not lines or lines[-1] != "done\n":
                lines.append(job.stdout.readline())
                assert lines[-1], (tmp_path / "job.err").read_text()
                searched.look_at_processes()
            assert tail.stdout.readline()
            searched.look_at_processes()
            searched.look("output", "".join(lines).encode())
            assert any("java" in each for each in searched.places)
            searched.look_at_files(tmp_path, but=(token_file, secure))
            assert job.stdin is not None
            job.stdin.close()
            assert job.wait(WAIT_S) == 0
    searched.look_at_files(tmp_path, but=(token_file, secure))
    assert any("/events/" in each for each in searched.places)
    assert any("/checkpoint-1/" in each for each in searched.places)
    assert any(each.endswith("proxy-1.log") for each in searched.places)
