"""Bugs of subscriptions over proxies, put back on purpose: at proxies, and in their clients."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from dlcore.backends.flight.reader import FlightRows
from dlcore.backends.flight.subscriptions import FlightHold, show
from dlcore.base.ids import DLSN
from dlcore.log.metadata.values import Mark
from dlcore.log.reading.holding import Seen
from dlcore.log.reading.subscriptions import SubscriptionHold
from dlcore.metadata.port import ANY_VERSION
from dlcore.proxy.reading.subscriptions import Subscriptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.log.metadata.values import LogKey

_move = SubscriptionHold.move

# At proxies


@contextlib.contextmanager
def subscriptions_are_moved_whatever_was_seen() -> Iterator[None]:
    """A position is compared with nothing, and set."""

    async def blind(
        self: SubscriptionHold, position: DLSN, *, mark: Mark | None, **about: Any
    ) -> Mark:
        seen = await self.look()
        return await _move(self, position, mark=None if seen is None else seen.mark, **about)

    with patch.object(SubscriptionHold, "move", blind):
        yield


@contextlib.contextmanager
def positions_are_compared_before_they_are_set() -> Iterator[None]:
    """A value stored between a look and the change that follows it is written over."""

    class Late:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def put(self, path: str, value: bytes, **_: int) -> int:
            version: int = await self._store.put(path, value, version=ANY_VERSION)
            return version

    async def move(self: SubscriptionHold, position: DLSN, **about: Any) -> Mark:
        self._context = replace(self._context, store=cast("Any", Late(self._context.store)))
        return await _move(self, position, **about)

    with patch.object(SubscriptionHold, "move", move):
        yield


@contextlib.contextmanager
def what_a_stranger_stored_is_ones_own() -> Iterator[None]:
    """A client takes a later change for the one that it asked for before."""

    async def gullible(
        self: SubscriptionHold, position: DLSN, *, mark: Mark | None, **about: Any
    ) -> Mark:
        seen = await self.look()
        if mark is not None and seen is not None and seen.mark.version == mark.version + 1:
            return seen.mark
        return await _move(self, position, mark=mark, **about)

    with patch.object(SubscriptionHold, "move", gullible):
        yield


@contextlib.contextmanager
def who_asks_again_is_a_stranger() -> Iterator[None]:
    """The change of an unanswered attempt is taken for another client's."""

    async def forgetful(
        self: SubscriptionHold, position: DLSN, *, token: str, mark: Mark | None, timeout_s: float
    ) -> Mark:
        version = 0 if mark is None else mark.version
        if await self.look() == Seen(position, Mark(version + 1, token)):
            raise self._hold._moved()
        return await _move(self, position, token=token, mark=mark, timeout_s=timeout_s)

    with patch.object(SubscriptionHold, "move", forgetful):
        yield


@contextlib.contextmanager
def subscribed_logs_are_known_by_their_names() -> Iterator[None]:
    """A position is kept with whichever log has the name by now."""

    async def key_of(self: Subscriptions, request: Any) -> LogKey:
        return await self._context.logs.find(request.log)

    with patch.object(Subscriptions, "_key_of", key_of):
        yield


# In clients


@contextlib.contextmanager
def unanswered_commits_are_forgotten() -> Iterator[None]:
    """The next one does not know that the position may be stored."""
    commit = FlightHold.commit

    async def forgetful(self: FlightHold, position: DLSN) -> None:
        self._asked = None
        await commit(self, position)

    with patch.object(FlightHold, "commit", forgetful):
        yield


@contextlib.contextmanager
def takers_begin_where_they_looked_first() -> Iterator[None]:
    """Records committed since are read again."""
    take = FlightHold.take

    async def stale(self: FlightHold, position: DLSN | None = None, *, waits: bool) -> None:
        seen = (await show(self._calls, self._log, self._subscriber)).get(self._subscriber)
        first = DLSN.INITIAL if seen is None else DLSN.parse(seen.dlsn)
        await take(self, position or first, waits=waits)

    with patch.object(FlightHold, "take", stale):
        yield


@contextlib.contextmanager
def positions_are_behind_what_was_received() -> Iterator[None]:
    """Records that a reader holds, and no caller took, count as read."""
    with patch.object(FlightRows, "position", property(lambda self: self._end)):
        yield


MUTANTS = (
    positions_are_behind_what_was_received,
    positions_are_compared_before_they_are_set,
    subscribed_logs_are_known_by_their_names,
    subscriptions_are_moved_whatever_was_seen,
    takers_begin_where_they_looked_first,
    unanswered_commits_are_forgotten,
    what_a_stranger_stored_is_ones_own,
    who_asks_again_is_a_stranger,
)
