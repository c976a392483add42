"""The commands of docs/tls.md, run as they stand there: what they make passes on this Python."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.tls_refusals import own_refusal
from tests.dlcore.wire.test_tls import client_of
from tests.fixtures.pages import blocks_of
from tests.fixtures.served_bookie import BOOKIE, frame_of, run, serve
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands were run."""
    made = tmp_path_factory.mktemp("page")
    # Each block is pasted twice: what is there already does no harm.
    commands = "".join(2 * each.text for each in blocks_of("docs/tls.md"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=made,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bookie-1.pem: OK\nclient-1.pem: OK\n" in done.stdout
    return made


def files_of(folder: Path, name: str) -> TlsFiles:
    """Return the files of the one of this name."""
    return TlsFiles(
        ca=str(folder / "ca.pem"), cert=str(folder / f"{name}.pem"), key=str(folder / f"{name}.key")
    )


def test_bookies_and_clients_accept_each_other(folder: Path, tmp_path: Path) -> None:
    """On both ports; the certificate of a bookie serves it as a client, too."""

    async def scenario() -> None:
        async with serve(tmp_path, tls=files_of(folder, "bookie-1")) as served:
            for number, name in enumerate(("client-1", "bookie-1")):
                client = client_of(served, files_of(folder, name))
                await client.add_entry(BOOKIE, frame_of(1, number))
                (peer,) = (each.socket.peer for each in served.service.connections)
                assert peer == name
                assert len(await client.list_entries(BOOKIE, ledger_id=1)) == 1
                await client.aclose()

    run(scenario)
    for host in ("127.0.0.1", "localhost", None):
        assert own_refusal(files_of(folder, "bookie-1"), host=host) is None


def test_a_proxy_takes_that_of_a_bookie(folder: Path) -> None:
    """Its clients are let in."""

    async def scenario(served: Proxies) -> None:
        files = files_of(folder, "bookie-1")
        await served.start(tls_ca=files.ca, tls_cert=files.cert, tls_key=files.key)
        location = served.servers[0].location
        async with await open_namespace(location, tls=files_of(folder, "client-1")) as namespace:
            assert await namespace.get_logs() == ["clicks"]

    with_proxies("clicks")(scenario)


def test_secret_nodes_are_readable_by_their_owner_only(folder: Path) -> None:
    """Whatever the umask of who copies the commands."""
    keys = sorted(folder.glob("*.key"))
    assert [each.name for each in keys] == ["bookie-1.key", "ca.key", "client-1.key"]
    assert {each.stat().st_mode & 0o777 for each in keys} == {0o600}
