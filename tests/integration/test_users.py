"""Users at proxies as processes: Arrow's own client, `dlog`, and keys that change during a stream.

The output of each proxy is searched for the tokens that it was sent.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from dlcore.base.access.tls import TlsFiles
from dlcore.base.errors import UnauthenticatedError
from dlcore.flight.producer_server import PARTING_S
from dlcore.sync import open_namespace
from dlspark.options import Address
from dlspark.sessions import close_shared_namespace
from dlspark.source import DistributedLogDataSource
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.certificates import Authority
from tests.fixtures.proxies import proxy_process, wait_for_no_proxy
from tests.fixtures.tokens import AUDIENCE, ISSUER, Issuer, forged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration
SCHEMA = pa.schema([("value", pa.binary())])
ROW = pa.record_batch([pa.array([b"x"], pa.binary())], schema=SCHEMA)
LASTS_S = 10.0
"""Long enough to open a stream on a busy machine, and to change the keys meanwhile."""


class Service:
    """Where users are served, by whom, and what is in the issuer's file of keys."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri = uri
        self.issuer = Issuer()
        self.keys = folder / "keys.json"
        self.files = Authority(folder / "authority").issue("proxy")
        self.log = f"users/{uuid4().hex}"
        self.publish()

    def publish(self) -> None:
        """Write the issuer's keys into the file."""
        self.keys.write_bytes(self.issuer.key_set())

    @contextmanager
    def proxy(self, *more: str, tls: TlsFiles | None = None) -> Iterator[ProxyProcess]:
        """Yield a proxy for users over TLS."""
        files = tls or self.files
        with proxy_process(
            self.uri,
            *(f"--serve-tls-{name}={getattr(files, name)}" for name in ("ca", "cert", "key")),
            "--serve-tls-client-auth=none",
            f"--token-issuer={ISSUER}",
            f"--token-audience={AUDIENCE}",
            f"--token-keys={self.keys}",
            "--token-skew-s=0",
            *more,
        ) as proxy:
            yield proxy

    @contextmanager
    def client(self, proxy: ProxyProcess) -> Iterator[flight.FlightClient]:
        """Yield Arrow's own client, which trusts the proxy's certificate."""
        roots = Path(self.files.ca).read_bytes()
        with flight.connect(proxy.location, tls_root_certs=roots) as client:
            yield client


@pytest.fixture
def service(
    namespace_uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Iterator[Service]:
    """A log and an issuer; no token is in the output of the proxies."""
    wait_for_no_proxy(namespace_uri)
    service = Service(namespace_uri, tmp_path)
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log(service.log)
    yield service
    output = "".join(capfd.readouterr())
    parts = {part for token in service.issuer.given for part in token.split(".")}
    assert "live proxies" in output
    assert not any(part in output for part in parts)


def bearer(token: str) -> flight.FlightCallOptions:
    """Return the options of a call with a token, for Arrow's own client."""
    return flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])


def write(client: flight.FlightClient, log: str, options: flight.FlightCallOptions) -> None:
    """Write a record and wait for its acknowledgement."""
    writer, answers = client.do_put(flight.FlightDescriptor.for_path(log), SCHEMA, options)
    with writer:
        assert answers.read() is not None
        writer.write_batch(ROW)
        assert b'"acked":1' in answers.read().to_pybytes()
        writer.done_writing()


def test_arrows_own_client_shows_a_token(service: Service) -> None:
    """As a header of each call, or by the standard handshake; without one no caller is served."""
    with service.proxy("--anonymous=refused") as proxy, service.client(proxy) as client:
        options = bearer(service.issuer.token())
        write(client, service.log, options)
        header = client.authenticate_basic_token("anybody", service.issuer.token("bob"))
        options = flight.FlightCallOptions(headers=[header])
        write(client, service.log, options)
        assert {each.descriptor.path[0] for each in client.list_flights(options=options)} >= {
            service.log.encode()
        }
        ticket = flight.Ticket(b'{"log": "%s"}' % service.log.encode())
        assert client.do_get(ticket, options).read_all().num_rows == 2
        with pytest.raises(flight.FlightUnauthenticatedError, match="without a proof"):
            list(client.do_action("logs"))
        with pytest.raises(flight.FlightUnauthenticatedError, match="three parts"):
            client.authenticate_basic_token("anybody", "password")


def test_tokens_of_others_are_refused(service: Service) -> None:
    """Altered, of another issuer, unsigned, signed by what is public, expired, or too early."""
    issuer = service.issuer
    token = issuer.token()
    head, payload, signature = token.split(".")
    with service.proxy() as proxy, service.client(proxy) as client:
        list(client.do_action("logs", bearer(token)))
        for wrong in (
            f"{head}.{issuer.token('root').split('.')[1]}.{signature}",
            f"{head}.{payload}.{signature[::-1]}",
            Issuer().token(),
            issuer.token(iss="https://other.example"),
            issuer.token(aud="other"),
            forged(token, "none"),
            forged(token, "HS256", service.keys.read_bytes()),
            issuer.token(lasts_s=-1),
            issuer.token(nbf=time.time() + 100),
        ):
            with pytest.raises(flight.FlightUnauthenticatedError) as refused:
                list(client.do_action("logs", bearer(wrong)))
            assert not any(part and part in str(refused.value) for part in wrong.split("."))


