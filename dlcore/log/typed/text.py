"""Columns as people write them, ``city string, place struct<lat double, lon double>``.

This parses the text of `dlcore.log.typed.schema.describe`, and Arrow's own spelling, which has a
colon after each name and a name for the element of a list.  Columns are separated by commas or
lines.  After a type, ``not null`` says that its values cannot be null.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.errors import ConfigurationError
from dlcore.log.typed.schema import LIST, MAP, STRUCT, Column

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = re.compile(r"[^\s:,<>()\[\]]+")
_LEAF = re.compile(r"\w+(?:\([^()]*\)|\[[^\[\]]*\])?")
_ELEMENT_NAME = re.compile(r"\s*\w+\s*:")
_NOT_NULL = re.compile(r"[^\S\n]*not[^\S\n]+null(?!\w)", re.IGNORECASE)
_SPACE = re.compile(r"[^\S\n]*")
_PARTS_OF = {LIST: 1, MAP: 2}
_NESTED_MAX = 50
"""The limit of nesting, because nested columns are parsed by recursive calls."""


def parse_columns(text: str) -> tuple[Column, ...]:
    """Return the columns that a text describes.

    Raises:
        ConfigurationError: it does not parse; the message shows the place.
    """
    reader = _Reader("\n".join(line.rstrip(" \t,") for line in text.strip().splitlines()))
    columns = reader.listed(reader.named, "\n,")
    if not reader.is_at_end:
        raise reader.error("a comma, and a name and a type")
    return columns


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._text)

    def error(self, expected: str) -> ConfigurationError:
        return ConfigurationError(
            f"schema {self._text!r}: expected {expected} at {self._text[self._at :]!r}, for "
            "example: city string not null, fare double, stops list<string>, "
            "place struct<lat double, lon double>"
        )

    def listed(self, part: Callable[[], Column], separators: str) -> tuple[Column, ...]:
        parts = [part()]
        while self._takes(separators):
            parts.append(part())
        return tuple(parts)

    def named(self) -> Column:
        name = self._match(_NAME, "a name")
        self._takes(":")
        return self._typed(name)

    def _typed(self, name: str) -> Column:
        kind = self._match(_LEAF, f"the type of {name}")
        if not self._takes("<"):
            return Column(name, kind, nullable=not self._is_required())
        self._depth += 1
        if self._depth > _NESTED_MAX:
            raise self.error(f"at most {_NESTED_MAX} types one in another")
        if kind == STRUCT:
            fields = self.listed(self.named, ",")
        elif kind in _PARTS_OF:
            names = iter(("item",) if kind == LIST else ("key", "value"))
            fields = self.listed(lambda: self._element(next(names, "")), ",")
            if kind == MAP:  # a key can never be null, whether the text says so or not
                fields = (replace(fields[0], nullable=True), *fields[1:])
            if len(fields) != _PARTS_OF[kind]:
                raise self.error(f"{kind}<…> of {_PARTS_OF[kind]}, not {len(fields)}")
        else:
            raise self.error(f"list, map or struct before <…>, not {kind},")
        if not self._takes(">"):
            raise self.error("a comma or >")
        self._depth -= 1
        return Column(name, kind, fields, nullable=not self._is_required())

    def _is_required(self) -> bool:
        found = _NOT_NULL.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found is not None

    def _element(self, name: str) -> Column:
        """Read a type, or one with a name, which is ignored."""
        if _ELEMENT_NAME.match(self._text, self._at):
            self._match(_NAME, "a name")
            self._takes(":")
        return self._typed(name)

    def _takes(self, characters: str) -> bool:
        self._skip()
        if self.is_at_end or self._text[self._at] not in characters:
            return False
        self._at += 1
        return True

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        self._skip()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self.error(expected)
        self._at = found.end()
        return found[0]

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None, "nothing is a space too"
        self._at = found.end()
