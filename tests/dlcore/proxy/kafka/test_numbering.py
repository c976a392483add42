"""The numbers of Kafka's producers: which records are new, and which are known or refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from kio.schema.errors import ErrorCode

from dlcore.log.entries.stamp import GENERATED_PREFIX, PRODUCER_NAME_BYTES_MAX, Claim, Mark
from dlcore.log.proxied.producers import Durable, Fresh, InFlight, Producers
from dlcore.proxy.kafka.numbering import ID_BITS, mark_of, name_of
from dlcore.proxy.kafka.positions import BATCHES_KEPT, PRODUCERS_MAX, RecentOffsets
from dlcore.proxy.kafka.records import ProducedBatch

PRODUCER = 2**62 + 5
GAP, STALE, UNKNOWN = (
    ErrorCode.out_of_order_sequence_number,
    ErrorCode.invalid_producer_epoch,
    ErrorCode.unknown_producer_id,
)


def batch(sequence: int, count: int = 1, *, epoch: int = 0) -> ProducedBatch:
    """Return a batch of the producer."""
    return ProducedBatch(PRODUCER, epoch, sequence, pa.array([b""] * count), None, None)


def claim(*, epoch: int = 0, base: int = 0) -> Claim:
    """Return the claim of an epoch, which began at a number."""
    found = mark_of(batch(0, epoch=epoch), None)
    assert isinstance(found, Mark)
    return Claim(name=found.claim.name, epoch=epoch + 1, base=base, token=found.claim.token)


def test_a_name_fits_and_is_soon_forgotten() -> None:
    """Whatever the id is."""
    for producer in (0, 2**ID_BITS - 1):
        name = name_of(producer)
        assert name.startswith(GENERATED_PREFIX)
        assert len(name) <= PRODUCER_NAME_BYTES_MAX


def test_a_producer_begins_with_0() -> None:
    """In any epoch; another number of an unknown producer means that it was forgotten."""
    assert mark_of(batch(0), None) == Mark(claim(), 0)
    assert mark_of(batch(0, epoch=3), None) == Mark(claim(epoch=3), 0)
    assert mark_of(batch(1), None) is UNKNOWN
    assert claim().token != claim(epoch=1).token


@pytest.mark.parametrize(("base", "accepted"), [(0, 9), (7, 16)])
def test_numbers_of_the_same_epoch(base: int, accepted: int) -> None:
    """They begin with the epoch, wherever that began."""
    known = claim(base=base), accepted
    assert mark_of(batch(10), known) == Mark(known[0], base + 10)
    assert mark_of(batch(0, 10), known) == Mark(known[0], base)
    assert mark_of(batch(9), known) == Mark(known[0], base + 9)
    assert mark_of(batch(11), known) is GAP
    assert mark_of(batch(2**31 - 1), known) is GAP  # it would stand for a number before the first
    assert mark_of(batch(2**30), known) is GAP


def test_a_later_epoch_begins_anew() -> None:
    """Behind all records of the ones before; those may write nothing more."""
    known = claim(), 9
    assert mark_of(batch(0, epoch=2), known) == Mark(claim(epoch=2, base=10), 10)
    assert mark_of(batch(1, epoch=2), known) is GAP
    assert mark_of(batch(10), (claim(epoch=1, base=10), 12)) is STALE
    assert mark_of(batch(0), (claim(epoch=1, base=10), 12)) is STALE


def test_numbers_begin_anew_behind_the_last() -> None:
    """Also in the middle of a batch."""
    last = 2**31 - 1
    known = claim(base=5), 5 + last
    assert mark_of(batch(0, 3), known) == Mark(known[0], 5 + 2**31)
    assert mark_of(batch(last), known) == Mark(known[0], 5 + last)
    assert mark_of(batch(last - 1, 4), (known[0], 5 + last - 2)) == Mark(known[0], 5 + last - 1)
    known = claim(base=5), 5 + 3 * 2**31 + 10
    assert mark_of(batch(11), known) == Mark(known[0], 5 + 3 * 2**31 + 11)
    assert mark_of(batch(last), known) == Mark(known[0], 5 + 3 * 2**31 - 1)
    assert mark_of(batch(12), known) is GAP


def test_the_table_of_a_log_takes_these_claims() -> None:
    """A retry is known, and a later epoch fences the one before, at this owner and the next."""
    producers: Producers[str] = Producers()

    def written(what: ProducedBatch, ticket: str) -> None:
        mark = mark_of(what, producers.known_of(name_of(PRODUCER)))
        assert isinstance(mark, Mark)
        producers.continue_with(mark.claim, now_ms=0)
        assert producers.look_at(mark.claim, mark.first, len(what)) == Fresh(0)
        producers.accepted(mark, len(what), ticket, now_ms=0)

    written(batch(0, 5), "a")
    written(batch(5, 3), "b")
    mark = mark_of(batch(0, 5), producers.known_of(name_of(PRODUCER)))
    assert isinstance(mark, Mark)
    assert producers.look_at(mark.claim, mark.first, 5) == InFlight("a", is_last=True)
    written(batch(0, 2, epoch=1), "c")
    assert mark_of(batch(8), producers.known_of(name_of(PRODUCER))) is STALE
    mark = mark_of(batch(0, 2, epoch=1), producers.known_of(name_of(PRODUCER)))
    assert isinstance(mark, Mark)
    assert mark.first == 8
    assert producers.known_of("unknown") is None
    assert isinstance(producers.look_at(mark.claim, 8, 2), (InFlight, Durable))


def test_offsets_of_the_last_batches_are_known() -> None:
    """As many as a client sends ahead, of each producer and log; the oldest producers go."""
    recent = RecentOffsets()
    for number in range(BATCHES_KEPT + 1):
        recent.note("log", 7, (number * 10, 10), 1000 + number)
    assert recent.find("log", 7, (0, 10)) is None
    assert recent.find("log", 7, (10, 10)) == 1001
    assert recent.find("log", 7, (10, 9)) is None
    assert recent.find("other", 7, (10, 10)) is None
    recent.note("log", 7, (10, 10), 2000)
    assert recent.find("log", 7, (10, 10)) == 2000
    for producer in range(PRODUCERS_MAX):
        recent.note("log", 100 + producer, (0, 1), producer)
    assert len(recent) == PRODUCERS_MAX
    assert recent.find("log", 7, (10, 10)) is None
