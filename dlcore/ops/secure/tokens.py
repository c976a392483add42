"""Tokens of users, signed with the key of a cluster's folder."""

from __future__ import annotations

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import ECKey

from dlcore.base.access.rights import Principal, Proof
from dlcore.base.errors import ConfigurationError
from dlcore.ops.secure.plan import AUDIENCE, ISSUER

_MS_PER_HOUR = 3_600_000


def signed_token(key: bytes, user: str, *, now_ms: int, hours: float) -> tuple[str, int]:
    """Return a token of a user, and when it expires, in epoch milliseconds.

    Raises:
        ConfigurationError: the name is none of a user, or the key is none for tokens.
    """
    Principal(Proof.TOKEN, user)  # raises what the proxy would say
    try:
        signer = ECKey.import_key(key)
    except (JoseError, ValueError) as error:
        raise ConfigurationError(
            f"expected tokens.key, which dlog secure init makes: {error}"
        ) from error
    expires_ms = now_ms + int(hours * _MS_PER_HOUR)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": user, "iat": now_ms // 1000}
    claims |= {"exp": expires_ms // 1000}
    return jwt.encode({"alg": "ES256"}, claims, signer), expires_ms
