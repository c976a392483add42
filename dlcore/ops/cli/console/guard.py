"""Requests that the console answers: those of its own page, opened by its own user.

Any web page may send requests to a port of the machine on which it is shown, and any user of that
machine may connect to it.  Therefore:

* `Host` names the console's own address.  A page whose name was bound to this address (DNS
  rebinding) sends its own name, and is refused.
* `Origin` and `Sec-Fetch-Site`, where a browser sends them, name the console's own page.
* Everything but the files of the page needs the console's secret in a header, which no other page
  can send, and which a new start makes anew.  It is in the fragment of the address that the command
  prints, which browsers never send.
* Changes are JSON, which a form of another page cannot send.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET_HEADER = "X-Dlog-Console"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The content security policy of the page: only its own files, no text becomes code."""
_OWN_SITES = ("same-origin", "none")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is refused."""

    status: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Knows the console's own addresses, `scheme://host:port`, and its secret."""

    origins: frozenset[str]
    secret: str

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is refused; None if it is to be answered.

        Args:
            method: its method.
            path: its path, without a query.
            headers: its headers, whose names may be asked for in any case.
        """
        hosts = {origin.partition("://")[2] for origin in self.origins}
        host = headers.get("Host", "").lower()
        if host not in hosts:
            return Refusal(421, f"Host {host!r}: expected one of {', '.join(sorted(hosts))}")
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in self.origins:
            return Refusal(403, f"Origin {origin!r}: only the console's own page may ask")
        site = headers.get("Sec-Fetch-Site", "none")
        # A link on another page may lead to this one, as long as it only shows it.
        if site not in _OWN_SITES and path != "/":
            return Refusal(403, f"Sec-Fetch-Site {site!r}: only the console's own page may ask")
        if not path.startswith("/api/"):
            return None
        given = headers.get(SECRET_HEADER, "")
        if not hmac.compare_digest(given.encode(errors="replace"), self.secret.encode()):
            return Refusal(401, "open the address that dlog console has printed")
        kind = headers.get("Content-Type", "")
        if method == "POST" and kind.partition(";")[0].strip().lower() != "application/json":
            return Refusal(415, f"Content-Type {kind!r}: expected application/json")
        return None
