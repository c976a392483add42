"""Reasons of TLS why a proxy does not answer, which gRPC tells in words of its own.

The connection is made once more without gRPC, and its handshake says what is wrong.  A proxy that
is gone, or busy, gives no reason here: what is tried again may succeed.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from dlcore.base.tls_refusals import explained, judge_as_grpc, own_refusal

if TYPE_CHECKING:
    from dlcore.base.tls import TlsFiles

_LOOK_S = 2.0
"""A proxy that answers begins to within so much."""


async def tls_reason(address: str, tls: TlsFiles | None, *, is_secure: bool) -> str | None:
    """Return what is wrong with TLS between us and a proxy, and what would be right, if anything.

    Raises: ConfigurationError: our files are not what they should be.
    """
    if not is_secure:
        found = await _first_byte(address, _trusting_all())
        if found is None or _is_plain(found):
            return None
        return f"it speaks TLS: expected grpc+tls://{address}, with the certificates to trust"
    context = ssl.create_default_context() if tls is None else tls.client_context()
    judge_as_grpc(context)
    found = await _first_byte(address, context)
    if isinstance(found, ssl.SSLCertVerificationError):
        return explained(found, tls)
    if _is_plain(found):
        return f"it does not speak TLS: expected grpc://{address}"
    if found is None or found == _SETTINGS:
        return None
    if tls is None or not tls.cert:
        return f"it lets nobody in without a certificate: {_EXPECTED}"
    own = own_refusal(tls, host=None, strictly=False)
    return f"it lets nobody in with cert={tls.cert!r}: {own or _EXPECTED}"


_EXPECTED = "expected a certificate signed by whom its tls_ca names"


_SETTINGS = b"\0"
"""The first byte of HTTP/2 from a server that has let us in."""


def _trusting_all() -> ssl.SSLContext:
    """Return what a server is only looked at with: nothing is sent to it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _is_plain(found: bytes | ssl.SSLError | None) -> bool:
    return isinstance(found, ssl.SSLError) and "ALERT" not in (found.reason or "")


async def _first_byte(address: str, context: ssl.SSLContext) -> bytes | ssl.SSLError | None:
    """Return what a server says first under TLS, or why not; None if that is not known."""
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
    except OSError:  # also one that took too long
        return None
