"""Bugs of tiering, of its sweeper, and of readers of objects, put back on purpose."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.log.cold import reading
from dlcore.log.cold.reading import ColdLedgers
from dlcore.ops.upkeep import (
    objects_made,
    strays,
    swap,
    tier_visits,
    tierer,
    worker as upkeep,
)
from dlcore.ops.upkeep.tiering import (
    Check,
    Close,
    ReadBack,
    Signal,
    TierRun,
    TierState,
    Write,
    Written,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.upkeep.tiering import Effect, Event


@contextlib.contextmanager
def objects_are_not_read_back() -> Iterator[None]:
    """A store has what was written to it: the next object is written at once."""
    handle = TierRun.handle

    def trusting(self: TierRun, event: Event) -> Effect:
        effect = handle(self, event)
        if isinstance(effect, Check):
            assert isinstance(event, Written)
            return handle(self, ReadBack(event.facts))
        return effect

    with patch.object(TierRun, "handle", trusting):
        yield


@contextlib.contextmanager
def extents_are_swapped_before_objects_are_named() -> Iterator[None]:
    """Readers meet a cold ledger that does not say yet where its entries are."""
    handle = TierRun.handle

    def early(self: TierRun, event: Event) -> Effect:
        effect = handle(self, event)
        if isinstance(effect, Close):
            return handle(self, Signal.CLOSED)
        return effect

    with patch.object(TierRun, "handle", early):
        yield


@contextlib.contextmanager
def the_first_object_has_to_do() -> Iterator[None]:
    """A run with several objects ends with the first one."""
    compare = TierRun._compare

    def brief(self: TierRun, facts: Any) -> Effect:
        effect = compare(self, facts)
        if isinstance(effect, Write) and not effect.again:
            self._become(TierState.READING_BACK)
            self._become(TierState.CLOSING)
            return Close(tuple(self._objects), self._extent())
        return effect

    with patch.object(TierRun, "_compare", brief):
        yield


@contextlib.contextmanager
def a_segment_is_looked_at_once() -> Iterator[None]:
    """A worker that finds a segment too young does not look at it when it is old."""
    look_at = tier_visits.look_at

    def once(head: Any, ends: Any, rule: Any, **more: Any) -> Any:
        look = look_at(head, ends, rule, **more)
        return look._replace(done=ends[-1][0] + 1) if ends and look.lssn is None else look

    with patch.object(tierer, "look_at", once):
        yield


@contextlib.contextmanager
def young_segments_go_too() -> Iterator[None]:
    """Completed objects go, however many readers they have."""
    look_at = tier_visits.look_at

    def eager(head: Any, ends: Any, rule: Any, **more: Any) -> Any:
        return look_at(head, ends, rule._replace(after_s=0.0), **more)

    with patch.object(tierer, "look_at", eager):
        yield


@contextlib.contextmanager
def footers_are_not_read_back() -> Iterator[None]:
    """It is enough that the rows of an object are right: readers begin with its end."""
    read = ColdLedgers._read_as_sent

    async def rows_alone(self: ColdLedgers, url: str, start: int, end: int, _: Any) -> Any:
        return await read(self, url, start, end, None)

    with patch.object(ColdLedgers, "_read_as_sent", rows_alone):
        yield


@contextlib.contextmanager
def sequence_ids_are_counted_within_the_segment() -> Iterator[None]:
    """A reader of objects by other means than dlog finds other numbers than readers of the log."""
    start_of = tierer._start_of

    def first(stored: Any, run: Any) -> Any:
        start = start_of(stored, run)
        return start._replace(sequence_id=start.sequence_id - stored.end.start_sequence_id)

    with patch.object(tierer, "_start_of", first):
        yield


@contextlib.contextmanager
def transaction_ids_that_commits_gave_stay_behind() -> Iterator[None]:
    """Rows of an object have the transaction ids that they were staged with."""
    with patch.object(objects_made, "with_txid", lambda batch, _: batch):
        yield


@contextlib.contextmanager
def objects_that_are_being_written_are_stray() -> Iterator[None]:
    """No ledger names them yet, so the sweeper deletes them before one does."""
    is_stray = strays._is_stray

    def strict(url: str, token: str, path: str, node: Any) -> bool:
        if node is None or is_stray(url, token, path, node):
            return True
        return url.rpartition("/")[2].encode() not in node.value

    with patch.object(strays, "_is_stray", strict):
        yield


@contextlib.contextmanager
def objects_of_other_attempts_are_kept() -> Iterator[None]:
    """Objects that a ledger might have named, and does not, stay for ever."""
    is_stray = strays._is_stray

    def lenient(url: str, token: str, path: str, node: Any) -> bool:
        return node is None and is_stray(url, token, path, node)

    with patch.object(strays, "_is_stray", lenient):
        yield


@contextlib.contextmanager
def strays_are_not_looked_for() -> Iterator[None]:
    """Objects of dead workers and of truncated segments stay for ever."""

    async def none(*_: Any, **__: Any) -> int:
        return 0

    with patch.object(upkeep, "delete_strays", none):
        yield


@contextlib.contextmanager
def a_truncation_during_a_tiering_is_not_noticed() -> Iterator[None]:
    """A swap puts extents back into a segment that was merged, tiered or truncated meanwhile."""
    is_there = swap.is_there

    def careless(at: Any, stored: Any, *, merges: int) -> bool:
        return is_there(at, stored, merges=at.head.merges)

    with patch.object(swap, "is_there", careless):
        yield


@contextlib.contextmanager
def later_objects_are_read_from_the_start_of_the_ledger() -> Iterator[None]:
    """A reader gives the entries of a second object the numbers of the first one's."""
    frames = reading._frames

    def unmoved(ledger: Any, at: Any, *about: Any) -> Any:
        first = replace(at.stored, first_entry_id=0, records_before=0)
        return frames(ledger, at._replace(stored=first), *about)

    with patch.object(reading, "_frames", unmoved):
        yield


MUTANTS = (
    a_segment_is_looked_at_once,
    a_truncation_during_a_tiering_is_not_noticed,
    extents_are_swapped_before_objects_are_named,
    footers_are_not_read_back,
    later_objects_are_read_from_the_start_of_the_ledger,
    objects_are_not_read_back,
    objects_of_other_attempts_are_kept,
    objects_that_are_being_written_are_stray,
    sequence_ids_are_counted_within_the_segment,
    strays_are_not_looked_for,
    the_first_object_has_to_do,
    transaction_ids_that_commits_gave_stay_behind,
    young_segments_go_too,
)
