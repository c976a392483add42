"""The cursor of a reader: from a position and the segment list to the next step.  No I/O.

Invariants: entries are delivered in order, each once, and none is left out.  A position moves past
a segment only when that segment is completed and all its entries were delivered; the next segment
must have the next number.  A reader that has delivered entries of a segment never finds it shorter.
"""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.errors import AlreadyTruncatedError, DLError, UnexpectedError
from dlcore.base.ids import DLSN
from dlcore.log.metadata.segment import Extent, LogSegment, SegmentState

if TYPE_CHECKING:
    from dlcore.log.metadata.values import LogState


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExtentStep:
    """An extent, its place in segment and log, and the first entry of it to read."""

    lssn: int
    extent: Extent
    first_entry_id: int
    last_entry_id: int | None
    """None: the extent is open, and all entries that come are read."""
    base_entry_id: int
    start_sequence_id: int
    segment_sequence_id: int


class ReadExtent(_ExtentStep):
    """Step: read entries of a final extent, from `first_entry_id` of its ledger up to the last."""

    __slots__ = ()


class FollowExtent(_ExtentStep):
    """Step: follow an open extent, from `first_entry_id` of its ledger on."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LearnSegments:
    """Step: read the metadata of the segments from that of the position on."""


@dataclass(frozen=True, slots=True)
class WaitForChange:
    """Step: there is nothing to read until the segment list changes."""


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """Step: everything up to the end of a sealed log, or up to the cursor's end, was read."""


Step: TypeAlias = ReadExtent | FollowExtent | LearnSegments | WaitForChange | EndOfStream


class TruncationRule(enum.Enum):
    """How to treat records that were truncated before they were read."""

    REFUSE = "an error"
    SKIP = "left out"
    IGNORE = "read, as long as they are stored"


