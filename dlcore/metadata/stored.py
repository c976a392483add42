"""Conversion of values of the metadata store to bytes and back; each has one struct.

A stored struct has a field ``layout: int = LAYOUT``; in a positional struct it is the first one.
Values that are many or are written often are positional msgpack (``array_like=True``).  Their new
fields go last and have a default.  Other values are JSON, because people read them.  A value that
does not parse, has another layout or contradicts itself raises `CorruptMetadataError`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import msgspec

from dlcore.base.errors import ConfigurationError, CorruptMetadataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.metadata.port import Versioned

LAYOUT = 2
"""Version of the format of all values; values of another version are refused, unless `LAYOUTS` of
their struct has it."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A count, an id, or a time in epoch milliseconds."""
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class _Layout(msgspec.Struct):
    layout: int


class _PackedLayout(msgspec.Struct, array_like=True):
    layout: int


_S = TypeVar("_S", bound=msgspec.Struct)

# Maps have a fixed order: after a lost reply, a client compares the stored bytes with its own.
_packed = msgspec.msgpack.Encoder(order="deterministic")
_json = msgspec.json.Encoder(order="deterministic")
_packed_layout = msgspec.msgpack.Decoder(_PackedLayout)
_json_layout = msgspec.json.Decoder(_Layout)


@cache
def _decoder(kind: type[msgspec.Struct]) -> Any:
    is_packed = kind.__struct_config__.array_like
    return (msgspec.msgpack if is_packed else msgspec.json).Decoder(kind)


def encode(value: msgspec.Struct) -> bytes:
    """Return `value` as bytes; equal values give equal bytes."""
    return (_packed if value.__struct_config__.array_like else _json).encode(value)


def decode(kind: type[_S], value: bytes, *, source: str) -> _S:
    """Parse the result of `encode` for this kind; `source`, a path, names the value in errors.

    Raises:
        CorruptMetadataError: the bytes are no such value, or have another layout.
    """
    what = f"{kind.__name__} at {source}"
    known = getattr(kind, "LAYOUTS", (LAYOUT,))
    is_packed = kind.__struct_config__.array_like
    try:
        layout = (_packed_layout if is_packed else _json_layout).decode(value).layout
        found: _S | None = _decoder(kind).decode(value) if layout in known else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptMetadataError(f"{what} does not parse: {error}") from error
    except (ConfigurationError, CorruptMetadataError, ArithmeticError, ValueError) as error:
        # One of the value's own checks failed.
        raise CorruptMetadataError(f"{what} contradicts itself: {error}") from error
    if found is None:
        readable = " and ".join(map(str, known))
        raise CorruptMetadataError(
            f"{what} has layout version {layout}, this release reads {readable}"
        )
    return found


def decode_or_tell(
    kind: type[_S],
    node: Versioned | None,
    *,
    source: str,
    tell: Callable[[CorruptMetadataError], object],
) -> _S | None:
    """Return the value of a node, None if there is no node or it is damaged.

    It is for lists of nodes, where one damaged node must not hide the others.  `tell` is called
    with the damage.
    """
    try:
        return None if node is None else decode(kind, node.value, source=source)
    except CorruptMetadataError as error:
        tell(error)
        return None
