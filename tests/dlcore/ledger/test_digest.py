"""Goal: no damaged or foreign frame passes.  Method: flip every bit, cut everywhere, swap ids."""

from __future__ import annotations

import pytest

from dlcore.errors import DigestMismatchError
from dlcore.ledger.digest import FRAME_HEADER_BYTES, decode_frame, encode_frame

FRAME = encode_frame(
    ledger_id=3,
    entry_id=17,
    last_add_confirmed=16,
    ledger_bytes=1000,
    body=[b"ab", memoryview(b"c")],
)


def test_round_trip() -> None:
    """What goes in comes out, without a copy of the body."""
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
        "00000000" + FRAME[44:48].hex() + "616263"
    )
    assert len(FRAME) == FRAME_HEADER_BYTES + 3


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
