"""Certificates, keys and authorities that are replaced under load, of real processes."""

from __future__ import annotations

import shutil
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from cryptography import x509

from dlcore import LogRecord
from dlcore.sync import open_namespace
from tests.fixtures.certificates import Authority
from tests.fixtures.proxies import proxy_process
from tests.fixtures.tls_cluster import tls_cluster
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.access.tls import TlsFiles
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper
    from dlcore.sync import Namespace

pytestmark = pytest.mark.integration
SEEN_S = 60.0
HEARD_S = 1.0
"""Time in which a server that refuses a client has closed."""


@dataclass
class Appender:
    """Appends one record after the other until the signal to stop; the first error ends it."""

    namespace: Namespace
    log: str

    def __post_init__(self) -> None:
        self.acknowledged = 0
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"appender to {self.log}")
        self._thread.start()

    def _run(self) -> None:
        try:
            with self.namespace.open_log(self.log) as log, log.open_writer() as writer:
                while not self._stop.is_set():
                    writer.write(LogRecord(txid=self.acknowledged, payload=b"x"))
                    writer.flush()
                    self.acknowledged += 1
                    self._stop.wait(0.01)
        except Exception as error:  # noqa: BLE001  # the test raises it
            self._error = error

    def wait_for_more(self) -> None:
        """Return when more is acknowledged than now."""
        now = self.acknowledged
        wait_until(lambda: self._error or self.acknowledged > now, timeout_s=SEEN_S)
        if self._error is not None:
            raise self._error

    def ask_to_end(self) -> None:
        """Append no more."""
        self._stop.set()

    def end(self) -> int:
        """Stop; return how many appends were acknowledged, none having failed."""
        self.ask_to_end()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.acknowledged


def handshake(address: str, files: TlsFiles) -> tuple[int, bool]:
    """Return the serial number that a new connection sees, 0 for none, and whether it is let in."""
    host, _, port = address.rpartition(":")
    context = files.client_context()
    context.set_alpn_protocols(["h2"])
    serial = 0
    try:
        with (
            socket.create_connection((host, int(port)), timeout=HEARD_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as secure,
        ):
            shown = secure.getpeercert(binary_form=True)
            assert shown is not None
            serial = x509.load_der_x509_certificate(shown).serial_number
            # gRPC sends its settings; a bookie waits for our HELLO; an end that refuses us closes.
            return serial, bool(secure.recv(1))
    except TimeoutError:
        return serial, True
    except OSError:
        return serial, False


def serial_in(files: TlsFiles) -> int:
    """Return the serial number of the certificate in a file."""
    return x509.load_pem_x509_certificate(Path(files.cert).read_bytes()).serial_number


@pytest.fixture
def uri(zookeeper: EmbeddedZooKeeper) -> str:
    """A namespace of the test's own."""
    return f"distributedlog://{zookeeper.servers}/test-{uuid4().hex}"


@pytest.fixture
def appenders() -> Iterator[list[Appender]]:
    """Ended with the test."""
    running: list[Appender] = []
    yield running
    for each in running:
        each.ask_to_end()


def test_a_rotation_of_everything_fails_no_append(
    uri: str, tmp_path: Path, appenders: list[Appender]
) -> None:
    """Trust in both authorities, then new certificates and keys, then trust in the new one only.

    Appends go on directly and through a proxy.  New connections see the new certificates, and at
    the end a client whose certificate the old authority signed is refused.
    """
    with ExitStack() as stack:
        cluster = stack.enter_context(tls_cluster(uri, tmp_path))
        old, new = cluster.authority, Authority(tmp_path / "new")
        in_use = {name: old.files_of(name) for name in ("a", "b", "c", "client")}
        in_use["proxy"] = files = old.issue("proxy")
        given = {"ca": files.ca, "cert": files.cert, "key": files.key}
        options = [
            f"--{of}-{name}={path}" for of in ("serve-tls", "tls") for name, path in given.items()
        ]
        proxy = stack.enter_context(proxy_process(uri, *options))
        direct = stack.enter_context(open_namespace(uri, tls=cluster.client))
        remote = stack.enter_context(open_namespace(proxy.location, tls=cluster.client))
        for name in ("direct", "proxied"):
            direct.create_log(name)
        appenders += [Appender(direct, "direct"), Appender(remote, "proxied")]
        served = [(files, proxy.location.partition("://")[2])]
        for bookie in direct.get_bookies():
            own = in_use[bookie.bookie.name]
            served += [(own, bookie.address), (own, bookie.control_address)]

        def wait_for(client: TlsFiles, *, is_let_in: bool) -> None:
            for own, address in served:
                expected = (serial_in(own), is_let_in)
                wait_until(lambda: handshake(address, client) == expected, timeout_s=SEEN_S)  # noqa: B023
            for each in appenders:
                each.wait_for_more()

        of_new, of_old = new.issue("new-client"), old.issue("old-client")
        trusting = replace(of_new, ca=str(tmp_path / "both.pem"))
        both = old.ca.read_bytes() + new.ca.read_bytes()
        Path(trusting.ca).write_bytes(both)
        old.ca.write_bytes(both)
        wait_for(trusting, is_let_in=True)
        replaced = {name: new.issue(name) for name in in_use}
        for name in ("key", "cert"):  # between them nothing fits
            for who, own in in_use.items():
                shutil.copyfile(getattr(replaced[who], name), getattr(own, name))
            for each in appenders:
                each.wait_for_more()
        wait_for(trusting, is_let_in=True)
        old.ca.write_bytes(new.ca.read_bytes())
        wait_for(replace(of_old, ca=trusting.ca), is_let_in=False)
        wait_for(of_new, is_let_in=True)
        # These connect anew.
        with open_namespace(proxy.location, tls=of_new) as again, again.open_log("proxied") as log:
            assert log.status().record_count > 0
        with open_namespace(uri, tls=of_new) as again:
            for each in appenders:
                assert each.end() == again.open_log(each.log).get_log_record_count()
