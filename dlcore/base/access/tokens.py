"""Tokens of users: JWTs that an issuer signed, checked by its public keys.

Promises: a token is taken only if a key of the issuer signed it with an asymmetric algorithm that
the key is for, whatever the token says of itself, and only for this service and this time.  No
error and no `repr` contains a token, or a part of one.

This module imports joserfc; it is imported where a proxy checks tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, cast

from joserfc import jws
from joserfc.errors import ClaimError, ExpiredTokenError, JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey, import_key
from joserfc.jwt import JWTClaimsRegistry

from dlcore.base.access.rights import Principal, Proof
from dlcore.base.config import NUMBER_MAX
from dlcore.base.errors import ConfigurationError, UnauthenticatedError

ALGORITHMS = (
    "ES256", "ES384", "ES512", "EdDSA", "Ed25519",
    "PS256", "PS384", "PS512", "RS256", "RS384", "RS512",
)  # fmt: skip
"""Signatures that are taken: all asymmetric ones of RFC 7518, and Ed25519 by its two names."""
TOKEN_LENGTH_MAX = 16 * 1024
KEYS_MAX = 100
"""Most keys of an issuer."""
_KINDS = (RSAKey, ECKey, OKPKey)
_RSA_BITS_MIN = 2048
_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)
_PEM_KINDS = (b"PUBLIC KEY", b"RSA PUBLIC KEY")


class _Signatures(jws.JWSRegistry):
    """The algorithms; without joserfc's warning that the name EdDSA is an old one."""

    def get_alg(self, name: str) -> Any:
        if name not in ALGORITHMS:  # `Token.parse` has checked it
            raise AssertionError(name)
        return self.algorithms[name]


# Headers that are not known are ignored, as RFC 7515 asks for; `Token.parse` refuses `crit`.
_SIGNATURES = _Signatures(algorithms=ALGORITHMS, strict_check_header=False)
_SIGNATURES.max_header_length = TOKEN_LENGTH_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """The claims that a token must have."""

    issuer: str
    """Its `iss`."""
    audience: str
    """Its `aud`, or one of them."""
    claim: str = "sub"
    """The claim that names the user."""
    skew_s: float = 10.0
    """By so much the clocks of issuer and proxy may differ."""


@dataclass(frozen=True, slots=True)
class CheckedToken:
    """The meaning of a token that was checked."""

    principal: Principal
    expires_at: float
    """The time in seconds since 1970 from which the token is refused."""


class Keys:
    """Public keys of an issuer."""

    def __init__(self, keys: list[Any]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, kid: str) -> bool:
        return any(each.kid == kid for each in self._keys)

    def named(self, kid: str | None) -> list[Any]:
        """Return the keys that may have signed a token which names a key, or none."""
        return [each for each in self._keys if kid in (None, each.kid)]

    @classmethod
    def parse(cls, data: bytes, where: str) -> Keys:
        """Read keys: a JWK set as JSON, or PEM blocks of public keys.

        Keys of a JWK set that sign nothing, or are of a kind that is not known, are left out.

        Raises: ConfigurationError: `data`, which is from `where`, has no key, or not only public
            ones.
        """
        try:
            found = _of_pem(data) if b"-----BEGIN" in data else _of_json(data)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"keys in {where}: {_EXPECTED}: {error}") from error
        if not 0 < len(found) <= KEYS_MAX:
            raise ConfigurationError(
                f"keys in {where}: {len(found)} can check a token, expected 1 … {KEYS_MAX}"
            )
        for key in found:
            if key.is_private:
                raise ConfigurationError(f"keys in {where}: a private key: {_EXPECTED}")
            if isinstance(key, RSAKey) and key.public_key.key_size < _RSA_BITS_MIN:
                raise ConfigurationError(
                    f"keys in {where}: an RSA key of {key.public_key.key_size} bits: expected at "
                    f"least {_RSA_BITS_MIN}"
                )
        return cls(found)


_EXPECTED = "expected public keys, as a JWK set or in PEM blocks"


def _of_pem(data: bytes) -> list[Any]:
    found = []
    for block in _PEM.finditer(data):
        if block[1] not in _PEM_KINDS:
            raise ValueError(f"a block {block[1].decode()!r}")
        found.append(_of_block(block[0]))
    return found


