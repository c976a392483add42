"""Stored positions of subscribers that read through proxies.

These clients have no ZooKeeper sessions, so tokens identify them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from dlcore.flight import answers
from dlcore.flight.requests import SeenPosition
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.subscriptions import SubscriptionHold, list_subscriptions

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.flight.requests import ForgetRequest, MoveRequest, SubscriptionsRequest


class Subscriptions:
    """The stored positions, for the clients of one proxy."""

    def __init__(self, namespace: DirectNamespace) -> None:
        self._context = namespace.log_context

    async def show(self, request: SubscriptionsRequest) -> answers.Subscriptions:
        """Return the positions of a log by subscriber.  Raises: LogNotFoundError, MetadataError."""
        log = await self._key_of(request)
        found = await list_subscriptions(self._context, log, request.subscriber)
        return answers.Subscriptions(
            {
                subscriber: SeenPosition(str(seen.position), seen.mark)
                for subscriber, seen in found.items()
            }
        )

    async def _key_of(self, request: SubscriptionsRequest | MoveRequest | ForgetRequest) -> LogKey:
        """Return the log of a request; its id, if given, finds the log under a new name as well."""
        if request.log_id is None:
            return await self._context.logs.find(request.log)
        return LogKey(name=request.log, log_id=request.log_id)

    async def move(self, request: MoveRequest) -> answers.MovedSubscription:
        """Store a position by compare-and-set; return the new mark.

        Raises:
            SubscriptionMovedError: the stored state differs from the request's mark.
            OwnershipAcquireFailedError: a reader of `dlcore` holds the subscriber's lock.
            OverCapacityError: the log keeps as many positions as it may.
            LogNotFoundError, ConfigurationError, MetadataError.
        """
        position = DLSN.parse(request.dlsn)
        hold = SubscriptionHold(self._context, await self._key_of(request), request.subscriber)
        timeout_s = self._context.config.lock_timeout_s if request.waits else 0
        try:
            mark = await hold.move(
                position, token=request.token, mark=request.mark, timeout_s=timeout_s
            )
        finally:
            await hold.release()
        return answers.MovedSubscription(mark)

    async def forget(self, request: ForgetRequest) -> answers.NoAnswer:
        """Remove a subscription that has no reader.  Raises: as `move`."""
        hold = SubscriptionHold(self._context, await self._key_of(request), request.subscriber)
        try:
            await hold.forget(request.mark)
        finally:
            await hold.release()
        return answers.NoAnswer()
