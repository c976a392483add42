"""Ranges that are looked up step by step: those of one look at all."""

from __future__ import annotations

from bookie.files.entry_runs import ListedRanges, RangePage
from dlcore.wire.port import EntryRange


def listed(*pages: tuple[tuple[int, int], ...]) -> ListedRanges:
    """Return what looks these pages up, which begin at entries 0, 100, 200 …, in turn."""

    def look(first: int) -> RangePage:
        number = first // 100
        found = pages[number]
        return RangePage(
            firsts=[first for first, _ in found],
            lasts=[last for _, last in found],
            next_entry_id=None if number == len(pages) - 1 else 100 * (number + 1),
        )

    return ListedRanges(look)


def test_a_range_that_a_step_cut_is_one() -> None:
    """Also over several steps; one that only ends where a step does stays its own."""
    pages = (
        ((0, 3), (90, 99)),
        ((100, 199),),
        ((200, 210), (250, 260)),
        (),
        ((405, 406),),
    )
    expected = [(0, 3), (90, 210), (250, 260), (405, 406)]
    ranges = listed(*pages)
    assert list(ranges) == [EntryRange(first_entry_id=a, last_entry_id=b) for a, b in expected]
    steps = list(ranges.pages())
    assert [each for page in steps for each in page] == expected
    assert len(steps) == len(pages) + 1


def test_nothing_is_listed_of_nothing() -> None:
    """Each step is still one."""
    assert list(listed(())) == []
    assert list(listed((), ()).pages()) == [[], [], []]