class ReadCursor:
    """A reader's position, and the rules by which it moves.

    Records that are truncated before they were read are an `AlreadyTruncatedError`, left out, or
    read as long as their segment exists.  The last entry is the one that contains `end`, or the one
    before it.
    """

    def __init__(
        self,
        log: str,
        position: DLSN,
        *,
        truncated: TruncationRule,
        end: DLSN | None = None,
    ) -> None:
        self._log = log
        self._truncated = truncated
        self._end = end
        self._has_delivered = False  # in the segment of the position
        self._next_sequence_id: int | None = None  # known once an entry was delivered
        self.position = position

    def copy(self) -> ReadCursor:
        """Return an independent copy."""
        return copy.copy(self)

    def plan(self, state: LogState) -> Step:
        """Return the next step; moves the position over ends of segments and truncated records.

        Raises:
            AlreadyTruncatedError: the position was truncated away.
            UnexpectedError: the segment list contradicts what was read before.
        """
        if self._is_at_end():
            return EndOfStream()
        self._pass_truncated(state)
        while self.position.lssn <= state.head.max_lssn:
            if self._is_at_end():
                return EndOfStream()
            segment = state.segment(self.position.lssn)
            if state.known_lssn is not None and self.position.lssn > state.known_lssn:
                return LearnSegments()
            if segment is None:
                raise UnexpectedError(
                    f"log {self._log!r}: segment {self.position.lssn} is missing before "
                    f"{state.head.max_lssn}"
                )
            step = self._plan_in(segment)
            if step is not None:
                return step
            if segment.lssn == state.head.max_lssn:
                break
            self.position = DLSN(segment.lssn + 1, 0, 0)
            self._has_delivered = False
        return EndOfStream() if state.head.sealed else WaitForChange()

    def is_at(self, extent: Extent, state: LogState) -> bool:
        """Return whether the next step is to follow this extent; the position stays."""
        # An earlier step may still deliver entries below records that were truncated meanwhile.
        later = self.copy()
        try:
            step = later.plan(state)
        except DLError:
            return False  # the plan proper raises it
        return (
            isinstance(step, FollowExtent)
            and step.extent.ledger_id == extent.ledger_id
            and later.position == self.position
        )

    def _is_at_end(self) -> bool:
        return self._end is not None and self.position >= self._end

    def plan_after(self, step: ReadExtent, state: LogState) -> Step:
        """Return the step after `step`, once all of that was delivered; the position stays.

        Raises: as `plan`.
        """
        extent, later = step.extent, self.copy()
        later.position = DLSN(step.lssn, step.base_entry_id + extent.entry_count, 0)
        later._next_sequence_id = step.start_sequence_id + extent.record_count
        later._has_delivered = True
        return later.plan(state)

    def _pass_truncated(self, state: LogState) -> None:
        first = state.first_active
        # Truncation drops positions at once, but segments later: until then they can be read.
        if self._truncated is TruncationRule.IGNORE and state.segments:
            first = min(first, max(state.segments[0].start, self.position))
        if self.position >= first:
            return
        if self._truncated is TruncationRule.REFUSE and not self._has_read_up_to(first, state):
            raise truncated_away(self._log, f"position {self.position}", first)
        if not self._has_read_up_to(first, state):
            self._next_sequence_id = None  # records are left out, so the next number is unknown
        self.position = first
        self._has_delivered = False

    def _has_read_up_to(self, first: DLSN, state: LogState) -> bool:
        """Return whether every record below `first` was delivered, though the position is lower."""
        # The position may be at the end of a segment and `first` at the start of a later one, with
        # no record between.  Sequence ids have no gaps, so they decide.
        following = self._next_sequence_id
        if following is None or first.slot_id:
            return False
        if first.lssn > state.head.max_lssn or first == state.head.end_dlsn:
            return following == state.head.next_sequence_id
        segment = state.segment(first.lssn)
        found = None if segment is None else segment.find(first.entry_id)
        if segment is None or found is None:
            return False
        _, base, sequence_id = found
        return (base, sequence_id) == (first.entry_id, following)

    def _plan_in(self, segment: LogSegment) -> Step | None:
        """Return the step within a segment; None if all of it was read."""
        found = segment.find(self.position.entry_id)
        if found is not None:
            extent, base, sequence_id = found
            step = FollowExtent if extent.is_open else ReadExtent
            last, end = extent.last_entry_id, self._end
            if last is not None and end is not None and end.lssn == segment.lssn:
                # Whole entries are read: the one that contains `end` is cut by the caller.
                last_wanted = end.entry_id if end.slot_id else end.entry_id - 1
                last = min(last, extent.first_entry_id + last_wanted - base)
            return step(
                lssn=segment.lssn,
                extent=extent,
                first_entry_id=extent.first_entry_id + self.position.entry_id - base,
                last_entry_id=last,
                base_entry_id=base,
                start_sequence_id=sequence_id,
                segment_sequence_id=segment.start_sequence_id,
            )
        base = segment.closed_entry_count
        if self._has_delivered and self.position.entry_id > base:
            raise UnexpectedError(
                f"log {self._log!r}: segment {segment.lssn} has {base} entries, "
                f"but entry {self.position.entry_id - 1} of it was read"
            )
        return WaitForChange() if segment.state is SegmentState.IN_PROGRESS else None

    def skip(self, step: ReadExtent | FollowExtent) -> None:
        """Move past the next entry of `step`, which is skipped."""
        assert step.lssn == self.position.lssn
        self.position = DLSN(step.lssn, self.position.entry_id + 1, 0)
        self._next_sequence_id = None
        self._has_delivered = True

    def deliver(
        self,
        step: ReadExtent | FollowExtent,
        ledger_entry_id: int,
        *,
        records_before: int,
        record_count: int,
    ) -> tuple[int, int]:
        """Move past an entry of the ledger that was read for `step`.

        Returns: its entry id in the segment, and the sequence id of its first record.
        """
        entry_id = step.base_entry_id + ledger_entry_id - step.extent.first_entry_id
        # Both checks are on entries that bookies returned: a reader rather fails than skips one.
        if (step.lssn, entry_id) != (self.position.lssn, self.position.entry_id):
            raise UnexpectedError(
                f"log {self._log!r}: entry {entry_id} of segment {step.lssn} was read, "
                f"expected {self.position}"
            )
        sequence_id = step.start_sequence_id + records_before
        if self._next_sequence_id not in (None, sequence_id):
            raise UnexpectedError(
                f"log {self._log!r}: entry {step.lssn}:{entry_id} begins with sequence id "
                f"{sequence_id}, expected {self._next_sequence_id}"
            )
        self.position = DLSN(step.lssn, entry_id + 1, 0)
        self._next_sequence_id = sequence_id + record_count
        self._has_delivered = True
        return entry_id, sequence_id


def truncated_away(log: str, what: str, first: DLSN) -> AlreadyTruncatedError:
    """Return the error for a reader that would start below the first remaining record."""
    return AlreadyTruncatedError(
        f"log {log!r}: {what} was truncated away, the first one left is at {first}: name that one "
        "or a later one, or none to begin at the first one"
    )
