"""Principals and their text form."""

from __future__ import annotations

import pytest

from dlcore.base.access.rights import ANONYMOUS, NAME_LENGTH_MAX, Caller, Principal, Proof
from dlcore.base.errors import ConfigurationError


@pytest.mark.parametrize(
    ("principal", "text"),
    [
        (Principal(Proof.TOKEN, "alice"), "user:alice"),
        (Principal(Proof.TOKEN, "https://issuer/alice:1"), "user:https://issuer/alice:1"),
        (Principal(Proof.CERTIFICATE, "ingest.example"), "certificate:ingest.example"),
        (ANONYMOUS, "anonymous"),
    ],
)
def test_a_principal_is_read_from_its_text(principal: Principal, text: str) -> None:
    """The text form and the principal stand for each other."""
    assert str(principal) == text
    assert Principal.parse(text) == principal


@pytest.mark.parametrize(
    "text",
    [
        "", "alice", "user", "user:", "anonymous:x", "group:alice", "USER:alice", "user:a\nb",
        "user:" + "a" * (NAME_LENGTH_MAX + 1),
    ],
)  # fmt: skip
def test_another_text_is_refused(text: str) -> None:
    """An unknown proof, a missing name, or a name with control characters is no principal."""
    with pytest.raises(ConfigurationError, match="expected user:NAME, certificate:NAME"):
        Principal.parse(text)


def test_names_of_different_proofs_differ() -> None:
    """A certificate of a user's name is not the user."""
    assert Principal(Proof.TOKEN, "alice") != Principal(Proof.CERTIFICATE, "alice")


def test_anonymous_callers_of_a_host_have_one_account() -> None:
    """Others have that of their principal, wherever they come from."""
    assert Caller(ANONYMOUS, "10.0.0.7").account == "host '10.0.0.7'"
    assert Caller(Principal(Proof.TOKEN, "alice"), "10.0.0.7").account == "user:alice"
