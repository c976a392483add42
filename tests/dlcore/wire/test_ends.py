"""Both ends of the wire, joined by bytes that are cut anywhere, and fed with anything."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings, strategies as st

from dlcore.base.config import MIB
from dlcore.base.errors import (
    BookieError,
    BookieUnavailableError,
    LedgerFencedError,
    NoSuchEntryError,
)
from dlcore.base.ids import BookieId
from dlcore.wire.bookie_end import BookieEnd
from dlcore.wire.fields import Status
from dlcore.wire.frames import FRAME_BYTES, gather
from dlcore.wire.messages import (
    ANYTHING,
    ENTRY_BYTES_MIN,
    HEADER,
    REQUEST_ID_MAX,
    WINDOW_BYTES_MAX,
    Add,
    Buffer,
    Cancel,
    Chunk,
    Credit,
    Durable,
    Failed,
    Follow,
    Hello,
    Lac,
    Message,
    Ping,
    ReadEntries,
    ReadEntry,
    ReadLac,
    Update,
    WireError,
    decode,
    encode,
)
from dlcore.wire.receiving import SCRATCH_BYTES, Assembly, Keepalive, ReceiveMemory
from dlcore.wire.session import (
    Brought,
    ClientEnd,
    LacReceived,
    ReadRefused,
    Stored,
    Welcomed,
    WriteRefused,
)
from tests.dlcore.wire.held import held_bytes
from tests.dlcore.wire.test_vectors import MESSAGES
from tests.fixtures.lengths import amount

if TYPE_CHECKING:
    from collections.abc import Iterable

BOOKIE = BookieId("bookie-1", "1" * 32)
HELLO = Hello(1, 0, "cluster", BOOKIE.name, BOOKIE.incarnation)
ENTRY = b"e" * 60
SIZES = st.one_of(st.integers(1, 64), st.integers(1, 3 * SCRATCH_BYTES))
FRAMES = st.lists(st.integers(48, 200) | st.sampled_from([33_000, 70_000, 200_000]), max_size=4)


def new_bookie(*, is_open: bool = True) -> BookieEnd:
    """Return a bookie's end."""
    end = BookieEnd(BOOKIE, "cluster", ReceiveMemory())
    if is_open:
        feed(end, encode(HELLO))
        assert isinstance(end.next_event(), Hello)
    return end


def new_client(*, is_open: bool = True) -> ClientEnd[str, str]:
    """Return a client's end."""
    end: ClientEnd[str, str] = ClientEnd(HELLO, ReceiveMemory())
    if is_open:
        feed(end, new_bookie().greeting.welcome())
        assert isinstance(end.next_event(), Welcomed)
    return end


def feed(end: Assembly | BookieEnd | ClientEnd[str, str], buffers: Iterable[Buffer]) -> None:
    """Give an end bytes, as one piece, which it takes whole."""
    data = b"".join(buffers)
    target = end.get_buffer()
    assert len(data) <= len(target)
    target[: len(data)] = data
    end.received(len(data))


def cut(assembly: Assembly, data: bytes, sizes: Iterable[int]) -> list[Message]:
    """Give an assembly data in pieces of `sizes`, over and over; return the messages."""
    messages: list[Message] = []
    pieces = itertools.cycle(sizes)
    rest = memoryview(data)  # a piece of bytes would copy all that follows, for each of many
    while rest:
        target = assembly.get_buffer()
        size = min(next(pieces), len(target), len(rest))
        target[:size] = rest[:size]
        rest = rest[size:]
        assembly.received(size)
        while (frame := assembly.next_frame()) is not None:
            messages.append(decode(*frame))
    return messages


def plain(message: Message) -> Message:
    """Return a message with entries that can be compared."""
    if isinstance(message, Add | Chunk | Update):
        return message._replace(frames=[bytes(each) for each in message.frames])
    if isinstance(message, Durable):
        return message._replace(request_ids=[*message.request_ids])
    return message


@settings(max_examples=amount(60, sampled=15))
@given(frames=FRAMES, cuts=st.lists(SIZES, min_size=1, max_size=5), order=st.randoms())
def test_messages_arrive_whole_however_they_are_cut(
    frames: list[int], cuts: list[int], order: object
) -> None:
    """Segments cut and merged at random: the same messages, in order, byte for byte."""
    big = [bytes([size % 251]) * size for size in frames]
    sent: list[Message] = [
        *MESSAGES,
        Chunk(3, big, is_last=False),
        Ping(4),
        Update(5, big, 3, True),
    ]
    order.shuffle(sent)  # type: ignore[attr-defined]
    data = b"".join(part for message in sent for part in gather(encode(message)))
    got = cut(Assembly(ReceiveMemory(), ANYTHING), data, cuts)
    assert [plain(each) for each in got] == [plain(each) for each in sent]


