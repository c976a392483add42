"""Goal: every transition of the machine that forks a log, and what a fork begins with.

Method: exact effects over a tree of nodes; then seeded chance with lost answers, other forks, a
source that goes and sweeps.  After each the counts of ledgers are those of all extents.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace as changed
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from dlcore.base.config import LogSettings, QuorumConfig
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    LogExistsError,
    MetadataConnectionError,
    MetadataVersionError,
)
from dlcore.base.ids import DLSN
from dlcore.base.machines import CallFailed, Ended, Pause
from dlcore.log.metadata import forking
from dlcore.log.metadata.forking import (
    TRANSITIONS,
    Effect,
    Event,
    ForkCut,
    ForkRun,
    ForkState,
    Look,
    Looked,
    Signal,
    cut_of,
    removed_txid_of,
)
from dlcore.log.metadata.segment import ColdExtent, LogSegment, SegmentState
from dlcore.log.metadata.values import (
    Chunk,
    LogHead,
    LogKey,
    LogMetadata,
    LogState,
    OpenSegment,
    SegmentEnd,
    StagedLedger,
)
from dlcore.log.typed.schema import LogSchema
from dlcore.metadata.attempts import ATTEMPTS_MAX, Store
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.port import Versioned
from dlcore.metadata.stored import decode, encode
from tests.fixtures.log_states import final
from tests.fixtures.nodes import Nodes, refused

PATHS = NamespacePaths("/dlog")
LOG = LogMetadata(name="test", log_id="fork-1", created_ms=1, quorum=QuorumConfig())
OWN = PATHS.log_of(LOG.log_id)
AWAY = MetadataConnectionError("no answer")
CHANGED = MetadataVersionError("changed")
FIRST = (2, 1, 0)


def cold(ledger_id: int, **changes: Any) -> ColdExtent:
    """Return a cold extent of three entries with ten records."""
    return replace(ColdExtent(**asdict(final(ledger_id))), **changes)


def segment(lssn: int, *extents: Any, **changes: Any) -> LogSegment:
    """Return a completed segment."""
    made = LogSegment(
        lssn=lssn,
        state=SegmentState.COMPLETED,
        created_ms=5,
        completed_ms=6,
        start_sequence_id=100 * lssn,
        extents=extents,
    )
    return changed(made, **changes)


SEGMENTS = (
    segment(2, cold(1), cold(2, last_txid=7)),
    segment(
        3,
        cold(3, last_txid=8),
        cold(4, last_txid=9),
        cold(1, first_entry_id=3, last_entry_id=5, last_txid=9),
    ),
)


class Bench(Nodes):
    """A machine, validated after each event; ledgers that another log refers to once each."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        for ledger_id in (1, 2, 3, 4):
            self.put(PATHS.staged_ledger(ledger_id), self.registration(ledger_id, 1))
        for path in (PATHS.deleted_log("x"), PATHS.log("test") + "x", OWN.head + "x"):
            self.put(path, b"")
        self.put(PATHS.retained_log(LOG.log_id) + "x", b"")
        given: dict[str, Any] = {"settings": LogSettings(), "schema": None, "removed_txid": 3}
        self.machine = ForkRun(PATHS, LOG, SEGMENTS, first_active=FIRST, **(given | options))

    @staticmethod
    def registration(ledger_id: int, extents: int) -> bytes:
        """Return a registration."""
        return encode(
            StagedLedger(
                ledger_id=ledger_id,
                identity=":merging",
                owner="",
                created_ms=0,
                settled=True,
                extents=extents,
            )
        )

    def extents(self, ledger_id: int) -> int:
        """Return how many extents are counted."""
        path = PATHS.staged_ledger(ledger_id)
        return decode(StagedLedger, self.value(path), source="").extents

    def referred(self) -> Counter[int]:
        """Return how many extents of the fork refer to each ledger, by what is stored."""
        counts: Counter[int] = Counter()
        for lssn in (2, 3):
            node = self.read(OWN.segment(lssn))
            number = 0
            while (chunk := self.read(OWN.chunk(lssn, number))) is not None:
                extents = decode(Chunk, chunk.value, source="").extents
                counts.update(each.ledger_id for each in extents)
                number += 1
            if node is not None and node.value:
                tail = decode(SegmentEnd, node.value, source="").tail
                counts.update(each.ledger_id for each in tail)
        return counts

    def handle(self, event: Event) -> Effect:
        """Feed an event."""
        effect = self.machine.handle(event)
        self.machine.validate()
        return effect

    def look(self, effect: Effect) -> Effect:
        """Answer a look."""
        assert isinstance(effect, Look), effect
        return self.handle(Looked([self.read(path) for path in effect.paths]))

    def planned(self) -> Store:
        """Plan the first transaction, and return it."""
        store = self.look(self.handle(Signal.BEGIN))
        assert isinstance(store, Store)
        return store

    def run(self) -> list[LogHead]:
        """Run it to its end; return the heads after each transaction."""
        heads = []
        effect: Effect = self.handle(Signal.BEGIN)
        while isinstance(effect, Look):
            store = self.look(effect)
            assert isinstance(store, Store)
            assert self.store(store)
            heads.append(decode(LogHead, self.value(OWN.head), source=""))
            effect = self.handle(Signal.STORED)
        assert effect == Ended(True)
        return heads


