"""Planned changes of a log's metadata: exact operations, and a plain list as second implementation.

Goal: whatever is done to a log, its head, segments and chunks say the same as a list of all its
extents, and what a change writes does not depend on what is there.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    EndOfStreamError,
    LogRenamedError,
    TransactionIdOutOfOrderError,
    UnexpectedError,
)
from dlcore.base.ids import DLSN, TXID_MAX
from dlcore.log.metadata.changes import (
    Piece,
    SegmentLimits,
    plan_append,
    plan_complete,
    plan_create,
    plan_delete,
    plan_pause,
    plan_remove,
    plan_rename,
    plan_settings,
    plan_start,
    plan_truncate,
)
from dlcore.log.metadata.segment import Extent, LogSegment, SegmentState
from dlcore.log.metadata.values import (
    CHUNK_EXTENTS_MAX,
    TAIL_EXTENTS_MAX,
    LogHead,
    LogMetadata,
    StoredSettings,
    Totals,
    VersionedHead,
)
from dlcore.metadata.port import Create, Delete, Op, Put, Versioned
from dlcore.metadata.stored import decode, encode
from tests.fixtures.lengths import sample
from tests.fixtures.log_states import (
    LOG,
    NAMESPACE,
    PATHS,
    Tree,
    final,
    front_pieces,
    removable,
    staged,
    written,
)

if TYPE_CHECKING:
    from dlcore.log.metadata.changes import Change
    from dlcore.log.metadata.segment import StagedExtent

LIMITS = SegmentLimits(size_bytes_max=10_000, age_max_ms=1000)
NO_LIMITS = SegmentLimits(size_bytes_max=10**15, age_max_ms=10**15)


def kinds_of(change: Change) -> list[tuple[type[Op], str]]:
    """Return kind and path of each operation."""
    return [(type(op), op.path) for op in change.ops]


def append(tree: Tree, *extents: StagedExtent, now_ms: int = 3) -> tuple[DLSN, DLSN]:
    """Append extents; return the range of their positions."""
    change, first, end = plan_append(PATHS, tree.at, extents, now_ms=now_ms, limits=LIMITS)
    tree.apply(change)
    return first, end


def remove(tree: Tree) -> Counter[int]:
    """Remove all that can go; return how many extents of each ledger were."""
    pieces = removable(tree)
    tree.apply(plan_remove(PATHS, tree.at, pieces, ()))
    return Counter(extent.ledger_id for piece in pieces for extent in piece.extents)


def test_creation() -> None:
    """The name's node, and the head."""
    ops = plan_create(NAMESPACE, LOG, LogSettings())
    assert [(type(op), op.path) for op in ops] == [
        (Create, NAMESPACE.log("clicks")),
        (Create, PATHS.head),
    ]


def test_settings_have_a_node_only_while_there_are_some() -> None:
    """It is made with the log or later, replaced by version, and goes with the last of them."""
    small, large = LogSettings(entry_bytes=100), LogSettings(entry_bytes=1000)
    *_, op = plan_create(NAMESPACE, LOG, small)
    assert isinstance(op, Create)
    assert plan_settings(NAMESPACE, LOG, None, small) == (op,)
    assert decode(StoredSettings, op.value, source=op.path).settings == small
    assert plan_settings(NAMESPACE, LOG, None, LogSettings()) == ()
    node = Versioned(op.value, 7)
    value = encode(StoredSettings(settings=large))
    assert plan_settings(NAMESPACE, LOG, node, large) == (Put(PATHS.settings, value, 7),)
    assert plan_settings(NAMESPACE, LOG, node, LogSettings()) == (Delete(PATHS.settings, 7),)


def test_the_first_segment() -> None:
    """Its number is 1, its sequence ids begin with 0; one write says so."""
    change = plan_start(PATHS, Tree().at, ledger_id=7, now_ms=2)
    assert kinds_of(change) == [(Put, PATHS.head)]
    (put,) = change.ops
    assert isinstance(put, Put)
    assert put.version == 0
    (segment,) = Tree().apply(change).state.segments
    assert (segment.lssn, segment.state) == (1, SegmentState.IN_PROGRESS)
    assert (segment.start_sequence_id, segment.created_ms) == (0, 2)
    assert segment.has_open_extent


