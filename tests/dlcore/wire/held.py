"""The memory of one end of the wire for bytes that are no whole frame yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.config import ENTRY_SIZE_BYTES_MAX
from dlcore.wire.messages import CHUNK_BYTES_MAX
from dlcore.wire.receiving import SCRATCH_BYTES

if TYPE_CHECKING:
    from dlcore.wire.bookie_end import BookieEnd
    from dlcore.wire.session import ClientEnd

HELD_BYTES_MAX = CHUNK_BYTES_MAX + ENTRY_SIZE_BYTES_MAX + 2 * SCRATCH_BYTES
"""The largest payload that a sound head may announce, and what came before it was one."""


def held_bytes(end: BookieEnd | ClientEnd[Any, Any]) -> int:
    """Return the bytes of memory that an end has for what was sent to it."""
    assembly = end._assembly
    partial = assembly._partial
    return len(assembly._data) + (0 if partial is None else len(partial.payload))
