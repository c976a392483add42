"""Identities and positions: bookies, ledgers, log names, DLSN."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias

import msgspec

from dlcore.base.errors import ConfigurationError, InvalidLogNameError

if TYPE_CHECKING:
    from collections.abc import Sequence

INVALID_ENTRY_ID = -1
"""The entry before the first one; a last add confirmed of -1 means that no entry is confirmed."""

TXID_MAX = 2**63 - 2
"""Highest transaction id; 2**63 - 1 is reserved for the end of the stream."""

LogId: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z-]{1,64}\Z")]
"""Id of a log, which does not depend on its name; it is part of a path in the metadata store."""

LOG_NAME_LENGTH_MAX = 512
_IDENTITY_BYTES_MAX = 200
"""Longest name of an appender or a subscriber: it is part of a path in the metadata store."""
_NAMES_KEPT = 1024
"""Names that are kept with their problem, if any, since each call of a client names a log."""
# Python refuses to convert a text of thousands of digits.
_DLSN_TEXT = re.compile(r"(0|[1-9][0-9]{0,99}):(0|[1-9][0-9]{0,99}):(0|[1-9][0-9]{0,99})")
_REFUSED_CATEGORIES = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})
"""Unicode's controls, formats, unassigned, private and surrogate characters, and all its spaces."""


class BookieId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A bookie: its name, and the incarnation of its data.

    The incarnation (a UUID as 32 hex digits) is created with the first cookie.  Therefore an empty
    disk at the same address is another bookie.
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    incarnation: Annotated[str, msgspec.Meta(min_length=1)]

    def __str__(self) -> str:
        return f"{self.name}/{self.incarnation[:8]}"


class DLSN(msgspec.Struct, frozen=True, order=True, gc=False):
    """Position of a record in a log: segment number, entry within it, slot within the entry.

    Totally ordered.  ``entry_id`` counts entries within the segment across its extents, so it does
    not change when extents are compacted.  Text form: ``3:17:0``.
    """

    lssn: int
    entry_id: int
    slot_id: int

    INITIAL: ClassVar[DLSN]

    def __post_init__(self) -> None:
        # One step for all three numbers, because every acknowledged record gets a DLSN.
        try:
            is_bad = (self.lssn | self.entry_id | self.slot_id) >> 63
        except TypeError as error:
            parts = f"{self.lssn!r}, {self.entry_id!r}, {self.slot_id!r}"
            raise ConfigurationError(f"DLSN parts are whole numbers, not {parts}") from error
        if is_bad:
            bad = next(n for n in (self.lssn, self.entry_id, self.slot_id) if n >> 63)
            raise ConfigurationError(f"DLSN parts are in 0 … 2**63-1, not {bad}")

    def __str__(self) -> str:
        return f"{self.lssn}:{self.entry_id}:{self.slot_id}"

    @classmethod
    def parse(cls, text: str) -> DLSN:
        """Parse ``lssn:entry:slot``, the inverse of ``str``.

        Raises:
            ConfigurationError: the text is something else, or a number is above 2**63 - 1.
        """
        match = _DLSN_TEXT.fullmatch(text)
        if match is None:
            raise ConfigurationError(f"expected a DLSN like 3:17:0, not {text!r}")
        lssn, entry_id, slot_id = (int(part) for part in match.groups())
        return cls(lssn, entry_id, slot_id)

    def next_slot(self) -> DLSN:
        """Return the lowest position after this record."""
        return DLSN(self.lssn, self.entry_id, self.slot_id + 1)


DLSN.INITIAL = DLSN(1, 0, 0)


def validate_log_name(name: str) -> str:
    """Return `name` without one leading slash, or raise `InvalidLogNameError` saying what is wrong.

    Names are paths: components joined by ``/``, none of them empty, ``.`` or ``..``; no spaces,
    control or private characters, ``<`` or ``>``; a name does not start with ``.``.
    Source: distributedlog.md section 1.4.
    """
    if not isinstance(name, str):
        raise InvalidLogNameError(f"invalid log name {name!r}: expected text")
    stripped = name.removeprefix("/")
    problem = _log_name_problem(stripped)
    if problem:
        raise InvalidLogNameError(f"invalid log name {name!r}: {problem}")
    return stripped


def validate_log_id(log_id: str) -> str:
    """Return `log_id`, or raise `ConfigurationError`."""
    try:
        return msgspec.convert(log_id, LogId)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"log_id={log_id!r}: expected 1 to 64 ASCII letters, digits and hyphens"
        ) from error


def validate_log_names(names: Sequence[str]) -> list[str]:
    """Return each of `names` as `validate_log_name` does.

    Raises:
        ConfigurationError: `names` is one text, whose letters are no names, or is no list.
        InvalidLogNameError: one of the names is invalid.
    """
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise ConfigurationError(f"names={names!r}: expected a list of names")
    return [validate_log_name(name) for name in names]


def require_identity(key: str, value: object) -> str:
    """Return `value` if it is text of 1 … 200 bytes, or raise `ConfigurationError`."""
    if isinstance(value, str):
        size_bytes = len(value.encode("utf-8", "surrogatepass"))
        if 0 < size_bytes <= _IDENTITY_BYTES_MAX:
            return value
    raise ConfigurationError(f"{key}={value!r}: expected 1 … {_IDENTITY_BYTES_MAX} bytes of text")


def name_prefix(prefix: str | None) -> str:
    """Return a prefix of log names, without one leading slash, as names have it.

    Raises: InvalidLogNameError: it is no text.
    """
    if not isinstance(prefix, str | None):
        raise InvalidLogNameError(f"prefix={prefix!r}: expected the start of log names")
    return (prefix or "").removeprefix("/")


def _log_name_problem(name: str) -> str:
    if not name:
        return "it is empty"
    if len(name.encode("utf-8", "surrogatepass")) > LOG_NAME_LENGTH_MAX:
        return f"it is longer than {LOG_NAME_LENGTH_MAX} bytes"
    return _characters_problem(name)


@lru_cache(_NAMES_KEPT)
def _characters_problem(name: str) -> str:
    if name.startswith("."):
        return "names starting with '.' are reserved"
    components = name.split("/")
    if "" in components:
        return "it has an empty component ('//' or a trailing '/')"
    if "." in components or ".." in components:
        return "'.' and '..' are not allowed as components"
    for character in name:
        if character in "<>" or unicodedata.category(character) in _REFUSED_CATEGORIES:
            return f"character {character!r} is not allowed"
        # DistributedLog's rule, which is that of ZooKeeper's paths.
        if "\ufff0" <= character <= "\uffff":
            return f"character {character!r} is not allowed"
    return ""
