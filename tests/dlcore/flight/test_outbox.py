"""The outbox of a remote writer until the ack: sequences, messages, positions, limits."""

from __future__ import annotations

import contextlib
import random

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from dlcore.base.errors import OverCapacityError, UnexpectedError
from dlcore.base.ids import DLSN
from dlcore.flight.producer_client import MESSAGE_BYTES, Outbox
from dlcore.flight.replies import End
from dlcore.log.entries.batcher import RECORD_OVERHEAD_BYTES, RECORD_TICKET_BYTES


def rows(count: int, size: int = 1) -> pa.RecordBatch:
    """Return a batch."""
    return pa.record_batch({"value": [bytes(size)] * count})


def outbox(bytes_max: int = 2**30, first: int = 0) -> Outbox[str]:
    """Return an empty one."""
    made: Outbox[str] = Outbox(bytes_max=bytes_max)
    made.begin(first)
    return made


def sizes(box: Outbox[str]) -> list[tuple[int, int]]:
    """Send all there is; return of each message its first sequence and its records."""
    found = []
    while (message := box.look()) is not None:
        found.append((message.first, message.batch.num_rows))
        box.sent()
    return found


def test_records_wait_for_others_up_to_a_message() -> None:
    """And batches are messages of their own, cut where they are large."""
    box = outbox(first=5)
    for number in range(3):
        box.add_record(number, b"", str(number))
    assert (len(box), box.next_sequence, box.has_in_flight) == (3, 8, False)
    box.add_batch(rows(2))
    box.add_record(3, bytes(MESSAGE_BYTES), "large")
    box.add_record(4, b"", "next")
    box.add_batch(rows(8, 10**6), "cut")
    assert box.next_sequence == 20
    assert sizes(box) == [(5, 3), (8, 2), (10, 1), (11, 1), *((12 + 2 * n, 2) for n in range(4))]
    assert box.has_in_flight
    assert repr(box) == "<Outbox 15 records, 8 messages in flight>"


def test_positions_of_what_is_side_by_side() -> None:
    """The others are only known to be there."""
    box = outbox()
    for number in range(4):
        box.add_record(number, b"", str(number))
    assert sizes(box) == [(0, 4)]
    acknowledged = box.acknowledged(3, [(3, End(4, "2:5:9", 2))])
    assert acknowledged == [("0", None), ("1", None), ("2", DLSN(2, 5, 8)), ("3", DLSN(2, 5, 9))]
    assert not box.add_barrier("nothing is pending")
    box.add_batch(rows(2), "a")
    box.add_batch(rows(1), "b")
    assert box.add_barrier("c")
    sizes(box)
    assert box.acknowledged(4) == []
    assert box.acknowledged(6, [(5, End(2, None, 0))]) == [("a", None), ("b", None), ("c", None)]
    assert box.acknowledged(6) == []
    assert len(box) == 0
    assert not box.has_in_flight


def test_unsent_records_cannot_be_acknowledged() -> None:
    """A proxy that says so is not believed."""
    box = outbox()
    with pytest.raises(UnexpectedError, match="up to sequence 0, but -1 is the last sent"):
        box.acknowledged(0)
    box.add_batch(rows(2))
    box.add_batch(rows(2))
    box.look()
    box.sent()
    with pytest.raises(UnexpectedError, match="up to sequence 2, but 1 is the last sent"):
        box.acknowledged(2)


def test_a_new_stream_begins_with_what_is_not_durable() -> None:
    """Messages that the proxy reports as durable are not sent again."""
    box = outbox()
    for name in "abc":
        box.add_batch(rows(2), name)
    sizes(box)
    box.begin_again()
    assert box.first == 0
    assert box.sent_bytes == 0
    assert box.durable_before(4) == [("a", None), ("b", None)]
    assert sizes(box) == [(4, 2)]
    assert box.drain() == ["c"]
    assert (len(box), box.look()) == (0, None)
    box.add_record(1, b"", "open")
    assert box.drain() == ["open"]


