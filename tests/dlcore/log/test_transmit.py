"""The transmitter: what is sent at once, what waits, and how big entries get."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import TransactionIdOutOfOrderError
from dlcore.base.records import LogRecord
from dlcore.log.entries.body import batch_of
from dlcore.log.entries.stamp import Claim, Mark
from dlcore.log.writing.port import MarkedRows
from dlcore.log.writing.transmit import Group, Transmitter, Unwritten
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    import pyarrow as pa


def test_a_lone_record_leaves_at_once_and_the_rest_fills_an_entry() -> None:
    """While the first is in flight the others wait together; its ack lets them go."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=10_000)
    transmitter.add_record(1, b"a", "first")
    first = transmitter.next_group()
    transmitter.add_record(2, b"b", "second")
    transmitter.add_record(2, b"c", "third")
    assert not transmitter.has_next
    assert transmitter.acknowledged() is first
    assert (first.slots, first.tickets) == ([0], ["first"])
    group = transmitter.next_group()
    assert group.batch().to_pydict() == {"txid": [2, 2], "value": [b"b", b"c"]}
    assert (group.first_txid, group.last_txid, group.record_count) == (2, 2, 2)
    assert (group.slots, group.tickets) == ([0, 1], ["second", "third"])


def test_full_entries_are_sent_while_others_are_in_flight() -> None:
    """An entry takes records up to its target size; a larger record gets one of its own."""
    transmitter: Transmitter[int] = Transmitter(entry_bytes=100)
    for txid in range(10):
        transmitter.add_record(txid, b"x" * 28, txid)  # 40 bytes with its overhead
    transmitter.add_record(10, b"y" * 500, 10)
    transmitter.add_record(11, b"z", 11)
    sizes = []
    while transmitter.has_next:
        sizes.append(transmitter.next_group().record_count)
    assert sizes == [2, 2, 2, 2, 2, 1]  # the last one waits for an ack
    for _ in sizes:
        transmitter.acknowledged()
    assert transmitter.next_group().record_count == 1
    transmitter.acknowledged()
    assert transmitter.is_idle
    assert transmitter.pending_bytes == 0


def test_small_batches_are_joined_with_records_in_order() -> None:
    """Everything that waits together becomes one entry, in the order of the calls."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=10_000)
    transmitter.add_record(0, b"-", "alone")
    transmitter.next_group()
    transmitter.add_record(1, b"a", "first")
    transmitter.add_batch(batch_of([2, 3], [b"b", b"c"]), "batch")
    transmitter.add_record(4, b"d", "last")
    transmitter.seal()
    group = transmitter.next_group()
    assert group.batch().to_pydict() == {
        "txid": [1, 2, 3, 4],
        "value": [b"a", b"b", b"c", b"d"],
    }
    assert (group.slots, group.tickets) == ([0, 2, 3], ["first", "batch", "last"])


def test_a_batch_of_one_row_is_a_record() -> None:
    """A producer's batch, too, whose rows are marked where they are; refused as a record is."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=1000, last_txid=3)
    claim = Claim("meter", 1, 0, b"12345678")
    transmitter.add_batch(batch_of([4], [b"a"]), "alone", mark=Mark(claim, 7))
    first = transmitter.next_group()
    assert first.plain_records() == ([4], [b"a"])
    assert (first.slots, first.tickets) == ([0], ["alone"])
    assert first.marked == [MarkedRows(Mark(claim, 7), 1, 0)]
    transmitter.add_batch(batch_of([5, 5], [b"b", b"c"]), "two")
    transmitter.add_batch(LogRecord(6, b"d"), "row", mark=Mark(claim, 8), whole=True)
    transmitter.add_batch(batch_of([6], [b"e"]), "another")
    with pytest.raises(TransactionIdOutOfOrderError, match="5 is lower than 6"):
        transmitter.add_batch(batch_of([5], [b"x"]), "low")
    assert transmitter.pending_records == 5
    transmitter.acknowledged()
    group = transmitter.next_group()
    assert group.batch().to_pydict() == {"txid": [5, 5, 6, 6], "value": [b"b", b"c", b"d", b"e"]}
    assert (group.slots, group.tickets) == ([1, 2, 3], ["two", "row", "another"])
    assert group.marked == [MarkedRows(Mark(claim, 8), 1, 2)]
    transmitter.acknowledged()
    assert transmitter.pending_bytes == 0


