"""The positions of a query that logs keep as a subscription: when each is stored, and of what name.

Spark keeps positions in the checkpoint, which only the query can read.  A log that has them too can
tell others how far the query is, and which records it still needs.  The checkpoint alone decides
where the query goes on; what a log keeps is never read back.

Promises:

* A position that is stored was read by a batch that has ended.
* Logs are asked at most once in `PAUSE_S`, and for at most 1 % of the time.  A query that has read
  everything stores its last position as soon as this allows, or at once if its run ends there.
* A failure is logged once, and never fails the query.
* Without a name of the user's, a log keeps the positions of at most `QUERIES_MAX` queries, so that
  queries that are gone leave room for other subscribers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from dlcore.base.errors import ConfigurationError, DLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlspark.offsets import LogPosition, StreamOffset

logger = logging.getLogger(__name__)
PAUSE_S = 10.0
"""Others look at positions now and then, and each store is a write to ZooKeeper for each log."""
_SHARE_MAX = 0.01
QUERIES_MAX = 100
NAME_PREFIX = "spark:"
"""Begins the names of queries that have none of the user's."""
NO_SUBSCRIPTION = "none"
"""The value of the option `subscription` with which nothing is stored."""
_NAME_BYTES_MAX = 200


def parse_subscription(key: str, text: str) -> str | None:
    """Return the value of the option.  Raises: ConfigurationError."""
    if not 0 < len(text.encode()) <= _NAME_BYTES_MAX or text.startswith(NAME_PREFIX):
        raise ConfigurationError(
            f"option {key}={text!r}: expected {NO_SUBSCRIPTION}, or 1 … {_NAME_BYTES_MAX} "
            f"bytes of text that do not begin with {NAME_PREFIX}"
        )
    return text


class PositionStore(Protocol):
    """Where positions are stored."""

    def store_position(self, log: str, position: LogPosition, subscriber: str) -> bool:
        """Store a position; return False if the log keeps those of too many queries.

        Raises: DLError.
        """


class KeptPositions:
    """Stores the positions of one query from time to time.

    Args:
        store: gives the place where to store.
        subscription: value of the option, None for a name by the id in the offset.
        monotonic_ns: a clock.
    """

    def __init__(
        self,
        store: Callable[[], PositionStore],
        subscription: str | None,
        monotonic_ns: Callable[[], int],
    ) -> None:
        self._store = store
        self._subscription = subscription
        self._monotonic_ns = monotonic_ns
        self._latest: StreamOffset | None = None
        self._stored: dict[str, LogPosition] = {}
        self._due_ns: int | None = None
        self._is_logged = False

    def note(self, offset: StreamOffset, *, is_last: bool = False) -> None:
        """Take the end of a batch that has ended; store it if it is time, or the last one."""
        self._latest = offset
        if is_last or self._due_ns is None or self._monotonic_ns() >= self._due_ns:
            self.flush()

    def flush(self) -> None:
        """Store the positions that are not stored yet."""
        offset, name = self._latest, self._name()
        if offset is None or name is None:
            return
        changed = {
            log: position
            for log, position in offset.logs.items()
            if log not in offset.gone and self._stored.get(log) != position
        }
        if not changed:
            return
        began_ns = self._monotonic_ns()
        for log, position in changed.items():
            self._put(log, position, name)
        now_ns = self._monotonic_ns()
        # A store that is slow is asked more seldom, so that batches do not wait for it.
        pause_ns = max(PAUSE_S * 1e9, (now_ns - began_ns) / _SHARE_MAX)
        self._due_ns = now_ns + int(pause_ns)

    def _name(self) -> str | None:
        if self._subscription is not None:
            return None if self._subscription == NO_SUBSCRIPTION else self._subscription
        query = self._latest.query if self._latest is not None else None
        return None if query is None else NAME_PREFIX + query

    def _put(self, log: str, position: LogPosition, name: str) -> None:
        try:
            is_stored = self._store().store_position(log, position, name)
        except DLError as error:
            self._tell(log, name, repr(error))
            return
        # Also if the log refuses it: it is asked again with the next position, and not before.
        self._stored[log] = position
        if not is_stored:
            self._tell(
                log,
                name,
                f"it keeps those of {QUERIES_MAX} queries: delete those that are gone with "
                f"dlog log subscriptions {log} --delete NAME, or give this one a name with the "
                "option subscription",
            )

    def _tell(self, log: str, name: str, reason: str) -> None:
        if not self._is_logged:
            self._is_logged = True
            logger.warning(
                "log %r does not keep the position of subscriber %r, and this is logged once: %s; "
                "to do: see to the reason; the query goes on",
                log,
                name,
                reason,
            )
