"""TLS of bookies and proxies: certificates in PEM files, which are given by their paths.

Only the paths are passed on, for example to a Spark executor: every host has its own files there,
and the process that connects reads them.  The server's certificate must contain the name that a
client connects to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.errors import ConfigurationError
from dlcore.base.html_tables import ShownFields

if TYPE_CHECKING:
    import ssl

    import grpc


class PemBytes(NamedTuple):
    """Content of the files; empty for a file that is not given."""

    ca: bytes
    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles(ShownFields):
    """Paths of PEM files.

    Raises:
        ConfigurationError: a file is given without others that it needs.
    """

    ca: str
    """Certificates of authorities that may sign the other end's certificate."""
    cert: str = ""
    """Our own certificate, with those between it and the other end's `ca`; empty: we have none."""
    key: str = ""
    """Its private key, without a passphrase."""

    def __post_init__(self) -> None:
        if not self.ca:
            raise ConfigurationError(
                f"TLS with cert={self.cert!r} key={self.key!r} and no ca: expected the file of "
                "the certificates to trust as well"
            )
        if bool(self.cert) != bool(self.key):
            raise ConfigurationError(
                f"TLS with cert={self.cert!r} key={self.key!r}: expected both files or none"
            )

    @classmethod
    def of(cls, *, ca: str, cert: str, key: str) -> TlsFiles | None:
        """Return the files, or None if none is given."""
        return cls(ca=ca, cert=cert, key=key) if ca or cert or key else None

    def client_context(self) -> ssl.SSLContext:
        """Return the context of a client.

        Raises:
            ConfigurationError: a file cannot be read, or has wrong content.
        """
        return self._context(is_server=False, asks_clients=False)

    def server_context(self, *, asks_clients: bool) -> ssl.SSLContext:
        """Return the context of a server; with `asks_clients` it requires client certificates.

        Raises:
            ConfigurationError: as `client_context`, or there is no certificate.
        """
        if not self.cert:
            raise ConfigurationError("a server with TLS needs a certificate and its key")
        return self._context(is_server=True, asks_clients=asks_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a gRPC client.  Raises: as `client_context`."""
        import grpc

        files = self._read()
        return grpc.ssl_channel_credentials(files.ca, files.key or None, files.cert or None)

    def server_credentials(self, *, asks_clients: bool) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server.  Raises: as `server_context`."""
        import grpc

        self.server_context(asks_clients=asks_clients)
        files = self._read()
        return grpc.ssl_server_credentials(
            [(files.key, files.cert)],
            root_certificates=files.ca,
            require_client_auth=asks_clients,
        )

    def _read(self) -> PemBytes:
        self.client_context()  # its error messages are better than those of gRPC
        return PemBytes(
            Path(self.ca).read_bytes(),
            Path(self.cert).read_bytes() if self.cert else b"",
            Path(self.key).read_bytes() if self.key else b"",
        )

    def _context(self, *, is_server: bool, asks_clients: bool) -> ssl.SSLContext:
        import ssl  # a process without connections does not need it

        purpose = ssl.Purpose.CLIENT_AUTH if is_server else ssl.Purpose.SERVER_AUTH
        try:
            context = ssl.create_default_context(purpose, cafile=self.ca)
        except OSError as error:  # SSLError is an OSError
            raise ConfigurationError(
                f"TLS ca={self.ca!r}: expected a readable PEM file of certificates: {error}"
            ) from error
        # From Python 3.13 on these are the defaults; this way every Python has the same rule.
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        if self.cert:
            try:
                context.load_cert_chain(self.cert, self.key, password="")
            except OSError as error:
                raise ConfigurationError(
                    f"TLS cert={self.cert!r} key={self.key!r}: expected readable PEM files of a "
                    f"certificate and its key, without a passphrase: {error}"
                ) from error
        return context


def name_in_certificate(certificate: Any) -> str | None:
    """Return the common name of a certificate in the form of `ssl`."""
    for parts in (certificate or {}).get("subject", ()):
        for key, value in parts:
            if key == "commonName":
                return str(value)
    return None
