"""Facts of a cold ledger: the contents of an object by its own end, and what the ledger replaced.

The chain says what an object holds, too: its metadata names each object with its entries, records,
size and sum.  The rows of an object are compared with both.

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


FORMAT = 1


class ObjectFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of an object: `entries` entries of a segment, from `first_entry` on."""

    format: int = FORMAT
    cluster_id: str
    log_id: str
    lssn: int
    schema_id: int
    first_entry: int
    entries: int
    first_sequence_id: int
    records: int
    first_txid: int
    last_txid: int
    crc32c: int


def url_of(ledger: LedgerMetadata, number: int) -> str:
    """Return the URL of an object of a cold ledger."""
    return f"{ledger.folder}/{ledger.objects[number].name}"


def end_entry_of(ledger: LedgerMetadata, number: int) -> int:
    """Return the first entry of a cold ledger that is after those of an object."""
    following = ledger.objects[number + 1 :]
    return following[0].first_entry_id if following else ledger.last_entry_id + 1


def difference(ledger: LedgerMetadata, number: int, facts: ObjectFacts) -> str:
    """Return how an object differs from what the chain says of it; empty: it does not.

    Args:
        ledger: the cold ledger.
        number: the place of the object among its objects.
        facts: those of the object by its rows.
    """
    stored = ledger.objects[number]
    following = ledger.objects[number + 1 :]
    expected: dict[str, object] = {
        "place": ledger.folder.split("/")[-3:],
        "entries": end_entry_of(ledger, number) - stored.first_entry_id,
    }
    found: dict[str, object] = {
        "place": [facts.cluster_id, facts.log_id, str(facts.lssn)],
        "entries": facts.entries,
    }
    if following:
        expected["records"] = following[0].records_before - stored.records_before
        found["records"] = facts.records
    if stored.crc32c is not None:
        expected["crc32c"], found["crc32c"] = stored.crc32c, facts.crc32c
    return "; ".join(
        f"{what} {found[what]}, and the chain says {said}"
        for what, said in expected.items()
        if found[what] != said
    )


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