def test_a_stream_outlives_the_change_of_keys_and_not_its_token(service: Service) -> None:
    """The keys are replaced while it is open; what was accepted is acknowledged at its end."""
    with service.proxy() as proxy, service.client(proxy) as client:
        older = bearer(service.issuer.token())
        options = bearer(service.issuer.token(lasts_s=LASTS_S))
        descriptor = flight.FlightDescriptor.for_path(service.log)
        writer, answers = client.do_put(descriptor, SCHEMA, options)
        answers.read()
        service.issuer.rotate()
        del service.issuer.keys[0]
        service.publish()
        with pytest.raises(flight.FlightUnauthenticatedError, match="signature"):
            list(client.do_action("logs", older))
        write(client, service.log, bearer(service.issuer.token("bob")))
        acked, output, turns_s = 0, b"", [time.monotonic()]

        def write_on() -> None:
            nonlocal acked, output
            while b"draining" not in output:
                turns_s.append(time.monotonic())
                writer.write_batch(ROW)
                output = answers.read().to_pybytes()
                acked += b'"acked":%d' % (acked + 1) in output
                time.sleep(0.02)
            writer.close()

        with pytest.raises(flight.FlightUnauthenticatedError, match="expired during the stream"):
            write_on()
        is_late = time.monotonic() - turns_s[-2] > PARTING_S  # then it may have met the end only
        assert b"draining" in output or is_late
        ticket = flight.Ticket(b'{"log": "%s"}' % service.log.encode())
        found = client.do_get(ticket, bearer(service.issuer.token())).read_all()
        assert found.num_rows == acked + 1


def test_this_librarys_clients_send_tokens(service: Service, tmp_path: Path) -> None:
    """A function in Python, and a file for `dlog`; the error for a wrong one does not show it."""
    token, path = service.issuer.token(), tmp_path / "token"
    trusting = TlsFiles(ca=service.files.ca)
    with service.proxy("--anonymous=refused") as proxy:
        with open_namespace(proxy.location, tls=trusting, token=lambda: token) as remote:
            log = remote.open_log(service.log)
            with log.open_writer() as writer:
                writer.write_batch(pa.record_batch({"txid": [1], "value": [b"one"]}))
            assert [each.payload for each in log.open_reader().records()] == [b"one"]
            assert token not in repr([remote, log])
        with (
            open_namespace(proxy.location, tls=trusting, token=token[:-9] + "AAAAAAAAA") as remote,
            pytest.raises(UnauthenticatedError, match="signature") as refused,
        ):
            remote.get_logs()
        assert token[:-9] not in str(refused.value)

        def dlog(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "dlcore.ops.cli", "--endpoint", proxy.location]
            command += ["--tls-ca", service.files.ca, *words]
            environment = {**os.environ, **variables}
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=REPOSITORY,
                env=environment,
                check=False,
            )

        path.write_text(f"{token}\n")
        assert service.log in dlog("--token-file", str(path), "log", "list").stdout
        assert dlog("proxy", "drain", DLOG_TOKEN_FILE=str(path)).returncode == 0
        path.write_text(token[:-9] + "AAAAAAAAA")
        for failed in (
            dlog("log", "list", DLOG_TOKEN_FILE=str(path)),
            dlog("--debug", "log", "count", service.log, DLOG_TOKEN_FILE=str(path)),
        ):
            assert failed.returncode != 0
            assert "signature" in failed.stderr
            assert token[:-9] not in failed.stderr + failed.stdout


def test_another_part_of_a_certificate_may_name_its_owner(service: Service, tmp_path: Path) -> None:
    """By the rule of the proxy; one who has none is anonymous, and may be refused."""
    authority = Authority(tmp_path / "machines")
    server = authority.issue("server")
    named, nameless = authority.issue("a", host="DNS:ingest.example"), authority.issue("b")
    rule = ("--serve-tls-client-auth=required", "--certificate-principal=dns")
    path = flight.FlightDescriptor.for_path(service.log)
    with service.proxy(
        *rule, "--anonymous=refused", "--principal-streams-max=1", tls=server
    ) as proxy:
        for files, reason in (
            (named, "certificate:ingest.example has 1 streams"),
            (nameless, "proof"),
        ):
            ca, cert, key = (Path(each).read_bytes() for each in (files.ca, files.cert, files.key))
            with flight.connect(
                proxy.location, tls_root_certs=ca, cert_chain=cert, private_key=key
            ) as client:
                first, answers = client.do_put(path, SCHEMA)
                if files is named:
                    answers.read()
                    second, answers = client.do_put(path, SCHEMA)
                else:
                    second = first
                assert answers.read() is None
                with pytest.raises(pa.ArrowException, match=reason):
                    second.close()
                if files is named:
                    first.close()


def test_sparks_source_reads_the_token_in_a_file(service: Service, tmp_path: Path) -> None:
    """In the planning process and in tasks; plans have its path, and never the token."""
    path, roots = tmp_path / "token", service.files.ca
    path.write_text(service.issuer.token())
    with service.proxy("--anonymous=refused") as proxy:
        where = {"endpoint": proxy.location, "tlsCa": roots, "log": service.log}
        with service.client(proxy) as client:
            write(client, service.log, bearer(service.issuer.token()))
        given = {**where, "tokenFile": str(path)}
        source = DistributedLogDataSource(given)
        address = Address(uri=proxy.location, tls=TlsFiles(ca=roots), token_file=str(path))
        reader: Any = source.reader(source.schema())
        try:
            plan = pickle.dumps((source, reader, reader.partitions()))
            _, reader, parts = pickle.loads(plan)
            rows = [batch.num_rows for each in parts for batch in reader.read(each)]
        finally:
            close_shared_namespace(address)
        assert sum(rows) == 1
        assert str(path).encode() in plan
        assert not any(part.encode() in plan for part in path.read_text().split("."))
        with pytest.raises(UnauthenticatedError, match="without a proof"):
            DistributedLogDataSource(where).schema()
        close_shared_namespace(Address(uri=proxy.location, tls=TlsFiles(ca=roots)))
