"""Text without secrets: what looks like a key, a token or a password is cut out.

Nothing that goes into an archive is read from a file of keys or tokens.  This is a second line: a
log may hold a text that a client sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CUT = "[cut out]"
_SECRETS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    re.compile(r"\beyJ[\w-]{5,}\.[\w-]+\.[\w-]*"),  # a JSON web token
    re.compile(r"(?<=://)[^/\s@:]+:[^/\s@]+(?=@)"),
    re.compile(r"(?<=\bbearer )[\w.~+/-]{8,}=*", re.I),
    re.compile(r"(?i)(?<=\bpassword[=:])\s*[^\s,;\"']+"),
    re.compile(r"(?i)(?<=\bsecret[=:])\s*[^\s,;\"']+"),
)


def redacted(text: str) -> str:
    """Return `text` without what looks like a secret."""
    for each in _SECRETS:
        text = each.sub(CUT, text)
    return text


def redacted_value(value: object) -> object:
    """Return a value of JSON whose texts have no such secrets."""
    match value:
        case str():
            return redacted(value)
        case Mapping():
            return {redacted(str(key)): redacted_value(each) for key, each in value.items()}
        case list() | tuple():
            return [redacted_value(each) for each in value]
        case _:
            return value
