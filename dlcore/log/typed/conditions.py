"""Conditions on rows of a typed log, as people write them: ``user_id = 42 and city is not null``.

A condition is a column, an operator and literals; several are joined by ``and``.

* Operators: ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in (…, …)``, ``is null``,
  ``is not null``.  Keywords may have any case.
* Columns have their names; one that is no plain word is in double quotes, as ``"user id"``.
* Literals are numbers, ``true``, ``false``, or texts in single quotes, in which ``''`` is one
  quote.  A text is also how times, dates, decimals and binary values are written.  A literal must
  be a value of its column's type.

As in SQL, null fulfils no comparison.  Parts of lists, structs and maps cannot be compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

CONDITIONS_MAX = 100
LITERALS_MAX = 10_000
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")+")
      | (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)
      | (?P<word>[^\W\d]\w*)
      | (?P<sign><=|>=|!=|<>|==|[=<>(),])
    )""",
    re.VERBOSE,
)
_COMPARISONS = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_SPELLED = {"==": "=", "<>": "!="}
_KEYWORDS = ("and", "in", "is", "not", "null", "or", "true", "false")


class Literal(NamedTuple):
    """A literal: its text without quotes, and whether it had some."""

    text: str
    is_text: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition; `operator` is a comparison, ``in``, ``is null`` or ``is not null``."""

    column: str
    operator: str
    literals: tuple[Literal, ...] = ()

    @property
    def shape(self) -> str:
        """The condition without its literals, which may be about a person."""
        column = self.column if re.fullmatch(r"[^\W\d]\w*", self.column) else f'"{self.column}"'
        if not self.literals:
            return f"{column} {self.operator}"
        marks = ", ".join("?" for _ in self.literals)
        return f"{column} {self.operator} {f'({marks})' if self.operator == 'in' else marks}"


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Return the conditions of a text, all of which must hold.

    Raises:
        ConfigurationError: it has another form; the message says where, and what would be right.
    """
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._scan())
        self._next = 0

    def _scan(self) -> Iterator[_Token]:
        position = 0
        while position < len(self._text.rstrip()):
            found = _TOKEN.match(self._text, position)
            if found is None or found.lastgroup is None:
                raise self._refused(position, "a column, a literal or an operator")
            kind = found.lastgroup
            yield _Token(kind, found[kind], found.start(kind))
            position = found.end()

    def parse(self) -> tuple[Condition, ...]:
        found = [self._condition()]
        while self._next < len(self._tokens):
            if not self._takes_word("and"):
                raise self._refused(self._tokens[self._next].start, "`and`, or the end")
            found.append(self._condition())
            if len(found) > CONDITIONS_MAX:
                raise ConfigurationError(
                    f"more than {CONDITIONS_MAX} conditions: expected so many at most"
                )
        return tuple(found)

    def _condition(self) -> Condition:
        column = self._column()
        if self._takes_word("is"):
            is_not = self._takes_word("not")
            if not self._takes_word("null"):
                raise self._refused_here("`null`")
            return Condition(column, "is not null" if is_not else "is null")
        if self._takes_word("in"):
            return Condition(column, "in", self._list())
        token = self._peek()
        sign = "" if token is None else _SPELLED.get(token.text, token.text)
        if token is None or token.kind != "sign" or sign not in _COMPARISONS:
            raise self._refused_here("=, !=, <, <=, >, >=, in (…), `is null` or `is not null`")
        self._next += 1
        return Condition(column, sign, (self._literal(),))

    def _list(self) -> tuple[Literal, ...]:
        self._take_sign("(")
        found = [self._literal()]
        while self._takes_sign(","):
            found.append(self._literal())
            if len(found) > LITERALS_MAX:
                raise ConfigurationError(
                    f"more than {LITERALS_MAX} literals in one list: expected so many at most"
                )
        self._take_sign(")")
        return tuple(found)

    def _column(self) -> str:
        token = self._peek()
        if token is not None and token.kind == "quoted":
            self._next += 1
            return token.text[1:-1].replace('""', '"')
        if token is None or token.kind != "word" or token.text.lower() in _KEYWORDS:
            raise self._refused_here("the name of a column")
        self._next += 1
        return token.text

    def _literal(self) -> Literal:
        token = self._peek()
        if token is not None and token.kind == "text":
            self._next += 1
            return Literal(token.text[1:-1].replace("''", "'"), is_text=True)
        if token is not None and (
            token.kind == "number" or token.text.lower() in ("true", "false")
        ):
            self._next += 1
            return Literal(token.text.lower(), is_text=False)
        raise self._refused_here("a number, true, false, or a text in single quotes")

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _takes_word(self, word: str) -> bool:
        token = self._peek()
        is_it = token is not None and token.kind == "word" and token.text.lower() == word
        self._next += is_it
        return is_it

    def _takes_sign(self, sign: str) -> bool:
        token = self._peek()
        is_it = token is not None and token.kind == "sign" and token.text == sign
        self._next += is_it
        return is_it

    def _take_sign(self, sign: str) -> None:
        if not self._takes_sign(sign):
            raise self._refused_here(f"`{sign}`")

    def _refused_here(self, expected: str) -> ConfigurationError:
        token = self._peek()
        return self._refused(len(self._text) if token is None else token.start, expected)

    def _refused(self, position: int, expected: str) -> ConfigurationError:
        rest = self._text[position : position + 30].strip()
        found = f"{rest!r} at character {position + 1}" if rest else "the end"
        return ConfigurationError(
            f"the condition {self._text!r:.200}: found {found}, expected {expected}"
        )


