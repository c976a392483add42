"""Requests to the console: which are its own page's, and which another page's.

Goal: neither another page in the user's browser nor another user of the machine reaches anything
but the page's files.  Method: the headers that browsers and others send.
"""

from __future__ import annotations

import pytest

from dlcore.ops.cli.console.guard import SECRET_HEADER, Guard

OWN = "http://127.0.0.1:4180"
GUARD = Guard(origins=frozenset({OWN, "http://localhost:4180"}), secret="sesame")
HOST = {"Host": "127.0.0.1:4180"}
KNOWN = HOST | {SECRET_HEADER: "sesame"}
JSON = {"Content-Type": "application/json; charset=utf-8"}


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/", HOST),
        ("GET", "/", {"Host": "LOCALHOST:4180", "Sec-Fetch-Site": "none"}),
        ("GET", "/", HOST | {"Sec-Fetch-Site": "cross-site"}),
        ("GET", "/main.js", HOST | {"Sec-Fetch-Site": "same-origin", "Origin": OWN}),
        ("GET", "/api/logs", KNOWN | {"Sec-Fetch-Site": "same-origin"}),
        ("POST", "/api/seal", KNOWN | JSON | {"Origin": OWN}),
    ],
)
def test_the_own_page_is_answered(method: str, path: str, headers: dict[str, str]) -> None:
    """Its files without the secret, all else with it; a link of another page may show it."""
    assert GUARD.refusal(method, path, headers) is None


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 421),
        ("GET", "/", {"Host": "evil.example:4180"}, 421),
        ("GET", "/api/logs", KNOWN | {"Host": "127.0.0.1:4181"}, 421),
        ("GET", "/main.js", HOST | {"Origin": "http://evil.example"}, 403),
        ("POST", "/api/seal", KNOWN | JSON | {"Origin": "null"}, 403),
        ("POST", "/api/seal", KNOWN | JSON | {"Origin": "https://127.0.0.1:4180"}, 403),
        ("GET", "/main.js", HOST | {"Sec-Fetch-Site": "cross-site"}, 403),
        ("GET", "/api/logs", KNOWN | {"Sec-Fetch-Site": "same-site"}, 403),
        ("GET", "/api/logs", HOST, 401),
        ("GET", "/api/logs", HOST | {SECRET_HEADER: "sesam\u00e9"}, 401),
        ("POST", "/api/seal", HOST | JSON, 401),
        ("POST", "/api/seal", KNOWN, 415),
        ("POST", "/api/seal", KNOWN | {"Content-Type": "text/plain"}, 415),
    ],
)
def test_others_are_refused(method: str, path: str, headers: dict[str, str], status: int) -> None:
    """A rebound name, another page, a form, and a client without the secret."""
    refusal = GUARD.refusal(method, path, headers)
    assert refusal is not None
    assert refusal.status == status
    assert "sesame" not in refusal.text
