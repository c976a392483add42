"""Goal: ledger metadata refuses what contradicts itself, and changes as the protocol needs."""

from __future__ import annotations

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import CorruptMetadataError
from dlcore.ledger.metadata.values import (
    COLD_LAYOUT,
    Ensemble,
    LedgerMetadata,
    LedgerState,
    StoredObject,
)
from dlcore.log.metadata.values import SegmentEnd
from dlcore.metadata.stored import decode, encode
from tests.fixtures.ledgers import bookies, metadata_of


@pytest.mark.parametrize(
    ("ensembles", "message"),
    [
        ([], "must start at entry 0"),
        ([(1, "ABC")], "must start at entry 0"),
        ([(0, "ABC"), (5, "ABD"), (3, "ABE")], "ascend"),
        ([(0, "ABC"), (0, "ABD")], "ascend"),
        ([(0, "AB")], "ensemble of 2 bookies, expected 3"),
        ([(0, "ABA")], "one bookie twice in the ensemble at entry 0"),
    ],
)
def test_contradictions(ensembles: list[tuple[int, str]], message: str) -> None:
    """The message names ledger and problem."""
    with pytest.raises(CorruptMetadataError, match=message):
        metadata_of(*ensembles)


def test_an_entry_is_in_the_ensemble_that_starts_at_or_before_it() -> None:
    """Boundaries included."""
    metadata = metadata_of((0, "ABC"), (5, "ABD"), (9, "AED"))
    found = [metadata.ensemble_of(entry).first_entry_id for entry in (0, 4, 5, 8, 9, 10**12)]
    assert found == [0, 0, 5, 5, 9, 9]


def test_a_new_ensemble_is_added_or_replaces_one_that_starts_there() -> None:
    """And the original value stays."""
    metadata = metadata_of((0, "ABC"))
    added = metadata.with_last_ensemble(first_entry_id=4, bookies=bookies("ABD"))
    assert added == metadata_of((0, "ABC"), (4, "ABD"))
    replaced = added.with_last_ensemble(first_entry_id=4, bookies=bookies("EBD"))
    assert replaced == metadata_of((0, "ABC"), (4, "EBD"))
    assert metadata == metadata_of((0, "ABC"))


def test_closing() -> None:
    """Once, and for an empty ledger too."""
    closed = metadata_of((0, "ABC")).closed(last_entry_id=-1, length_bytes=0)
    assert (closed.state, closed.last_entry_id) == (LedgerState.CLOSED, -1)
    with pytest.raises(AssertionError):
        closed.closed(last_entry_id=0, length_bytes=1)


def cold_ledger(**changes: object) -> LedgerMetadata:
    """Return a cold ledger of two objects."""
    objects = (StoredObject(0, 0, "a", 10), StoredObject(3, 7, "b", 20))
    values: dict[str, object] = {
        "layout": COLD_LAYOUT,
        "ledger_id": 7,
        "quorum": QuorumConfig(),
        "state": LedgerState.CLOSED,
        "ensembles": (),
        "token": "t",
        "created_ms": 1,
        "last_entry_id": 4,
        "length_bytes": 30,
        "folder": "s3://bucket/log",
        "objects": objects,
    }
    return LedgerMetadata(**{**values, **changes})  # type: ignore[arg-type]


def test_a_cold_ledger_has_objects_and_no_bookies() -> None:
    """It comes back as it was stored, empty too; a release without such ledgers refuses it."""
    empty = cold_ledger(objects=(), last_entry_id=-1, length_bytes=0)
    for ledger in (cold_ledger(), empty):
        assert decode(LedgerMetadata, encode(ledger), source="p") == ledger
        assert ledger.is_cold
        assert ledger.home == ["s3://bucket/log"]
    with pytest.raises(CorruptMetadataError, match="layout version 3, this release reads 2"):
        decode(SegmentEnd, encode(cold_ledger()), source="p")  # or any kind of the old layout


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": 2},
        {"folder": ""},
        {"objects": ()},
        {"objects": (StoredObject(1, 0, "a", 10),)},
        {"objects": (StoredObject(0, 0, "a", 10), StoredObject(0, 0, "b", 10))},
        {"state": LedgerState.OPEN, "last_entry_id": -1, "length_bytes": 0, "objects": ()},
        {"ensembles": (Ensemble(0, ()),)},
        {"last_entry_id": -1, "length_bytes": 0},
    ],
)
def test_a_cold_ledger_that_contradicts_itself(changes: dict[str, object]) -> None:
    """It is refused, and nothing is read from half of it."""
    with pytest.raises(CorruptMetadataError, match="expected a closed ledger without bookies"):
        cold_ledger(**changes)
