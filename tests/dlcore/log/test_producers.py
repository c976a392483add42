"""The producers of a log: records that are written, known or forgotten, and the right to write.

Each verdict is checked by itself, then random lives of owners and clients over one log.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlcore.base.config import MIB
from dlcore.base.errors import (
    ConfigurationError,
    InvalidEntryError,
    OverCapacityError,
    ProducerFencedError,
    SequenceGapError,
)
from dlcore.base.ids import DLSN
from dlcore.log.entries.stamp import (
    GENERATED_KEPT_MS,
    KEPT_MS,
    PRODUCERS_KEPT_MS,
    Claim,
    Mark,
    ProducerRow,
    Stamp,
    StampedRun,
    decode_stamp,
)
from dlcore.log.proxied.producers import GENERATED_FORGOTTEN_MS, Durable, Fresh, InFlight, Producers
from dlcore.log.writing.port import MarkedRows
from tests.fixtures.durable import durable_of


def token(number: int = 0) -> bytes:
    """Return a token that its number distinguishes."""
    return number.to_bytes(8, "big")


class Owner:
    """An owner of a log, whose batches become entries of their own; each is durable on command."""

    def __init__(self, *, producers_max: int = 10, lssn: int = 1) -> None:
        self.producers: Producers[str] = Producers(producers_max=producers_max)
        self.lssn = lssn
        self.now_ms = 0
        self.entries: list[tuple[bytes, int]] = []
        self.in_flight: list[tuple[Mark, int, DLSN]] = []

    def grant(self, name: str, number: int = 0) -> Claim:
        """Begin an incarnation."""
        return self.producers.grant(name, token(number), now_ms=self.now_ms)

    def accept(self, claim: Claim, first: int, count: int, ticket: str = "") -> Mark:
        """Take records that are new."""
        assert self.producers.look_at(claim, first, count) == Fresh(0)
        mark = Mark(claim, first)
        self.producers.accepted(mark, count, ticket, now_ms=self.now_ms)
        return mark

    def entry(
        self, *rows: MarkedRows[Mark], size_bytes: int = 0, is_last: bool = False
    ) -> Stamp | None:
        """Make an entry of rows; return its stamp."""
        stamp = self.producers.stamp(
            rows,
            lssn=self.lssn,
            entry_id=len(self.entries),
            size_bytes=size_bytes,
            now_ms=self.now_ms,
            is_last=is_last,
        )
        self.entries.append((stamp, self.now_ms))
        assert len(stamp) % 8 == 0
        return decode_stamp(memoryview(stamp)) if stamp else None

    def write(self, claim: Claim, first: int, count: int) -> Stamp:
        """Take records, make an entry of them, and have it durable."""
        mark = self.accept(claim, first, count)
        stamp = self.entry(MarkedRows(mark, count, count - 1))
        self.producers.durable(mark, count, DLSN(self.lssn, len(self.entries) - 1, count - 1))
        assert stamp is not None
        return stamp

    def successor(self) -> Owner:
        """Return the next owner, which has read this one's segment, from the last snapshot on."""
        after = Owner(lssn=self.lssn + 1)
        after.now_ms = self.now_ms
        after.read(self)
        return after

    def read(self, before: Owner) -> None:
        """Take over what the segment of an owner says."""
        if before.entries and before.entries[-1][0]:
            first = decode_stamp(memoryview(before.entries[-1][0])).snapshot
            for entry_id in range(first, len(before.entries)):
                data, written_ms = before.entries[entry_id]
                stamp = decode_stamp(memoryview(data))
                assert (stamp.rows is not None) == (entry_id == first)
                self.producers.restore(
                    stamp, lssn=before.lssn, entry_id=entry_id, written_ms=written_ms
                )


