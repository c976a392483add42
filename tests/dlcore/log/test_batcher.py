"""Single records on their way into batches: what is accepted, and how it is counted."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from typing_extensions import override

from dlcore.base.config import RECORD_SIZE_BYTES_MAX
from dlcore.base.errors import (
    ConfigurationError,
    LogNotReadyError,
    LogRecordTooLongError,
    OverCapacityError,
    TransactionIdOutOfOrderError,
)
from dlcore.base.ids import TXID_MAX
from dlcore.log.entries.batcher import (
    RECORD_OVERHEAD_BYTES,
    RECORD_TICKET_BYTES,
    Batcher,
    Lists,
    checked_payload,
)
from tests.fixtures.lengths import for_each

BATCH_BYTES = 200


class Batch(NamedTuple):
    """Single records."""

    txids: list[int]
    payloads: list[bytes]
    tickets: list[int]


class Batches(Batcher[int]):
    """A queue that only keeps its batches, each of at most `batch_bytes` or one record."""

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        self.batch_bytes = batch_bytes
        self.admitted = 0
        self.may_go_on = True
        self.refusal: Exception | None = None
        self.batches: list[Batch] = [Batch([], [], [])]
        self.counted = [(0, 0)]
        super().__init__(admit=self.admit)

    def admit(self) -> bool:
        """Count the calls; refuse if the test says so, or without room."""
        self.admitted += 1
        if self.refusal is not None:
            raise self.refusal
        self.require_room("clicks")
        return self.may_go_on

    @override
    def _batch_for(self, txid: int, size_bytes: int) -> Lists[int]:
        if self.counted[-1][1] + size_bytes > self.batch_bytes:
            self.batches.append(Batch([], [], []))
            self.counted.append((0, 0))
        return *self.batches[-1], self.batch_bytes - self.counted[-1][1]

    @override
    def _counted(self, records: int, size_bytes: int) -> None:
        before, bytes_before = self.counted[-1]
        self.counted[-1] = before + records, bytes_before + size_bytes


@for_each(range(30))
def test_only_accepted_records_are_counted(seed: int) -> None:
    """Whenever a caller asks, and whether records are admitted one by one or many at once."""
    rng = random.Random(seed)
    queue, pending = Batches(), (0, 0)
    for step in range(300):
        queue.may_go_on = rng.random() < 0.9
        payload = bytes(rng.randrange(80))
        queue.add_record(step, payload, step)
        size_bytes = len(payload) + RECORD_OVERHEAD_BYTES
        pending = pending[0] + 1, pending[1] + size_bytes + RECORD_TICKET_BYTES
        if rng.random() < 0.1:
            assert (queue.pending_records, queue.pending_bytes) == pending
        if rng.random() < 0.05:
            queue.revoke()
    queue.revoke()
    assert queue.last_txid == 299
    assert [ticket for each in queue.batches for ticket in each.tickets] == list(range(300))
    assert [txid for each in queue.batches for txid in each.txids] == list(range(300))
    for each, counted in zip(queue.batches, queue.counted, strict=True):
        sizes = [len(payload) + RECORD_OVERHEAD_BYTES for payload in each.payloads]
        assert counted == (len(sizes), sum(sizes))
        assert sum(sizes) <= BATCH_BYTES


def test_many_records_are_admitted_at_once_until_that_is_revoked() -> None:
    """Or each by itself, if the queue says so; a refused one changes nothing."""
    queue = Batches()
    for txid in range(3):
        queue.add_record(txid, b"", 0)
    assert queue.admitted == 1
    queue.refusal = LogNotReadyError("it is rolling")
    queue.add_record(3, b"", 0)
    queue.revoke()
    with pytest.raises(LogNotReadyError):
        queue.add_record(4, b"", 0)
    assert (queue.last_txid, queue.pending_records) == (3, 4)
    queue.refusal, queue.may_go_on, queue.admitted = None, False, 0
    for txid in range(3, 6):
        queue.add_record(txid, b"", 0)
    assert queue.admitted == 3


@for_each(range(10))
def test_bounds_are_kept_to_the_record(seed: int) -> None:
    """One is accepted as long as less is pending than the bounds say, however many at once."""
    rng = random.Random(seed)
    bytes_max, records_max = rng.randrange(5000), rng.randrange(1, 20)
    queue = Batches()
    queue.limit(bytes_max=bytes_max, records_max=records_max)
    count = pending_bytes = 0
    while count < records_max and pending_bytes <= bytes_max:
        payload = bytes(rng.randrange(100))
        queue.add_record(1, payload, 0)
        count += 1
        pending_bytes += len(payload) + RECORD_OVERHEAD_BYTES + RECORD_TICKET_BYTES
    reason = (
        f"{pending_bytes} bytes in {count} records are pending, the limits are {bytes_max} bytes"
    )
    with pytest.raises(
        OverCapacityError, match=f"log 'clicks': {reason} and {records_max} records:"
    ):
        queue.add_record(1, b"", 0)
    rooms = [queue.has_room]
    for bytes_max, records_max in ((4, 4), (4, 3), (3, 4)):  # a quarter of each may be pending
        queue.limit(bytes_max=bytes_max * pending_bytes, records_max=records_max * count)
        rooms.append(queue.has_room)
    assert rooms == [False, True, False, False]
    queue.add_record(1, b"", 0)


def test_a_value_that_is_no_record_is_refused() -> None:
    """By the same rules as `checked_payload`, within a grant as well; the longest one is taken."""
    queue = Batches(batch_bytes=2**30)
    for txid, payload, error in (
        (4, b"", TransactionIdOutOfOrderError),
        (TXID_MAX + 1, b"", ConfigurationError),
        (6, bytes(RECORD_SIZE_BYTES_MAX + 1), LogRecordTooLongError),
    ):
        queue.add_record(5, b"", 0)
        with pytest.raises(error):
            queue.add_record(txid, payload, 0)
    queue.add_record(5, bytearray(b"x"), 0)  # type: ignore[arg-type]
    queue.add_record(6, bytes(RECORD_SIZE_BYTES_MAX), 0)
    assert queue.pending_records == 5
    assert [bytes(each[:1]) for each in queue.batches[0].payloads] == [b"", b"", b"", b"x", b"\0"]


def test_records_are_checked() -> None:
    """Each refusal names the value and the rule."""
    checked_payload(5, b"", last_txid=5)
    checked_payload(TXID_MAX, b"x" * RECORD_SIZE_BYTES_MAX, last_txid=-1)
    with pytest.raises(TransactionIdOutOfOrderError, match="4 is lower than 5"):
        checked_payload(4, b"", last_txid=5)
    for txid in (-1, TXID_MAX + 1):
        with pytest.raises(ConfigurationError, match="out of range"):
            checked_payload(txid, b"", last_txid=-1)
    with pytest.raises(LogRecordTooLongError, match=str(RECORD_SIZE_BYTES_MAX + 1)):
        checked_payload(1, b"x" * (RECORD_SIZE_BYTES_MAX + 1), last_txid=0)
    with pytest.raises(ConfigurationError, match="expected bytes"):
        checked_payload(1, "text", last_txid=0)  # type: ignore[arg-type]


def test_payloads_cannot_change_after_they_were_accepted() -> None:
    """Immutable values are not copied."""
    payload = b"x" * 1000
    assert checked_payload(1, payload, last_txid=0) is payload
    for view in (bytearray(b"abcd"), memoryview(b"abcd"), memoryview(b"a-b-c-d-")[::2]):
        stored = checked_payload(1, view, last_txid=0)  # type: ignore[arg-type]
        assert type(stored) is bytes
        assert stored == b"abcd"
    wide = memoryview(bytes(RECORD_SIZE_BYTES_MAX + 8)).cast("Q")
    with pytest.raises(LogRecordTooLongError):  # bytes count, not items
        checked_payload(1, wide, last_txid=0)  # type: ignore[arg-type]


def test_transaction_ids_are_integers() -> None:
    """A text or a float is no id; it would be refused by Arrow much later."""
    for txid in ("5", 5.0, None):
        with pytest.raises(ConfigurationError, match=f"txid={txid!r}: expected an integer"):
            checked_payload(txid, b"", last_txid=0)  # type: ignore[arg-type]
