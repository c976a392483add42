"""The features' table, and what a release tells of them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.base import features
from dlcore.base.features import (
    FEATURES,
    HANDSHAKE_BITS,
    UNKNOWN_RELEASE,
    Announced,
    Feature,
    Release,
    own_release,
)
from dlcore.wire import messages

if TYPE_CHECKING:
    import pytest

HELLO = "d10b01000000001500000000000000000000000034de8348000100000000000000030001630001620001690000"
"""The bytes of a HELLO with all features, as release 0.2.0 sends it."""


def test_each_feature_has_a_name_and_a_bit_of_its_own() -> None:
    """A bit for those of the handshake, and none for the others."""
    assert len({each.name for each in FEATURES}) == len(FEATURES)
    for each in FEATURES:
        assert (each.bit.bit_count() == 1) is (each.announced is Announced.HANDSHAKE)
    bits = [each.bit for each in FEATURES if each.bit]
    assert len(set(bits)) == len(bits)
    assert HANDSHAKE_BITS == {"read-held": 1, "authorize": 2}


def test_a_release_lists_the_features_that_registrations_announce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sorted, and none of the wire."""
    new = [
        Feature(name=name, since="9.0.0", gates="a format", announced=Announced.REGISTRATION)
        for name in ("newer", "cold")
    ]
    monkeypatch.setattr(features, "FEATURES", (*FEATURES, *new))
    own = own_release()
    assert {"cold", "newer"} <= set(own.features)
    assert list(own.features) == sorted(own.features)
    assert "read-held" not in own.features
    assert own.lacks(["cold", "b", "a"]) == ("a", "b")
    assert UNKNOWN_RELEASE.lacks(own.features) == own.features
    assert Release(features=("a",)).lacks([]) == ()


def test_the_page_of_operators_has_each_feature_that_is_finalized() -> None:
    """With the first release that has it."""
    page = (Path(__file__).parents[3] / "docs" / "upgrading.md").read_text(encoding="utf-8")
    for each in FEATURES:
        if each.announced is Announced.REGISTRATION:
            assert f"| `{each.name}` | {each.since} |" in page


def test_the_wire_speaks_each_feature_of_the_handshake() -> None:
    """Its first message has their bits; the page of the protocol counts them from 0."""
    page = (Path(__file__).parents[3] / "docs" / "wire.md").read_text(encoding="utf-8")
    for name, bit in HANDSHAKE_BITS.items():
        assert f"| `{name}` | {bit.bit_length() - 1} |" in page
    hello = messages.Hello(messages.PROTOCOL_VERSION, messages.FEATURES, "c", "b", "i")
    assert b"".join(messages.encode(hello)).hex() == HELLO


def test_a_folder_of_sources_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a member could not start from one."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    features._version.cache_clear()
    monkeypatch.setattr(features, "version", missing)
    try:
        assert own_release().version == "unknown"
    finally:
        features._version.cache_clear()
