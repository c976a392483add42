"""The value in the end of a cold ledger's object that says what the object holds."""

from __future__ import annotations

import msgspec

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
