"""The file of an export: what goes in comes out, and damage is reported."""

from __future__ import annotations

import gzip

import pytest

from dlcore.base.errors import CorruptMetadataError
from dlcore.ops.backup.archive import Export, ExportHeader, packed, unpacked
from tests.fixtures.lengths import sample

HEADER = ExportHeader(
    root="/dlog",
    cluster_id="c",
    exported_ms=1,
    release="0.2.0",
    moment=7,
    logs=1,
    ledgers=2,
)
EXPORT = Export(HEADER, {"": b"root", "/logs": b"", "/logs/00": bytes(range(256))})
LINES = gzip.decompress(packed(EXPORT)).splitlines(keepends=True)


def test_there_and_back() -> None:
    """Equal exports give equal bytes, and the same export again."""
    assert unpacked(packed(EXPORT), source="f") == EXPORT
    assert packed(EXPORT) == packed(
        Export(HEADER, dict(sorted(EXPORT.nodes.items(), reverse=True)))
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no whole export"),
        (b"PK", "no export of metadata"),
        (packed(EXPORT)[:-9], "no export of metadata, or damaged"),
        (gzip.compress(b"", mtime=0), "no whole export"),
        (gzip.compress(b"".join(LINES[:-1])), "no whole export"),
        (gzip.compress(b"".join(LINES[:1] + LINES[2:])), "the checksum"),
        (gzip.compress(b"".join(LINES).replace(b"0.2.0", b"0.2.1")), "the checksum"),
        (gzip.compress(b"".join(LINES).replace(b'"layout":1', b'"layout":9')), "dlog-metadata 9"),
    ],
)
def test_a_wrong_file(data: bytes, message: str) -> None:
    """Cut, changed, of another version, or something else."""
    with pytest.raises(CorruptMetadataError, match=message):
        unpacked(data, source="f")


def test_damage_of_any_byte() -> None:
    """It is never taken for another export."""
    data = packed(EXPORT)
    for at in sample(range(len(data)), 60):
        damaged = bytearray(data)
        damaged[at] ^= 0x40
        try:
            assert unpacked(bytes(damaged), source="f") == EXPORT  # the head of gzip's format
        except CorruptMetadataError:
            continue
