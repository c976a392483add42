"""Requests of the HTTP door: what is read from headers, query and body, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dlcore.base.errors import (
    ConfigurationError,
    LogRecordTooLongError,
    UnauthenticatedError,
)
from dlcore.base.ids import DLSN
from dlcore.ops.cli.console import door_requests as requests
from dlcore.ops.cli.console.door_requests import (
    BODY_BYTES_MAX,
    RECORDS,
    RECORDS_MAX,
    Reading,
    claim_of,
    key_of,
    kind_of,
    read_of,
    records_in,
    require_single,
    require_size,
    token_of,
)

NOW_MS = 10_000_000
EVENTS = {"Accept": "text/event-stream"}


@pytest.mark.parametrize("given", ["Bearer abc", "bearer  abc "])
def test_tokens(given: str) -> None:
    """The scheme may have any case."""
    assert token_of({"Authorization": given}) == "abc"


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer  ", "Basic abc", "abc", "Bearer \udcff"])
def test_no_token(given: str) -> None:
    """The error says how it is sent."""
    with pytest.raises(UnauthenticatedError, match="Authorization: Bearer TOKEN"):
        token_of({"Authorization": given})


def test_headers_that_have_one_value() -> None:
    """Twice they are refused, in any case; others may come again."""
    require_single(["Host", "Accept", "accept", "Authorization", "Idempotency-Key"])
    for name in ("Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"):
        with pytest.raises(ConfigurationError, match=f"header {name} is given 2 times"):
            require_single(["Host", name, name.upper()])


def test_types_of_bodies() -> None:
    """Lines of JSON, or one record; others are refused, as those that a form sends."""
    assert kind_of({"Content-Type": "application/json; charset=utf-8"}) == "application/json"
    assert kind_of({"Content-Type": "Application/Octet-Stream"}) == "application/octet-stream"
    for given in ("", "application/x-www-form-urlencoded", "text/plain"):
        with pytest.raises(ConfigurationError, match=re.escape(f"Content-Type {given!r}: expec")):
            kind_of({"Content-Type": given})


def test_keys() -> None:
    """An append without one, or with one that cannot be sent again as it is, is refused."""
    for key in ("1", "a b", '"8e03978e-40d5-43dd-bc93-6894a57f9324"', "k" * 255):
        assert key_of({"Idempotency-Key": key}) == key
    for key in ("", "k" * 256, "tab\t", "grün"):
        with pytest.raises(ConfigurationError, match=r"expected 1 to 255 printable ASCII"):
            key_of({"Idempotency-Key": key})


def test_claims() -> None:
    """One key and body of a user give one claim; another body another token, and no other name."""
    user = ("https://issuer", "u")
    claim = claim_of(user, "k", "application/json", b"{}")
    assert claim == claim_of(user, "k", "application/json", b"{}")
    assert (claim.epoch, claim.base) == (1, 0)
    assert claim.name.startswith("_http-")
    for other in (
        claim_of(user, "k", "application/json", b"[]"),
        claim_of(user, "k", "text", b"{}"),
    ):
        assert other.name == claim.name
        assert other.token != claim.token
    assert claim_of(user, "K", "application/json", b"{}").name != claim.name
    for another in (("https://issuer", "v"), ("https://another", "u"), ("", "")):
        assert claim_of(another, "k", "application/json", b"{}").name != claim.name


def test_sizes() -> None:
    """A body that is too large is refused by its length, before it is read."""
    require_size(None)
    require_size(BODY_BYTES_MAX)
    with pytest.raises(LogRecordTooLongError, match=r"1,048,577 bytes: expected at most 1,048,576"):
        require_size(BODY_BYTES_MAX + 1)


def test_records_are_lines_of_json() -> None:
    """As they are, but for spaces around them; a last line end belongs to none."""
    assert records_in("application/json", b' {"a": 1}\r\n[2]\n"three"\n') == [
        b'{"a": 1}',
        b"[2]",
        b'"three"',
    ]
    assert records_in("application/octet-stream", b"\xff\n") == [b"\xff\n"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "line 1: .*expected one JSON value in each line"),
        (b"1\n\n2", "line 2: "),
        (b"1\n{", "line 2: "),
        (b'"\xff"', "line 1: "),
        (b"NaN", "line 1: "),
        (b"[" * 100_000, "line 1: "),
        (b"1\n" * (RECORDS_MAX + 1), "10,001 lines: expected at most 10,000 records"),
    ],
)
def test_bodies_that_are_refused(body: bytes, reason: str) -> None:
    """The error names the line."""
    with pytest.raises(ConfigurationError, match=reason):
        records_in("application/x-ndjson", body)


@pytest.mark.parametrize(
    ("query", "headers", "reading"),
    [
        ({}, {}, Reading()),
        ({"from": "earliest", "limit": "10000"}, {}, Reading(limit=RECORDS_MAX)),
        ({"from": "latest"}, EVENTS, Reading(at_end=True, is_stream=True)),
        ({"from": "3:17:0"}, {"Accept": "*/*"}, Reading(dlsn=DLSN(3, 17, 0))),
        ({"after": "3:17:0"}, {}, Reading(dlsn=DLSN(3, 17, 1))),
        ({"from": "1970-01-01T00:00:02Z"}, {}, Reading(timestamp_ms=2000)),
        ({"from": "-1s"}, {}, Reading(timestamp_ms=NOW_MS - 1000)),
        ({"from": "-1d"}, {}, Reading(timestamp_ms=0)),
        ({"columns": "a,b"}, {}, Reading(columns=("a", "b"))),
        # A browser that connects again sends the query of its first request, too.
        (
            {"from": "latest"},
            EVENTS | {"Last-Event-ID": "1:2:3"},
            Reading(dlsn=DLSN(1, 2, 4), is_stream=True),
        ),
        ({"from": "1:0:0"}, {"Last-Event-ID": "1:2:3"}, Reading(dlsn=DLSN(1, 0, 0))),
    ],
)
def test_reads(query: dict[str, str], headers: dict[str, str], reading: Reading) -> None:
    """From where, how many, and in which form."""
    assert read_of(list(query.items()), headers, now_ms=NOW_MS) == reading
    assert reading.limit in (RECORDS, RECORDS_MAX)


@pytest.mark.parametrize(
    ("query", "headers", "reason"),
    [
        ([("form", "1:0:0")], {}, "query 'form': expected from, after, columns, limit"),
        ([("limit", "5")], EVENTS, "query 'limit': expected from, after, columns$"),
        ([("from", "1:0:0"), ("from", "2:0:0")], {}, "'from' is given twice"),
        ([("from", "1:0:0"), ("after", "2:0:0")], {}, "expected one of them"),
        ([("after", "yesterday")], {}, "expected a DLSN like 3:17:0, not 'yesterday'"),
        ([("from", "yesterday")], {}, "from='yesterday': expected earliest, latest, a position"),
        ([("from", "1:0:99999999999999999999")], {}, "DLSN parts are in"),
        ([("from", "1:0:" + "9" * 5000)], {}, "expected a DLSN like 3:17:0"),
        ([("from", "9" * 5000)], {}, "expected earliest, latest, a position"),
        ([("from", f"-{'9' * 400}d")], {}, "expected earliest, latest, a position"),
        ([("limit", "9" * 5000)], {}, "expected a number from 1 to 10,000"),
        ([], EVENTS | {"Last-Event-ID": "x"}, "expected a DLSN like 3:17:0, not 'x'"),
        *(([("limit", n)], {}, "expected a number from 1 to 10,000") for n in ("0", "10001", "-1")),
        ([("limit", "\u0661")], {}, "expected a number from 1 to 10,000"),
    ],
)
def test_reads_that_are_refused(query: Any, headers: dict[str, str], reason: str) -> None:
    """The error says what would be right."""
    with pytest.raises(ConfigurationError, match=reason):
        read_of(query, headers, now_ms=NOW_MS)


def test_the_bounds_are_those_of_the_page() -> None:
    """docs/http.md has them in words."""
    assert (requests.BODY_BYTES_MAX, requests.RECORDS_MAX, requests.RECORDS) == (
        1 << 20,
        10**4,
        1000,
    )
