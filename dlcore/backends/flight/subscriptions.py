"""The stored position of a subscriber, held by a client of proxies.

Such a client has no ZooKeeper session; a token identifies it instead.  Each change is a
compare-and-set: it carries the `Mark` (version and token) that the client saw last.  Therefore a
request that is retried after a lost answer takes effect once, and a client that takes the
subscription later ends the hold of the earlier one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.backends.flight.planning import act
from dlcore.base.backoff import Wait
from dlcore.base.clock import SystemClock
from dlcore.base.errors import OwnershipAcquireFailedError, SubscriptionMovedError
from dlcore.base.ids import DLSN
from dlcore.flight import actions
from dlcore.flight.requests import (
    ForgetRequest,
    MoveRequest,
    SeenPosition,
    SubscriptionsRequest,
)

if TYPE_CHECKING:
    from dlcore.backends.flight.endpoint import Endpoint
    from dlcore.log.metadata.values import LogKey, Mark

logger = logging.getLogger(__name__)


async def show(
    calls: Endpoint, log: LogKey, subscriber: str | None = None
) -> dict[str, SeenPosition]:
    """Return the stored positions by subscriber; only that of `subscriber` if it is given."""
    request = SubscriptionsRequest(log=log.name, log_id=log.log_id, subscriber=subscriber)
    return (await act(calls, actions.SUBSCRIPTIONS, request)).subscriptions


async def forget(calls: Endpoint, log: LogKey, subscriber: str) -> bool:
    """Remove a subscription; return whether there was one."""
    seen = (await show(calls, log, subscriber)).get(subscriber)
    if seen is None:
        return False
    request = ForgetRequest(log=log.name, log_id=log.log_id, subscriber=subscriber, mark=seen.mark)
    await act(calls, actions.DELETE_SUBSCRIPTION, request)
    return True


class FlightHold:
    """A subscription of a log, from `take` until another one takes it."""

    def __init__(self, calls: Endpoint, log: LogKey, subscriber: str) -> None:
        self._calls = calls
        self._log = log
        self._subscriber = subscriber
        self._token = ""
        self._mark: Mark | None = None
        self._position = DLSN.INITIAL
        self._asked: DLSN | None = None  # position of a request whose result is unknown
        self._turn = asyncio.Lock()

    @property
    def position(self) -> DLSN:
        """The stored position."""
        return self._position

    async def take(self, position: DLSN | None = None, *, waits: bool) -> None:
        """Take the subscription, at `position` if it is given, otherwise at the stored one.

        If a reader of `dlcore` has it and `waits` is set, wait, and log a warning that names the
        reader; otherwise raise.

        Raises: OwnershipAcquireFailedError: a reader of `dlcore` has it.
        """
        while True:
            seen = (await show(self._calls, self._log, self._subscriber)).get(self._subscriber)
            at = DLSN.INITIAL if seen is None else DLSN.parse(seen.dlsn)
            self._mark = None if seen is None else seen.mark
            self._token = SystemClock().new_token()
            at = at if position is None else position
            try:
                try:
                    await self._move(at)
                except OwnershipAcquireFailedError as held:
                    if not waits:
                        raise
                    await self._wait_for(at, held)
            except SubscriptionMovedError:
                continue  # another client changed it since we read it
            return

    async def _wait_for(self, position: DLSN, held: OwnershipAcquireFailedError) -> None:
        loop = asyncio.get_running_loop()
        text = "%s; waiting for as long as the proxy does"
        telling = loop.call_at(Wait(loop.time()).due_s, logger.warning, text, held)
        try:
            await self._move(position, waits=True)
        finally:
            telling.cancel()

    async def commit(self, position: DLSN) -> None:
        """Store a position, unless another client has taken the subscription.

        Raises:
            SubscriptionMovedError: another client has taken it.
            ProxyUnavailableError: no proxy answers; the call may be retried.
        """
        async with self._turn:
            # Repeat the request whose answer was lost: only its answer has the present mark.
            if self._asked is not None:
                await self._move(self._asked)
            await self._move(position)

    async def _move(self, position: DLSN, *, waits: bool = False) -> None:
        request = MoveRequest(
            log=self._log.name,
            log_id=self._log.log_id,
            subscriber=self._subscriber,
            dlsn=str(position),
            token=self._token,
            mark=self._mark,
            waits=waits,
        )
        self._asked = position
        moved = await act(self._calls, actions.MOVE_SUBSCRIPTION, request)
        self._mark, self._position, self._asked = moved.mark, position, None
