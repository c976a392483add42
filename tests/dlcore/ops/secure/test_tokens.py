"""Tokens of users: what they say, and that the key which hosts get checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from joserfc import jwt
from joserfc.errors import BadSignatureError
from joserfc.jwk import ECKey

from dlcore.base.errors import ConfigurationError
from dlcore.ops.secure.certificates import new_key
from dlcore.ops.secure.tokens import signed_token
from tests.dlcore.ops.secure.test_folder import make

if TYPE_CHECKING:
    from pathlib import Path

NOW_MS = 1_800_000_000_500


def test_hosts_can_check_a_token(tmp_path: Path) -> None:
    """By the key that they have; that of another cluster signs nothing here."""
    one, other = tmp_path / "one", tmp_path / "other"
    make(one)
    make(other)
    token, expires_ms = signed_token(
        (one / "tokens.key").read_bytes(), "alice", now_ms=NOW_MS, hours=1.5
    )
    assert expires_ms == NOW_MS + 5_400_000
    checked = jwt.decode(token, ECKey.import_key((one / "hosts/node-1/tokens.pem").read_bytes()))
    assert checked.header["alg"] == "ES256"
    assert checked.claims == {
        "iss": "dlog", "aud": "dlog", "sub": "alice", "iat": 1_800_000_000, "exp": 1_800_005_400,
    }  # fmt: skip
    with pytest.raises(BadSignatureError):
        jwt.decode(token, ECKey.import_key((other / "hosts/node-1/tokens.pem").read_bytes()))


def test_only_issuers_have_the_key(tmp_path: Path) -> None:
    """Neither hosts nor clients, and clients need no key at all."""
    make(tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("tokens.*")}
    hosts = {f"hosts/{host}/tokens.pem" for host in ("node-1", "127.0.0.1")}
    assert found == {"tokens.key", "tokens.pem"} | hosts
    assert (tmp_path / "tokens.key").stat().st_mode & 0o777 == 0o600


def test_a_token_without_a_user_or_a_key_is_not_made() -> None:
    """The error names what is wrong."""
    with pytest.raises(ConfigurationError, match=r"expected tokens\.key, which dlog secure init"):
        signed_token(b"nonsense", "alice", now_ms=NOW_MS, hours=1)
    for name in ("", "a\nb"):
        with pytest.raises(ConfigurationError, match="principal"):
            signed_token(new_key(), name, now_ms=NOW_MS, hours=1)