class Matcher:
    """Finds the rows of batches with certain columns that fulfil all conditions.

    Args:
        log: the name of the log, for errors.
        conditions: the conditions.
        columns: the log's columns, with the types that batches have.

    Raises:
        ConfigurationError: a column does not exist or cannot be compared, or a literal is no value
            of its column's type.
    """

    def __init__(self, log: str, conditions: tuple[Condition, ...], columns: pa.Schema) -> None:
        self._conditions = [(each, _values_of(log, each, columns)) for each in conditions]

    def mask(self, batch: pa.RecordBatch) -> Any:
        """Return an array that is true for each row that fulfils all conditions, else false."""
        masks = (
            pc.fill_null(_mask_of(each, values, batch.column(each.column)), False)
            for each, values in self._conditions
        )
        return reduce(pc.and_, masks)


def _mask_of(condition: Condition, values: Any, column: Any) -> Any:
    match condition.operator:
        case "is null":
            return pc.is_null(column)
        case "is not null":
            return pc.is_valid(column)
        case "in":
            return pc.is_in(column, value_set=values, skip_nulls=True)
        case operator:
            return _COMPARISONS[operator](column, values[0])


def _values_of(log: str, condition: Condition, columns: pa.Schema) -> Any:
    """Return the literals of a condition as an array of its column's type."""
    if condition.column not in columns.names:
        raise ConfigurationError(
            f"log {log!r} has no column {condition.column!r}: expected one of "
            f"{', '.join(columns.names)}"
        )
    kind = columns.field(condition.column).type
    if not condition.literals:
        return None
    if pa.types.is_nested(kind) or pa.types.is_null(kind):
        raise _not_compared(log, condition, kind)
    _require_literals(log, condition, kind)
    try:
        values = pa.array([each.text for each in condition.literals]).cast(kind)
        # Comparing tells whether the type has an order, before anything is done.
        _mask_of(condition, values, pa.nulls(1, kind))
    except pa.ArrowNotImplementedError as error:
        raise _not_compared(log, condition, kind) from error
    except pa.ArrowInvalid as error:
        raise _not_values(log, condition, kind) from error
    return values


def _require_literals(log: str, condition: Condition, kind: Any) -> None:
    """Refuse a number for a text: it is a mistake, and would find nothing."""
    types = pa.types
    is_numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if not (is_numeric or types.is_boolean(kind) or all(e.is_text for e in condition.literals)):
        raise _not_values(log, condition, kind)


def _not_compared(log: str, condition: Condition, kind: Any) -> ConfigurationError:
    return ConfigurationError(
        f"column {condition.column!r} of log {log!r} has the type {kind}, which "
        f"`{condition.operator}` cannot compare: only `is null` and `is not null` can"
    )


def _not_values(log: str, condition: Condition, kind: Any) -> ConfigurationError:
    literals = condition.literals
    written = ", ".join(repr(each.text) if each.is_text else each.text for each in literals)
    return ConfigurationError(
        f"column {condition.column!r} of log {log!r} has the type {kind}: expected literals of "
        f"that type, not {written:.200}"
    )
