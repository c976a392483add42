"""Goal: a capability gives exactly what was signed, to its expiry, and other bytes give nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dlcore.base.access.capability import (
    ALL_RIGHTS,
    CAPABILITY_BYTES_MAX,
    EVERYTHING,
    GRANTS_MAX,
    ID_MAX,
    LIFETIME_S_MAX,
    SKEW_S,
    Capability,
    Grant,
    LedgerRight,
    Reach,
    Signer,
    Verifier,
    joined,
    key_id_of,
    new_private_key,
    parse,
)
from dlcore.base.errors import AccessDeniedError, ConfigurationError

NOW_S = 1_800_000_000
SIGNER = Signer(new_private_key())
GRANTS = [
    Grant.of(5, LedgerRight.READ, first_entry_id=10, last_entry_id=19),
    Grant.of(7, ALL_RIGHTS),
]
TOKEN = SIGNER.sign(GRANTS, expires_s=NOW_S + 60)


def verifier(*signers: Signer, now_s: float = NOW_S) -> Verifier:
    """Return one that knows the keys of `signers`."""
    made = Verifier(lambda: now_s)
    made.use(each.public_key for each in signers)
    return made


def test_a_signed_capability_is_read_as_it_was_made() -> None:
    """Key, time and grants come back; one of the most grants has the most bytes."""
    found = verifier(SIGNER).verify(TOKEN)
    assert found == Capability(SIGNER.key_id, NOW_S + 60, tuple(GRANTS))
    assert found.key_id == key_id_of(SIGNER.public_key)
    most = [Grant.of(ledger_id, LedgerRight.READ) for ledger_id in range(GRANTS_MAX)]
    token = SIGNER.sign(most, expires_s=NOW_S)
    assert len(token) == CAPABILITY_BYTES_MAX
    assert verifier(SIGNER).verify(token).grants == tuple(most)


@given(st.integers(0, len(TOKEN) - 1), st.integers(1, 255))
def test_altered_bytes_are_refused(at: int, change: int) -> None:
    """Whichever byte it is, by whatever check."""
    altered = bytearray(TOKEN)
    altered[at] ^= change
    with pytest.raises(AccessDeniedError):
        verifier(SIGNER).verify(bytes(altered))


@given(st.binary(max_size=400) | st.binary(min_size=116, max_size=116))
def test_other_bytes_are_refused(token: bytes) -> None:
    """No bytes make another error."""
    with pytest.raises(AccessDeniedError):
        verifier(SIGNER).verify(token)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (TOKEN[:-1], "none has this size"),
        (b"\2" + TOKEN[1:], "version 2: expected 1"),
        (TOKEN[:17] + b"\0\3" + TOKEN[19:], "of 2 grants, 3 by its head"),
        (TOKEN[:-1] + bytes([TOKEN[-1] ^ 1]), "signature is wrong"),
        (TOKEN[:16] + bytes([TOKEN[16] ^ 64]) + TOKEN[17:], "signature is wrong"),
        (Signer(new_private_key()).sign(GRANTS, expires_s=NOW_S), "not known"),
        (SIGNER.sign(GRANTS, expires_s=NOW_S - SKEW_S - 1), "expired 61 s ago"),
        (SIGNER.sign(GRANTS, expires_s=NOW_S + LIFETIME_S_MAX + SKEW_S + 9), "at most 86400"),
    ],
    ids=["size", "version", "grants", "last byte", "lifetime", "key", "expired", "too long"],
)
def test_the_error_names_the_reason(token: bytes, reason: str) -> None:
    """Each check names what it saw."""
    with pytest.raises(AccessDeniedError, match=reason):
        verifier(SIGNER).verify(token)


def test_grants_that_contradict_each_other_are_refused() -> None:
    """Also by a client that reads them only to present them."""
    with pytest.raises(AccessDeniedError, match="contradicts itself"):
        parse(TOKEN[:19] + b"\xff" + TOKEN[20:])


def test_clocks_may_be_apart() -> None:
    """Up to the tolerance on both ends of its time."""
    for expires_s in (NOW_S - SKEW_S, NOW_S + LIFETIME_S_MAX + SKEW_S):
        verifier(SIGNER).verify(SIGNER.sign(GRANTS, expires_s=expires_s))


def test_several_keys_verify_and_one_that_is_withdrawn_does_not() -> None:
    """In a rotation both keys are valid; a verified token is not once its key is gone."""
    after = Signer(new_private_key())
    judge = verifier(SIGNER, after)
    found = [judge.verify(each.sign(GRANTS, expires_s=NOW_S)) for each in (SIGNER, after)]
    judge.use([after.public_key])
    judge.require_valid(found[1])
    with pytest.raises(AccessDeniedError, match="withdrawn"):
        judge.require_valid(found[0])


def of_ledgers(first: int, last: int) -> Grant:
    """Return a grant of a range of ledgers."""
    return Grant(first, 5, last, 9, int(LedgerRight.READ))


@pytest.mark.parametrize(
    "grants",
    [
        [],
        [Grant.of(0, LedgerRight.READ)] * (GRANTS_MAX + 1),
        [Grant.of(-1, LedgerRight.READ)],
        [Grant.of(2**63, LedgerRight.READ)],
        [Grant.of(0, LedgerRight(0))],
        [Grant(0, 0, 0, 0, 16)],
        [Grant(1, 0, 0, 0, 1)],
        [Grant.of(1, LedgerRight.READ, first_entry_id=2, last_entry_id=1)],
        [Grant.of(2, LedgerRight.READ), Grant.of(1, LedgerRight.READ)],
        [Grant.of(1, LedgerRight.READ)] * 2,
        [of_ledgers(1, 3), of_ledgers(3, 4)],
        [of_ledgers(1, 3), Grant.of(1, LedgerRight.READ, first_entry_id=10)],
        [
            Grant.of(1, LedgerRight.READ, last_entry_id=1),
            Grant.of(1, LedgerRight.ADD, first_entry_id=2),
        ],
    ],
)
def test_grants_that_make_no_capability(grants: list[Grant]) -> None:
    """None, too many, ids out of order, unknown rights, overlaps, and rights that differ."""
    with pytest.raises(ConfigurationError):
        SIGNER.sign(grants, expires_s=NOW_S)


@pytest.mark.parametrize("expires_s", [-1, 2**63])
def test_a_time_out_of_range_makes_no_capability(expires_s: int) -> None:
    """It would not fit its field."""
    with pytest.raises(ConfigurationError, match="expires_s"):
        SIGNER.sign(GRANTS, expires_s=expires_s)


PARTS = st.tuples(st.integers(0, 4), st.integers(0, 12), st.integers(0, 6))


@given(st.lists(PARTS, max_size=12), PARTS)
def test_grants_reach_what_they_name(parts: list[tuple[int, int, int]], wanted: object) -> None:
    """Against a set of all the entries: the search finds a grant if they lie in one run."""
    grants = joined(
        Grant.of(ledger, LedgerRight.READ, first_entry_id=first, last_entry_id=first + more)
        for ledger, first, more in parts
    )
    if not grants:
        return
    assert isinstance(wanted, tuple)
    ledger, first, more = wanted
    entries = {(of, entry) for of, low, up in parts for entry in range(low, low + up + 1)}
    capability = Capability(b"", 0, tuple(grants))
    reach = Reach(ledger, first, first + more, int(LedgerRight.READ))
    has_all = all((ledger, entry) in entries for entry in range(first, first + more + 1))
    assert (capability.grant_for(reach) is not None) == has_all
    anything = Reach(ledger, ID_MAX, -1, int(LedgerRight.READ))
    assert (capability.grant_for(anything) is not None) == any(of == ledger for of, _ in entries)


def test_a_range_of_ledgers_reaches_each_of_them() -> None:
    """And none beside it; everything reaches all there is."""
    capability = Capability(b"", 0, (of_ledgers(3, 5),))
    found = [capability.grant_for(Reach(ledger_id, 5, 9, 1)) for ledger_id in range(2, 7)]
    assert found == [None, of_ledgers(3, 5), of_ledgers(3, 5), of_ledgers(3, 5), None]
    every = Capability(b"", 0, (EVERYTHING,))
    assert every.grant_for(Reach(ID_MAX, ID_MAX, ID_MAX, 1)) == EVERYTHING


def test_more_grants_than_one_capability_has_make_several() -> None:
    """All of them are given, and those of one ledger that touch take one place."""
    grants = [Grant.of(ledger_id, LedgerRight.READ) for ledger_id in range(GRANTS_MAX + 1)]
    tokens = SIGNER.sign_all(reversed(grants), expires_s=NOW_S)
    assert [grant for token in tokens for grant in parse(token).grants] == grants
    pieces = [Grant.of(1, LedgerRight.READ, first_entry_id=n, last_entry_id=n) for n in (3, 1, 2)]
    (token,) = SIGNER.sign_all(pieces, expires_s=NOW_S)
    assert parse(token).grants == (
        Grant.of(1, LedgerRight.READ, first_entry_id=1, last_entry_id=3),
    )


def test_the_text_of_a_signer_has_no_secret() -> None:
    """Neither its text nor a verifier's has a key."""
    assert "object at" in repr(SIGNER)