def test_rolling_is_one_change() -> None:
    """The old segment's node is written once, when it is completed."""
    tree = Tree().apply(plan_start(PATHS, Tree().at, ledger_id=7, now_ms=2))
    change = plan_start(PATHS, tree.at, ledger_id=8, now_ms=9, closing=final(7))
    assert kinds_of(change) == [(Create, PATHS.segment(1)), (Put, PATHS.head)]
    first, second = tree.apply(change).state.segments
    assert first.state is SegmentState.COMPLETED
    assert (first.completed_ms, first.closed_record_count) == (9, 10)
    assert second.start_sequence_id == 10
    assert tree.at.head.max_txid == 5
    assert tree.at.head.last_timestamp_ms == 77


def test_a_segment_without_entries_is_forgotten() -> None:
    """Its number is used again, and it leaves no node."""
    tree = written(7)
    tree.apply(plan_start(PATHS, tree.at, ledger_id=8, now_ms=2))
    change = plan_complete(PATHS, tree.at, now_ms=3, closing=None, empty_ledger_id=8)
    assert kinds_of(change) == [(Put, PATHS.head)]
    tree.apply(change)
    assert tree.at.head.max_lssn == 1
    assert tree.at.head.end_dlsn == DLSN(1, 3, 0)
    tree.apply(plan_start(PATHS, tree.at, ledger_id=9, now_ms=4))
    assert [s.lssn for s in tree.state.segments] == [1, 2]


def test_the_sequence_id_outlives_all_segments() -> None:
    """Also where everything is truncated, removed, and a segment without entries came after."""
    tree = written(7)
    change = plan_truncate(PATHS, tree.at, DLSN(1, 3, 0))
    assert change is not None
    tree.apply(change)
    assert remove(tree) == {7: 1}
    tree.apply(plan_start(PATHS, tree.at, ledger_id=8, now_ms=2))
    tree.apply(plan_complete(PATHS, tree.at, now_ms=3, closing=None, empty_ledger_id=8))
    assert tree.state.segments == ()
    assert list(tree.nodes) == [PATHS.head]
    tree.apply(plan_start(PATHS, tree.at, ledger_id=9, now_ms=4))
    assert (tree.at.head.max_lssn, tree.at.head.next_sequence_id) == (2, 10)


def test_an_open_extent_is_not_forgotten() -> None:
    """The client that completes its segment must say what became of it."""
    tree = written(7)
    tree.apply(plan_start(PATHS, tree.at, ledger_id=8, now_ms=2))
    with pytest.raises(UnexpectedError, match="ledger 8"):
        plan_complete(PATHS, tree.at, now_ms=3, closing=None, empty_ledger_id=7)


def test_a_sealed_log_takes_nothing_more() -> None:
    """Neither segments nor extents."""
    tree = Tree().apply(plan_start(PATHS, Tree().at, ledger_id=7, now_ms=2))
    tree.apply(plan_complete(PATHS, tree.at, now_ms=3, closing=final(7), seal=True))
    assert tree.at.head.sealed
    with pytest.raises(EndOfStreamError, match="clicks"):
        plan_start(PATHS, tree.at, ledger_id=8, now_ms=4)
    with pytest.raises(EndOfStreamError, match="clicks"):
        append(tree, staged(9))


def test_staged_extents_share_a_segment_until_it_is_full() -> None:
    """By size here; each extent follows the one before it."""
    tree = written(7)
    positions = append(tree, staged(8), staged(9, size=10_000), staged(8), now_ms=100)
    assert positions == (DLSN(2, 0, 0), DLSN(3, 2, 0))
    _, second, third = tree.state.segments
    assert second.state is SegmentState.COMPLETED
    assert [extent.ledger_id for extent in second.extents] == [8, 9]
    assert second.start_sequence_id == 10
    assert (third.state, third.start_sequence_id) == (SegmentState.IN_PROGRESS, 18)
    assert append(tree, staged(8), now_ms=200) == (DLSN(3, 2, 0), DLSN(3, 4, 0))
    assert len(tree.state.segments) == 3
    assert append(tree, staged(8), now_ms=1100)[0] == DLSN(4, 0, 0)
    assert tree.state.segments[2].state is SegmentState.COMPLETED