@settings(max_examples=amount(200, sampled=60))
@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_any_bytes_are_an_error_or_nothing(data: bytes, cuts: list[int]) -> None:
    """Random bytes, before and behind the handshake, and behind a sound magic: never a crash.

    Nor do they take memory for what is only announced.
    """
    heads = (HEADER.pack(0xD10B, 2, 0, 4, size, 1, 0)[:20] for size in (60, 4 * MIB))
    for start in (b"", b"\xd1\x0b", *heads):
        for end in (
            new_bookie(is_open=False),
            new_bookie(),
            new_client(is_open=False),
            new_client(),
        ):
            rest = start + data
            pieces = iter(cuts * (len(rest) + 1))
            while rest:
                size = next(pieces)
                feed(end, [rest[:size]])
                rest = rest[size:]
                try:
                    while end.next_event() is not None:
                        pass
                except BookieError:
                    break
                finally:
                    assert held_bytes(end) <= len(start) + len(data)


@settings(max_examples=amount(200, sampled=60))
@given(
    number=st.integers(0, len(MESSAGES) - 1),
    position=st.integers(0, 10_000),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_of_header_or_fields_is_noticed(number: int, position: int, bit: int) -> None:
    """Entries have checksums of their own; all else is covered by the header's."""
    head = bytearray(encode(MESSAGES[number])[0])
    head[position % len(head)] ^= 1 << bit
    assembly = Assembly(ReceiveMemory(), ANYTHING)
    feed(assembly, [bytes(head), *encode(MESSAGES[number])[1:]])

    def read_on() -> None:
        # A larger size makes it wait for more: with enough more the checksum is looked at.
        for _ in range(100):
            assert assembly.next_frame() is None
            feed(assembly, [bytes(min(len(assembly.get_buffer()), SCRATCH_BYTES))])

    with pytest.raises(WireError):
        read_on()


@pytest.mark.parametrize("size", [2**20 * 8 + 1, 2**31, 2**32 - 1])
def test_a_size_beyond_the_limits_gets_no_memory(size: int) -> None:
    """Refused by the header alone."""
    for kind in (2, 36, 37):
        for fields, payload in ((4, size), (size, 4)):
            assembly = Assembly(ReceiveMemory(), ANYTHING)
            feed(assembly, [HEADER.pack(0xD10B, kind, 0, fields, payload, 1, 0)])
            with pytest.raises(WireError, match="expected"):
                assembly.next_frame()


@pytest.mark.parametrize(
    ("message", "is_open"),
    [
        (Add(1, False, [b"x" * MIB]), False),
        (Chunk(1, [b"x" * MIB], is_last=False), True),
        (Update(1, [ENTRY] * 80_000, 0, fenced=False), True),
    ],
)
def test_a_message_that_is_not_allowed_now_gets_no_memory(message: Message, is_open: bool) -> None:
    """Refused by the header alone, however much is announced behind it."""
    end = new_bookie(is_open=is_open)
    feed(end, [encode(message)[0][: HEADER.size]])
    with pytest.raises(WireError, match=r"^[A-Z]+: expected (ADD or|HELLO$)"):
        end.next_event()


def test_a_payload_gets_its_buffer_only_behind_a_sound_head() -> None:
    """A wrong checksum is noticed before megabytes are waited for."""
    head = bytearray(encode(Add(1, False, [b"x" * 2**20]))[0])
    head[-1] ^= 1
    assembly = Assembly(ReceiveMemory(), ANYTHING)
    feed(assembly, [bytes(head)])
    with pytest.raises(WireError, match="CRC32C"):
        assembly.next_frame()


def test_a_big_payload_is_received_in_place() -> None:
    """Behind its head the buffer offered is the payload's own, and exactly as large."""
    entry = bytes(range(256)) * 1000
    head, body = encode(Chunk(1, [entry], is_last=True))
    assembly = Assembly(ReceiveMemory(), ANYTHING)
    feed(assembly, [head, body[:100]])
    assert assembly.next_frame() is None
    target = assembly.get_buffer()
    assert len(target) == len(entry) - 100
    target[:] = body[100:]
    assembly.received(200)
    assert assembly.next_frame() is None
    assert len(assembly.get_buffer()) == len(target) - 200
    assembly.received(len(target) - 200)
    frame = assembly.next_frame()
    assert frame is not None
    assert frame.payload == entry
    assert frame.payload.obj is target.obj
    assert frame.payload.readonly


def test_a_small_payload_keeps_little_of_what_came_with_it() -> None:
    """A bookie holds adds until they are durable: not with them all that was sent in between."""
    assembly = Assembly(ReceiveMemory(), ANYTHING)
    pings = [part for number in range(1, 1000) for part in encode(Ping(number))]
    feed(assembly, [*pings, *encode(Add(1, False, [ENTRY])), *pings])
    while (frame := assembly.next_frame()) is not None and not frame.payload:
        pass
    assert frame is not None
    assert frame.payload == ENTRY
    assert len(frame.payload.obj) <= 8 * len(ENTRY)  # type: ignore[arg-type]  # bytes


class OneAtATime:
    """Room for a big payload, if it is free."""

    is_free = False

    def take(self, size: int) -> bool:
        """Return whether it is."""
        assert size == BIG_BYTES
        return self.is_free

    def give(self) -> None:
        """Count."""
        self.is_free = True


BIG_BYTES = 40_000


def test_a_big_payload_that_is_not_whole_waits_for_room() -> None:
    """The received part stays where it is; a whole one needs none."""
    room, entry = OneAtATime(), b"x" * BIG_BYTES
    assembly = Assembly(ReceiveMemory(), ANYTHING, room)
    data = b"".join(encode(Add(1, False, [entry])))
    feed(assembly, [data])
    assert assembly.next_frame() is not None
    assert not room.is_free
    feed(assembly, [data[:1000]])
    for _ in range(2):
        assert assembly.next_frame() is None
    room.is_free = True
    assert assembly.next_frame() is None
    room.is_free = False
    assert len(assembly.get_buffer()) == len(data) - 1000
    feed(assembly, [data[1000:]])
    frame = assembly.next_frame()
    assert frame is not None
    assert frame.payload == entry
    assert room.is_free  # given back


def test_the_shortest_entry_is_the_header_of_a_frame() -> None:
    """The wire knows no more of entries than this."""
    assert ENTRY_BYTES_MIN == FRAME_BYTES


def test_request_ids_only_ascend() -> None:
    """An id that comes again, or runs out, ends the connection."""
    for second in (Add(1, False, [ENTRY]), Add(2, False, [ENTRY]), ReadLac(0, 1, False)):
        end = new_bookie()
        feed(end, [*encode(Add(1, False, [ENTRY, ENTRY])), *encode(second)])
        assert isinstance(end.next_event(), Add)
        with pytest.raises(WireError, match="request id"):
            end.next_event()
    end = new_bookie()
    feed(end, encode(Add(REQUEST_ID_MAX, False, [ENTRY])))
    with pytest.raises(WireError, match="request id"):
        end.next_event()


def test_windows_are_taken_and_given_back() -> None:
    """The window of a bookie, as both ends count it."""
    bookie, client = new_bookie(), new_client()
    request_id, buffers = client.read(ReadEntries(0, 1, 0, 9, 1, 500, 1000), "read")
    feed(bookie, buffers)
    assert isinstance(bookie.next_event(), ReadEntries)
    chunk = Chunk(request_id, [b"x" * 600], is_last=False)
    for window in (1000, 336, -328):
        assert bookie.window_of(request_id) == window
        if window > 0:
            feed(client, bookie.send(chunk))
            assert isinstance(client.next_event(), Brought)
    assert client.take(request_id, 664) == encode(Credit(request_id, 664))
    assert client.take(request_id, 100) == []  # small ones wait for each other
    feed(bookie, encode(Credit(request_id, 664)))
    bookie.next_event()
    assert bookie.window_of(request_id) == 336
    feed(bookie, encode(Credit(request_id, WINDOW_BYTES_MAX)))
    with pytest.raises(WireError, match="window"):
        bookie.next_event()


def test_a_read_that_ended_has_no_window() -> None:
    """Credit and cancel that cross its end are no error."""
    bookie = new_bookie()
    feed(bookie, encode(Follow(1, 7, 0, 1000)))
    bookie.next_event()
    bookie.end(1)
    assert bookie.window_of(1) == 0
    feed(bookie, [*encode(Credit(1, 10)), *encode(Cancel(1)), *encode(Credit(99, 10))])
    assert [bookie.next_event() for _ in range(4)] == [
        Credit(1, 10),
        Cancel(1),
        Credit(99, 10),
        None,
    ]


def test_answers_find_their_requests() -> None:
    """Each kind of answer names what it answers; what was given up is passed over."""
    client = new_client()
    client.add([ENTRY, ENTRY], ["one", "two"], is_recovery=False)
    client.write_lac(1, 0, "three")
    lac_id, _ = client.read(ReadLac(0, 1, False), "lac")
    entry_id, _ = client.read(ReadEntry(0, 1, 0, False), "entry")
    follow_id, _ = client.read(Follow(0, 1, 0, 10_000), "follow")
    assert (lac_id, entry_id, follow_id) == (4, 5, 6)
    client.cancel(follow_id)
    assert client.cancel(follow_id) == []
    answers: list[Message] = [
        Durable([3, 1]),
        Update(6, [ENTRY], 0, False),
        Failed(2, Status.FENCED, "fenced"),
        Lac(4, 7),
        Failed(5, Status.NO_SUCH_ENTRY, "no"),
        Durable([1, 2, 3]),
    ]
    feed(client, [part for answer in answers for part in encode(answer)])
    assert client.next_event() == Stored(["three", "one"])
    refused = client.next_event()
    assert isinstance(refused, WriteRefused)
    assert (refused.write, type(refused.error)) == ("two", LedgerFencedError)
    assert client.next_event() == LacReceived("lac", 7)
    denied = client.next_event()
    assert isinstance(denied, ReadRefused)
    assert (denied.read, type(denied.error)) == ("entry", NoSuchEntryError)
    assert client.next_event() == Stored([])
    assert client.next_event() is None
    assert not client.writes
    assert not client.reads


def test_small_buffers_are_joined_and_large_ones_stay() -> None:
    """The sent bytes are the same; large ones are the caller's own buffers."""
    large = b"L" * 100_000
    gathered = gather([b"a", b"b", large, b"c", large, large])
    assert gathered == [b"ab", large, b"c", large, large]
    assert gathered[1] is large
    assert gather([]) == []


def test_silence_is_asked_about_and_then_ends() -> None:
    """A PING after half the patience, one only; any byte begins anew."""
    keepalive = Keepalive(8.0, now_s=0.0)
    assert keepalive.check(3.9) is None
    assert keepalive.check(4.0) == Ping(1)
    assert keepalive.check(6.0) is None
    keepalive.heard(6.5)
    assert keepalive.check(10.4) is None
    assert keepalive.check(10.5) == Ping(2)
    with pytest.raises(BookieUnavailableError, match="silent"):
        keepalive.check(14.5)


def test_a_late_request_waits_as_long_for_the_answer() -> None:
    """The process stood still past half of its patience, or all of it: a PING is sent first."""
    for late_s in (7.9, 8.0, 30.0):
        keepalive = Keepalive(8.0, now_s=0.0)
        assert keepalive.check(late_s) == Ping(1)
        assert keepalive.due_s(late_s) == late_s + 4.0
        assert keepalive.check(late_s + 3.9) is None
        with pytest.raises(BookieUnavailableError, match="silent"):
            keepalive.check(late_s + 4.0)


def test_silence_is_looked_at_when_it_means_something() -> None:
    """At half of the patience and at its end, whenever the last byte came, and never at once."""
    keepalive = Keepalive(8.0, now_s=0.0)
    assert [keepalive.due_s(now_s) for now_s in (0.0, 3.9)] == [4.0, 4.0]
    keepalive.check(4.0)
    assert [keepalive.due_s(now_s) for now_s in (4.0, 7.9)] == [8.0, 8.0]
    keepalive.heard(7.0)
    assert [keepalive.due_s(now_s) for now_s in (7.0, 8.0)] == [11.0, 11.0]


def test_due_entries_are_never_due_at_once() -> None:
    """However sums of times are rounded."""
    for number in range(1000):
        heard_s = number * 0.7
        keepalive = Keepalive(0.3, now_s=heard_s)
        half_s = keepalive.due_s(heard_s)
        keepalive.check(half_s)
        whole_s = keepalive.due_s(half_s)
        assert heard_s < half_s < whole_s < keepalive.due_s(whole_s)
