"""The note of a cold ledger on the extents that it replaced, by which an object is made again.

The ledgers of bookies stay for a grace after their entries went to objects.  A cold ledger notes
its old extents, unless they are many: the note stays with its metadata for good.  Nothing here does
I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dlcore.log.metadata.values import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.ledger.metadata.values import LedgerMetadata
    from dlcore.log.metadata.segment import Extent

EXTENTS_NOTED_MAX = 64
_KEY = "origin"


class ColdOrigin(msgspec.Struct, frozen=True):
    """The first entry of a cold ledger in its segment, its first sequence id, and old extents."""

    entry: int
    sequence_id: int
    packed: tuple[int, ...]

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The extents that had the entries."""
        return unpack(self.packed)


def noted_origin(entry: int, sequence_id: int, extents: Sequence[Extent]) -> dict[str, str]:
    """Return what a cold ledger notes; nothing if there are too many extents."""
    if len(extents) > EXTENTS_NOTED_MAX:
        return {}
    origin = ColdOrigin(entry, sequence_id, tuple(pack(extents)))
    return {_KEY: msgspec.json.encode(origin).decode()}


def origin_of(ledger: LedgerMetadata) -> ColdOrigin | None:
    """Return what a cold ledger noted; None if it noted nothing that this release reads."""
    try:
        return msgspec.json.decode(ledger.custom.get(_KEY, "null"), type=ColdOrigin | None)
    except msgspec.MsgspecError:
        return None
