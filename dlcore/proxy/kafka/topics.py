"""Names of logs as names of topics, and proxies as numbered nodes.

A topic's name has only letters, digits, `.`, `_` and `-`.  The `/` of a log's name becomes a `.`.
Any other byte that is not allowed becomes `._` and two hexadecimal digits, and so does a `.`, and
an `_` behind a `/`.  Thus no two logs have the same topic.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b

from dlcore.base.errors import InvalidLogNameError, LogNotFoundError
from dlcore.base.ids import validate_log_name

_ESCAPED = re.compile(r"/_|[^A-Za-z0-9_-]")
_KEPT_COUNT, _KEPT_LENGTH_MAX = 1024, 1024
"""Topics that are kept with their logs, since each request names some; no longer ones are kept."""
_PARTS = re.compile(r"\._(?P<byte>[0-9a-f]{2})|(?P<slash>\.)|(?P<text>[A-Za-z0-9_-]+)")


def topic_of(log: str) -> str:
    """Return the topic of a log."""
    return _ESCAPED.sub(_escaped, log)


def _escaped(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith("/"):
        return "." + "".join(_hex(each) for each in text[1:].encode())
    return "".join(_hex(each) for each in text.encode())


def _hex(byte: int) -> str:
    return f"._{byte:02x}"


def log_of(topic: str) -> str | None:
    """Return the log of a topic; None if no log can have this topic."""
    return (_kept_log_of if len(topic) <= _KEPT_LENGTH_MAX else _log_of)(topic)


def _log_of(topic: str) -> str | None:
    found, end = bytearray(), 0
    for part in _PARTS.finditer(topic):
        if part.start() != end:
            return None
        end = part.end()
        match part.lastgroup:
            case "byte":
                found.append(int(part["byte"], 16))
            case "slash":
                found += b"/"
            case _:
                found += part[0].encode()
    try:
        log = found.decode()
    except UnicodeDecodeError:
        return None
    if end != len(topic) or topic_of(log) != topic:
        return None
    try:
        return log if validate_log_name(log) == log else None
    except InvalidLogNameError:
        return None


_kept_log_of = lru_cache(_KEPT_COUNT)(_log_of)


def log_in(topic: str | None, partition: int = 0) -> str:
    """Return the log of a partition.  Raises: LogNotFoundError: no log can have it."""
    log = log_of(topic or "")
    if not log:
        raise LogNotFoundError(f"topic {topic!r} is the topic of no log (docs/kafka-protocol.md)")
    if partition:
        raise LogNotFoundError(f"topic {topic!r} has no partition {partition}: expected 0")
    return log


def node_of(location: str) -> int:
    """Return the number of the proxy at a location, which is the same wherever it is asked."""
    return int.from_bytes(blake2b(location.encode(), digest_size=4).digest()) >> 1