def test_the_results_of_records() -> None:
    """They are new, in flight, durable, or do not follow."""
    owner = Owner()
    claim = owner.grant("p")
    mark = owner.accept(claim, 0, 3, "first")
    look_at = owner.producers.look_at
    assert look_at(claim, 0, 2) == InFlight("first", is_last=False)
    assert look_at(claim, 1, 2) == InFlight("first", is_last=True)
    assert look_at(claim, 2, 3) == Fresh(1)
    assert look_at(claim, 3, 1) == Fresh(0)
    with pytest.raises(SequenceGapError, match="sequence 4 does not follow, expected 3") as gap:
        look_at(claim, 4, 1)
    assert gap.value.expected == 3
    owner.entry(MarkedRows(mark, 3, 2))
    owner.producers.durable(mark, 3, DLSN(1, 0, 2))
    assert look_at(claim, 0, 3) == Durable(DLSN(1, 0, 2))
    assert look_at(claim, 0, 2) == Durable(None)
    assert durable_of(owner.producers, "p") == 2
    assert durable_of(owner.producers, "q") == -1
    assert (len(owner.producers), repr(owner.producers)) == (1, "<Producers 1>")


def test_durable_follows_accepted() -> None:
    """Records in flight are not durable, though earlier ones are."""
    owner = Owner()
    claim = owner.grant("p")
    marks = [owner.accept(claim, number, 1, str(number)) for number in range(2)]
    owner.entry(MarkedRows(marks[0], 1, 0), MarkedRows(marks[1], 1, 1))
    owner.producers.durable(marks[0], 1, DLSN(1, 0, 0))
    assert owner.producers.look_at(claim, 0, 2) == InFlight("1", is_last=True)
    assert owner.producers.look_at(claim, 0, 1) == Durable(DLSN(1, 0, 0))


def test_a_batch_that_comes_again_waits_for_its_own() -> None:
    """Not for what came later, which may be durable much later."""
    owner = Owner()
    claim = owner.grant("p")
    marks = [owner.accept(claim, 2 * number, 2, str(number)) for number in range(3)]
    look_at = owner.producers.look_at
    for number in range(3):
        assert look_at(claim, 2 * number, 1) == InFlight(str(number), is_last=False)
        assert look_at(claim, 2 * number, 2) == InFlight(str(number), is_last=True)
    assert look_at(claim, 0, 4) == InFlight("1", is_last=True)
    owner.entry(MarkedRows(marks[0], 2, 1))
    owner.producers.durable(marks[0], 2, DLSN(1, 0, 1))
    assert look_at(claim, 0, 2) == Durable(DLSN(1, 0, 1))
    assert look_at(claim, 1, 2) == InFlight("1", is_last=False)
    assert look_at(claim, 4, 2) == InFlight("2", is_last=True)


def test_a_later_incarnation_fences() -> None:
    """It begins behind all that was accepted; neither earlier ones nor ones of its epoch write."""
    owner = Owner()
    old = owner.grant("p", 1)
    mark = owner.accept(old, 0, 2)
    new = owner.grant("p", 2)
    assert (new.epoch, new.base) == (2, 2)
    for claim in (old, Claim(name="p", epoch=2, base=2, token=token(3))):
        with pytest.raises(ProducerFencedError, match="superseded by 2, which goes on behind seq"):
            owner.producers.look_at(claim, 2, 1)
        with pytest.raises(ProducerFencedError):
            owner.producers.continue_with(claim, now_ms=0)
    with pytest.raises(SequenceGapError, match="expected 2"):
        owner.producers.look_at(new, 1, 1)  # of the one before
    assert owner.producers.continue_with(new, now_ms=0) == -1
    stamp = owner.entry(MarkedRows(mark, 2, 1), MarkedRows(owner.accept(new, 2, 1), 1, 2))
    assert stamp is not None
    assert [(each.epoch, each.base) for each in stamp.claims] == [(1, 0), (2, 2)]
    assert owner.successor().producers.continue_with(new, now_ms=0) == 2
    with pytest.raises(ProducerFencedError):
        owner.successor().producers.continue_with(old, now_ms=0)


def test_a_claim_of_another_owner_is_believed_if_nothing_was_written_since() -> None:
    """Only one of two incarnations writes, wherever they were begun."""
    owner = Owner()
    old = owner.grant("p", 1)
    owner.write(old, 0, 2)
    lost = [owner.successor().grant("p", number) for number in (2, 3)]
    after = owner.successor()
    assert after.producers.continue_with(old, now_ms=0) == 1
    assert after.producers.continue_with(lost[0], now_ms=0) == 1
    for claim in (old, lost[1]):
        with pytest.raises(ProducerFencedError):
            after.producers.continue_with(claim, now_ms=0)
    other = owner.successor()
    other.write(old, 2, 1)
    with pytest.raises(ProducerFencedError):
        other.producers.continue_with(lost[0], now_ms=0)
    fresh = Owner().grant("q")
    assert other.producers.continue_with(fresh, now_ms=0) == -1
    other.write(fresh, 0, 1)


