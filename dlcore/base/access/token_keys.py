"""The public keys of an issuer of tokens, from a file or from its server, as they change.

Answers of a server are bounded in size and time, and come over HTTPS from the named server only.
`dlcore.base.access.key_sources` says when it is asked.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from dlcore.base.access.key_sources import SIZE_BYTES_MAX, KeyFile, KeySource, KeyTeller
from dlcore.base.access.tokens import Keys
from dlcore.base.clock import steady_s
from dlcore.base.errors import ConfigurationError

ANSWER_S = 10.0
"""A server has this time to answer."""
_CHUNK_BYTES = 64 * 1024


def open_keys(where: str, issuer: str) -> KeySource[Keys]:
    """Return the keys in a file, at an ``https://`` URL, or by the issuer's OpenID discovery.

    Raises: ConfigurationError: the file has none; or neither is a URL of HTTPS.
    """
    if where and "://" not in where:
        return KeyFile(where, Keys.parse)
    if not (where or issuer).startswith("https://"):
        raise ConfigurationError(
            f"token_keys={where!r} token_issuer={issuer!r}: expected a file, or an https:// URL of "
            "a JWK set, or none for an issuer whose name is an https:// URL"
        )
    if where:
        return KeyTeller(where, lambda: fetch(where), Keys.parse)
    return KeyTeller(issuer, lambda: fetch(_discovered(issuer)), Keys.parse)


def _discovered(issuer: str) -> str:
    """Return the URL of the keys of an issuer, by OpenID Connect Discovery.  Raises: ValueError."""
    found = json.loads(fetch(f"{issuer.rstrip('/')}/.well-known/openid-configuration"))
    if not isinstance(found, dict) or found.get("issuer") != issuer:
        named = found.get("issuer") if isinstance(found, dict) else found
        raise ValueError(f"its discovery document is of issuer={named!r}, expected {issuer!r}")
    where = found.get("jwks_uri")
    if not isinstance(where, str) or not where.startswith("https://"):
        raise ValueError(f"its discovery document has jwks_uri={where!r}: expected an https:// URL")
    return where


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which could lead to another server or out of HTTPS."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def fetch(url: str) -> bytes:
    """Return what a server answers.  Raises: OSError, ValueError, HTTPException."""
    opener = urllib.request.build_opener(_NoRedirection)
    begun_s, found = steady_s(), b""
    try:
        answer = opener.open(url, timeout=ANSWER_S)
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer, too
        raise
    with answer:
        # read1 returns what has come: a server that sends byte by byte is seen to take too long.
        while chunk := answer.read1(_CHUNK_BYTES):
            found += chunk
            if len(found) > SIZE_BYTES_MAX or steady_s() - begun_s > ANSWER_S:
                raise ValueError(f"{url} tells more than {SIZE_BYTES_MAX} bytes, or for too long")
    return found
