"""Proxies whose port speaks TLS: clients that reach them, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import grpc
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.proxy.config import ProxyConfig
from dlcore.sync import open_namespace, open_namespace as open_remote
from tests.fixtures.certificates import Authority
from tests.fixtures.proxies import proxy_process, proxy_thread, wait_for_no_proxy

if TYPE_CHECKING:
    from dlcore.base.access.tls import TlsFiles

pytestmark = pytest.mark.integration
SCHEMA = pa.schema([("value", pa.binary())])


def serving(files: TlsFiles, *more: str) -> list[str]:
    """Return the options of a proxy with these files."""
    names = {"ca": files.ca, "cert": files.cert, "key": files.key}
    return [*(f"--serve-tls-{name}={path}" for name, path in names.items()), *more]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The authority that both ends trust."""
    return Authority(tmp_path / "authority")


@pytest.fixture
def log(namespace_uri: str) -> str:
    """A log with a record; no proxy is live."""
    wait_for_no_proxy(namespace_uri)
    name = f"tls/{uuid4().hex}"
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log(name)
        with namespace.open_log(name).open_writer() as writer:
            writer.write_batch(pa.record_batch({"txid": [1], "value": [b"one"]}))
    return name


def test_only_clients_with_a_certificate_enter(
    namespace_uri: str, log: str, authority: Authority, tmp_path: Path
) -> None:
    """Reading and writing, by the library and by Arrow's own client; others are let in by none."""
    client = authority.issue("client", host="DNS:client")
    stranger = Authority(tmp_path / "strangers").issue("client", host="DNS:client")
    with proxy_process(namespace_uri, *serving(authority.issue("proxy"))) as proxy:
        assert proxy.location.startswith("grpc+tls://127.0.0.1:")
        with open_remote(proxy.location, tls=client) as remote:
            read = remote.open_log(log)
            assert read.status().record_count == 1
            assert [each.payload for each in read.open_reader().records()] == [b"one"]
        ca, cert, key = (Path(path).read_bytes() for path in (client.ca, client.cert, client.key))
        with flight.connect(
            proxy.location, tls_root_certs=ca, cert_chain=cert, private_key=key
        ) as arrow:
            writer, answers = arrow.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
            with writer:
                answers.read()
                writer.write_batch(
                    pa.record_batch([pa.array([b"two"], pa.binary())], schema=SCHEMA)
                )
                answers.read()
                writer.done_writing()
            info = arrow.get_flight_info(flight.FlightDescriptor.for_path(log))
            locations = {each.uri.decode() for part in info.endpoints for each in part.locations}
            assert locations == {proxy.location}
        plain = proxy.location.replace("grpc+tls", "grpc")
        for endpoint, files, reason in (
            (plain, None, "it speaks TLS"),
            (proxy.location, None, "its certificate is not accepted"),
            (proxy.location, stranger, "its certificate is not accepted"),
        ):
            with (
                open_remote(endpoint, tls=files, patience_s=60) as remote,
                pytest.raises(ConfigurationError, match=reason),
            ):
                remote.open_log(log)
        with pytest.raises(ConfigurationError, match=r"expected grpc\+tls://"):
            open_remote(plain, tls=client)


def test_clients_without_a_certificate_where_none_is_asked_for(
    namespace_uri: str, log: str, authority: Authority
) -> None:
    """They trust the proxy's; the others' address is one of IPv6."""
    files = authority.issue("proxy", host="IP:::1")
    options = serving(files, "--serve-tls-client-auth=none", "--host=::1")
    with proxy_process(namespace_uri, *options) as proxy:
        assert proxy.location.startswith("grpc+tls://[::1]:")
        trusting = type(files)(ca=files.ca)
        with open_remote(proxy.location, tls=trusting) as remote:
            assert remote.open_log(log).get_log_record_count() == 1
        credentials = grpc.ssl_channel_credentials(Path(files.ca).read_bytes())
        with grpc.secure_channel(
            proxy.location.removeprefix("grpc+tls://"), credentials
        ) as channel:
            grpc.channel_ready_future(channel).result(30)


def test_missing_files_are_named_with_their_paths(
    namespace_uri: str, authority: Authority, tmp_path: Path
) -> None:
    """Before anything is opened."""
    missing = str(tmp_path / "no.pem")
    for given, reason in (
        (ProxyConfig(tls_cert=missing, tls_key=missing, tls_ca=missing), "a readable PEM file"),
        (ProxyConfig(tls_cert=missing, tls_ca=missing), "expected both files or none"),
        (ProxyConfig(tls_ca=str(authority.ca)), "needs a certificate and its key"),
    ):
        with (
            pytest.raises(ConfigurationError, match=reason),
            proxy_thread(namespace_uri, given),
        ):
            pass
    with pytest.raises(ConfigurationError, match="expected required or none"):
        ProxyConfig(tls_client_auth="perhaps")


def test_the_rate_of_a_principal_is_that_of_a_certificate(
    namespace_uri: str, log: str, authority: Authority
) -> None:
    """A client of another name has a rate of its own."""
    limits = ("--principal-records-per-s=1", "--throttle-max-s=2")
    row = pa.record_batch([pa.array([b"x"] * 100, pa.binary())], schema=SCHEMA)
    with proxy_process(namespace_uri, *serving(authority.issue("proxy"), *limits)) as proxy:
        for name, refused in (("one", False), ("one", True), ("two", False)):
            files = authority.issue(name, host="DNS:client")
            ca, cert, key = (Path(path).read_bytes() for path in (files.ca, files.cert, files.key))
            with flight.connect(
                proxy.location, tls_root_certs=ca, cert_chain=cert, private_key=key
            ) as arrow:
                writer, answers = arrow.do_put(flight.FlightDescriptor.for_path(log), SCHEMA)
                answers.read()
                writer.write_batch(row)
                assert (answers.read() is None) is refused
                if refused:
                    with pytest.raises(pa.ArrowException, match="rate of certificate:one"):
                        writer.close()
                else:
                    writer.close()