def test_a_writer_that_pauses_goes_on_in_its_segment() -> None:
    """Behind the extents of others, unless the segment is full; their sums are the segment's."""
    tree = Tree().apply(plan_start(PATHS, Tree().at, ledger_id=7, now_ms=2, limits=LIMITS))
    change = plan_pause(PATHS, tree.at, closing=replace(final(7), stamped=True))
    assert kinds_of(change) == [(Put, PATHS.head)]
    tree.apply(change)
    head = tree.at.head
    assert (head.open_extent, head.producers_lssn, head.producers_entries) == (None, 1, 3)
    assert append(tree, staged(8), now_ms=100) == (DLSN(1, 3, 0), DLSN(1, 5, 0))
    tree.apply(plan_start(PATHS, tree.at, ledger_id=9, now_ms=200, limits=LIMITS))
    (segment,) = tree.state.segments
    assert [extent.ledger_id for extent in segment.extents] == [7, 8, 9]
    tree.apply(plan_pause(PATHS, tree.at, closing=final(9)))
    assert tree.at.head.producers_entries == 3
    tree.apply(plan_start(PATHS, tree.at, ledger_id=10, now_ms=1002, limits=LIMITS))
    first, second = tree.state.segments
    assert (first.state, first.closed_record_count) == (SegmentState.COMPLETED, 24)
    assert [extent.ledger_id for extent in second.extents] == [10]


