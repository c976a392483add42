"""Goal: received memory is used again when nobody looks at it, never before, and not without bound.

Method: views of every kind that payloads get, kept and dropped; sizes drawn at random.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from dlcore.wire.frames import FrameRun
from dlcore.wire.memory import ReceiveMemory

SIZE = 512 * 1024


def address_of(view: memoryview) -> int:
    """Return where a view begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.mark.parametrize(
    "use",
    [
        lambda view: view[100:200],
        lambda view: view.toreadonly(),
        lambda view: view.toreadonly()[5:].cast("B"),
        lambda view: pa.py_buffer(view[8:]),
        lambda view: pa.py_buffer(view).slice(8, 16),
        lambda view: pa.Array.from_buffers(pa.int64(), 2, [None, pa.py_buffer(view)]).slice(1),
        lambda view: np.frombuffer(view, np.uint8)[::2],
        lambda view: FrameRun(view, np.array([0, 10, len(view)]))[1],
    ],
)
def test_memory_in_use_is_not_given_again(use: object) -> None:
    """Whatever refers to a part of it."""
    assert callable(use)
    memory = ReceiveMemory()
    view = memory.take(SIZE)
    first = address_of(view)
    used = use(view)
    del view
    other = memory.take(SIZE)
    assert address_of(other) != first
    del used
    assert address_of(memory.take(SIZE)) == first


def test_memory_serves_payloads_of_about_its_size() -> None:
    """Not of a much smaller one, which would keep all of it."""
    memory = ReceiveMemory()
    first = address_of(memory.take(SIZE))
    assert address_of(memory.take(SIZE * 4 // 5)) == first
    small = memory.take(SIZE // 2)
    assert address_of(small) != first
    assert len(memory.take(10)) == 10
    assert memory.kept_bytes == SIZE + SIZE // 2


@given(
    steps=st.lists(st.tuples(st.integers(1, 3 * SIZE), st.integers(0, 3)), max_size=30),
    bytes_max=st.integers(0, 6 * SIZE),
)
def test_kept_memory_is_bounded_and_views_are_apart(
    steps: list[tuple[int, int]], bytes_max: int
) -> None:
    """Each view keeps what was written there, however many there are."""
    memory = ReceiveMemory(bytes_max)
    held: list[tuple[memoryview, int]] = []
    for number, (size, drop) in enumerate(steps):
        view = memory.take(size)
        assert len(view) == size
        assert not view.readonly
        view[0] = view[-1] = number
        held.append((view, number))
        del view
        assert memory.kept_bytes <= bytes_max
        assert memory.kept_bytes == sum(map(len, memory._arrays))
        for each, written in held:
            assert each[0] == each[-1] == written
        del held[len(held) - min(drop, len(held)) :]


def test_unused_memory_goes_when_other_sizes_need_room() -> None:
    """What is in use stays, and what is beyond the bound is not kept."""
    memory = ReceiveMemory(2 * SIZE)
    used = memory.take(SIZE)
    memory.take(SIZE)
    memory.take(2 * SIZE)  # not kept: the one in use is in its way
    assert memory.kept_bytes == SIZE
    del used
    view = memory.take(2 * SIZE)
    assert memory.kept_bytes == 2 * SIZE
    assert view.nbytes == 2 * SIZE
