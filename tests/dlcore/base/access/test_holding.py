"""Goal: both ends keep the same capabilities, and a client presents the one that fits."""

from __future__ import annotations

import pytest

from dlcore.base.access import capability
from dlcore.base.access.capability import (
    CarriedPurse,
    Grant,
    Kept,
    LedgerRight,
    OwnPurse,
    Reach,
    Signer,
    new_private_key,
    parse,
)
from dlcore.base.errors import AccessDeniedError

SIGNER = Signer(new_private_key())


def token_of(ledger_id: int, **entries: int) -> bytes:
    """Return a capability to read a ledger."""
    return SIGNER.sign([Grant.of(ledger_id, LedgerRight.READ, **entries)], expires_s=9)


def keep(kept: Kept, *tokens: bytes) -> list[bytes]:
    """Keep tokens; return those that are kept then."""
    for token in tokens:
        kept.keep(token, parse(token))
    return [token for token, _ in kept]


def test_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes first, and one that comes again is the latest."""
    monkeypatch.setattr(capability, "KEPT_MAX", 2)
    kept, (a, b, c) = Kept(), map(token_of, range(3))
    assert keep(kept, a, b, a) == [a, b]
    assert keep(kept, c) == [c, a]
    assert kept.get(b) is None
    assert kept.get(a) == parse(a)


def test_their_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few they are, and a repeated one counts once."""
    a, b, c = map(token_of, range(3))
    monkeypatch.setattr(capability, "KEPT_BYTES_MAX", 2 * len(a))
    kept = Kept()
    assert keep(kept, a, b, b, a, b) == [b, a]
    assert keep(kept, c) == [c, b]


def test_carried_ones_are_presented_for_what_they_reach() -> None:
    """By ledger and entries; the latest of two that fit, and none for another ledger."""
    low, high = token_of(5, last_entry_id=9), token_of(5, first_entry_id=10)
    again = SIGNER.sign(parse(low).grants, expires_s=99)
    purse = CarriedPurse()
    purse.learn([low, high])
    found = [purse.token_for(Reach(5, first, first, 1)) for first in (3, 30)]
    assert found == [low, high]
    purse.learn([again])
    assert purse.token_for(Reach(5, 3, 3, 1)) == again
    assert purse.token_for(Reach(6, 0, 0, 1)) is None
    with pytest.raises(AccessDeniedError):
        purse.learn([b"x"])


def test_the_own_one_is_renewed_at_half_of_its_time() -> None:
    """It is closed not before, and at once when that is asked for."""
    now_s, made = 1000.0, list[int]()

    def make(expires_s: int) -> bytes:
        made.append(expires_s)
        return b"%d" % expires_s

    purse = OwnPurse(make, lambda: now_s, lifetime_s=100)
    reach = Reach(0, 0, 0, 1)
    assert purse.token_for(reach) == b"1100"
    now_s = 1049.0
    assert purse.token_for(reach) == b"1100"
    now_s = 1050.0
    assert purse.token_for(reach) == b"1150"
    purse.renew()
    assert purse.token_for(reach) == b"1150"
    assert made == [1100, 1150, 1150]