HEAD = LogHead(
    max_lssn=3,
    max_txid=9,
    next_sequence_id=330,
    last_timestamp_ms=77,
    end=(3, 9),
    first_active=FIRST,
    first_lssn=2,
    removed_txid=3,
)


def test_a_small_fork_is_one_look_and_one_transaction() -> None:
    """The name, the head, segments and counts come together."""
    settings = LogSettings(retention_s=5)
    schema = LogSchema(versions=((),))
    bench = Bench(settings=settings, schema=schema)
    assert len(bench.machine._steps) == 1
    look = bench.handle(Signal.BEGIN)
    assert look == Look((OWN.head, PATHS.log("test"), *map(PATHS.staged_ledger, (1, 2, 3, 4))))
    bench = Bench(settings=settings, schema=schema)
    assert bench.run() == [HEAD]
    assert decode(LogMetadata, bench.value(PATHS.log("test")), source="") == LOG
    assert [bench.extents(each) for each in (1, 2, 3, 4)] == [3, 2, 2, 2]
    end = decode(SegmentEnd, bench.value(OWN.segment(3)), source="")
    assert (end.tail, end.start_sequence_id, end.chunk_count) == (SEGMENTS[1].extents, 300, 0)
    assert (end.created_ms, end.completed_ms) == (5, 6)
    assert decode(LogSchema, bench.value(OWN.schema), source="") == schema
    assert bench.read(OWN.settings) is not None
    assert bench.read(PATHS.retained_log(LOG.log_id)) is not None
    assert bench.read(PATHS.deleted_log(LOG.log_id)) is None


def test_a_large_fork_is_hidden_until_its_last_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its head is that of a deleted log with the segments so far, and it is listed as one."""
    monkeypatch.setattr(forking, "OPS_MAX", 1)
    monkeypatch.setattr(forking, "CHUNK_EXTENTS_MAX", 1)
    bench = Bench()
    assert len(bench.machine._steps) == 5
    assert bench.store(bench.planned())
    listed = PATHS.deleted_log(LOG.log_id)
    assert decode(LogMetadata, bench.value(listed), source="") == LOG
    assert bench.read(PATHS.log("test")) is None
    assert (bench.referred(), bench.extents(1), bench.extents(2)) == (Counter([1]), 2, 1)
    bench = Bench()
    *heads, last = bench.run()
    assert [head.deleted for head in heads] == [True] * 4
    assert [head.max_lssn for head in heads] == [2, 2, 3, 3]
    assert [head.segment is not None for head in heads] == [True, False, True, True]
    assert heads[-1].segment is not None
    assert (heads[-1].segment.chunk_count, heads[-1].segment.chunked.records) == (2, 20)
    assert last == HEAD
    assert bench.read(listed) is None
    chunk = decode(Chunk, bench.value(OWN.chunk(3, 1)), source="")
    assert (chunk.first_entry_id, chunk.first_sequence_id) == (3, 310)
    assert bench.referred() == Counter({1: 2, 2: 1, 3: 1, 4: 1})


@pytest.mark.parametrize("ops_max", [300, 1])
@pytest.mark.parametrize("is_applied", [True, False])
def test_a_lost_answer(is_applied: bool, ops_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head, or the name, shows whether the transaction was applied."""
    monkeypatch.setattr(forking, "OPS_MAX", ops_max)
    bench = Bench()
    store = bench.planned()
    if is_applied:
        assert bench.store(store)
    pause = bench.handle(CallFailed(AWAY))
    assert isinstance(pause, Pause)
    assert pause.error is AWAY
    effect = bench.look(bench.handle(Signal.PAUSE_OVER))
    if not is_applied:
        assert effect == store
    else:
        assert effect == Ended(True) if ops_max == 300 else isinstance(effect, Look)


