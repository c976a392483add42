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

    def server_context(self, *, asks_clients: bool, requires_them: bool = True) -> ssl.SSLContext:
        """Return the context of a server; with `asks_clients` it requires client certificates.

        Without `requires_them` clients need none, but one that is not trusted is always refused.

        Raises:
            ConfigurationError: as `client_context`, or there is no certificate.
        """
        if not self.cert:
            raise ConfigurationError("a server with TLS needs a certificate and its key")
        context = self._context(is_server=True, asks_clients=asks_clients)
        if asks_clients and not requires_them:
            import ssl

            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def content(self) -> PemBytes:
        """Return what the files hold now, whether it fits together or not.

        Raises:
            ConfigurationError: a file cannot be read.
        """
        found = {}
        for name, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            try:
                found[name] = Path(path).read_bytes() if path else b""
            except OSError as error:
                raise ConfigurationError(
                    f"TLS {name}={path!r}: expected a readable PEM file: {error}"
                ) from error
        return PemBytes(**found)

    def _context(self, *, is_server: bool, asks_clients: bool) -> ssl.SSLContext:
        import ssl  # a process without connections does not need it

        purpose = ssl.Purpose.CLIENT_AUTH if is_server else ssl.Purpose.SERVER_AUTH
        try:
            context = context_for(purpose, ca=self.ca)
        except OSError as error:  # SSLError is an OSError
            raise ConfigurationError(
                f"TLS ca={self.ca!r}: expected a readable PEM file of certificates: {error}"
            ) from error
        # From Python 3.13 on these are the defaults; this way every Python has the same rule.
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        if self.cert:
            named = f"TLS cert={self.cert!r} key={self.key!r}"
            load_own(context, cert=self.cert, key=self.key, named=named)
        return context


def load_own(context: ssl.SSLContext, *, cert: str, key: str, named: str) -> None:
    """Give a context the certificate of this process and its key; `named` is how errors begin.

    Raises:
        ConfigurationError: a file cannot be read, has wrong content, or needs a passphrase.
    """
    try:
        context.load_cert_chain(cert, key, password="")
    except OSError as error:  # SSLError is an OSError
        raise ConfigurationError(
            f"{named}: expected readable PEM files of a certificate and its key, without a "
            f"passphrase: {error}"
        ) from error


def context_for(purpose: ssl.Purpose, *, ca: str | None = None) -> ssl.SSLContext:
    """Return a context of TLS 1.2 or later; both ends take 1.3 if they have it.

    gRPC's own library has the same minimum, and no option for it.  Without `ca` the system's own
    authorities are trusted.
    """
    import ssl

    context = ssl.create_default_context(purpose, cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def name_in_certificate(certificate: Any) -> str | None:
    """Return the common name of a certificate in the form of `ssl`."""
    for parts in (certificate or {}).get("subject", ()):
        for key, value in parts:
            if key == "commonName":
                return str(value)
    return None
