"""Goal: frames in one buffer are the frames they are made of.  Method: compare with slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dlcore.wire.assembly import Assembly, Frame
from dlcore.wire.frames import FrameParts, FrameRun, total_bytes
from dlcore.wire.messages import (
    ANYTHING,
    ENTRY_BYTES_MIN,
    Add,
    Chunk,
    Held,
    WireError,
    decode,
    encode,
)
from dlcore.wire.receive_memory import ReceiveMemory


def run_of(frames: list[bytes]) -> FrameRun:
    """Return frames in one buffer."""
    sizes = np.array([len(frame) for frame in frames], np.int64)
    return FrameRun.of_sizes(memoryview(b"".join(frames)), sizes)


def test_each_frame_is_a_view_of_the_buffer() -> None:
    """By position, from behind, as a slice, in turn."""
    frames = [b"ab", b"", b"cde"]
    run = run_of(frames)
    assert len(run) == 3
    assert list(run) == frames
    assert [run[0], run[-2], run[2]] == frames
    assert run[1:] == frames[1:]
    assert run[2].obj is run.payload.obj
    assert total_bytes(run) == total_bytes(frames) == 5
    with pytest.raises(IndexError):
        run[3]


@given(st.lists(st.binary(min_size=0, max_size=100), min_size=1, max_size=40))
def test_a_run_is_sent_and_received_as_its_frames_are(frames: list[bytes]) -> None:
    """Many frames are split at once, few one by one; the bytes are the same."""
    data = b"".join(encode(Chunk(7, frames, is_last=True)))
    assert b"".join(encode(Chunk(7, run_of(frames), is_last=True))) == data
    message = _read(data)
    assert isinstance(message, Chunk)
    assert list(message.frames) == frames


def test_many_frames_are_checked_as_few_are() -> None:
    """Sizes that contradict the payload, and entries too short to be one."""
    frames = [bytes(ENTRY_BYTES_MIN)] * 20
    data = b"".join(encode(Add(1, is_recovery=False, frames=frames)))
    assert isinstance(_read(data), Add)
    frames[7] = bytes(ENTRY_BYTES_MIN - 1)
    with pytest.raises(WireError, match="an entry of 47 bytes"):
        _read(b"".join(encode(Add(1, is_recovery=False, frames=frames))))
    head, *payload = encode(Chunk(1, frames, is_last=False))
    with pytest.raises(WireError, match="entries of 959 bytes in a payload of 958 bytes"):
        decode(*_frame(b"".join((head, *payload)))._replace(payload=memoryview(bytes(958))))


def _frame(data: bytes) -> Frame:
    assembly = Assembly(ReceiveMemory(), ANYTHING)
    assembly.get_buffer()[: len(data)] = data
    assembly.received(len(data))
    frame = assembly.next_frame()
    assert frame is not None
    return frame


def _read(data: bytes) -> object:
    return decode(*_frame(data))


def test_frames_are_described_by_their_sizes() -> None:
    """And not by their bytes, which may be megabytes."""
    assert repr(run_of([b"ab", b"c"])) == "<FrameRun frames=2 bytes=3>"
    assert repr(FrameParts([b"ab", memoryview(b"c")])) == "<FrameParts parts=2 bytes=3>"


@pytest.mark.parametrize("ranges", [[(3, 5)], [(6, 5)], [(5, 6), (6, 7)], [(5, 91)]])
def test_held_entries_come_in_order_and_within_the_searched_range(
    ranges: list[tuple[int, int]],
) -> None:
    """At or below the LAC, backwards, twice, or beyond its end it says nothing."""
    sound = b"".join(encode(Held(10, 4, 90, [(5, 6), (8, 90)])))
    assert _read(sound) == Held(10, 4, 90, [(5, 6), (8, 90)])
    with pytest.raises(WireError, match="expected them up to 90"):
        _read(b"".join(encode(Held(10, 4, 90, ranges))))