def test_a_name_that_is_taken() -> None:
    """By another log; one with the fork's own id is the fork."""
    bench = Bench()
    bench.put(PATHS.log("test"), encode(replace(LOG, log_id="another")))
    assert isinstance(refused(bench.look(bench.handle(Signal.BEGIN))), LogExistsError)
    bench.machine = Bench().machine
    bench.put(PATHS.log("test"), encode(LOG))
    assert bench.look(bench.handle(Signal.BEGIN)) == Ended(True)


@pytest.mark.parametrize("value", [None, Bench.registration(4, 0)], ids=["gone", "given up"])
def test_a_ledger_that_the_source_gave_up(value: bytes | None) -> None:
    """The fork begins again, with what the source has then."""
    bench = Bench()
    look = bench.handle(Signal.BEGIN)
    assert isinstance(look, Look)
    nodes = [bench.read(path) for path in look.paths[:-1]]
    nodes.append(None if value is None else Versioned(value, 3))
    assert bench.handle(Looked(nodes)) == Ended(False)
    assert bench.machine.state is ForkState.OVERTAKEN


def test_an_unfinished_fork_that_was_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is another one, or gone."""
    monkeypatch.setattr(forking, "OPS_MAX", 1)
    bench = Bench()
    assert bench.store(bench.planned())
    look = bench.handle(Signal.STORED)
    bench.put(OWN.head, encode(LogHead(deleted=True)))
    assert bench.look(look) == Ended(False)


def test_a_refusal_of_the_store_ends_it() -> None:
    """And so do too many attempts."""
    bench = Bench()
    bench.handle(Signal.BEGIN)
    assert refused(bench.handle(CallFailed(AWAY))) is AWAY
    bench = Bench()
    bench.planned()
    closed = AlreadyClosedError("closed")
    assert refused(bench.handle(CallFailed(closed))) is closed
    bench = Bench()
    bench.planned()
    for _ in range(ATTEMPTS_MAX - 1):
        assert isinstance(bench.handle(CallFailed(CHANGED)), Pause)
        assert isinstance(bench.look(bench.handle(Signal.PAUSE_OVER)), Store)
    error = refused(bench.handle(CallFailed(CHANGED)))
    assert isinstance(error, MetadataConnectionError)
    assert "100 attempts to store" in str(error)


def test_chance_makes_every_transition_and_the_counts_are_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers are lost; registrations and the fork's own head change meanwhile."""
    made: set[tuple[ForkState, ForkState]] = set()
    for seed in range(400):
        rng = random.Random(seed)
        monkeypatch.setattr(forking, "OPS_MAX", rng.choice([1, 6, 300]))
        monkeypatch.setattr(forking, "CHUNK_EXTENTS_MAX", rng.choice([1, 2, 64]))
        made |= play(rng)
    expected = {
        (before, after) for before, afters in TRANSITIONS.causes.items() for after in afters
    }
    assert made == expected


def play(rng: random.Random) -> set[tuple[ForkState, ForkState]]:
    """Run one fork; return the transitions."""
    bench, made = Bench(), set[tuple[ForkState, ForkState]]()
    others = Counter({1: 1, 2: 1, 3: 1, 4: 1})
    effect: Effect | None = None
    while not isinstance(effect, Ended):
        before = bench.machine.state
        if rng.random() < 0.15:  # another log is forked, or truncated
            ledger_id = rng.randint(1, 4)
            others[ledger_id] = max(0, others[ledger_id] + rng.choice([1, 1, -1]))
            count = others[ledger_id] + bench.referred()[ledger_id]
            bench.put(PATHS.staged_ledger(ledger_id), Bench.registration(ledger_id, count))
        effect = bench.handle(Signal.BEGIN) if effect is None else answer(bench, effect, rng)
        made.add((before, bench.machine.state))
        referred = bench.referred()
        for ledger_id in (1, 2, 3, 4):
            assert bench.extents(ledger_id) == others[ledger_id] + referred[ledger_id]
    is_there = bench.read(PATHS.log("test")) is not None
    if effect.outcome is True:
        assert decode(LogHead, bench.value(OWN.head), source="") == HEAD
    elif effect.outcome is False:
        assert not is_there
    if is_there:  # perhaps with an answer that was lost
        assert bench.referred() == Counter({1: 2, 2: 1, 3: 1, 4: 1})
        assert bench.read(PATHS.deleted_log(LOG.log_id)) is None
    elif bench.referred():
        assert bench.read(PATHS.deleted_log(LOG.log_id)) is not None
    return made