@pytest.mark.parametrize("name", ["", "x" * 101, "é" * 51, "a\nb", "\ud800"])
def test_a_name_is_short_and_can_be_printed(name: str) -> None:
    """It goes into every snapshot, and into messages."""
    with pytest.raises(ConfigurationError, match="expected a name of 1 to 100 bytes"):
        Owner().grant(name)


def test_a_producer_that_is_silent_for_long_is_forgotten() -> None:
    """With the next snapshot; its claim is worth nothing then."""
    owner = Owner()
    claim = owner.grant("p")
    owner.write(claim, 0, 2)
    new = owner.grant("p")
    owner.now_ms = PRODUCERS_KEPT_MS
    after = owner.successor()
    after.accept(after.grant("pending"), 0, 1)
    assert after.entry() == Stamp(0, ())
    assert len(after.producers) == 1
    for each in (claim, new):
        with pytest.raises(ProducerFencedError, match="was forgotten: begin anew"):
            after.producers.look_at(each, 1, 1)
    with pytest.raises(ProducerFencedError, match="is not known to the log any more"):
        after.producers.continue_with(new, now_ms=0)
    assert after.grant("p", 9).base == 0


def test_there_is_place_for_so_many() -> None:
    """Producers without records go first, then those silent for an hour; else a new one is
    refused."""
    owner = Owner(producers_max=3)
    claims = {}
    for number, name in enumerate("abc"):
        owner.now_ms = number
        claims[name] = owner.grant(name)
        owner.accept(claims[name], 0, 1) if name == "c" else owner.write(claims[name], 0, 1)
    with pytest.raises(OverCapacityError, match="silent for 60 minutes"):
        owner.grant("d")
    owner.now_ms = KEPT_MS
    owner.grant("d")
    with pytest.raises(ProducerFencedError):
        owner.producers.look_at(claims["a"], 1, 1)
    owner.grant("e")  # d wrote nothing
    assert durable_of(owner.producers, "b") == 0
    assert owner.producers.look_at(claims["c"], 0, 1) == InFlight("", is_last=True)
    full = Owner(producers_max=1)
    full.accept(full.grant("p"), 0, 1)
    with pytest.raises(OverCapacityError):
        full.grant("q")


def test_names_made_for_one_writer_are_forgotten_soon() -> None:
    """There may be many of them."""
    owner = Owner(producers_max=1)
    owner.write(owner.grant("_1"), 0, 1)
    owner.now_ms = GENERATED_KEPT_MS
    owner.write(owner.grant("_2"), 0, 1)
    with pytest.raises(OverCapacityError):
        owner.grant("p")
    after = owner.successor()
    after.now_ms += GENERATED_FORGOTTEN_MS
    assert durable_of(after.producers, "_2") == 0
    after.producers.grant("p", token(), now_ms=after.now_ms)
    assert after.entry() == Stamp(0, ())
    assert len(after.producers) == 1


def test_a_name_that_comes_again_is_another_producer() -> None:
    """Also to a reader of its being forgotten and its return."""
    owner = Owner(producers_max=1)
    owner.write(owner.grant("p"), 0, 5)
    owner.now_ms = KEPT_MS
    other = owner.grant("q")
    owner.write(other, 0, 1)
    owner.now_ms = 2 * KEPT_MS
    claim = owner.grant("p", 7)
    owner.write(claim, 0, 2)
    after = owner.successor()
    assert after.producers.continue_with(claim, now_ms=0) == 1
    assert durable_of(after.producers, "q") == 0


def test_without_producers_nothing_is_said() -> None:
    """Until there is one; then each entry of the segment names the snapshot."""
    owner = Owner()
    assert owner.entry() is None
    claim = owner.grant("p")
    stamp = owner.write(claim, 0, 1)
    assert (stamp.snapshot, stamp.rows, len(stamp.claims)) == (1, (), 1)
    assert owner.entry() == Stamp(1)
    assert owner.producers.has_stamped
    owner.lssn, owner.entries = 2, []
    stamp = owner.write(claim, 1, 1)
    assert stamp.rows == (
        ProducerRow(
            number=0,
            name="p",
            epoch=1,
            base=0,
            token=token(),
            last=0,
            dlsn=(1, 1, 0),
            used_ms=0,
        ),
    )
    assert not stamp.claims


