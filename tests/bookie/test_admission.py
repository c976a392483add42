"""A bookie lets clients in by their certificates."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bookie.serving.access import Access, Admission, Admitted
from dlcore.base.access.client_names import EVERY_CLIENT, ClientNames

NAMED = {"subjectAltName": (("DNS", "writer.example"),)}
STRANGER = {"subjectAltName": (("DNS", "writer.elsewhere"),)}
NO_NAMES = {"subject": ()}
NAMES = ClientNames.parse("*.example")
RIGHTS = Access(cast("Any", None))


def new_access() -> Access:
    """Return the rights of a client without a certificate."""
    return RIGHTS


@pytest.mark.parametrize("certificate", [None, {}, NAMED, STRANGER])
def test_all_are_let_in_if_no_name_is_asked_for(certificate: Any) -> None:
    """And may do everything."""
    assert Admission(EVERY_CLIENT).admit(certificate) == Admitted(None, None)


@pytest.mark.parametrize("certificate", [None, {}])
def test_a_client_without_a_certificate_needs_capabilities_where_they_are_taken(
    certificate: Any,
) -> None:
    """Where they are not, it has no name to be let in by."""
    assert Admission(NAMES, new_access).admit(certificate) == Admitted(RIGHTS, None)
    admitted = Admission(NAMES).admit(certificate)
    assert admitted.access is None
    assert "the names none" in str(admitted.refusal)


@pytest.mark.parametrize(
    ("certificate", "is_let_in"), [(NAMED, True), (STRANGER, False), (NO_NAMES, False)]
)
def test_a_client_with_a_certificate_is_let_in_by_name(certificate: Any, is_let_in: bool) -> None:
    """It may do everything, also where others need capabilities."""
    for admission in (Admission(NAMES), Admission(NAMES, new_access)):
        admitted = admission.admit(certificate)
        assert admitted.access is None
        assert (admitted.refusal is None) == is_let_in
