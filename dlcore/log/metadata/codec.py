"""Metadata values of logs to bytes and back: msgpack for heads, segments and chunks, JSON else."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from dlcore.errors import ConfigurationError, CorruptMetadataError
from dlcore.log.metadata.values import (
    LAYOUT,
    Chunk,
    CommitRecord,
    LockHolder,
    LogHead,
    LogMetadata,
    SegmentEnd,
    StagedLedger,
    UpkeepRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_Value = TypeVar("_Value")
_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


class _JsonLayout(msgspec.Struct):
    layout: int


class _PackedLayout(msgspec.Struct, array_like=True):
    layout: int


_json_layout = msgspec.json.Decoder(_JsonLayout).decode
_packed_layout = msgspec.msgpack.Decoder(_PackedLayout).decode


def _parse(
    value: bytes,
    what: str,
    layout_of: Callable[[bytes], _JsonLayout | _PackedLayout],
    decode: Callable[[bytes], _Value],
) -> _Value:
    """Check the version of the layout before anything else, then decode."""
    try:
        layout = layout_of(value).layout
        if layout != LAYOUT:
            raise CorruptMetadataError(
                f"{what} has layout version {layout}, this release reads {LAYOUT}"
            )
        return decode(value)
    except msgspec.MsgspecError as error:
        raise CorruptMetadataError(f"{what} does not parse: {error}") from error


_log = msgspec.json.Decoder(LogMetadata).decode
_lock = msgspec.json.Decoder(LockHolder).decode
_commit = msgspec.json.Decoder(CommitRecord).decode
_staged = msgspec.json.Decoder(StagedLedger).decode
_upkeep = msgspec.json.Decoder(UpkeepRequest).decode
_head = msgspec.msgpack.Decoder(LogHead).decode
_chunk = msgspec.msgpack.Decoder(Chunk).decode
_segment_end = msgspec.msgpack.Decoder(SegmentEnd).decode


def encode(
    value: LogMetadata | LockHolder | CommitRecord | StagedLedger | UpkeepRequest,
) -> bytes:
    """Encode a value that people look at."""
    return _encode_json(value)


def encode_packed(value: LogHead | SegmentEnd | Chunk) -> bytes:
    """Encode a value that is written often, or that there are many of."""
    return _encode_msgpack(value)


def decode_log(value: bytes, *, path: str) -> LogMetadata:
    """Decode the metadata of a log; `CorruptMetadataError` names `path`."""
    what = f"log metadata at {path}"
    log = _parse(value, what, _json_layout, _log)
    try:
        log.quorum  # noqa: B018  # checks that the numbers fit each other
    except ConfigurationError as error:
        raise CorruptMetadataError(f"{what} contradicts itself: {error}") from error
    return log


def decode_head(value: bytes, *, path: str) -> LogHead:
    """Decode the head of a log."""
    return _parse(value, f"log head at {path}", _packed_layout, _head)


def decode_chunk(value: bytes, *, path: str) -> Chunk:
    """Decode a chunk of extents."""
    return _parse(value, f"chunk at {path}", _packed_layout, _chunk)


def decode_segment_end(value: bytes, *, path: str) -> SegmentEnd:
    """Decode a completed segment."""
    return _parse(value, f"segment at {path}", _packed_layout, _segment_end)


def decode_lock(value: bytes, *, path: str) -> LockHolder:
    """Decode the holder of a writer lock."""
    return _parse(value, f"writer lock at {path}", _json_layout, _lock)


def decode_commit(value: bytes, *, path: str) -> CommitRecord:
    """Decode the last commit of an identity."""
    return _parse(value, f"commit record at {path}", _json_layout, _commit)


def decode_staged(value: bytes, *, path: str) -> StagedLedger:
    """Decode a staged ledger."""
    return _parse(value, f"staged ledger at {path}", _json_layout, _staged)


def decode_upkeep(value: bytes, *, path: str) -> UpkeepRequest:
    """Decode the request for a log's upkeep."""
    return _parse(value, f"request for upkeep at {path}", _json_layout, _upkeep)
