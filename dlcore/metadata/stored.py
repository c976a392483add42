"""Values of the metadata store to bytes and back; each is declared once, as a struct.

A stored struct has a field ``layout: int = LAYOUT``, if it is positional then as its first.  What
there are many of, or what is written often, is positional msgpack (``array_like=True``), so
its new fields go last and have a default.  The rest is JSON, since people look at it.  A value that
does not parse, is of another layout or contradicts itself is `CorruptMetadataError`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import msgspec

from dlcore.errors import ConfigurationError, CorruptMetadataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.metadata.port import Versioned

LAYOUT = 2
"""Version of the format of every value; those of another one are refused."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of something, an id, or a time in epoch milliseconds."""
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class _Layout(msgspec.Struct):
    layout: int


class _PackedLayout(msgspec.Struct, array_like=True):
    layout: int


_S = TypeVar("_S", bound=msgspec.Struct)

# Maps in one order: who lost a reply compares what is there with what it wrote.
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
    """Parse what `encode` made of a value of this kind; `source`, a path, names it in errors.

    Raises:
        CorruptMetadataError: it is not one, or of another layout.
    """
    what = f"{kind.__name__} at {source}"
    is_packed = kind.__struct_config__.array_like
    try:
        layout = (_packed_layout if is_packed else _json_layout).decode(value).layout
        found: _S | None = _decoder(kind).decode(value) if layout == LAYOUT else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptMetadataError(f"{what} does not parse: {error}") from error
    except (ConfigurationError, CorruptMetadataError, ArithmeticError, ValueError) as error:
        # Of the value's own checks.
        raise CorruptMetadataError(f"{what} contradicts itself: {error}") from error
    if found is None:
        raise CorruptMetadataError(
            f"{what} has layout version {layout}, this release reads {LAYOUT}"
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

    For nodes of which one that is damaged must hide no other: `tell` is given the damage.
    """
    try:
        return None if node is None else decode(kind, node.value, source=source)
    except CorruptMetadataError as error:
        tell(error)
        return None
