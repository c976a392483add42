"""The checkers' own reading of ledgers, compared with the product's on random ledgers."""

from __future__ import annotations

from hypothesis import given, strategies as st
from msgspec.structs import replace

from dlcore.base.config import QuorumConfig
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.quorum import is_covered, write_set
from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.metadata.stored import encode
from tests.simulation.stored_ledger import read_ledger

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
