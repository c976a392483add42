"""Names of certificates that are let in."""

from __future__ import annotations

import pytest

from dlcore.base.access.client_names import ClientNames, names_in
from dlcore.base.errors import ConfigurationError


@pytest.mark.parametrize(
    ("patterns", "names", "is_let_in"),
    [
        ("", [], True),
        ("", ["any"], True),
        ("a.example", ["b.example", "A.example"], True),
        ("a.example, b.example", ["b.example"], True),
        ("*.dlog.example", ["one.dlog.example"], True),
        ("*.DLOG.example", ["one.rack.dlog.example"], True),
        ("spiffe://dlog/bookie", ["spiffe://dlog/bookie"], True),
        ("10.0.0.1", ["10.0.0.1"], True),
        ("*.dlog.example", ["dlog.example"], False),
        ("*.dlog.example", ["evil-dlog.example"], False),
        ("dlog.example", ["one.dlog.example"], False),
        ("a.example", [], False),
        ("a.example", ["*.example"], False),
    ],
)
def test_clients_that_are_let_in(patterns: str, names: list[str], is_let_in: bool) -> None:
    """By one of its names; else the error has its names, and those that would do."""
    refusal = ClientNames.parse(patterns).refusal(names)
    assert (refusal is None) is is_let_in
    if refusal is not None:
        assert ", ".join(names) in refusal
        assert patterns in refusal


@pytest.mark.parametrize("text", ["*", "a.*", "*.*.example", "a b", "a.example,", ","])
def test_texts_that_are_no_pattern(text: str) -> None:
    """A star stands at the beginning, and never alone."""
    with pytest.raises(ConfigurationError, match="tls_client_names"):
        ClientNames.parse(text)


def test_the_names_of_a_certificate() -> None:
    """Those of hosts, addresses and URIs; none without a certificate."""
    names = (("DNS", "a.example"), ("IP Address", "10.0.0.1"), ("URI", "spiffe://dlog/a"))
    found = names_in({"subjectAltName": names, "subject": ((("commonName", "b"),),)})
    assert found == ["a.example", "10.0.0.1", "spiffe://dlog/a"]
    assert names_in(None) == names_in({}) == []