def test_records_of_a_lost_stream_are_in_doubt() -> None:
    """Messages of a first stream that was refused are not, and are numbered anew."""
    box, doubts = outbox(first=7), []
    box.add_batch(rows(2), "a")
    box.add_batch(rows(3), "b")
    assert sizes(box) == [(7, 2), (9, 3)]
    doubts.append(box.is_in_doubt)
    box.refused()
    box.begin_again()
    doubts.append(box.is_in_doubt)
    box.begin(0)
    assert sizes(box) == [(0, 2), (2, 3)]
    box.begin_again()
    doubts.append(box.is_in_doubt)
    box.refused()
    assert box.durable_before(1) == [("a", None)]
    doubts.append(box.is_in_doubt)
    box.durable_before(4)
    doubts.append(box.is_in_doubt)
    assert doubts == [False, False, True, True, False]
    box.add_record(1, b"", "c")
    box.begin_again()
    assert (box.next_sequence, box.first) == (6, 5)


def test_a_batch_that_is_too_large_is_sent_in_parts() -> None:
    """A waiting caller gets the result of its record's part; a part in doubt stays so."""
    box = outbox(bytes_max=2**30)
    for number in range(5):
        box.add_record(number, b"", str(number))
    box.add_batch(rows(1), "b")
    assert sizes(box) == [(0, 5), (5, 1)]
    box.begin_again()
    box.look()
    assert box.split()
    assert sizes(box) == [(0, 2), (2, 3), (5, 1)]
    assert box.sent_bytes == 5 * RECORD_OVERHEAD_BYTES + rows(1).nbytes
    assert box.acknowledged(1, [(1, End(2, "1:0:1", 2))]) == [
        ("0", DLSN(1, 0, 0)),
        ("1", DLSN(1, 0, 1)),
    ]
    acknowledged = box.acknowledged(4, [(4, End(5, "1:1:2", 3))])
    assert acknowledged == [(f"{2 + slot}", DLSN(1, 1, slot)) for slot in range(3)]
    assert box.is_in_doubt
    box.begin_again()
    assert not box.split()
    assert box.durable_before(5) == [("b", None)]
    assert (box.is_in_doubt, box.pending_bytes, box.sent_bytes) == (False, 0, 0)


def test_pending_records_count_until_they_are_acknowledged() -> None:
    """A record by its price, a batch by its size; bounds are for the caller to require."""
    box = outbox(bytes_max=4000)
    box.add_record(0, b"xyz", "")
    one = 3 + RECORD_OVERHEAD_BYTES + RECORD_TICKET_BYTES
    assert (box.pending_bytes, box.pending_records) == (one, 1)
    box.add_batch(rows(2, 5000))
    assert (box.pending_bytes, box.pending_records) == (one + rows(2, 5000).nbytes, 3)
    with pytest.raises(OverCapacityError, match="in 3 records are pending, the limits are 4000 b"):
        box.require_room("clicks")
    assert not box.has_room
    sizes(box)
    box.acknowledged(0)
    assert box.pending_bytes == rows(2, 5000).nbytes
    box.acknowledged(2)
    assert (box.pending_bytes, box.pending_records, box.has_room) == (0, 0, True)


@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_each_record_is_acknowledged_once_and_in_order(seed: int) -> None:
    """Whatever is sent again, and acknowledged by whichever stream."""
    chance = random.Random(seed)
    box, added, acknowledged, taken = outbox(), 0, [], 0
    while added < 200 or len(box):
        match chance.randrange(4):
            case 0 if added < 200:
                box.add_record(added, b"x", str(added))
                added += 1
            case 1 if added < 200:
                box.add_batch(rows(3), str(added + 2))
                added += 3
            case 2 if (message := box.look()) is not None:
                assert message.first >= taken
                box.sent()
            case 3 if chance.random() < 0.2:
                box.begin_again()
                assert box.first == added - len(box)
            case 3 if box.has_in_flight:
                first = added - len(box)
                taken = max(taken, chance.randrange(first, max(first + 12, added)))
                with contextlib.suppress(UnexpectedError):  # it was not sent so far
                    acknowledged += box.acknowledged(taken)
                taken = added - len(box)
        box.validate()
    names = [int(name) for name, _ in acknowledged]
    assert names == sorted(set(names))
    assert not len(box)
