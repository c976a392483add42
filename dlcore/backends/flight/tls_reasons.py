"""The reason why TLS with a proxy fails, which gRPC does not report clearly.

A second connection is made without gRPC, and its handshake shows the reason.  A proxy that is gone
or busy yields no reason here, because another attempt may succeed.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from dlcore.base.access.tls import context_for
from dlcore.base.access.tls_refusals import explained, judge_as_grpc, own_refusal
from dlcore.base.errors import ConfigurationError, DLError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.access.tls import TlsFiles

_SERVERS = ssl.Purpose.SERVER_AUTH
_LOOK_S = 2.0
"""A proxy that answers at all sends its first byte within this time."""


class TlsReasons:
    """Why TLS fails with each of several proxies, as far as it was looked for."""

    def __init__(self, locations: Sequence[str], tls: TlsFiles | None) -> None:
        self._locations = locations
        self._tls = tls
        self._found: dict[str, str] = {}

    async def explained(self, error: DLError, location: str) -> DLError:
        """Return the error to report if a proxy does not answer.

        If TLS is wrong at every proxy, it is a `ConfigurationError`, which is not retried.
        """
        scheme, _, address = location.partition("://")
        reason = await tls_reason(address, self._tls, is_secure=scheme == "grpc+tls")
        if reason is None:
            self._found.pop(location, None)
            return error
        self._found[location] = f"the proxy at {location}: {reason}"
        is_everywhere = len(self._found) == len(set(self._locations))
        kind = ConfigurationError if is_everywhere else type(error)
        return kind("; ".join(self._found.values()))


async def tls_reason(address: str, tls: TlsFiles | None, *, is_secure: bool) -> str | None:
    """Return why TLS with a proxy fails, and how to mend it; None if TLS is not the reason.

    Raises: ConfigurationError: our own files are invalid.
    """
    if not is_secure:
        found = await _first_byte(address, _trusting_all())
        if found is None or _is_plain(found):
            return None
        return f"it speaks TLS: expected grpc+tls://{address}, with the certificates to trust"
    context = context_for(_SERVERS) if tls is None else tls.client_context()
    judge_as_grpc(context)
    found = await _first_byte(address, context)
    if isinstance(found, ssl.SSLCertVerificationError):
        return explained(found, tls)
    if _is_plain(found):
        return f"it does not speak TLS: expected grpc://{address}"
    if found is None or found == _SETTINGS:
        return None
    if tls is None or not tls.cert:
        return f"it lets no client in without a certificate: {_EXPECTED}"
    own = own_refusal(tls, host=None, strictly=False)
    return f"it lets no client in with cert={tls.cert!r}: {own or _EXPECTED}"


_EXPECTED = "expected a certificate signed by whom its tls_ca names"


_SETTINGS = b"\0"
"""The first byte of HTTP/2 from a server that has accepted our certificate."""


def _trusting_all() -> ssl.SSLContext:
    """Return a context that trusts every server: safe, because no data is sent."""
    context = context_for(_SERVERS)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _is_plain(found: bytes | ssl.SSLError | None) -> bool:
    return isinstance(found, ssl.SSLError) and "ALERT" not in (found.reason or "")


async def _first_byte(address: str, context: ssl.SSLContext) -> bytes | ssl.SSLError | None:
    """Return the first byte from a server under TLS, or TLS's error; None if neither is known."""
    host, _, port = address.rpartition(":")
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(_LOOK_S):
            opening = asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
            reader, writer = await opening
            try:
                return await reader.read(1)
            finally:
                writer.transport.abort()
    except ssl.SSLEOFError:
        return None
    except ssl.SSLError as error:
        return error
    except OSError:  # a timeout is one as well
        return None
