"""The versions of TLS: 1.2 at least, at both ports of a bookie and of its clients."""

from __future__ import annotations

import asyncio
import ssl
import warnings
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import BookieUnavailableError
from tests.dlcore.wire.test_tls import client_of
from tests.fixtures.certificates import make_tls
from tests.fixtures.served_bookie import BOOKIE, ServedBookie, frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.base.access.tls import TlsFiles

_OF_ALL_AGES = "ALL:@SECLEVEL=0"
"""Ciphers that OpenSSL offers in versions that it regards as insecure."""


def old_version() -> ssl.TLSVersion:
    """Return one that is refused; Python warns of its use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return ssl.TLSVersion.TLSv1_1


def limited(context: ssl.SSLContext, version: ssl.TLSVersion) -> ssl.SSLContext:
    """Return a context that speaks one version only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.set_ciphers(_OF_ALL_AGES)
        context.minimum_version = context.maximum_version = version
    return context


async def version_of(address: str, files: TlsFiles, version: ssl.TLSVersion) -> str:
    """Return the version that a server speaks with a client of one version only."""
    context = limited(files.client_context(), version)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found: str = writer.get_extra_info("ssl_object").version()
    writer.transport.abort()
    return found


def test_a_bookie_refuses_an_older_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At its data port and at its control port; of those that it knows it takes the latest."""
    tls = make_tls(tmp_path / "tls")

    async def scenario() -> None:
        async with serve(tmp_path / "data", tls=tls.bookie) as served:
            for address in (served.address, served.control_address):
                for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                    found = await version_of(address, tls.client, version)
                    assert found.replace(".", "_") == version.name
                with pytest.raises(OSError, match=r"^$|SSL"):
                    await version_of(address, tls.client, old_version())

    run(scenario)
    assert "a client with an old TLS is not let in: expected TLS 1.2 or later" in caplog.text


def test_a_client_refuses_a_bookie_with_an_older_tls(tmp_path: Path) -> None:
    """Also in its calls of gRPC: nothing is sent."""
    tls = make_tls(tmp_path / "tls")
    context = limited(tls.bookie.server_context(asks_clients=False), old_version())

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("the handshake succeeded")

    async def scenario() -> None:
        async with (
            serve(tmp_path / "data") as bookie,
            await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context) as server,
        ):
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            served = ServedBookie(
                address=address,
                control_address=address,
                storage=bookie.storage,
                service=bookie.service,
            )
            client = client_of(served, tls.client)
            with pytest.raises(BookieUnavailableError, match="no connection"):
                await client.add_entry(BOOKIE, frame_of(1, 0))
            with pytest.raises(BookieUnavailableError):
                await client.list_entries(BOOKIE, ledger_id=1)
            await client.aclose()

    run(scenario)
