"""Goal: received memory is used again when nothing refers to it, never before, and within a bound.

Method: views of every kind that payloads get, kept and dropped; sizes drawn at random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from dlcore.wire.frames import FrameRun, gather
from dlcore.wire.messages import ANYTHING, Add, encode
from dlcore.wire.receiving import Assembly, ReceiveMemory

if TYPE_CHECKING:
    from collections.abc import Callable


SIZE = 512 * 1024


def address_of(view: memoryview) -> int:
    """Return where a view begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


USES: dict[str, Callable[[memoryview], Any]] = {
    "view": lambda view: view,
    "slice of a view": lambda view: view[100:200],
    "read-only view": lambda view: view.toreadonly(),
    "cast": lambda view: view.toreadonly()[5:].cast("B"),
    "view of a view": lambda view: memoryview(view)[7:],
    "Arrow buffer": lambda view: pa.py_buffer(view[8:]),
    "slice of an Arrow buffer": lambda view: pa.py_buffer(view).slice(8, 16),
    "slice of an Arrow array": lambda view: pa.Array.from_buffers(
        pa.int64(), len(view) // 8, [None, pa.py_buffer(view)]
    ).slice(1),
    "Arrow table": lambda view: pa.table(
        {"value": pa.Array.from_buffers(pa.int64(), len(view) // 8, [None, pa.py_buffer(view)])}
    ),
    "numpy array": lambda view: np.frombuffer(view, np.uint8),
    "slices of a numpy array": lambda view: np.frombuffer(view, np.uint8)[8:][::2],
    "other type of a numpy array": lambda view: np.asarray(view).view(np.uint16)[1:],
    "numpy array of an Arrow array": lambda view: pa.Array.from_buffers(
        pa.int64(), len(view) // 8, [None, pa.py_buffer(view)]
    ).to_numpy()[3:],
    "frame of a run": lambda view: FrameRun(view, np.array([0, 10, len(view)]))[1],
}
"""The objects that hold received memory, and how."""


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_memory_in_use_is_not_given_again(use: Callable[[memoryview], Any]) -> None:
    """Whatever refers to a part of it."""
    memory = ReceiveMemory()
    view = memory.take(SIZE)
    first = address_of(view)
    used = use(view)
    del view
    other = memory.take(SIZE)
    assert address_of(other) != first
    del used
    assert address_of(memory.take(SIZE)) == first


def _receive(assembly: Assembly, payload: bytes) -> memoryview:
    """Return the payload of a frame that an assembly receives in pieces."""
    data = memoryview(b"".join(gather(encode(Add(1, is_recovery=False, frames=[payload])))))
    while True:
        target = assembly.get_buffer()
        count = min(len(target), len(data))
        target[:count] = data[:count]
        data = data[count:]
        assembly.received(count)
        if (frame := assembly.next_frame()) is not None:
            return frame.payload


def _pattern(number: int) -> bytes:
    return (b"%07d " % number) * (SIZE // 8)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_held_memory_keeps_its_bytes(use: Callable[[memoryview], Any]) -> None:
    """Goal: no payload that comes later is received over one that is still referred to.

    Method: hold some of hundreds of received payloads, and compare them with copies of what they
    were.
    """
    assembly = Assembly(ReceiveMemory(), ANYTHING)
    held: list[tuple[Any, bytes]] = []

    def keep(payload: memoryview) -> None:
        used = use(payload)
        held.append((used, _bytes_of(used)))
        del used

    for number in range(300):
        payload = _receive(assembly, _pattern(number))
        assert payload[-16:] == _pattern(number)[-16:]
        if number % 20 == 0:
            keep(payload)
    for used, was in held:
        assert _bytes_of(used) == was
    assert len(held) == 15


def _bytes_of(used: Any) -> bytes:
    """Return a copy of all that something holds."""
    if isinstance(used, pa.Table | pa.Array):
        return b"%r" % used.to_pylist()
    return bytes(used)


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
        assert memory.kept_bytes == sum(kept.size for kept in memory._kept)
        for each, written in held:
            assert each[0] == each[-1] == written
        del held[len(held) - min(drop, len(held)) :]


def test_unused_memory_goes_when_other_sizes_need_room() -> None:
    """Used memory stays, and memory beyond the bound is not kept."""
    memory = ReceiveMemory(2 * SIZE)
    used = memory.take(SIZE)
    memory.take(SIZE)
    memory.take(2 * SIZE)  # not kept: the one in use is in its way
    assert memory.kept_bytes == SIZE
    del used
    view = memory.take(2 * SIZE)
    assert memory.kept_bytes == 2 * SIZE
    assert view.nbytes == 2 * SIZE


def test_free_memory_is_forgotten_and_what_is_in_use_is_not() -> None:
    """A server that is idle gives it back; a holder of a view keeps its memory."""
    memory = ReceiveMemory(4 * SIZE)
    held, _free = memory.take(SIZE), memory.take(SIZE)
    held[:4] = b"held"
    del _free
    memory.forget_free()
    assert memory.kept_bytes == SIZE
    memory.take(SIZE)[:4] = b"else"
    assert bytes(held[:4]) == b"held"