def test_the_writes_of_an_append_do_not_grow() -> None:
    """The head always, and with every few extents a chunk; bytes as after a handful of extents."""
    tree = Tree()
    sizes: list[int] = []
    for number in range(1000):
        change, _, _ = plan_append(
            PATHS, tree.at, [staged(number // 100)], now_ms=number, limits=NO_LIMITS
        )
        assert len(change.ops) <= 3
        tree.apply(change)
        sizes.append(sum(len(op.value) for op in change.ops if isinstance(op, Create | Put)))
    assert max(sizes[500:]) <= 1.2 * max(sizes[:50])
    assert sum(sizes) / len(sizes) <= 300
    (segment,) = tree.state.segments
    assert len(segment.extents) == 1000


def test_an_append_that_replaces_is_one_change_of_the_head() -> None:
    """One write adds its extents and removes the old ones, also within a segment."""
    tree = Tree()
    append(tree, staged(8), staged(9))
    change, first, end = plan_append(
        PATHS, tree.at, [staged(10)], now_ms=3, limits=NO_LIMITS, replaces=True
    )
    assert kinds_of(change) == [(Put, PATHS.head)]
    tree.apply(change)
    assert tree.at.head.first_active_dlsn == first
    assert tree.at.head.end_dlsn == end
    assert first < end


def test_chunks_of_an_append_of_many_extents() -> None:
    """None of them is larger than it may be; the tail is emptied."""
    tree = Tree()
    extents = [staged(8)] * (2 * CHUNK_EXTENTS_MAX + TAIL_EXTENTS_MAX)
    change, _, end = plan_append(PATHS, tree.at, extents, now_ms=1, limits=NO_LIMITS)
    assert kinds_of(change) == [
        (Create, PATHS.segment(1)),
        *((Create, PATHS.chunk(1, number)) for number in range(3)),
        (Put, PATHS.head),
    ]
    tree.apply(change)
    assert end == DLSN(1, 2 * len(extents), 0)
    assert tree.at.head.segment is not None
    assert tree.at.head.segment.tail == ()
    assert len(tree.state.segments[0].extents) == len(extents)


def test_transaction_ids_of_staged_extents() -> None:
    """Own ones must follow the log's; missing ones are the time, but never lower than the log's."""
    tree = written(7)  # its highest is 5
    append(tree, staged(8, txids=(5, 9)), staged(9))
    own, assigned = tree.state.segments[-1].extents
    assert (own.first_txid, own.last_txid, own.txid_assigned) == (5, 9, False)
    assert (assigned.first_txid, assigned.last_txid, assigned.txid_assigned) == (9, 9, True)
    assert tree.at.head.max_txid == 9
    later = written(7)
    append(later, staged(9), now_ms=1000)
    assert later.at.head.max_txid == 1000
    with pytest.raises(TransactionIdOutOfOrderError, match="id 4, lower than 5"):
        append(written(7), staged(8, txids=(4, 9)))
    with pytest.raises(TransactionIdOutOfOrderError, match="id 8, lower than 9"):
        append(written(7), staged(8, txids=(6, 9)), staged(9, txids=(8, 8)))


def test_the_highest_transaction_id_can_be_assigned_after() -> None:
    """Nothing overflows."""
    tree = Tree()
    append(tree, staged(8, txids=(1, TXID_MAX)))
    append(tree, staged(9), now_ms=5)
    assert tree.at.head.max_txid == TXID_MAX


def test_timestamps_of_staged_extents_have_a_floor() -> None:
    """They were staged at 50, but the log has 77 already."""
    tree = written(7)
    append(tree, staged(8))
    extent = tree.state.segments[-1].extents[0]
    assert (extent.timestamp_floor_ms, extent.last_timestamp_ms) == (77, 77)


@pytest.mark.parametrize(
    ("dlsn", "left", "first"),
    [
        (DLSN(1, 0, 1), [1, 2, 3], DLSN(1, 0, 1)),
        (DLSN(2, 0, 0), [2, 3], DLSN(2, 0, 0)),
        (DLSN(2, 1, 5), [2, 3], DLSN(2, 1, 5)),
        (DLSN(2, 3, 0), [3], DLSN(3, 0, 0)),
        (DLSN(3, 0, 0), [3], DLSN(3, 0, 0)),
        (DLSN(3, 3, 0), [], DLSN(4, 0, 0)),
    ],
)
def test_truncation(dlsn: DLSN, left: list[int], first: DLSN) -> None:
    """One write of the head; what is wholly below goes, and then the head says what is left."""
    tree = written(7, 8, 9)
    change = plan_truncate(PATHS, tree.at, dlsn)
    assert change is not None
    assert kinds_of(change) == [(Put, PATHS.head)]
    tree.apply(change)
    assert plan_truncate(PATHS, tree.at, dlsn) is None
    if removable(tree):
        remove(tree)
    assert removable(tree) == []
    assert tree.at.head.first_active_dlsn == first
    assert [segment.lssn for segment in tree.state.segments] == left
    assert {path for path in tree.nodes if path != PATHS.head} == set(map(PATHS.segment, left))


def test_truncation_inside_the_segment_that_is_written() -> None:
    """It stays when the segment is completed."""
    tree = written(7)
    tree.apply(plan_start(PATHS, tree.at, ledger_id=8, now_ms=2))
    change = plan_truncate(PATHS, tree.at, DLSN(2, 4, 2))
    assert change is not None
    tree.apply(change)
    assert remove(tree) == {7: 1}
    tree.apply(plan_start(PATHS, tree.at, ledger_id=9, now_ms=5, closing=final(8, entries=9)))
    assert tree.at.head.first_active_dlsn == DLSN(2, 4, 2)
    assert removable(tree) == []


def test_deletion() -> None:
    """The name is free at once; the head says that the log is deleted, and goes last."""
    tree = written(7, 8)
    ops = plan_delete(NAMESPACE, LOG, tree.at)
    assert [(type(op), op.path) for op in ops] == [
        (Put, PATHS.head),
        (Delete, PATHS.lock),
        (Delete, NAMESPACE.log("clicks")),
        (Create, NAMESPACE.deleted_log("id")),
    ]
    (put,) = [op for op in ops if isinstance(op, Put)]
    tree.nodes[PATHS.head] = put.value
    head = decode(LogHead, put.value, source="")
    assert head.deleted
    tree.at = VersionedHead(log=LOG, head=head, version=tree.at.version + 1)
    assert remove(tree) == {7: 1, 8: 1}
    assert list(tree.nodes) == [PATHS.head]


def test_renaming() -> None:
    """Only the name's node moves; the head has the name for clients with an older one."""
    tree = written(7)
    renamed, ops = plan_rename(NAMESPACE, LOG, tree.at, "visits")
    assert renamed == replace(LOG, name="visits")
    put, delete, create = ops
    assert isinstance(put, Put)
    assert isinstance(create, Create)
    assert (put.path, put.version) == (PATHS.head, tree.at.version)
    assert decode(LogHead, put.value, source="") == replace(tree.at.head, name="visits")
    assert delete == Delete(NAMESPACE.log("clicks"))
    assert create.path == NAMESPACE.log("visits")
    assert decode(LogMetadata, create.value, source="") == renamed
    head = decode(LogHead, put.value, source="")
    after = VersionedHead(log=LOG, head=head, version=tree.at.version + 1)
    for plan in (
        lambda: plan_rename(NAMESPACE, LOG, after, "late"),
        lambda: plan_delete(NAMESPACE, LOG, after),
    ):
        with pytest.raises(LogRenamedError, match="'clicks' is called 'visits' now"):
            plan()
    assert plan_delete(NAMESPACE, renamed, after)[2] == Delete(NAMESPACE.log("visits"))


class World:
    """A log, and the same as a plain list of segments, each a list of all its extents."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.limits = SegmentLimits(size_bytes_max=rng.choice([500, 10_000]), age_max_ms=10**9)
        self.tree = Tree()
        self.segments: dict[int, list[Extent]] = {}
        self.first_active = (1, 0, 0)
        self.released: Counter[int] = Counter()
        self.step = 0

    def append(self) -> None:
        """Append some staged extents."""
        self.close()
        extents = [staged(self.step)] * self.rng.choice([1, 1, 2, 9, 70])
        known = {lssn: len(found) for lssn, found in self.segments.items()}
        change, first, end = plan_append(
            PATHS, self.tree.at, extents, now_ms=self.step, limits=self.limits
        )
        self.tree.apply(change)
        added = 0
        for segment in self.tree.state.segments:
            start = known.get(segment.lssn, 0) - self.gone(segment)
            new = segment.extents[start:] if segment.lssn >= first.lssn else ()
            self.segments.setdefault(segment.lssn, []).extend(new)
            assert {extent.ledger_id for extent in new} <= {self.step}
            added += len(new)
        assert added == len(extents)
        last = max(self.segments)
        assert end == DLSN(last, sum(e.entry_count for e in self.segments[last]), 0)

    def gone(self, segment: LogSegment) -> int:
        """Return how many extents were removed at the front of a segment."""
        count, left = 0, Totals(entries=segment.removed_entries, records=segment.removed_records)
        while left.entries > 0:
            left = left.minus([self.segments[segment.lssn][count]])
            count += 1
        assert (left.entries, left.records) == (0, 0)
        assert (segment.lssn, segment.removed_entries, 0) <= max(
            self.first_active, (segment.lssn, 0, 0)
        )
        return count

    def close(self) -> None:
        """Complete the segment of a writer, which may have written nothing, or only its extent."""
        extent = self.tree.at.head.open_extent
        if extent is None:
            return
        head = self.tree.at.head
        entries = self.rng.randrange(3)
        closing = final(extent.ledger_id, entries=entries, txid=head.max_txid + 1)
        self.tree.apply(
            plan_pause(PATHS, self.tree.at, closing=closing)
            if entries and self.rng.random() < 0.5
            else plan_complete(
                PATHS,
                self.tree.at,
                now_ms=self.step,
                closing=closing if entries else None,
                empty_ledger_id=extent.ledger_id,
            )
        )
        if entries:
            self.segments.setdefault(head.max_lssn, []).append(closing)

    def start(self) -> None:
        """Start a writer's segment, or its next extent in the one in progress."""
        self.close()
        ledger_id, limits = 10_000 + self.step, self.rng.choice([None, self.limits])
        self.tree.apply(
            plan_start(PATHS, self.tree.at, ledger_id=ledger_id, now_ms=self.step, limits=limits)
        )

    def truncate(self) -> None:
        """Truncate anywhere."""
        if not self.segments:
            return
        lssn = self.rng.choice(list(self.segments))
        entries = sum(extent.entry_count for extent in self.segments[lssn])
        dlsn = DLSN(lssn, self.rng.randrange(entries + 1), 0)
        change = plan_truncate(PATHS, self.tree.at, dlsn)
        if change is not None:
            self.tree.apply(change)
        self.first_active = max(self.first_active, (dlsn.lssn, dlsn.entry_id, 0))

    def remove(self) -> bool:
        """Remove some of what can go; return whether there was any."""
        pieces = removable(self.tree) or front_pieces(self.tree)
        some = pieces[: self.rng.randrange(len(pieces) + 1)]
        self.tree.apply(plan_remove(PATHS, self.tree.at, some, ()))
        self.released.update(extent.ledger_id for piece in some for extent in piece.extents)
        return bool(pieces)

    def check(self) -> None:
        """Compare both."""
        found = {segment.lssn: segment for segment in self.tree.state.segments}
        for lssn, extents in self.segments.items():
            entries = sum(e.entry_count for e in extents)
            if (lssn, entries, 0) > self.first_active:
                assert list(found[lssn].closed_extents) == extents[self.gone(found[lssn]) :]
                assert found[lssn].closed_entry_count == entries
                assert found[lssn].closed_record_count == sum(e.record_count for e in extents)
        every = [extent for extents in self.segments.values() for extent in extents]
        head = self.tree.at.head
        assert head.next_sequence_id == sum(extent.record_count for extent in every)
        assert head.last_timestamp_ms == max((e.last_timestamp_ms for e in every), default=0)
        assert head.max_txid == max((e.last_txid for e in every), default=-1)


@pytest.mark.parametrize("seed", sample(range(60), 15))
def test_random_changes(seed: int) -> None:
    """Whatever is done, in whatever pieces it is removed, both say the same."""
    world = World(random.Random(seed))
    actions = [world.append, world.append, world.start, world.close, world.truncate, world.remove]
    for step in range(200):
        world.step = step
        world.rng.choice(actions)()
        world.check()
    while world.remove():
        world.check()
    left = {segment.lssn: world.gone(segment) for segment in world.tree.state.segments}
    gone = [e.ledger_id for n, each in world.segments.items() for e in each[: left.get(n)]]
    assert world.released == Counter(gone)


def test_a_deleted_log_goes_with_its_open_segment() -> None:
    """Which has no node as long as it has no chunk: only the head is written, and forgets it."""
    tree = written(7)
    tree.apply(plan_start(PATHS, tree.at, ledger_id=8, now_ms=4))
    *ops, put = plan_delete(NAMESPACE, LOG, tree.at)[:1]
    assert not ops
    assert isinstance(put, Put)
    head = decode(LogHead, put.value, source="")
    at = VersionedHead(log=LOG, head=head, version=tree.at.version + 1)
    extents = (tree.state.segments[-1].extents,)
    pieces = [
        Piece(lssn=1, chunk=None, extents=(final(7),)),
        Piece(lssn=2, chunk=None, extents=extents[0], has_node=False),
    ]
    change = plan_remove(PATHS, at, pieces, [Delete("/released")])
    assert kinds_of(change) == [
        (Delete, PATHS.segment(1)),
        (Delete, "/released"),
        (Put, PATHS.head),
    ]
    after = change.after.head
    assert (after.first_lssn, after.first_chunk, after.segment) == (3, 0, None)
    assert after.first_active == (3, 0, 0)
