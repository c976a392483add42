"""The state of one ledger at a bookie: fence, last add confirmed, and its files."""

from __future__ import annotations

from bookie.files.index import LedgerState, LedgerSummary


def summary(
    first: int, last: int, *, lac: int = -1, fenced: bool = False, size: int = 100
) -> LedgerSummary:
    """Return what a file says of ledger 7."""
    return LedgerSummary(7, first, last, lac, fenced, size)


def test_files_tell_where_entries_may_be() -> None:
    """And how much they hold of the ledger; deleted ones are forgotten."""
    state = LedgerState()
    assert not state.has_files
    state.note_sealed(1, summary(0, 9, lac=8, size=1000))
    state.note_sealed(2, summary(5, 30, lac=4, fenced=True, size=2000))
    state.note_sealed(4, summary(0, -1, lac=29, size=0))
    assert list(state.files()) == [1, 2, 4]
    assert list(state.file_bytes()) == [(1, 1000), (2, 2000), (4, 0)]
    assert (state.last_entry_id, state.last_add_confirmed) == (30, 29)
    assert state.fenced
    assert state.is_fence_durable
    assert state.files_between(8, 12) == [(0, 1), (5, 2)]
    state.forget_files({1, 4})
    assert list(state.file_bytes()) == [(2, 2000)]
    state.forget_files({2})
    assert not state.has_files


def test_the_last_add_confirmed_only_rises() -> None:
    """An entry that carries an older one changes nothing; followers get it only when it moved."""
    state = LedgerState()
    assert state.note_entry(4, 3)
    assert not state.note_entry(5, 3)
    assert not state.note_lac(2)
    assert state.note_lac(4)
    assert (state.last_entry_id, state.last_add_confirmed) == (5, 4)


def test_a_fenced_ledger_takes_only_what_recovery_writes() -> None:
    """From the moment the fence is accepted, durable or not."""
    state = LedgerState()
    assert state.accepts(is_recovery=False)
    state.fenced = True
    assert not state.accepts(is_recovery=False)
    assert state.accepts(is_recovery=True)
