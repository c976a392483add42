"""Tells bookies a ledger's LAC when no add carries it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError, LedgerFencedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.ids import BookieId
    from dlcore.ledger.port import BookieClient

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class LacPublisher:
    """Brings the members of one ensemble to the newest LAC, with one message per bookie at a time.

    A newer LAC is sent when the message before it was answered, so a slow bookie never collects a
    queue.  Failed messages are repeated until they succeed or no longer matter.
    """

    def __init__(
        self,
        bookies: BookieClient,
        *,
        ledger_id: int,
        on_accepted: Callable[[], None],
        on_fenced: Callable[[LedgerFencedError], None],
    ) -> None:
        self._bookies = bookies
        self._ledger_id = ledger_id
        self._on_accepted = on_accepted
        self._on_fenced = on_fenced
        self._loop = asyncio.get_running_loop()
        self._due: dict[BookieId, int] = {}  # the newest LAC that each member has to accept
        self._out: dict[BookieId, asyncio.Future[None]] = {}
        self._accepted: dict[BookieId, int] = {}
        self._retry_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def publish(
        self,
        last_add_confirmed: int,
        members: tuple[BookieId, ...],
        *,
        only: BookieId | None = None,
    ) -> None:
        """Send the LAC to the members that have not accepted it, or to `only` alone.

        Bookies other than `only` keep the LAC that was already pending for them.
        """
        due = {each: self._due[each] for each in members if each in self._due}
        self._due = due | dict.fromkeys(members if only is None else (only,), last_add_confirmed)
        self._send_all()

    def has_accepted(self, bookie: BookieId, last_add_confirmed: int) -> bool:
        """Whether `bookie` accepted this LAC or a higher one."""
        return self._accepted.get(bookie, -1) >= last_add_confirmed

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        for future in self._out.values():
            future.cancel()

    def _send_all(self) -> None:
        for bookie in self._due:
            self._send(bookie)

    def _send(self, bookie: BookieId) -> None:
        due = self._due.get(bookie, -1)
        if bookie in self._out or self.has_accepted(bookie, due):
            return
        future = self._bookies.write_lac(bookie, ledger_id=self._ledger_id, last_add_confirmed=due)
        self._out[bookie] = future
        future.add_done_callback(partial(self._on_done, bookie, due))

    def _on_done(self, bookie: BookieId, sent: int, future: asyncio.Future[None]) -> None:
        del self._out[bookie]
        error = None if future.cancelled() else future.exception()
        if self._is_closed:
            return
        if future.cancelled() or error is not None:
            self._on_failed(bookie, error)
            return
        self._accepted[bookie] = max(sent, self._accepted.get(bookie, -1))
        self._on_accepted()
        self._send(bookie)

    def _on_failed(self, bookie: BookieId, error: BaseException | None) -> None:
        if isinstance(error, LedgerFencedError):
            self._on_fenced(error)
            return
        if error is not None and not isinstance(error, DLError):
            raise error  # a defect: the loop's exception handler reports it
        logger.debug("lac not accepted ledger=%d bookie=%s: %s", self._ledger_id, bookie, error)
        if self._retry_timer is None and not self._is_closed:
            self._retry_timer = self._loop.call_later(_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        self._send_all()
