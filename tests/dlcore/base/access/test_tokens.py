"""Tokens that are taken, and those that are refused, without a word of them in the error."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from joserfc import jws
from joserfc.jwk import ECKey, KeySet, OctKey, OKPKey, RSAKey

from dlcore.base.access.rights import Principal, Proof
from dlcore.base.access.tokens import KEYS_MAX, TOKEN_LENGTH_MAX, Keys, Token, TokenRules
from dlcore.base.errors import ConfigurationError, UnauthenticatedError
from tests.fixtures.tokens import AUDIENCE, ISSUER, encoded, forged, sign

NOW = 1_800_000_000.0
RULES = TokenRules(issuer=ISSUER, audience=AUDIENCE)
CLAIMS = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": NOW + 60}
KEY = ECKey.generate_key("P-256", {"kid": "one"})
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})
ED = OKPKey.generate_key("Ed25519", {"kid": "ed"})


def pem(key: Any) -> bytes:
    """Return the public key in PEM."""
    return bytes(key.as_pem(private=False))


def key_set(*keys: Any, **more: Any) -> bytes:
    """Return public keys as a JWK set, with more members in each."""
    found = [{**each, **more} for each in KeySet(list(keys)).as_dict(private=False)["keys"]]
    return json.dumps({"keys": found}).encode()


def check(token: str, data: bytes, rules: TokenRules = RULES) -> Any:
    """Check a token by keys in a file."""
    return Token.parse(token).check(Keys.parse(data, "keys.json"), rules, now_s=NOW)


def refusal(token: str, data: bytes, rules: TokenRules = RULES) -> str:
    """Return why a token is refused; neither this nor a cause has the token in it."""
    with pytest.raises(UnauthenticatedError) as refused:
        check(token, data, rules)
    found = repr([refused.value, refused.value.__cause__])
    assert not any(each and each in found for each in token.split(".") if len(each) > 10)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    return str(refused.value)


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [(KEY, "ES256"), (RSA, "RS256"), (RSA, "PS384"), (ED, "EdDSA"), (ED, "Ed25519")],
)
def test_a_token_of_each_kind_of_key_is_taken(key: Any, algorithm: str) -> None:
    """From a JWK set and from PEM, beside other keys."""
    token = sign(key, CLAIMS, alg=algorithm)
    others = [each for each in (KEY, RSA, ED) if each is not key]
    for data in (key_set(key), key_set(*others, key), pem(key)):
        found = check(
            sign(key, CLAIMS, alg=algorithm, kid=None) if data == pem(key) else token, data
        )
        assert found.principal == Principal(Proof.TOKEN, "alice")
        assert found.expires_at == NOW + 60 + RULES.skew_s
    bundle = b"".join(pem(each) for each in (*others, key))
    unnamed = sign(key, CLAIMS, alg=algorithm, kid=None)
    assert check(unnamed, bundle).principal.name == "alice"


def test_the_claim_that_names_the_user_is_a_setting() -> None:
    """And must be a name."""
    rules = TokenRules(issuer=ISSUER, audience=AUDIENCE, claim="email")
    token = sign(KEY, {**CLAIMS, "email": "a@example"})
    assert str(check(token, key_set(KEY), rules).principal) == "user:a@example"
    assert "claim 'email' names no user" in refusal(sign(KEY, CLAIMS), key_set(KEY), rules)
    for name, reason in ((7, "names no user"), ("", "expected a name"), ("a\nb", "printable")):
        token = sign(KEY, {**CLAIMS, "email": name})
        assert reason in refusal(token, key_set(KEY), rules)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://other.example"}, r"\(iss\)"),
        ({"iss": None}, r"\(iss\)"),
        ({"aud": "other"}, r"\(aud\)"),
        ({"aud": ["other", "third"]}, r"\(aud\)"),
        ({"aud": None}, r"\(aud\)"),
        ({"exp": None}, r"\(exp\)"),
        ({"exp": "soon"}, r"\(exp\)"),
        ({"exp": NOW - 10.5}, "has expired"),
        ({"nbf": NOW + 10.5}, r"\(nbf\)"),
        ({"iat": NOW + 3600}, r"\(iat\)"),
        ({"sub": None}, "claim 'sub' names no user"),
    ],
)
def test_a_token_with_other_claims_is_refused(claims: dict[str, Any], reason: str) -> None:
    """The error says which one, and what would be right."""
    assert re.search(reason, refusal(sign(KEY, {**CLAIMS, **claims}), key_set(KEY)))


def test_clocks_may_differ_a_little() -> None:
    """Both ways, and no further than the tolerance."""
    for claims in ({"exp": NOW - 9.5}, {"nbf": NOW + 9.5}, {"aud": ["x", AUDIENCE]}):
        assert check(sign(KEY, {**CLAIMS, **claims}), key_set(KEY)).principal.name == "alice"
    far = check(sign(KEY, {**CLAIMS, "exp": 10**400}), key_set(KEY))
    assert far.expires_at > NOW
    strict = TokenRules(issuer=ISSUER, audience=AUDIENCE, skew_s=0)
    assert "has expired" in refusal(sign(KEY, {**CLAIMS, "exp": NOW}), key_set(KEY), strict)


def test_the_algorithm_is_the_servers_choice() -> None:
    """No signature is none, and a public key is no secret of HMAC."""
    token = sign(KEY, CLAIMS)
    for data in (key_set(KEY), pem(KEY)):
        assert "algorithm 'none'" in refusal(forged(token, "none"), data)
        assert "algorithm 'HS256'" in refusal(forged(token, "HS256", pem(KEY)), data)
    assert "algorithm 'HS256'" in refusal(forged(token, "HS256", key_set(KEY)), key_set(KEY))
    refused = refusal(sign(KEY, CLAIMS, kid="rsa"), key_set(KEY, RSA))
    assert "signature is not of a key" in refused
    for kid, algorithm in (("rsa", "RS256"), ("ed", "EdDSA"), ("one", "ES384")):
        header = encoded(json.dumps({"alg": algorithm, "kid": kid}).encode())
        refused = refusal(f"{header}.{token.partition('.')[2]}", key_set(KEY, RSA, ED))
        assert "signature is not of a key" in refused
    refused = refusal(sign(RSA, CLAIMS, alg="PS256"), key_set(RSA, alg="RS256"))
    assert "signature is not of a key" in refused


def test_an_altered_token_is_refused() -> None:
    """Another name, a shorter signature, or the signature of another token."""
    token, other = sign(KEY, CLAIMS), sign(KEY, {**CLAIMS, "sub": "bob"})
    head, payload, signature = token.split(".")
    for altered in (
        f"{head}.{other.split('.')[1]}.{signature}",
        f"{head}.{payload}.{signature[:-2]}",
        f"{head}.{payload}.",
    ):
        assert "signature is not of a key" in refusal(altered, key_set(KEY))
    stranger = ECKey.generate_key("P-256", {"kid": "one"})
    assert "signature is not of a key" in refusal(sign(stranger, CLAIMS), key_set(KEY))


@pytest.mark.parametrize(
    "token",
    ["", "a", "a.b", "a.b.c", "a.b.c.d", "é.ü.ö", "\udcff", "e30.e30.e30", "W10.e30.e30", "..",
     encoded(b'{"alg":"ES256","x":' + b"[" * 5000) + ".e30.e30"],
)  # fmt: skip
def test_a_text_that_is_no_token_is_refused(token: str) -> None:
    """However it is broken."""
    assert "expected" in refusal(token, key_set(KEY)) or "three parts" in refusal(
        token, key_set(KEY)
    )


def test_headers_that_ask_for_more_are_refused() -> None:
    """Those that must be understood, and a key that is not named by text; others are ignored."""
    key = ECKey.generate_key("P-256")
    payload = sign(KEY, CLAIMS).split(".")[1]

    def headed(header: dict[str, Any]) -> str:
        return f"{encoded(json.dumps(header).encode())}.{payload}.AAAA"

    headers: tuple[dict[str, Any], ...]
    headers = ({"alg": "ES256", "crit": ["exp"]}, {"alg": "ES256", "b64": True})
    for header in headers:
        assert "header that is not known" in refusal(headed(header), key_set(key))
    headers = (
        {"alg": "ES256", "kid": 5},
        {"alg": "ES256", "b64": False},
        {"alg": 5},
        {"kid": "one"},
    )
    for header in headers:
        assert "token" in refusal(headed(header), key_set(key))
    assert check(sign(KEY, CLAIMS, unheard="of"), key_set(KEY)).principal.name == "alice"
    assert "at most" in refusal("a" * (TOKEN_LENGTH_MAX + 1), key_set(key))


def test_a_payload_that_is_no_object_is_refused() -> None:
    """Though it is signed."""
    for payload in (b"[]", b"no JSON", b"[" * 9000):
        token = jws.serialize_compact({"alg": "ES256"}, payload, KEY, algorithms=["ES256"])
        assert "no JSON object" in refusal(token, key_set(KEY))


def test_a_token_is_shown_without_itself() -> None:
    """Whatever prints it."""
    token = sign(KEY, CLAIMS)
    assert repr(Token.parse(token)) == "Token(algorithm='ES256', kid='one')"


SYMMETRIC = OctKey.generate_key(256)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "expected public keys"),
        (b"{}", "expected public keys"),
        (b"[]", "expected public keys"),
        (b'{"keys": [{}]}', "expected public keys"),
        (b'{"keys": [{"kty": "EC"}]}', "expected public keys"),
        (b'{"keys": []}', "0 can check"),
        (json.dumps({"keys": [SYMMETRIC.as_dict(private=True)]}).encode(), "0 can check"),
        (key_set(KEY, use="enc"), "0 can check"),
        (key_set(*[KEY] * (KEYS_MAX + 1)), "101 can check"),
        (json.dumps({"keys": [KEY.as_dict(private=True)]}).encode(), "a private key"),
        (bytes(KEY.as_pem(private=True)), "a block 'PRIVATE KEY'"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----", "neither RSA, EC"),
        (b"-----BEGIN PUBLIC KEY-----", "0 can check"),
    ],
    ids=itertools.count(),  # some have keys, which differ in each process
)
def test_keys_that_check_nothing_are_refused(data: bytes, reason: str) -> None:
    """With the place that they came from, and never with a key."""
    with pytest.raises(ConfigurationError, match=reason) as refused:
        Keys.parse(data, "keys.json")
    assert "keys.json" in str(refused.value)
    secret = KEY.as_dict(private=True)["d"]
    assert str(secret) not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Key size")
def test_a_short_key_is_refused() -> None:
    """It could be found out from the public one."""
    with pytest.raises(ConfigurationError, match="1024 bits: expected at least 2048"):
        Keys.parse(pem(RSAKey.generate_key(1024)), "keys.pem")


def test_keys_are_known_by_their_names() -> None:
    """A new one is then looked for."""
    keys = Keys.parse(key_set(KEY, RSA), "here")
    assert "one" in keys
    assert "two" not in keys
    assert len(keys) == 2
