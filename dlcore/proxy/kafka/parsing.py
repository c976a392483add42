"""A bounded reader of requests, by the schemas of the library `kio`.

The library's own reader takes memory for as many elements as a request says that it has, and ends
the process if there is not so much.  It also refuses fields with tags that it does not know, which
later clients may send.  This one takes no length that exceeds what is left of the request.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import groupby
from struct import Struct
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints
from uuid import UUID

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUMBERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "bool": "?"}
SHORT, INT, LONG = Struct(">h"), Struct(">i"), Struct(">q")
_VARINT_BYTES_MAX = 5


class Unread:
    """The part of a request that is not read yet."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        """Take so many bytes."""
        start, end = self._at, self._at + count
        if not start <= end <= len(self._data):
            raise ConfigurationError(f"{count:,} bytes of something: expected 0 to {len(self):,}")
        self._at = end
        return self._data[start:end]

    def numbers(self, form: Struct) -> tuple[Any, ...]:
        """Take numbers of fixed sizes."""
        start, end = self._at, self._at + form.size
        if end > len(self._data):
            self.take(form.size)  # raises
        self._at = end
        return form.unpack_from(self._data, start)

    def varint(self) -> int:
        """Take a varint without a sign."""
        data, at = self._data, self._at
        if at < len(data) and data[at] < 0x80:  # nearly all have one byte
            self._at = at + 1
            return data[at]
        found = 0
        for index in range(_VARINT_BYTES_MAX):
            (byte,) = self.take(1)
            found |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return found
        raise ConfigurationError(f"a varint of more than {_VARINT_BYTES_MAX} bytes")

    def length(self, *, form: Struct | None) -> int:
        """Take a length: a number of this form, else a varint that is higher by one; -1: null."""
        return self.varint() - 1 if form is None else int(self.numbers(form)[0])

    def count(self, *, is_flexible: bool) -> int:
        """Take the number of elements of an array, each of which has a byte at least."""
        found = self.length(form=None if is_flexible else INT)
        if not -1 <= found <= len(self):
            raise ConfigurationError(f"an array of {found:,}: expected 0 to {len(self):,}")
        return found


def read(kind: type[Any], unread: Unread) -> Any:
    """Read a value of a dataclass of the library.  Raises: ConfigurationError."""
    untagged, tagged = _readers(kind)  # type: ignore[arg-type]  # a class is hashable
    values: dict[str, Any] = {}
    for name, reader in untagged:
        if isinstance(name, tuple):
            values.update(zip(name, reader(unread), strict=True))
        else:
            values[name] = reader(unread)
    if kind.__flexible__:
        for _ in range(unread.varint()):
            tag, size = unread.varint(), unread.varint()
            part = Unread(unread.take(size))
            if tag in tagged:
                name, reader = tagged[tag]
                values[name] = reader(part)
    return kind(**values)


@cache
def _readers(
    kind: type[Any],
) -> tuple[list[tuple[str | tuple[str, ...], Any]], dict[int, tuple[str, Any]]]:
    """Return what reads the fields of a dataclass, and those with a tag.

    Numbers one after the other are read at once: their names are a tuple.
    """
    untagged, tagged = list[tuple[str | tuple[str, ...], Any]](), {}
    hints = get_type_hints(kind)
    for form, group in runs_of(kind, hints, NUMBERS):
        if form is not None:
            untagged.append((tuple(each.name for each in group), partial(_numbers, form)))
        else:
            untagged += [(each.name, _reader(kind, each, hints[each.name])) for each in group]
    for each in fields(kind):
        if "tag" in each.metadata:
            assert each.default is not MISSING
            tagged[each.metadata["tag"]] = (each.name, _reader(kind, each, hints[each.name]))
    return untagged, tagged


def runs_of(
    kind: type[Any], hints: dict[str, Any], numbers: dict[str, str]
) -> Iterator[tuple[Struct | None, list[Field[Any]]]]:
    """Yield the fields without tags in order, numbers one after the other with their form."""

    def is_number(field: Field[Any]) -> bool:
        is_one = getattr(hints[field.name], "__origin__", None) is not tuple
        return is_one and field.metadata.get("kafka_type") in numbers

    plain = [each for each in fields(kind) if "tag" not in each.metadata]
    for is_run, each in groupby(plain, is_number):
        group = list(each)
        forms = (numbers[one.metadata["kafka_type"]] for one in group) if is_run else ()
        yield Struct(">" + "".join(forms)) if is_run else None, group


def _reader(kind: type[Any], field: Field[Any], hint: Any) -> Callable[[Unread], Any]:
    choices = [each for each in get_args(hint) if each is not NoneType]
    is_null_allowed = NoneType in get_args(hint)
    inner = choices[0] if is_null_allowed else hint
    # The id of a client is always of the old form, since a server reads it in every version.
    is_flexible = kind.__flexible__ and field.name != "client_id"
    if getattr(inner, "__origin__", None) is tuple:
        (part, _) = get_args(inner)
        element = _element(field, part, is_flexible=is_flexible, is_null_allowed=False)
        return partial(_array, element, is_flexible=is_flexible, is_null_allowed=is_null_allowed)
    return _element(field, inner, is_flexible=is_flexible, is_null_allowed=is_null_allowed)


def _array(
    element: Callable[[Unread], Any], unread: Unread, *, is_flexible: bool, is_null_allowed: bool
) -> tuple[Any, ...] | None:
    count = unread.count(is_flexible=is_flexible)
    if count < 0:
        _require_null_allowed("an array", is_allowed=is_null_allowed)
        return None
    return tuple(element(unread) for _ in range(count))


def _require_null_allowed(what: str, *, is_allowed: bool) -> None:
    if not is_allowed:
        raise ConfigurationError(f"{what} is null: expected a value")


def _element(
    field: Field[Any], kind: Any, *, is_flexible: bool, is_null_allowed: bool
) -> Callable[[Unread], Any]:
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(read, kind)
    name = field.metadata["kafka_type"]
    match name:
        case "string" | "bytes" | "records":
            form = SHORT if name == "string" else INT
            return partial(
                _text if name == "string" else _bytes,
                form=None if is_flexible else form,
                is_null_allowed=is_null_allowed,
            )
        case "uuid":
            return _uuid
        case "timedelta_i32" | "timedelta_i64":
            return partial(_time, INT if name == "timedelta_i32" else LONG)
    return partial(_number, Struct(">" + NUMBERS[name]))


def _numbers(form: Struct, unread: Unread) -> tuple[Any, ...]:
    return unread.numbers(form)


def _number(form: Struct, unread: Unread) -> Any:
    return unread.numbers(form)[0]


def _bytes(unread: Unread, *, form: Struct | None, is_null_allowed: bool) -> bytes | None:
    length = unread.length(form=form)
    if length < 0:
        _require_null_allowed("a value", is_allowed=is_null_allowed)
        return None
    return unread.take(length)


def _text(unread: Unread, *, form: Struct | None, is_null_allowed: bool) -> str | None:
    found = _bytes(unread, form=form, is_null_allowed=is_null_allowed)
    try:
        return None if found is None else found.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{found!r}: expected UTF-8") from error


def _uuid(unread: Unread) -> UUID | None:
    found = UUID(bytes=unread.take(16))
    return found if found.int else None


def _time(form: Struct, unread: Unread) -> timedelta:
    (count,) = unread.numbers(form)
    try:
        return timedelta(milliseconds=count)
    except OverflowError as error:
        raise ConfigurationError(f"{count:,} ms: expected less than 10**17") from error
