"""Offsets of a log's records, and positions of groups: subscriptions, sent and stored as offsets.

A subscription keeps the position of the next record that is read, and so does an offset that a
client commits.  A coordinator claims a subscription by its token before it tells a member where to
begin: what an earlier coordinator, or a member of it, stores after that is refused.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from dlcore.base.errors import AlreadyTruncatedError
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.subscriptions import SubscriptionHold

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.records import RecordPlace
    from dlcore.log.metadata.values import Mark
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.proxy.reading.serving import ReadPath


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


NO_OFFSET = -1


class Positions:
    """The stored positions of groups, for one proxy."""

    def __init__(self, namespace: DirectNamespace, reads: ReadPath) -> None:
        self._namespace = namespace
        self._reads = reads

    async def find(self, group: str, name: str, token: str | None) -> tuple[int, Mark | None]:
        """Return the offset that a group has stored, `NO_OFFSET` if none, and its mark.

        With a token the subscription is claimed.

        Raises:
            OwnershipAcquireFailedError: a reader of dlog holds the subscription.
            SubscriptionMovedError: another client has moved it at this moment.
            LogNotFoundError, LedgerReadError, MetadataError.
        """
        log, snapshot = await self._reads.opened(name)
        hold = self._hold(log, group)
        try:
            seen = await hold.look()
            if seen is None:
                return NO_OFFSET, None
            mark = seen.mark
            if token not in (None, mark.token):
                mark = await hold.move(seen.position, token=token or "", mark=mark, timeout_s=0)
        finally:
            await hold.release()
        # The stored position may be truncated by now.
        at = max(seen.position, snapshot.first)
        return (await place_of(self._namespace, snapshot, at)).sequence_id, mark

    async def store(
        self, group: str, name: str, offset: int, *, token: str, mark: Mark | None
    ) -> Mark:
        """Store an offset, if the subscription has this mark (None: if there is none).

        Raises:
            AlreadyTruncatedError: no record has this offset, nor will the next one have it.
            SubscriptionMovedError: it has another mark.
            OverCapacityError: the log keeps as many positions as it may; else as `find`.
        """
        log, snapshot = await self._reads.opened(name)
        position = await self._position_of(name, snapshot, offset)
        hold = self._hold(log, group)
        try:
            return await hold.move(position, token=token, mark=mark, timeout_s=0)
        finally:
            await hold.release()

    def _hold(self, log: DirectLog, group: str) -> SubscriptionHold:
        key = LogKey(name=log.name, log_id=log.log_id)
        return SubscriptionHold(self._namespace.log_context, key, group)

    async def _position_of(self, name: str, snapshot: LogSnapshot, offset: int) -> DLSN:
        _, end = await bounds_of(self._namespace, snapshot)
        if not 0 <= offset <= end:
            raise AlreadyTruncatedError(f"log {name!r}: offset {offset}: expected 0 to {end}")
        if offset == end:
            return snapshot.end
        wanted = NotLessThan(RecordField.SEQUENCE_ID, offset)
        return (await place_of(self._namespace, snapshot, wanted)).dlsn
