"""A list of entries is looked up in bounded steps, and is the same as if it were one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from bookie.disk import MemoryDisk
from dlcore.errors import NoSuchLedgerError
from tests.fixtures.aio import run
from tests.fixtures.storage import make_frame, open_storage, small_config

if TYPE_CHECKING:
    from collections.abc import Collection

STEP = 4
entry_ids = st.lists(st.integers(0, 120), unique=True, max_size=80)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bookie.entry_reader._LISTED_COUNT", STEP)


def ranges_of(held: Collection[int]) -> list[tuple[int, int]]:
    """Return the ranges of some ids, one id at a time."""
    ranges: list[tuple[int, int]] = []
    for each in sorted(held):
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1] = ranges[-1][0], each
        else:
            ranges.append((each, each))
    return ranges


@given(entry_ids)
def test_a_list_in_steps_is_the_whole_list(added: list[int]) -> None:
    """Entries in any order, in many files that overlap: every range once, ascending and joined."""

    async def scenario() -> None:
        config = small_config(file_entries_max=5)
        async with open_storage(MemoryDisk(), config) as storage:
            await storage.add_entry(make_frame(2, 0))
            for entry_id in added:
                await storage.add_entry(make_frame(1, entry_id))
            if not added:
                return
            found = [(each.first_entry_id, each.last_entry_id) for each in storage.list_entries(1)]
            assert found == ranges_of(added)

    run(scenario())


def test_a_step_looks_at_few_entries() -> None:
    """Goal: however many ranges there are, none of the steps between others' turns is long."""

    async def scenario() -> None:
        async with open_storage(MemoryDisk(), small_config()) as storage:
            for entry_id in range(0, 400, 2):
                await storage.add_entry(make_frame(1, entry_id))
            pages = list(storage.list_entries(1).pages())
            assert sum(map(len, pages)) == 200
            assert max(map(len, pages)) <= 2 * STEP + 1  # where two files meet
            assert len(pages) > 200 / (2 * STEP)

    run(scenario())


def test_a_ledger_that_goes_while_it_is_listed_is_not_called_short() -> None:
    """Goal: a list that cannot be completed ends in an error, never as if it were whole."""

    async def scenario() -> None:
        async with open_storage(MemoryDisk(), small_config()) as storage:
            for entry_id in range(0, 100, 2):
                await storage.add_entry(make_frame(1, entry_id))
            pages = storage.list_entries(1).pages()
            assert next(pages)
            storage._ledgers[1].is_deleted = True
            with pytest.raises(NoSuchLedgerError):
                list(pages)

    run(scenario())
