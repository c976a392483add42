"""The features' table, and what a release tells of them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.base import features
from dlcore.base.features import (
    FEATURES,
    UNKNOWN_RELEASE,
    Announced,
    Feature,
    Release,
    handshake_bit,
    own_release,
)
from dlcore.wire import messages

if TYPE_CHECKING:
    import pytest


def test_each_feature_has_a_name_and_a_bit_of_its_own() -> None:
    """A bit for those of the handshake, and none for the others."""
    assert len({each.name for each in FEATURES}) == len(FEATURES)
    for each in FEATURES:
        assert (each.bit.bit_count() == 1) is (each.announced is Announced.HANDSHAKE)
    bits = [each.bit for each in FEATURES if each.bit]
    assert len(set(bits)) == len(bits)
    assert [handshake_bit(name) for name in ("read-held", "authorize")] == [1, 2]


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
    """The page of the protocol has their bits, counted from 0."""
    page = (Path(__file__).parents[3] / "docs" / "wire.md").read_text(encoding="utf-8")
    spoken = 0
    for each in FEATURES:
        if each.announced is Announced.HANDSHAKE:
            spoken |= each.bit
            assert f"| `{each.name}` | {each.bit.bit_length() - 1} |" in page
    assert spoken == messages.FEATURES, "`FEATURES` of dlcore/wire/messages.py has all their bits"


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
