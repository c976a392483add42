"""The checkers' own reading of ledgers, compared with the product's on random ledgers."""

from __future__ import annotations

from hypothesis import given, strategies as st
from msgspec.structs import replace

from dlcore.base.config import QuorumConfig
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.values import (
    COLD_LAYOUT,
    Ensemble,
    LedgerMetadata,
    LedgerState,
    StoredObject,
    is_covered,
    write_set,
)
from dlcore.log.metadata.segment import Extent
from dlcore.log.metadata.values import SegmentEnd, Totals, pack
from dlcore.metadata.stored import encode
from tests.simulation.stored_ledger import read_ledger
from tests.simulation.stored_log import extents_in

IDS = st.integers(0, 2**62)


@st.composite
def ledgers(draw: st.DrawFn) -> LedgerMetadata:
    """Draw the metadata of a ledger."""
    size = draw(st.integers(1, 6))
    write = draw(st.integers(1, size))
    quorum = QuorumConfig(
        ensemble_size=size,
        write_quorum_size=write,
        ack_quorum_size=draw(st.integers(1, write)),
    )
    pool = [BookieId(f"bookie-{n}é", f"{n:032x}") for n in range(size + 3)]
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 400), max_size=4)))]
    state = draw(st.sampled_from(LedgerState))
    is_closed = state is LedgerState.CLOSED
    lacking = draw(st.integers(0, 3)) if write == size else 0
    wanted = replace(quorum, ensemble_size=size + lacking, write_quorum_size=write + lacking)
    return LedgerMetadata(
        ledger_id=draw(IDS),
        quorum=quorum,
        state=state,
        ensembles=tuple(
            Ensemble(first, tuple(draw(st.permutations(pool))[:size])) for first in firsts
        ),
        token="token",
        created_ms=draw(IDS),
        last_entry_id=draw(st.integers(-1, 2**62)) if is_closed else -1,
        length_bytes=draw(IDS) if is_closed else 0,
        custom={"name": "value"},
        wanted=wanted if lacking else draw(st.sampled_from((None, quorum))),
    )


@given(ledgers(), st.integers(0, 500), st.data())
def test_checkers_and_product_agree(
    metadata: LedgerMetadata, entry_id: int, data: st.DataObject
) -> None:
    """Two implementations that share no line say the same of every ledger."""
    stored = read_ledger(encode(metadata))
    quorum = metadata.quorum
    assert (stored.ledger_id, stored.state) == (metadata.ledger_id, metadata.state.name)
    assert stored.end == (metadata.last_entry_id, metadata.length_bytes)
    assert [(each.first_entry_id, each.bookies) for each in stored.ensembles] == [
        (each.first_entry_id, each.bookies) for each in metadata.ensembles
    ]
    lacking = stored.wanted_copies - quorum.write_quorum_size
    assert lacking == metadata.copies_lacking
    assert stored.bookies_of(entry_id) == metadata.ensemble_of(entry_id).bookies
    assert set(stored.positions_of(entry_id)) == set(write_set(quorum, entry_id))
    fenced = data.draw(st.sets(st.integers(0, quorum.ensemble_size - 1)))
    bookies = {metadata.last_ensemble.bookies[position] for position in fenced}
    assert stored.is_fenced_by(bookies) == is_covered(quorum, fenced)


def test_a_cold_ledger_names_its_objects() -> None:
    """By their URLs; it has no bookies."""
    metadata = LedgerMetadata(
        layout=COLD_LAYOUT,
        ledger_id=7,
        quorum=QuorumConfig(),
        state=LedgerState.CLOSED,
        ensembles=(),
        token="token",
        created_ms=1,
        last_entry_id=8,
        length_bytes=9,
        folder="s3://bucket/logs",
        objects=(StoredObject(0, 0, "a.parquet", 5), StoredObject(4, 6, "b.parquet", 7, 8)),
    )
    stored = read_ledger(encode(metadata))
    assert stored.is_cold
    assert stored.objects == ("s3://bucket/logs/a.parquet", "s3://bucket/logs/b.parquet")
    assert stored.end == (8, 9)


def test_extents_are_read_from_where_they_are_packed() -> None:
    """The checkers' own reading of them, beside the product's."""
    extents = [
        Extent(
            ledger_id=ledger_id,
            first_entry_id=3,
            last_entry_id=4,
            record_count=records,
            size_bytes=10,
            first_txid=1,
            last_txid=2,
            timestamp_floor_ms=last_ms - 2,
            last_timestamp_ms=last_ms,
        )
        for ledger_id, records, last_ms in ((9, 5, 100), (4, 6, 150), (11, 7, 151))
    ]
    end = SegmentEnd(
        created_ms=1,
        completed_ms=2,
        start_sequence_id=0,
        packed=pack(extents),
        chunk_count=0,
        chunked=Totals(),
    )
    found = extents_in("/dlog/heads/0a/id/2", encode(end))
    assert [(each.ledger, each.entries, each.records, each.last_ms) for each in found] == [
        (each.ledger_id, 2, each.record_count, each.last_timestamp_ms) for each in extents
    ]
