"""Endpoints with TLS: a client with the right files reads and writes, others get the reason."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import ssl
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import pyarrow as pa
import pytest

from dlcore.backends.flight import endpoint
from dlcore.backends.flight.namespace import open_namespace
from dlcore.backends.flight.planning import act
from dlcore.base.access import tls_in_use
from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.errors import ConfigurationError, ProxyUnavailableError
from dlcore.flight import actions
from dlcore.flight.requests import NoRequest
from dlcore.ops.secure.certificates import CLIENT, SERVER
from dlcore.proxy.rendezvous import preferred_owner
from tests.dlcore.proxy.test_forwarding import put
from tests.dlcore.proxy.test_put import records
from tests.dlcore.wire.test_versions import old_version, version_of
from tests.fixtures.aio import until
from tests.fixtures.certificates import Authority
from tests.fixtures.ports import free_ports
from tests.fixtures.served_proxies import Client, Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dlcore.backends.flight.namespace import FlightNamespace


class Files:
    """Those of a proxy, of its client, and of a client from elsewhere."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = Authority(folder / "ours"), Authority(folder / "theirs")
        self.proxy = ours.issue("proxy")
        self.elsewhere = ours.issue("elsewhere", host="DNS:elsewhere.example")
        self.expired = ours.issue("expired", days=-1)
        self.early = ours.issue("early", since=timedelta(days=1))
        self.for_clients = ours.issue("for-clients", purposes=[CLIENT])
        self.for_servers = ours.issue("for-servers", purposes=[SERVER])
        self.unfit = Authority(folder / "unfit", has_key_usage=False).issue("unfit")
        self.client = ours.issue("client", host="DNS:client")
        stranger = theirs.issue("stranger", host="DNS:client")
        self.without = TlsFiles(ca=self.client.ca)
        self.trusts_others = TlsFiles(ca=stranger.ca, cert=self.client.cert, key=self.client.key)
        self.stranger = TlsFiles(ca=self.client.ca, cert=stranger.cert, key=stranger.key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Signed by two authorities."""
    return Files(tmp_path_factory.mktemp("tls"))


def serving(files: TlsFiles) -> dict[str, str]:
    """Return the settings of a proxy with these files."""
    return {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}


@asynccontextmanager
async def opened(
    endpoint: str, tls: TlsFiles | None, **more: Any
) -> AsyncIterator[FlightNamespace]:
    """Open the logs at an endpoint."""
    async with await open_namespace(endpoint, tls=tls, **more) as namespace:
        yield namespace


def endpoint_of(served: Proxies) -> str:
    """Return all proxies as one endpoint."""
    return "grpc+tls://" + ",".join(each.address for each in served.servers)


def test_the_right_files_read_write_and_stage(files: Files) -> None:
    """Also over a redirect from one proxy to the other."""

    async def scenario(served: Proxies) -> None:
        for _ in range(2):
            await served.start(**serving(files.proxy))
        for server in served.servers:
            async with opened(server.location, files.client) as namespace:
                log = await namespace.open_log("clicks")
                async with await log.open_writer() as writer:
                    await writer.write_batch(pa.record_batch({"value": [b"written"]}))
                append = await namespace.begin_append("job", served.servers.index(server))
                await append.write_batch("clicks", pa.record_batch({"value": [b"staged"]}))
                await append.commit()
                read = [each.payload async for each in (await log.open_reader()).records()]
        assert read == [each.payload for each in await records(served)]
        assert read == [b"written", b"staged"] * 2

    with_proxies("clicks")(scenario)


def test_records_that_a_proxy_forwards_over_tls_count_for_its_client(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """By the name in the client's certificate, which is shown to the first proxy only."""

    async def scenario(served: Proxies) -> None:
        for _ in range(2):
            await served.start(**serving(files.proxy), principal_streams_max=1)
        both = {each.location for each in served.servers}
        await until(lambda: all(each.reads._membership.live == both for each in served.servers))
        owner = preferred_owner("clicks", both)
        asked = next(each for each in served.servers if each.location != owner)
        credentials = TlsInUse(files.client).channel_credentials()
        async with grpc.aio.secure_channel(asked.address, credentials) as channel:
            first, second = (put(Client(channel)) for _ in range(2))
            await first.begin("clicks")
            assert "ready" in (await first.next_reply() or {})
            await first.send(b"a")
            await first.acked(1)
            await second.begin("clicks")
            assert await second.next_reply() is None
            code, message, _ = await second.status()
            assert (code, "certificate:client has 1 streams" in message) == (
                "RESOURCE_EXHAUSTED",
                True,
            )
            await first.last_reply()
        assert [each.payload for each in await records(served)] == [b"a"]
        for server in served.servers:
            assert server.reads._membership.presence.secret not in caplog.text

    with caplog.at_level(logging.DEBUG):
        with_proxies("clicks")(scenario)


@pytest.mark.parametrize(
    ("serves", "asks", "scheme", "reason"),
    [
        ("proxy", "without", "grpc+tls", "it lets no client in without a certificate: expected a"),
        ("proxy", "stranger", "grpc+tls", "it lets no client in with cert=.*stranger.pem.: exp"),
        (
            "proxy",
            "trusts_others",
            "grpc+tls",
            "unable to get local issuer .*: expected one signed by whom the file ca=",
        ),
        ("proxy", None, "grpc+tls", "expected one signed by whom the system trusts"),
        ("elsewhere", "client", "grpc+tls", "not valid for '127.0.0.1'.: expected one with the"),
        ("proxy", None, "grpc", r"it speaks TLS: expected grpc\+tls://127.0.0.1:\d+, with the"),
        ("expired", "client", "grpc+tls", "certificate has expired.: expected one that is valid"),
        ("early", "client", "grpc+tls", "certificate is not yet valid.*: expected one that is"),
        ("for_clients", "client", "grpc+tls", "purpose.: expected one with serverAuth in"),
        (
            "proxy",
            "expired",
            "grpc+tls",
            r"no client in with cert=.*: our .* \(certificate has expired\): expected one that is",
        ),
        (
            "proxy",
            "early",
            "grpc+tls",
            r"no client in with cert=.*: our .* \(certificate is not yet valid.*\): expected one",
        ),
        (
            "proxy",
            "for_servers",
            "grpc+tls",
            r"no client in with cert=.*: our .* \(uns.* purpose\): expected one with clientAuth in",
        ),
        (None, "client", "grpc+tls", r"it does not speak TLS: expected grpc://127.0.0.1:\d+$"),
    ],
)
def test_a_wrong_setting_is_reported_at_once(
    serves: str | None, asks: str | None, scheme: str, reason: str, files: Files
) -> None:
    """With where, and what would be right: for a call, a writer, and a staged append."""

    async def scenario(served: Proxies) -> None:
        await served.start(**serving(getattr(files, serves)) if serves else {})
        endpoint = f"{scheme}://{served.servers[0].address}"
        text = rf"the proxy at {endpoint.replace('+', '.')}: .*{reason}"
        tls = getattr(files, asks) if asks else None
        async with asyncio.timeout(20), opened(endpoint, tls, patience_s=60) as namespace:
            with pytest.raises(ConfigurationError, match=text):
                await namespace.open_log("clicks")
            staging = await namespace.open_staging_writer(identity="job")
            await staging.write_batch("clicks", pa.record_batch({"value": [b"x"]}))
            with pytest.raises(ConfigurationError, match=text):
                await staging.stage()

    with_proxies("clicks")(scenario)


def test_a_proxy_refuses_an_older_tls(files: Files) -> None:
    """It is gRPC's own library that refuses it."""

    async def scenario(served: Proxies) -> None:
        await served.start(**serving(files.proxy))
        address = served.servers[0].address
        assert await version_of(address, files.client, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        with pytest.raises(OSError, match=r"^$|SSL"):
            await version_of(address, files.client, old_version())

    with_proxies("clicks")(scenario)


def test_files_that_change_are_for_new_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxy and client get new files; an open stream goes on over the old connection."""
    monkeypatch.setattr(tls_in_use, "LOOK_S", 0.0)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    at_proxy, at_client = old.issue("proxy"), old.issue("client")

    async def scenario(served: Proxies) -> None:
        await served.start(**serving(at_proxy))
        (server,) = served.servers
        async with opened(server.location, at_client) as namespace:
            log = await namespace.open_log("clicks")
            channels = namespace._calls._channels
            async with await log.open_writer() as writer:
                await writer.write_batch(pa.record_batch({"value": [b"before"]}))
                first = channels.known[server.location].channel
                for name, files in (("proxy", at_proxy), ("client", at_client)):
                    renewed = new.issue(name)
                    shutil.copyfile(renewed.key, files.key)
                    shutil.copyfile(renewed.cert, files.cert)
                shutil.copyfile(new.ca, old.ca)
                assert await namespace.get_logs() == ["clicks"]
                assert channels.known[server.location].channel is not first
                await writer.write_batch(pa.record_batch({"value": [b"after"]}))
            await until(lambda: first.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
        async with opened(server.location, new.issue("other")) as namespace:
            assert await namespace.get_logs() == ["clicks"]
            reply = await act(namespace._calls, actions.HEALTH, NoRequest())
        assert reply.expires_at_ms == TlsInUse(at_proxy).expires_at_ms
        assert [each.payload for each in await records(served)] == [b"before", b"after"]

    with_proxies("clicks")(scenario)


def test_an_authority_without_key_usage_is_taken_where_grpc_judges(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """On each Python: no look at a proxy that did not answer once may refuse what gRPC takes."""

    async def scenario(served: Proxies) -> None:
        await served.start(**serving(files.unfit))
        server = served.servers[0]
        async with opened(server.location, files.unfit) as namespace:
            assert await namespace.get_logs() == ["clicks"]
        assert await endpoint.tls_reason(server.address, files.unfit, is_secure=True) is None

    with_proxies("clicks")(scenario)
    assert "not accepted" not in caplog.text


def test_a_proxy_tells_at_its_start_what_its_clients_will_refuse(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log names the file, and what a certificate needs."""

    async def scenario(served: Proxies) -> None:
        await served.start(**serving(files.elsewhere))

    with_proxies("clicks")(scenario)
    text = rf"cert='{files.elsewhere.cert}' is not accepted by others \(.*\): expected one with the"
    assert re.search(text, caplog.text)


def test_one_of_several_proxies_is_enough(files: Files) -> None:
    """And one that may come back is waited for, with a word about the other."""

    async def scenario(served: Proxies) -> None:
        await served.start(**serving(files.elsewhere))
        await served.start(**serving(files.proxy))
        async with opened(endpoint_of(served), files.client) as namespace:
            assert await namespace.get_logs() == ["clicks"]
        wrong = served.servers[0].location
        endpoint = f"{wrong},127.0.0.1:{free_ports(1)}"
        async with opened(endpoint, files.client, patience_s=0.5) as namespace:
            with pytest.raises(ProxyUnavailableError, match=r"not valid for|no proxy answers"):
                await namespace.get_logs()

    with_proxies("clicks")(scenario)


def test_a_silent_server_gives_no_reason(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has one that hangs up."""
    monkeypatch.setattr(endpoint, "_LOOK_S", 0.1)
    ended = asyncio.Event()

    async def serve(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, hangs_up: bool
    ) -> None:
        if not hangs_up:
            await reader.read()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        ended.set()

    async def scenario() -> None:
        for hangs_up in (True, False):
            serving = partial(serve, hangs_up=hangs_up)
            async with await asyncio.start_server(serving, "127.0.0.1", 0) as server:
                address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
                for tls, is_secure in ((files.client, True), (None, False)):
                    found = await endpoint.tls_reason(address, tls, is_secure=is_secure)
                    assert found is None
                    await ended.wait()
                    ended.clear()

    asyncio.run(scenario())