def test_snapshots_come_again() -> None:
    """After many bytes or entries, of which they are a small part."""
    owner = Owner()
    claim = owner.grant("p")
    owner.write(claim, 0, 1)
    for number in range(1, 9):
        stamp = owner.entry(size_bytes=MIB)
        assert stamp == Stamp(0)
        assert number < 9
    stamp = owner.entry()
    assert stamp is not None
    assert (stamp.snapshot, len(stamp.rows or ())) == (9, 1)
    for _ in range(1023):
        owner.entry()
    last = owner.entry()
    assert last is not None
    assert last.snapshot == 9 + 1024
    crowd = Owner(producers_max=10_000)
    for number in range(10_000):
        crowd.grant(str(number))
    crowd.entry()
    for _ in range(2):
        assert crowd.entry(size_bytes=9 * MIB) == Stamp(0)
    assert durable_of(crowd.successor().producers, "1") == -1


def test_the_last_entry_of_an_owner_lists_all() -> None:
    """The next one then reads no other; not where reading costs less than the list."""
    owner = Owner()
    claim = owner.grant("p")
    owner.write(claim, 0, 2)
    little = owner.entry(is_last=True)
    assert little == Stamp(0)
    owner.write(claim, 2, 1)
    owner.entry(MarkedRows(owner.accept(claim, 3, 1), 1, 0), size_bytes=200)
    last = owner.entry(is_last=True)
    assert last is not None
    assert (last.snapshot, [row.last for row in last.rows or ()]) == (4, [3])
    assert durable_of(owner.successor().producers, "p") == 3


def test_the_first_entry_of_all_fits() -> None:
    """With as many producers as there may be, of the longest names, and new ones beside them."""
    owner = Owner(producers_max=10_000)
    rows = []
    for number in range(10_000):
        claim = owner.grant(f"{number:0100}", number)
        rows.append(MarkedRows(owner.accept(claim, 0, 1), 1, number))
    stamp = owner.entry(*rows)
    assert stamp is not None
    after = Owner(producers_max=10_000, lssn=2)
    after.read(owner)
    assert after.entry() is not None
    assert len(owner.entries[0][0]) < 1.5 * MIB
    assert len(after.entries[0][0]) < 1.6 * MIB


def test_a_stamp_that_contradicts_itself_is_refused() -> None:
    """A gap between entries, a number of no producer, bytes that are none of ours."""
    owner = Owner()
    owner.write(owner.grant("p"), 0, 2)
    after = owner.successor().producers
    for run in (StampedRun(0, 3, 1, 0), StampedRun(0, 1, 1, 0), StampedRun(8, 0, 1, 0)):
        with pytest.raises(InvalidEntryError, match="records of producer"):
            after.restore(Stamp(0, None, (), (run,)), lssn=1, entry_id=1, written_ms=0)
    good = Stamp(7, (), (), (StampedRun(0, 3, 1, 0),)).encode()
    assert decode_stamp(memoryview(good)).snapshot == 7
    for cut in range(len(good) - 8):
        with pytest.raises(InvalidEntryError, match="stamp does not parse"):
            decode_stamp(memoryview(good)[:cut])
    with pytest.raises(InvalidEntryError, match="does not parse"):
        decode_stamp(memoryview(Stamp(0, None, (), (StampedRun(0, 3, 0, 0),)).encode()))


def test_a_claim_travels_as_json() -> None:
    """Clients hand back what they were given."""
    claim = Owner().grant("meter", 2**60)
    data = msgspec.json.encode(claim)
    assert msgspec.json.decode(data, type=Claim) == claim
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data.replace(b'"epoch":1', b'"epoch":0'), type=Claim)


class Client:
    """A program that has records 0, 1, 2, ... to write, and sends what was not acknowledged again.

    Its records are (producer, incarnation, number): so the log shows the writer of each.
    """

    def __init__(self, name: str, claim: Claim) -> None:
        self.name = name
        self.claim = claim
        self.acked = claim.base - 1
        self.sent = claim.base - 1