def test_a_barrier_waits_for_what_was_accepted_before_it() -> None:
    """It rides on the last record, queued or in flight, and is needless when all is acked."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=10_000)
    assert not transmitter.add_barrier("nothing")
    transmitter.add_record(1, b"a", "a")
    group = transmitter.next_group()
    assert transmitter.add_barrier("in flight")
    assert (group.slots, group.tickets) == ([0, 0], ["a", "in flight"])
    transmitter.add_record(2, b"b", "b")
    assert transmitter.add_barrier("queued")
    group = transmitter.next_group()
    assert (group.slots, group.tickets) == ([0, 0], ["b", "queued"])


def test_draining_tells_what_was_sent_from_what_was_not() -> None:
    """A failed writer answers differently to the two."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=10_000)
    transmitter.add_record(1, b"a", "a")
    sent = transmitter.next_group()
    transmitter.add_record(2, b"b", "b")
    in_flight, queued = transmitter.drain()
    assert in_flight == [sent]
    assert [group.record_count for group in queued] == [1]
    assert transmitter.is_idle
    assert not transmitter.has_next


class _Twin:
    """The dumb twin of a transmitter, a list: what was added, and what its groups held."""

    def __init__(self, rng: random.Random) -> None:
        self.transmitter: Transmitter[int] = Transmitter(
            entry_bytes=rng.randrange(1, 300), admit=lambda: rng.random() < 0.9
        )
        self.added: list[int] = []
        self.sent: list[int] = []
        self.in_flight: list[Group[int]] = []

    def add_record(self, txid: int, payload: bytes) -> None:
        """Add one, which is its own ticket."""
        self.transmitter.add_record(txid, payload, txid)
        self.added.append(txid)

    def add_batch(self, txid: int, payloads: list[bytes]) -> None:
        """Add several, for the last of which there is a ticket."""
        self.transmitter.add_batch(batch_of([txid] * len(payloads), payloads), txid)
        self.added += [txid] * len(payloads)

    def send(self) -> None:
        """Take a group: each ticket is that of the record at its slot."""
        group = self.transmitter.next_group()
        txids = group.batch().column(0).to_pylist()
        assert [txids[slot] for slot in group.slots] == group.tickets
        assert len(txids) == group.record_count
        self.in_flight.append(group)
        self.sent += txids

    def check_pending(self) -> None:
        """The counts on request are those of the added records."""
        in_flight = sum(group.record_count for group in self.in_flight)
        assert self.transmitter.pending_records == len(self.added) - len(self.sent) + in_flight


@for_each(range(50))
def test_random_use_keeps_every_record_once_in_order(seed: int) -> None:
    """Groups, put together, are what was added, each record at its slot."""
    rng = random.Random(seed)
    twin = _Twin(rng)
    transmitter = twin.transmitter
    for step in range(200):
        if rng.random() < 0.6:
            twin.add_record(step, b"x" * rng.randrange(80))
        if rng.random() < 0.1:
            twin.add_batch(step, [b"y" * rng.randrange(80)] * rng.randrange(1, 4))
        if rng.random() < 0.1:
            transmitter.seal()
        if rng.random() < 0.1:
            twin.check_pending()
        while transmitter.has_next and rng.random() < 0.5:
            twin.send()
        if twin.in_flight and rng.random() < 0.4:
            assert transmitter.acknowledged() is twin.in_flight.pop(0)
    transmitter.seal()
    while transmitter.has_next:
        twin.send()
    for _ in twin.in_flight:
        transmitter.acknowledged()
    assert twin.sent == twin.added
    assert (transmitter.pending_bytes, transmitter.pending_records) == (0, 0)


def test_batches_and_records_concatenate_without_copying_small_parts() -> None:
    """A group of one batch hands it on as it is."""
    transmitter: Transmitter[None] = Transmitter(entry_bytes=1000)
    batch: pa.RecordBatch = batch_of([1], [b"a"])
    transmitter.add_batch(batch)
    assert transmitter.queued_bytes == 13
    assert transmitter.next_group().batch().column(1).buffers()[2] == batch.column(1).buffers()[2]
    assert transmitter.queued_bytes == 0


def test_unwritten_records_are_described_in_words() -> None:
    """The queue in the order of writing: in flight, waiting, and not full yet."""
    transmitter: Transmitter[str] = Transmitter(entry_bytes=300)
    assert transmitter.unacknowledged() is None
    transmitter.add_record(5, b"a", "a")
    assert str(transmitter.unacknowledged()) == "1 record, transaction id 5"
    transmitter.next_group()
    transmitter.add_record(7, b"b" * 250, "b")
    transmitter.add_record(9, b"c" * 250, "c")
    transmitter.add_record(9, b"d", "d")
    unwritten = transmitter.unacknowledged()
    assert unwritten == Unwritten(4, 5, 9)
    assert str(unwritten) == "4 records, transaction ids 5 to 9"
    transmitter.acknowledged()
    more = Unwritten.of(batch_of([11, 12, 30], [b"", b"", b""]))
    joined = Unwritten.joined([transmitter.unacknowledged(), None, more])
    assert joined == Unwritten(6, 7, 30)
    assert Unwritten.joined([None]) is None
