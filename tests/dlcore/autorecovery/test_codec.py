"""What auto-recovery keeps in metadata: to bytes and back, damage refused by path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dlcore.autorecovery.codec import (
    Office,
    ReplicaCheckRun,
    UnderReplicatedLedger,
    decode_check_run,
    decode_office,
    decode_under_replicated,
    encode_check_run,
    encode_office,
    encode_under_replicated,
)
from dlcore.errors import CorruptMetadataError
from tests.fixtures.ledgers import bookies

if TYPE_CHECKING:
    from collections.abc import Callable

LEDGER = UnderReplicatedLedger(
    ledger_id=2**40, missing=bookies("AB"), since_ms=7, findings=3, attempts=2, reason="no copy"
)
OFFICE = Office(owner="host:1", token="1" * 32)
RUN = ReplicaCheckRun(started_ms=1, finished_ms=2, ledgers=3, under_replicated=4, unknown=5)
KINDS = [
    (LEDGER, encode_under_replicated, decode_under_replicated),
    (OFFICE, encode_office, decode_office),
    (RUN, encode_check_run, decode_check_run),
]


@pytest.mark.parametrize(("value", "encode", "decode"), KINDS)
def test_values_come_back(
    value: object, encode: Callable[[Any], bytes], decode: Callable[..., object]
) -> None:
    """Each field."""
    assert decode(encode(value), source="/node") == value


@pytest.mark.parametrize(("value", "encode", "decode"), KINDS)
def test_damage_is_refused_by_the_path_of_the_node(
    value: object, encode: Callable[[Any], bytes], decode: Callable[..., object]
) -> None:
    """Cut off, or of no version."""
    with pytest.raises(CorruptMetadataError, match=r"^/node: \d+ bytes do not parse"):
        decode(encode(value)[:-1] + b"\xff", source="/node")
    with pytest.raises(CorruptMetadataError, match=r"^/node: format version 0, this release reads"):
        decode(b"", source="/node")
