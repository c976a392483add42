"""Offsets of a log's records, and those that producers' batches got lately."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.log.reading.scan import LogSnapshot

BATCHES_KEPT = 5
"""A client has at most so many requests without an answer, and sends them again."""
PRODUCERS_MAX = 10_000


async def place_of(
    namespace: DirectNamespace, snapshot: LogSnapshot, wanted: DLSN | NotLessThan
) -> RecordPlace:
    """Return the record at a position, or the next one.  Raises: LedgerReadError, MetadataError."""
    (found,) = await namespace.find_places([(snapshot, wanted)])
    return found


async def bounds_of(namespace: DirectNamespace, snapshot: LogSnapshot) -> tuple[int, int]:
    """Return the offsets of the first record, and behind the last.  Raises: as `place_of`."""
    first = _first_of_segment(snapshot)
    is_asked = first is None and not snapshot.is_empty
    wanted = [snapshot.end, snapshot.first] if is_asked else [snapshot.end]
    last, *firsts = await namespace.find_places([(snapshot, each) for each in wanted])
    end = last.sequence_id
    if not any(each.extents for each in snapshot.segments):
        end = snapshot.next_sequence_id
    if snapshot.is_empty:
        return end, end
    return (firsts[0].sequence_id if first is None else first), end


def _first_of_segment(snapshot: LogSnapshot) -> int | None:
    """Return the offset of the first record, if it begins a segment: then no bookie is asked."""
    extents = ((segment.lssn, view) for segment in snapshot.segments for view in segment.extents)
    for lssn, view in extents:
        # An extent that was cut off in front does not say which record comes first in it now.
        begins = view.base_entry_id == 0 and snapshot.first == DLSN(lssn, 0, 0)
        return view.start_sequence_id if begins else None
    return None


class RecentOffsets:
    """The offsets of the last batches of each producer and log, for those that come again.

    A record that is durable keeps its offset: all of this holds for ever, under any owner of the
    log.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], deque[tuple[int, int, int]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, log_id: str, producer: int, batch: tuple[int, int], offset: int) -> None:
        """Note the offset of a batch, which is its first number and its count."""
        key = log_id, producer
        self._known.setdefault(key, deque(maxlen=BATCHES_KEPT)).append((*batch, offset))
        self._known.move_to_end(key)
        if len(self._known) > PRODUCERS_MAX:
            self._known.popitem(last=False)

    def find(self, log_id: str, producer: int, batch: tuple[int, int]) -> int | None:
        """Return the offset of a batch; None if it is not known any more."""
        for first, count, offset in reversed(self._known.get((log_id, producer), ())):
            if (first, count) == batch:
                return offset
        return None
