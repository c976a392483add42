"""Goal: no damaged or foreign frame passes.  Method: flip every bit, cut everywhere, swap ids."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import crc32c
import numpy as np
import pytest
from hypothesis import given, strategies as st

from dlcore.base.errors import DigestMismatchError
from dlcore.wire.frames import (
    FRAME_BYTES,
    FrameParts,
    FrameRun,
    decode_frame,
    decode_run,
    encode_frame,
    following_frames,
    frame_parts,
    is_sound,
    total_bytes,
)
from dlcore.wire.messages import (
    ANYTHING,
    ENTRY_BYTES_MIN,
    Add,
    Chunk,
    Held,
    WireError,
    decode,
    encode,
    encode_add,
)
from dlcore.wire.receiving import Assembly, Frame, ReceiveMemory

if TYPE_CHECKING:
    from dlcore.wire.frames import BytesLike


FRAME = encode_frame(
    ledger_id=3,
    entry_id=17,
    last_add_confirmed=16,
    ledger_bytes=1000,
    body=[b"ab", memoryview(b"c")],
)


def test_round_trip() -> None:
    """The content comes out as it went in, without a copy of the body."""
    entry = decode_frame(FRAME, ledger_id=3, entry_id=17)
    assert (entry.ledger_id, entry.entry_id) == (3, 17)
    assert (entry.last_add_confirmed, entry.ledger_bytes) == (16, 1000)
    assert bytes(entry.body) == b"abc"
    assert entry.data is FRAME


def test_the_layout_is_what_is_stored_on_disks() -> None:
    """Another layout would make stored data unreadable."""
    assert FRAME.hex() == (
        "d1060100"
        "00000003"
        "0000000000000003"
        "0000000000000011"
        "0000000000000010"
        "00000000000003e8"
        "616263"
        "00000000" + FRAME[-4:].hex()
    )
    assert len(FRAME) == FRAME_BYTES + 3


def test_an_empty_body_is_an_entry() -> None:
    """Zero bytes are allowed."""
    frame = encode_frame(ledger_id=0, entry_id=0, last_add_confirmed=-1, ledger_bytes=0, body=[])
    assert decode_frame(frame).body.nbytes == 0


def test_every_flipped_bit_is_found() -> None:
    """In the header, the checksum and the body."""
    for bit in range(len(FRAME) * 8):
        damaged = bytearray(FRAME)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DigestMismatchError):
            decode_frame(damaged)


def test_every_cut_and_every_tail_is_found() -> None:
    """A frame is whole or no frame."""
    for size in range(len(FRAME)):
        with pytest.raises(DigestMismatchError):
            decode_frame(FRAME[:size])
    with pytest.raises(DigestMismatchError, match="3 body bytes but 4"):
        decode_frame(FRAME + b"x")


def test_a_frame_of_another_entry_says_which() -> None:
    """A valid frame in the wrong place is damage too."""
    with pytest.raises(DigestMismatchError, match="ledger 3, expected ledger 4"):
        decode_frame(FRAME, ledger_id=4)
    with pytest.raises(DigestMismatchError, match="entry 17, expected entry 18"):
        decode_frame(FRAME, entry_id=18)


FRAMES = [
    encode_frame(
        ledger_id=3,
        entry_id=10 + 2 * number,
        last_add_confirmed=number,
        ledger_bytes=100 * number,
        body=[bytes([number]) * number],
    )
    for number in range(5)
]


def run_of(frames: list[bytes]) -> FrameRun:
    """Return frames in one buffer."""
    sizes = np.array([len(frame) for frame in frames], np.int64)
    return FrameRun.of_sizes(memoryview(b"".join(frames)), sizes)


def test_the_checksum_of_frames_is_zero() -> None:
    """One frame, or any number of them in a row: one pass verifies them."""
    assert crc32c.crc32c(FRAME) == 0
    assert crc32c.crc32c(b"".join(FRAMES)) == 0


def test_many_frames_are_decoded_as_each_of_them() -> None:
    """With the ids that are expected."""
    found = decode_run(run_of(FRAMES), ledger_id=3, first_entry_id=10, stride=2)
    assert found == [decode_frame(frame) for frame in FRAMES]
    assert is_sound(run_of(FRAMES), ledger_id=3, entry_ids=np.arange(10, 20, 2))


@pytest.mark.parametrize(
    ("ledger_id", "first", "stride"), [(4, 10, 2), (3, 9, 2), (3, 10, 1), (3, 2**63 - 6, 2)]
)
def test_frames_of_other_entries_are_no_run(ledger_id: int, first: int, stride: int) -> None:
    """A valid frame in the wrong place is damage too."""
    assert decode_run(run_of(FRAMES), ledger_id=ledger_id, first_entry_id=first, stride=stride) is (
        None
    )


def test_every_flipped_bit_of_a_run_is_found() -> None:
    """In each frame of it."""
    data = b"".join(FRAMES)
    sizes = np.array([len(frame) for frame in FRAMES])
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        run = FrameRun.of_sizes(memoryview(damaged), sizes)
        assert decode_run(run, ledger_id=3, first_entry_id=10, stride=2) is None


def test_frames_cut_in_the_wrong_places_are_found() -> None:
    """Their bytes are sound, all together; not so what each is said to be."""
    data = memoryview(b"".join(FRAMES))
    sizes = np.array([len(frame) for frame in FRAMES])
    for change in ([1, -1, 0, 0, 0], [0, 0, 0, 8, -8], [-49, 49, 0, 0, 0]):
        run = FrameRun.of_sizes(data, sizes + np.array(change))
        assert decode_run(run, ledger_id=3, first_entry_id=10, stride=2) is None
    assert decode_run(run_of(FRAMES[::-1]), ledger_id=3, first_entry_id=10, stride=2) is None
    assert decode_run(run_of([]), ledger_id=3, first_entry_id=10, stride=2) is None


def test_a_frame_in_parts_is_the_same_frame_without_copies() -> None:
    """Each part of the body is sent from where it is."""
    numbers = array("q", range(5))
    body: list[BytesLike] = [b"ab", memoryview(numbers).cast("B"), b"", bytearray(b"c")]
    frame = frame_parts(
        ledger_id=3, entry_id=17, last_add_confirmed=16, ledger_bytes=1000, body=body
    )
    assert bytes(decode_frame(bytes(frame)).body) == b"ab" + numbers.tobytes() + b"c"
    assert len(frame) == len(bytes(frame)) == sum(map(len, frame.parts))
    buffers = encode_add(5, [frame, FRAME], is_recovery=False)
    assert b"".join(buffers) == b"".join(
        encode(Add(5, is_recovery=False, frames=[bytes(frame), FRAME]))
    )
    assert isinstance(buffers[3], memoryview)
    assert buffers[3].obj == numbers


def test_only_whole_frames_of_consecutive_entries_follow_each_other() -> None:
    """Nothing is said of an empty run, of bytes too few for a frame, of a gap, or past all ids."""

    def frames_from(first: int, *, step: int = 1) -> list[bytes]:
        return [
            encode_frame(
                ledger_id=3, entry_id=entry_id, last_add_confirmed=4, ledger_bytes=9, body=[b"x"]
            )
            for entry_id in (first, first + step)
        ]

    found = following_frames(run_of(frames_from(7)))
    assert found is not None
    assert (found.ledger_id, found.first_entry_id) == (3, 7)
    assert found.last_add_confirmed.tolist() == [4, 4]
    assert found.checks.tolist() == [
        int.from_bytes(frame[-4:], "little") for frame in frames_from(7)
    ]
    assert following_frames(run_of(frames_from(7, step=2))) is None
    assert following_frames(run_of(frames_from(2**63 - 2))) is None
    assert following_frames(run_of([])) is None
    assert following_frames(run_of([FRAME[: FRAME_BYTES - 1]])) is None


@pytest.mark.parametrize("count", [1, 4, 5])
def test_few_frames_are_judged_as_many_are(count: int) -> None:
    """By each bit, whose they are, and where each ends."""
    frames, ids = FRAMES[:count], np.arange(10, 10 + 2 * count, 2)
    assert is_sound(run_of(frames), ledger_id=3, entry_ids=ids)
    assert not is_sound(run_of(frames), ledger_id=4, entry_ids=ids)
    assert not is_sound(run_of(frames), ledger_id=3, entry_ids=ids + 1)
    data = b"".join(frames)
    sizes = np.array([len(frame) for frame in frames])
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        run = FrameRun.of_sizes(memoryview(damaged), sizes)
        assert not is_sound(run, ledger_id=3, entry_ids=ids)
    if count > 1:
        for moved in (1, 10 - len(frames[0])):
            cut = sizes.copy()
            cut[:2] += moved, -moved
            run = FrameRun.of_sizes(memoryview(data), cut)
            assert not is_sound(run, ledger_id=3, entry_ids=ids)


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
