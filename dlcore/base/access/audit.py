"""The audit log: one line of JSON for each management action and each denial, chained by digests.

Each line has the SHA-256 digest of the line before it, so that a line that was altered, removed or
moved is found by `verify`.  Two things are not found: that the last lines are missing, and that all
lines after a place were written anew by a person with access to the file.  Against both, keep the
digest of the last line (`dlog audit verify` prints it) where that person can not write, and
compare.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

BEGINNING = "0" * 64
"""The digest before the first line of a log."""
TEXT_MAX = 1024
"""Longer texts of a caller are cut."""


class AuditLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line."""

    time: str = ""
    """When, in UTC, as ISO 8601 with milliseconds; the file fills it in."""
    principal: str
    address: str
    entrance: str
    resource: str
    result: str
    """``ok``, or the name of the error and its text."""
    count: int = 1
    """More than 1: so many calls that differ in time and address only, the others not written."""
    before: str = BEGINNING
    """The digest of the line before."""


class Chain:
    """The next lines of a log whose last line has this digest."""

    def __init__(self, digest: str = BEGINNING) -> None:
        self.digest = digest

    def next(self, line: AuditLine) -> bytes:
        """Return a line as bytes with a line feed."""
        texts = {
            name: getattr(line, name)[:TEXT_MAX]
            for name in ("principal", "address", "entrance", "resource", "result")
        }
        data = msgspec.json.encode(msgspec.structs.replace(line, before=self.digest, **texts))
        self.digest = digest_of(data)
        return data + b"\n"


def digest_of(line: bytes) -> str:
    """Return the digest of a line without its line feed."""
    return hashlib.sha256(line).hexdigest()


def verify(lines: Iterable[bytes], *, digest: str = BEGINNING) -> tuple[int, str]:
    """Check the lines of a log, which follow a line with `digest`.

    Returns: their number, and the digest of the last one.

    Raises:
        ConfigurationError: a line does not follow the one before, or is no line of an audit log.
    """
    count = 0
    for count, line in enumerate(lines, start=1):
        try:
            read = msgspec.json.decode(line, type=AuditLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"line {count}: no line of an audit log: {error}") from error
        if read.before != digest:
            raise ConfigurationError(
                f"line {count}: it follows a line with the digest {read.before[:16]}…, and the "
                f"line before it has {digest[:16]}…: a line was altered, removed or moved"
            )
        digest = digest_of(line.removesuffix(b"\n"))
    return count, digest