def answer(bench: Bench, effect: Effect, rng: random.Random) -> Effect:
    """Answer an effect, well or badly."""
    fails = rng.random() < 0.15
    match effect:
        case Look():
            return bench.handle(CallFailed(AWAY)) if fails else bench.look(effect)
        case Store():
            is_applied = rng.random() < 0.6 and bench.store(effect)
            if is_applied and not fails:
                return bench.handle(Signal.STORED)
            is_closed = rng.random() < 0.1
            return bench.handle(CallFailed(AlreadyClosedError("closed") if is_closed else AWAY))
        case _:
            return bench.handle(Signal.PAUSE_OVER)


# The beginning of a fork


def state_of(*segments: LogSegment, **head: Any) -> LogState:
    """Return a log's state."""
    last = segments[-1]
    opened = None
    if last.state is SegmentState.IN_PROGRESS:
        opened = OpenSegment(created_ms=1, start_sequence_id=0)
    made = replace(LogHead(max_lssn=last.lssn, segment=opened, first_active=FIRST), **head)
    log = LogKey(name="clicks", log_id="id")
    return LogState(log=log, head=made, version=1, segments=segments)


def test_segments_that_are_cold_from_the_beginning_on() -> None:
    """Up to the first extent that is on bookies, and to a segment in progress."""
    assert cut_of(state_of(*SEGMENTS), None) == ForkCut(DLSN(4, 0, 0), SEGMENTS)
    mixed = segment(3, cold(3), final(4))
    cut = cut_of(state_of(SEGMENTS[0], mixed), None)
    assert cut == ForkCut(DLSN(3, 3, 0), (SEGMENTS[0], segment(3, cold(3))))
    opened = segment(4, cold(9), state=SegmentState.IN_PROGRESS)
    cut = cut_of(state_of(*SEGMENTS, opened), None)
    assert cut == ForkCut(DLSN(4, 3, 0), (*SEGMENTS, segment(4, cold(9))))
    assert cut_of(state_of(*SEGMENTS, segment(4, final(9))), DLSN(3, 0, 0)).segments == SEGMENTS[:1]


def test_a_cut_within_an_extent() -> None:
    """The whole extents, and the one that is split, with what it keeps."""
    cut = cut_of(state_of(*SEGMENTS), DLSN(3, 5, 0))
    assert cut.segments == (SEGMENTS[0], segment(3, SEGMENTS[1].extents[0]))
    assert (cut.split, cut.split_entries) == (SEGMENTS[1].extents[1], 2)
    split = cold(4, last_entry_id=1)
    assert cut.whole(split)[-1].extents == (SEGMENTS[1].extents[0], split)
    assert cut.whole(None) == cut.segments
    whole = cut_of(state_of(*SEGMENTS), DLSN(3, 9, 0))
    assert whole == ForkCut(DLSN(3, 9, 0), SEGMENTS)


@pytest.mark.parametrize(
    ("segments", "at", "expected"),
    [
        ([segment(2, final(1))], None, "its records from 2:1:0 on are not in objects yet"),
        ([segment(2, cold(1), final(2))], DLSN(2, 4, 0), "from 2:3:0 on are not in objects"),
        (SEGMENTS, DLSN(2, 4, 2), "within an entry: expected 2:4:0 or 2:5:0"),
        (SEGMENTS, DLSN(2, 1, 0), "no record is before 2:1:0, .* expected 2:2:0 … 4:0:0"),
        (SEGMENTS, DLSN(2, 7, 0), "segment 2 has 6 entries: expected 2:6:0 or 3:0:0"),
        (SEGMENTS, DLSN(4, 0, 1), "within an entry"),
        (SEGMENTS, DLSN(5, 0, 0), "expected 4:0:0 or less, or first: dlog log settings clicks"),
    ],
)
def test_positions_that_do_not_work(
    segments: list[LogSegment], at: DLSN | None, expected: str
) -> None:
    """The error names those that do, or what to do."""
    with pytest.raises(ConfigurationError, match=expected):
        cut_of(state_of(*segments), at)


def test_transaction_ids_that_are_left_out() -> None:
    """The highest one of segments that are truncated, or were removed before."""
    first = segment(1, cold(8, last_txid=2))
    empty = segment(1)
    assert removed_txid_of(state_of(*SEGMENTS)) == -1
    assert removed_txid_of(state_of(first, *SEGMENTS)) == 2
    assert removed_txid_of(state_of(empty, *SEGMENTS, removed_txid=1)) == 1
