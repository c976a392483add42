"""The ring of recent bytes against a plain buffer."""

from __future__ import annotations

import mmap

from hypothesis import given, strategies as st

from bookie.disks.real_file import BLOCK_BYTES, RecentBytes, rounded_up

RING_BYTES = 8 * BLOCK_BYTES
SIZES = st.integers(1, 3 * BLOCK_BYTES) | st.just(BLOCK_BYTES)


@given(
    start=st.integers(0, 5 * BLOCK_BYTES),
    appends=st.lists(st.lists(SIZES, min_size=1, max_size=4), max_size=12),
    reads=st.lists(st.tuples(st.integers(0, 2**18), st.integers(0, BLOCK_BYTES)), max_size=30),
)
def test_it_writes_and_reads_what_a_file_holds(
    start: int, appends: list[list[int]], reads: list[tuple[int, int]]
) -> None:
    """Goal: every write is whole blocks with the right bytes, and every read is right or refused.

    Method: what is written goes to a buffer that stands for the device.
    """
    content = bytearray(b"s" * start)
    device = bytearray(content)
    recent = RecentBytes(
        mmap.mmap(-1, RING_BYTES), content[start - start % BLOCK_BYTES :], len(content)
    )
    for number, sizes in enumerate(appends):
        buffers = [bytes([number * 16 + each + 1]) * size for each, size in enumerate(sizes)]
        offset, size = len(content), sum(sizes)
        pieces = 0
        for at, memory in recent.fill(buffers, offset, size):
            data = b"".join(memory)
            assert at % BLOCK_BYTES == len(data) % BLOCK_BYTES == 0
            assert len(data) <= RING_BYTES // 4
            device[at : at + len(data)] = data
            pieces += 1
        assert (pieces == 1) == recent.is_one_piece(offset, size)
        content += b"".join(buffers)
        recent.note_written(len(content))
        assert device == content + bytes(rounded_up(len(content)) - len(content))
        check_reads(recent, content, reads, first=start - start % BLOCK_BYTES)


def read(recent: RecentBytes, offset: int, size: int) -> bytes | None:
    """Return bytes of the file, None if they are not there; they come in two buffers."""
    data = bytearray(size)
    view = memoryview(data)
    return bytes(data) if recent.read_into(offset, [view[: size // 3], view[size // 3 :]]) else None


def check_reads(
    recent: RecentBytes, content: bytearray, reads: list[tuple[int, int]], *, first: int
) -> None:
    """See that what is there is right, and that the last bytes always are there.

    It never held what is before `first`.
    """
    for offset, size in reads:
        found = read(recent, offset, size)
        assert found is None or found == content[offset : offset + size]
        assert found is None or offset + size <= len(content)
    at = max(first, len(content) - 5)
    last = read(recent, at, len(content) - at)
    assert last is not None
    assert last == content[at:]
    assert first == 0 or read(recent, first - 1, 1) is None
    overwritten = rounded_up(len(content)) - RING_BYTES - 1
    assert overwritten < 0 or read(recent, overwritten, 1) is None


def test_bytes_that_are_being_overwritten_are_not_read() -> None:
    """An append says what it will overwrite before it does; only then are the new bytes there."""
    recent = RecentBytes(mmap.mmap(-1, RING_BYTES), b"", 0)
    for offset in range(0, RING_BYTES, BLOCK_BYTES):
        list(recent.fill([bytes([offset // BLOCK_BYTES]) * BLOCK_BYTES], offset, BLOCK_BYTES))
        recent.note_written(offset + BLOCK_BYTES)
    assert read(recent, 0, 1) == b"\0"
    next(iter(recent.fill([b"n" * 10], RING_BYTES, 10)))
    assert read(recent, 0, 1) is None
    assert read(recent, BLOCK_BYTES, 1) == b"\1"
    assert read(recent, RING_BYTES, 10) is None  # not durable yet
    recent.note_written(RING_BYTES + 10)
    assert read(recent, RING_BYTES, 10) == b"n" * 10


def test_an_append_longer_than_a_piece_is_several_writes() -> None:
    """Each begins where the one before it ended, and the last one is padded."""
    recent = RecentBytes(mmap.mmap(-1, RING_BYTES), b"", 0)
    size = 2 * BLOCK_BYTES + 5
    assert not recent.is_one_piece(0, size)
    written = [(offset, b"".join(memory)) for offset, memory in recent.fill([b"x" * size], 0, size)]
    assert written == [
        (0, b"x" * 2 * BLOCK_BYTES),
        (2 * BLOCK_BYTES, b"x" * 5 + bytes(BLOCK_BYTES - 5)),
    ]
