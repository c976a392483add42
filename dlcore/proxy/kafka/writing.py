"""A writer of answers by the schemas of the library `kio`: the other way of `parsing`.

The library's own writer calls a function for each byte of a length, checks the type of each number,
and joins what it writes.  This one passes batches on as they are.  No answer has fields with tags.
"""

from __future__ import annotations

from dataclasses import Field, is_dataclass
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter
from struct import Struct
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from dlcore.proxy.kafka.batches import Batches, unsigned_varint
from dlcore.proxy.kafka.parsing import INT, LONG, NUMBERS, SHORT, runs_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from uuid import UUID

_NUMBERS = NUMBERS | {"error_code": "h"}
_MS = timedelta(milliseconds=1)


class Collected:
    """The bytes of an answer, with batches as they are."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.small = bytearray()
        """The bytes behind the parts."""

    def take(self, batches: Batches) -> None:
        """Take batches as parts."""
        self._end_small()
        self.parts += batches.parts

    def _end_small(self) -> None:
        self.parts.append(bytes(self.small))
        self.small = bytearray()

    def framed(self) -> list[bytes | memoryview]:
        """Return all parts, behind their size."""
        self._end_small()
        return [sum(map(len, self.parts)).to_bytes(4), *self.parts]


def write(sink: Collected, value: Any) -> None:
    """Write a value of a dataclass of the library."""
    for values, writer in _writers(type(value)):  # type: ignore[arg-type]  # a class is hashable
        writer(sink, values(value))


@cache
def _writers(kind: type[Any]) -> list[tuple[Callable[[Any], Any], Callable[[Collected, Any], Any]]]:
    """Return what takes values of fields out of a dataclass, and what writes these."""
    found = list[Any]()
    hints = get_type_hints(kind)
    for form, group in runs_of(kind, hints, _NUMBERS):
        names = [each.name for each in group]
        if form is None:
            found += [
                (attrgetter(each.name), _writer(kind, each, hints[each.name])) for each in group
            ]
        elif len(group) == 1:
            found.append((attrgetter(*names), partial(_number, form)))
        else:
            found.append((attrgetter(*names), partial(_numbers, form)))
    if kind.__flexible__:
        found.append((_no_tags, _plain))
    return found


def _no_tags(_: Any) -> bytes:
    return b"\0"


def _plain(sink: Collected, data: bytes) -> None:
    sink.small += data


def _number(form: Struct, sink: Collected, number: Any) -> None:
    sink.small += form.pack(number)


def _numbers(form: Struct, sink: Collected, numbers: tuple[Any, ...]) -> None:
    sink.small += form.pack(*numbers)


def _writer(kind: type[Any], field: Field[Any], hint: Any) -> Callable[[Collected, Any], None]:
    choices = [each for each in get_args(hint) if each is not NoneType]
    inner = choices[0] if NoneType in get_args(hint) else hint
    if getattr(inner, "__origin__", None) is tuple:
        element = _element(field, get_args(inner)[0], is_flexible=kind.__flexible__)
        return partial(_array, element, None if kind.__flexible__ else INT)
    return _element(field, inner, is_flexible=kind.__flexible__)


def _element(
    field: Field[Any], kind: Any, *, is_flexible: bool
) -> Callable[[Collected, Any], None]:
    if isinstance(kind, type) and is_dataclass(kind):
        return write
    match field.metadata["kafka_type"]:
        case "string":
            return partial(_text, None if is_flexible else SHORT)
        case "bytes" | "records":
            return partial(_bytes, None if is_flexible else INT)
        case "uuid":
            return _uuid
        case "timedelta_i32" | "timedelta_i64" as name:
            return partial(_time, INT if name == "timedelta_i32" else LONG)
        case "datetime_i64":
            return _moment
        case name:
            return partial(_number, Struct(">" + _NUMBERS[name]))


def _length(form: Struct | None, length: int) -> bytes:
    """Return a length as a number of a form, or a varint that is higher by one; -1 is null."""
    if form is not None:
        return form.pack(length)
    return unsigned_varint(length + 1)


def _array(
    element: Callable[[Collected, Any], None], form: Struct | None, sink: Collected, values: Any
) -> None:
    sink.small += _length(form, -1 if values is None else len(values))
    for each in values or ():
        element(sink, each)


def _text(form: Struct | None, sink: Collected, text: str | None) -> None:
    _bytes(form, sink, None if text is None else text.encode())


def _bytes(form: Struct | None, sink: Collected, data: Any) -> None:
    sink.small += _length(form, -1 if data is None else len(data))
    if isinstance(data, Batches):
        sink.take(data)
    elif data is not None:
        sink.small += data


def _uuid(sink: Collected, value: UUID | None) -> None:
    sink.small += bytes(16) if value is None else value.bytes


def _moment(sink: Collected, moment: datetime | None) -> None:
    sink.small += LONG.pack(-1 if moment is None else round(moment.timestamp() * 1000))


def _time(form: Struct, sink: Collected, time: timedelta) -> None:
    sink.small += form.pack(time // _MS)
