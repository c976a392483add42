"""Payloads of the chaos run, which say who wrote them and show any damage."""

from __future__ import annotations

from zlib import crc32

_SEPARATOR = b"|"
_FILLER_BYTES_MAX = 1500
_LARGE_FILLER_BYTES = 40_000
_LARGE_ONE_IN = 97


def payload_of(identity: str) -> bytes:
    """Return the payload of an append: its identity, and bytes that follow from it alone."""
    checksum = crc32(identity.encode())
    size = _LARGE_FILLER_BYTES if checksum % _LARGE_ONE_IN == 0 else checksum % _FILLER_BYTES_MAX
    filler = b"%08x" % checksum * (size // 8 + 1)
    return identity.encode() + _SEPARATOR + filler


def identity_of(payload: bytes) -> str | None:
    """Return whose payload it is; None if it is not what any append wrote."""
    try:
        identity = payload.partition(_SEPARATOR)[0].decode()
    except UnicodeDecodeError:
        return None
    return identity if payload_of(identity) == payload else None
