"""The books of a stream: the acknowledged count never falls, and is never above the durable one."""

from __future__ import annotations

import random

from dlcore.base.ids import DLSN
from dlcore.flight.producer_server import Ack, StreamAcks


def books(*, records: int = 100, size_bytes: int = 1000) -> StreamAcks:
    """Return empty books with a window."""
    return StreamAcks(window_records=records, window_bytes=size_bytes)


def settled(acks: StreamAcks) -> bool:
    """Return whether nothing is left to tell, asked anew each time."""
    return acks.is_settled


def has_room(acks: StreamAcks) -> bool:
    """Return whether a batch may be taken, asked anew each time."""
    return acks.has_room


def test_nothing_is_acknowledged_before_it_is_durable() -> None:
    """An accepted batch is not acknowledged yet."""
    acks = books()
    assert settled(acks)
    acks.accepted(3, 30)
    assert acks.next_ack() is None
    assert not settled(acks)
    acks.durable(DLSN(1, 0, 2))
    assert not settled(acks), "the client does not know"
    assert acks.next_ack() == Ack(3, DLSN(1, 0, 2))
    assert acks.next_ack() is None
    assert settled(acks)
    assert repr(acks) == "<StreamAcks durable=3 pending=0 sent=3>"


def test_several_that_are_due_are_one() -> None:
    """The last one says all."""
    acks = books()
    for _ in range(5):
        acks.accepted(2, 10)
    for entry in range(4):
        acks.durable(DLSN(1, entry, 1))
    assert acks.next_ack() == Ack(8, DLSN(1, 3, 1))
    assert repr(acks) == "<StreamAcks durable=8 pending=2 sent=8>"


def test_the_window_is_of_records_and_of_bytes() -> None:
    """Whichever is full first; it opens with what becomes durable, acknowledged or not."""
    by_records, by_bytes = books(records=4), books(size_bytes=100)
    by_records.accepted(3, 1)
    by_bytes.accepted(1, 99)
    assert has_room(by_records)
    assert has_room(by_bytes)
    by_records.accepted(50, 1)
    by_bytes.accepted(1, 5000)
    assert not has_room(by_records)
    assert not has_room(by_bytes)
    for acks in (by_records, by_bytes):
        acks.durable(DLSN(1, 0, 0))
        assert not has_room(acks)
        acks.durable(DLSN(1, 1, 0))
        assert has_room(acks)


def test_any_order_of_events_keeps_the_books() -> None:
    """A thousand random streams, each beside a list of what it sent."""
    for seed in range(1000):
        rng = random.Random(seed)
        acks, sent, durable, acked = books(), [], 0, 0
        for _ in range(rng.randrange(1, 40)):
            event = rng.choice(("accept", "durable", "tell"))
            if event == "accept" and acks.has_room:
                sent.append(rng.randrange(1, 60))
                acks.accepted(sent[-1], rng.randrange(600))
            elif event == "durable" and durable < len(sent):
                acks.durable(DLSN(1, durable, 0))
                durable += 1
            elif event == "tell":
                ack = acks.next_ack()
                known = sum(sent[:durable])
                assert (ack is None) == (known == acked), seed
                if ack is not None:
                    assert ack == Ack(known, DLSN(1, durable - 1, 0)), seed
                    acked = ack.records
        assert acks.is_settled == (acked == sum(sent)), seed
