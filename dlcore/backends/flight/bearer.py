"""The token that a client sends to proxies, and new ones in its place.

Promises: a function that returns tokens is called for the first call, shortly before the present
token expires, and when a proxy has refused it; never for each call.  No error and no `repr`
contains a token.
"""

from __future__ import annotations

import base64
import binascii
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dlcore.base.clock import wall_s
from dlcore.base.errors import ConfigurationError, DLError, UnauthenticatedError

if TYPE_CHECKING:
    from collections.abc import Callable

    Token: TypeAlias = "str | Callable[[], str]"

_EARLIER_S, _EARLIER_SHARE = 30.0, 0.1
"""A token is replaced this long before it expires, or this share of its time if that is less."""


class Bearer:
    """The token of one client.

    Raises: ConfigurationError: `token` is neither text nor a function.
    """

    def __init__(self, token: Token) -> None:
        if not isinstance(token, str) and not callable(token):
            raise ConfigurationError(
                f"a token of the kind {type(token).__name__}: expected text, or a function that "
                "returns text"
            )
        self._source = token
        self._token = ""
        self._replaced_at = 0.0

    def token(self) -> str:
        """Return the token for a call.

        Raises: UnauthenticatedError: the function fails, or returns what is no token.
        """
        if not self._token or wall_s() >= self._replaced_at:
            self._renew()
        return self._token

    def renewed(self, refused: str) -> bool:
        """Return whether there is another token than the one that was refused.

        Raises: as `token`.
        """
        # Another call may have renewed it meanwhile.
        if self._token == refused:
            self._renew()
        return self._token != refused

    def _renew(self) -> None:
        source = self._source
        try:
            token: object = source if isinstance(source, str) else source()
        except DLError:
            raise
        except Exception as error:
            raise UnauthenticatedError(
                f"the function that returns tokens failed: {error!r}"
            ) from error
        if not isinstance(token, str) or not token or not token.isascii() or " " in token:
            raise UnauthenticatedError(
                "a token that is empty, or has blanks or other than ASCII characters: expected a "
                "token as its issuer gave it"
            )
        if not token.isprintable():
            raise UnauthenticatedError("a token with control characters, such as an end of line")
        now_s, expires_at = wall_s(), _expiry_of(token)
        self._token = token
        left_s = max(0.0, expires_at - now_s)
        self._replaced_at = expires_at - min(_EARLIER_S, _EARLIER_SHARE * left_s)


@cache
def token_file(path: str) -> Callable[[], str]:
    """Return a function that reads the token in a file, which may be replaced at any time.

    It is the same one for the same path, so that connections are shared.
    """

    def read() -> str:
        try:
            return Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            # `from None`, because `UnicodeDecodeError` holds the bytes of the token.
            raise ConfigurationError(
                f"token_file={path!r}: expected a readable file with a token: "
                f"{type(error).__name__}"
            ) from None

    return read


def user_of(token: str) -> tuple[str, str]:
    """Return the claims `iss` and `sub` of a JWT, which name its user; empty where it has none.

    Nothing is checked: they are only true of a token that a proxy has accepted.
    """
    claims = _claims_of(token)
    return str(claims.get("iss", "")), str(claims.get("sub", ""))


def _expiry_of(token: str) -> float:
    """Return the time in seconds since 1970 when a JWT expires; of another token: never.

    The proxy checks it; here it only says when to ask for the next one.
    """
    try:
        return float(_claims_of(token)["exp"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return float("inf")


def _claims_of(token: str) -> dict[str, Any]:
    """Return the claims of a JWT, not checked; none of another token."""
    payload = token.split(".")[1] if token.count(".") == 2 else ""
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return {}
    return claims if isinstance(claims, dict) else {}