def _of_block(pem: bytes) -> Any:
    for kind in _KINDS:
        try:
            return kind.import_key(pem)
        except (JoseError, ValueError):  # it is of another kind
            continue
    raise ValueError("a public key that is neither RSA, EC nor Ed25519")


def _of_json(data: bytes) -> list[Any]:
    keys = json.loads(data)["keys"]
    return [
        import_key(each)
        for each in keys
        if each["kty"] in ("RSA", "EC", "OKP") and each.get("use", "sig") == "sig"
    ]


@dataclass(frozen=True, slots=True)
class Token:
    """A token whose signature is not checked yet."""

    algorithm: str
    kid: str | None
    """The key that signed it, as it says."""
    _signed: Any = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read the header of a token.  Raises: UnauthenticatedError: it is none that is taken."""
        if len(text) > TOKEN_LENGTH_MAX:
            raise UnauthenticatedError(
                f"a token of {len(text)} characters: expected at most {TOKEN_LENGTH_MAX}"
            )
        try:
            signed = jws.extract_compact(text.encode(), registry=_SIGNATURES)
            header = signed.headers()
            algorithm, kid = header["alg"], header.get("kid")
        except (JoseError, ValueError, TypeError, KeyError, RecursionError):
            # From None, here and below: the error has the token in its frames, or in its text.
            raise UnauthenticatedError(f"a token that is no {_FORM}") from None
        if algorithm not in ALGORITHMS:
            raise UnauthenticatedError(
                f"a token with the algorithm {str(algorithm)[:20]!r}: expected one of "
                f"{', '.join(ALGORITHMS)}"
            )
        if not (kid is None or isinstance(kid, str)) or "crit" in header or "b64" in header:
            raise UnauthenticatedError(
                f"a token with a header that is not known: expected a {_FORM}"
            )
        return cls(algorithm, kid, signed)

    def check(self, keys: Keys, rules: TokenRules, *, now_s: float) -> CheckedToken:
        """Return what the token means.  Raises: UnauthenticatedError."""
        if not any(self._is_signed_by(each) for each in keys.named(self.kid)):
            raise UnauthenticatedError(
                "a token whose signature is not of a key of the issuer "
                f"{rules.issuer!r}: it was altered, or another issuer made it, or the key is new"
            )
        claims = self._claims()
        _require(claims, rules, now_s)
        try:
            principal = Principal(Proof.TOKEN, claims[rules.claim])
        except ConfigurationError as error:
            raise UnauthenticatedError(
                f"a token with a bad claim {rules.claim!r}: {error}"
            ) from None
        return CheckedToken(principal, min(claims["exp"], NUMBER_MAX) + rules.skew_s)

    def _is_signed_by(self, key: Any) -> bool:
        try:
            return jws.validate_compact(self._signed, key, registry=_SIGNATURES)
        except (JoseError, ValueError):  # it is for another algorithm
            return False

    def _claims(self) -> dict[str, Any]:
        try:
            claims = json.loads(self._signed.payload)
        except (ValueError, RecursionError):
            claims = None
        if not isinstance(claims, dict):
            raise UnauthenticatedError("a token whose payload is no JSON object") from None
        return claims


_FORM = "signed JWT (three parts in base64url, with dots between)"


def _require(claims: dict[str, Any], rules: TokenRules, now_s: float) -> None:
    """Raise UnauthenticatedError if a claim does not fit."""
    # joserfc asks for whole seconds, and only compares them: parts of a second serve as well.
    now, leeway = cast("Any", lambda: now_s), cast("Any", rules.skew_s)
    checks = JWTClaimsRegistry(
        now,
        leeway,
        iss={"essential": True, "value": rules.issuer},
        aud={"essential": True, "value": rules.audience},
        exp={"essential": True},
    )
    try:
        checks.validate(claims)
    except ExpiredTokenError:
        raise UnauthenticatedError("a token that has expired: get a new one") from None
    except ClaimError as error:
        raise UnauthenticatedError(
            f"a token with a claim that is missing or does not fit ({error.claim}): expected "
            f"iss={rules.issuer!r}, aud={rules.audience!r}, an expiry exp, and times that have come"
        ) from None
    name = claims.get(rules.claim)
    if not isinstance(name, str):
        raise UnauthenticatedError(f"a token whose claim {rules.claim!r} names no user")
