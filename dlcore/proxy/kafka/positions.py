"""Positions of groups: named subscriptions of logs, sent and stored as offsets.

A subscription keeps the position of the next record that is read, and so does an offset that a
client commits.  A coordinator claims a subscription by its token before it tells a member where to
begin: what an earlier coordinator, or a member of it, stores after that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import AlreadyTruncatedError
from dlcore.base.records import NotLessThan, RecordField
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.subscriptions import SubscriptionHold
from dlcore.proxy.kafka.offsets import bounds_of, place_of

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.ids import DLSN
    from dlcore.log.metadata.values import Mark
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.proxy.reading.serving import ReadPath

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