class World:
    """One log, owners one after the other, and clients of some producers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.log: list[tuple[str, int]] = []  # (producer, sequence) of what is in the log for good
        self.owner = self.segment = Owner()
        """The owner of the log, and the writer of its last segment."""
        self.writers: dict[tuple[str, int], Claim] = {}
        self.queue: list[tuple[Mark, int]] = []  # accepted, in no entry
        self.flying: list[tuple[list[tuple[Mark, int]], DLSN]] = []  # in entries, not durable
        self.clients: list[Client] = []
        self.tokens = 0

    def begin(self) -> None:
        """A program starts, perhaps again: what it wrote before is to be durable first."""
        name = self.random.choice("ab")
        self.tokens += 1
        claim = self.owner.grant(name, self.tokens)
        while self.queue or self.flying:
            self.step_log()
        self.clients.append(Client(name, claim))

    def send(self) -> None:
        """A client sends some records, of which it may have sent some before."""
        if not self.clients:
            return
        client = self.random.choice(self.clients)
        first = self.random.randint(client.acked + 1, max(client.acked, client.sent) + 1)
        count = self.random.randint(1, 3)
        producers = self.owner.producers
        try:
            producers.continue_with(client.claim, now_ms=0)
            found = producers.look_at(client.claim, first, count)
        except ProducerFencedError:
            self.clients.remove(client)
            return
        except SequenceGapError:
            client.sent = client.acked  # of what was sent, some was lost with an owner
            return
        client.sent = max(client.sent, first + count - 1)
        if isinstance(found, Fresh):
            mark, count = Mark(client.claim, first + found.known), count - found.known
            producers.accepted(mark, count, "", now_ms=0)
            self.queue.append((mark, count))
        elif isinstance(found, Durable):
            assert all(
                self.writers[client.name, first + number] == client.claim for number in range(count)
            ), "acknowledged is what another incarnation wrote"
            client.acked = max(client.acked, first + count - 1)

    def step_log(self) -> None:
        """An entry is made, or the oldest one becomes durable, and is acknowledged."""
        if self.queue and self.random.random() < 0.5:
            parts, self.queue = self.queue[:2], self.queue[2:]
            rows, slot = [], -1
            for mark, count in parts:
                slot += count
                rows.append(MarkedRows(mark, count, slot))
            self.owner.entry(*rows, size_bytes=self.random.choice([0, MIB]))
            entry_id = len(self.owner.entries) - 1
            self.flying.append((parts, DLSN(self.owner.lssn, entry_id, slot)))
        elif self.flying:
            parts, dlsn = self.flying.pop(0)
            for mark, count in parts:
                self.stored(mark, count)
                self.owner.producers.durable(mark, count, dlsn)
                for client in self.clients:
                    if client.claim == mark.claim and self.random.random() < 0.7:
                        client.acked = max(client.acked, mark.first + count - 1)

    def stored(self, mark: Mark, count: int) -> None:
        """Note what is in the log."""
        stored = [(mark.claim.name, mark.first + number) for number in range(count)]
        self.log += stored
        self.writers |= dict.fromkeys(stored, mark.claim)

    def crash(self) -> None:
        """The owner dies: of what is in flight some of the first entries are in the log."""
        survives = self.random.randint(0, len(self.flying))
        for parts, _ in self.flying[:survives]:
            for mark, count in parts:
                self.stored(mark, count)
        lost = len(self.flying) - survives
        del self.owner.entries[len(self.owner.entries) - lost :]
        self.queue, self.flying = [], []
        if self.owner.entries:
            self.segment = self.owner
        self.owner = self.segment.successor()


@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_nothing_is_doubled_lost_or_swapped(seed: int) -> None:
    """Whatever is sent again, to whichever owner, in whichever order."""
    world = World(seed)
    for _ in range(300):
        step = world.random.choices(
            [world.begin, world.send, world.step_log, world.crash], [1, 6, 6, 1]
        )[0]
        step()
        acked = [(each.name, number) for each in world.clients for number in range(each.acked + 1)]
        assert set(acked) <= set(world.log)
    for name in "ab":
        found = [sequence for producer, sequence in world.log if producer == name]
        assert found == list(range(len(found)))
