"""The file that is compacted next: what frees most, of what fits."""

from __future__ import annotations

from hypothesis import given, strategies as st

from bookie.files.compaction_choice import FileLoad, choose_next


def load(number: int, live_bytes: int, *, ledgers: int = 1, is_unfit: bool = False) -> FileLoad:
    """Return a file of a megabyte."""
    return FileLoad(
        number=number,
        size_bytes=1_000_000,
        footer_bytes=10_000,
        live_bytes=live_bytes,
        live_ledgers=ledgers,
        is_unfit=is_unfit,
    )


def order(loads: list[FileLoad], *, room_bytes: int, below: float = 0.5) -> list[int]:
    """Return the numbers in the order in which the files are taken, with the room each leaves."""
    left = {each.number: each for each in loads}
    numbers = []
    while (
        chosen := choose_next(left.values(), below_live_share=below, room_bytes=room_bytes)
    ) is not None:
        del left[chosen.number]
        numbers.append(chosen.number)
        room_bytes += chosen.size_bytes - chosen.copy_bytes
    return numbers


def test_the_file_that_frees_most_comes_first_and_only_if_it_is_worth_it() -> None:
    """Goal: the emptiest first; at the threshold and above never."""
    loads = [load(1, 400_000), load(2, 0), load(3, 500_000), load(4, 900_000), load(5, 100_000)]
    assert order(loads, room_bytes=10**9) == [2, 5, 1]
    assert order(loads, room_bytes=10**9, below=0.0) == []


def test_a_nearly_full_disk_frees_its_way_up() -> None:
    """Goal: what does not fit yet waits for the room that others free."""
    loads = [load(1, 400_000), load(2, 300_000), load(3, 1_000)]
    assert order(loads, room_bytes=20_000) == [3, 2, 1]
    assert order(loads, room_bytes=10_000) == []


def test_the_oldest_of_equal_files_is_first_and_an_unfit_one_before_all() -> None:
    """Goal: a damaged header must be out of the way before the next start."""
    loads = [load(3, 5), load(2, 5), load(7, 990_000, is_unfit=True)]
    assert order(loads, room_bytes=10**9) == [7, 2, 3]
    assert order(loads, room_bytes=900_000) == [2, 7, 3]


@given(
    st.lists(
        st.tuples(st.integers(0, 1_000_000), st.integers(0, 1000), st.booleans()), max_size=20
    ),
    st.integers(0, 2_000_000),
)
def test_no_copy_is_begun_that_does_not_fit(
    files: list[tuple[int, int, bool]], room_bytes: int
) -> None:
    """Goal: for any files and any room, what is chosen fits, and no fitting one frees more."""
    loads = [
        load(number, live, ledgers=ledgers, is_unfit=is_unfit)
        for number, (live, ledgers, is_unfit) in enumerate(files)
    ]
    chosen = choose_next(loads, below_live_share=0.5, room_bytes=room_bytes)
    worth = [each for each in loads if each.is_unfit or each.live_share < 0.5]
    if chosen is None:
        assert all(each.copy_bytes > room_bytes for each in worth)
    else:
        assert chosen in worth
        assert chosen.copy_bytes <= room_bytes
        if not chosen.is_unfit:
            assert all(
                each.live_bytes >= chosen.live_bytes
                for each in worth
                if each.copy_bytes <= room_bytes
            )
