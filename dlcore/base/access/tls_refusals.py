"""Certificates that are refused: the reason, and the properties that a certificate needs.

OpenSSL gives the reason, and this module adds the remedy.  A server whose certificate is refused,
and a client that is refused, often see only a closed connection.  Both can check their own
certificate before, as peers with the same authorities will.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError
from dlcore.base.log_lines import Seldom

if TYPE_CHECKING:
    from dlcore.base.access.tls import TlsFiles

# Numbers that are the same in every version of OpenSSL; the header x509_vfy.h lists them.
_UNTRUSTED = frozenset({2, 18, 19, 20, 21})
_OUT_OF_DATE = frozenset({9, 10})
_WRONG_PURPOSE = 26
_WRONG_HOST = frozenset({62, 64})

_FORM = (
    "basicConstraints=critical,CA:TRUE, keyUsage=critical,keyCertSign and subjectKeyIdentifier in "
    "the certificate of each authority, and authorityKeyIdentifier in each certificate that an "
    "authority signed"
)
_PLAIN = "WRONG_VERSION_NUMBER"
_PLAIN_SERVER = "it does not speak TLS: expected tls_cert and tls_key there, or no tls_ca here"
TLS_CLOSED = "if a port is of TLS, it closes so: then expected tls_ca, and its other files"
"""An explanation for a client without TLS."""
_NO_TLS = "a client without TLS is not let in: expected one with tls_ca, and its other files"
_REFUSED = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": (
        "a client without a certificate is not let in: expected one signed by whom tls_ca names, "
        "or tls_client_auth=none"
    ),
    "UNSUPPORTED_PROTOCOL": "a client with an old TLS is not let in: expected TLS 1.2 or later",
    "HTTP_REQUEST": _NO_TLS,
    "PACKET_LENGTH_TOO_LONG": _NO_TLS,
    _PLAIN: _NO_TLS,
}
"""The reasons why a server refuses a client, by OpenSSL's name of the error."""
_UNFINISHED = (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
_ROUNDS_MAX = 10
"""Most rounds; a handshake has fewer."""

logger = logging.getLogger(__name__)


def explained(error: Exception, files: TlsFiles | None) -> str:
    """Return the text of a client's failed connection; for a certificate also what it needs."""
    if isinstance(error, ssl.SSLError) and error.reason == _PLAIN:
        return _PLAIN_SERVER
    if not isinstance(error, ssl.SSLCertVerificationError):
        return str(error) or type(error).__name__
    signers = "the system trusts" if files is None else f"the file ca={files.ca!r} names"
    return f"its certificate is not accepted {_reason(error, signers, purpose='serverAuth')}"


def closed_unheard(files: TlsFiles | None) -> str:
    """Return why a server may have closed a client's connection without an answer."""
    if files is None:
        return "a server that asks for TLS closes so: expected ca, cert and key"
    if not files.cert:
        return (
            "a server that asks for a certificate closes so: expected cert and key, a certificate "
            "signed by whom the server's tls_ca names"
        )
    own = own_refusal(files, host=None)
    return own or (
        f"a server that does not accept cert={files.cert!r} closes so, and its log tells why: "
        "expected a certificate signed by whom the server's tls_ca names"
    )


def grpc_failure(details: str, files: TlsFiles) -> str:
    """Return the text of a failed call, for which gRPC has only a text, with possible remedies."""
    if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
        return (
            f"{details}; its certificate is not accepted: expected one signed by whom the file "
            f"ca={files.ca!r} names, valid now, with serverAuth in extendedKeyUsage and the host "
            "that is connected to in subjectAltName"
        )
    if _PLAIN in details:
        return f"{details}; {_PLAIN_SERVER}"
    return f"{details}; {closed_unheard(files)}" if "Socket closed" in details else details


def own_refusal(files: TlsFiles, *, host: str | None, strictly: bool = True) -> str | None:
    """Return why peers with the same authorities will refuse our certificate.

    It is tested in a handshake with ourselves, without a network.  If our own `ca` did not sign it,
    it may still be right for the peers, and it is not judged.

    Args:
        files: our own files.
        host: the name that clients connect to, if we are a server; None: we are a client.
        strictly: apply Python's rules; else those of gRPC.
    """
    try:
        client, server = files.client_context(), files.server_context(asks_clients=host is None)
    except ConfigurationError as error:
        return str(error)
    if host is None:
        client.check_hostname = False
        client.verify_mode = ssl.CERT_NONE
    if not strictly:
        judge_as_grpc(client)
        judge_as_grpc(server)
    try:
        found = _handshake_error(client, server, (host or "client").strip("[]"))
    except ValueError as error:
        return f"clients cannot ask for host={host!r}: {error}: expected a name or an address"
    if found is None or found.verify_code in _UNTRUSTED:
        return None
    purpose = "clientAuth" if host is None else "serverAuth"
    reason = _reason(found, f"the file ca={files.ca!r} names", purpose=purpose)
    return f"our certificate cert={files.cert!r} is not accepted by others {reason}"


def judge_as_grpc(context: ssl.SSLContext) -> None:
    """Make a context apply the rules of gRPC's own library, on every Python."""
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT


def log_refusals(context: ssl.SSLContext) -> None:
    """Make a server's log show which clients' certificates it refuses, and why.

    An event loop drops such a connection silently, before a protocol learns of it.
    """
    seldom = Seldom(1)

    class LoggedHandshake(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except ssl.SSLError as error:
                _log(error, seldom, now_s=asyncio.get_running_loop().time())
                raise

    context.sslobject_class = LoggedHandshake


def _log(error: ssl.SSLError, seldom: Seldom, *, now_s: float) -> None:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = _reason(error, "tls_ca names", purpose="clientAuth")
        text = f"a client's certificate is not accepted {reason}"
    elif isinstance(error, _UNFINISHED):
        return
    else:  # OpenSSL's names of what is no TLS differ between its versions
        other = f"a client's handshake failed ({error.reason}); if it has none, {_NO_TLS}"
        text = _REFUSED.get(error.reason, other)
    for like, count in seldom.left_out(now_s=now_s).items():
        logger.warning(
            "%d more like this were left out: %s; to do: as for the first one", count, like
        )
    if seldom.is_written(text, now_s=now_s):
        logger.warning(
            "%s; to do: if the client is one of yours, correct its certificate (docs/tls.md); "
            "else nothing",
            text,
        )


def _reason(error: ssl.SSLCertVerificationError, signers: str, *, purpose: str) -> str:
    code, found = error.verify_code, error.verify_message.rstrip(".")
    if code in _UNTRUSTED:
        needed = f"one signed by whom {signers}"
    elif code in _OUT_OF_DATE:
        needed = "one that is valid now, by this machine's clock"
    elif code in _WRONG_HOST:
        needed = "one with the host that is connected to in subjectAltName, as DNS:name or IP:…"
    elif code == _WRONG_PURPOSE:
        needed = f"one with {purpose} in extendedKeyUsage"
    else:
        needed = _FORM
    return f"({found}): expected {needed}"


def _handshake_error(
    client: ssl.SSLContext, server: ssl.SSLContext, host: str
) -> ssl.SSLCertVerificationError | None:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_ROUNDS_MAX):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error
    return None
