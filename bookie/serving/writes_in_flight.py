"""The writes of one client that the storage has not ended yet."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, cast

from bookie.serving.reported import reported
from bookie.serving.session import Event, Outcome, RunNotTaken, Session, Stored
from dlcore.base.background import failed
from dlcore.base.errors import BookieUnavailableError, DLError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bookie.storage.writes import Writes
    from dlcore.wire.frames import FrameRun
    from dlcore.wire.messages import Add, WriteLac

_GIVEN_UP = "the bookie dropped the request"


class WritesInFlight:
    """Gives writes to the storage, and tells the session of their ends, of many in one event.

    Args:
        storage: takes the writes.
        session: has counted each write that it asks for.
        tell: feeds the session, and performs what it answers.
    """

    def __init__(self, storage: Writes, session: Session, tell: Callable[[Event], object]) -> None:
        self._storage = storage
        self._session = session
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._landed: list[Outcome] = []
        self.settled = asyncio.Event()
        """Set when the bookie drains, and every write that was accepted is answered."""

    def store_run(self, add: Add) -> None:
        """Store the entries of a message all together."""
        run = cast("FrameRun", add.frames)
        future = self._storage.add_run(run)
        if future is None:
            self._tell(RunNotTaken(add))
        else:
            first = add.first_request_id
            self._fly(range(first, first + len(run)), len(run.payload), future)

    def store_each(self, add: Add) -> None:
        """Store each entry of a message."""
        for request_id, frame in enumerate(add.frames, add.first_request_id):
            future = self._storage.add_entry(frame, is_recovery=add.is_recovery)
            self._fly([request_id], len(frame), future)

    def store_lac(self, request: WriteLac) -> None:
        """Store a LAC."""
        try:
            future = self._storage.write_lac(request.ledger_id, request.last_add_confirmed)
        except DLError as error:
            future = failed(error)
        self._fly([request.request_id], 0, future)

    def close(self) -> None:
        """Go on for a client that is gone: its session counts the ends, and answers none.

        Afterwards nothing refers back to the connection.
        """
        self._tell = self._session.handle

    def _fly(
        self, request_ids: Sequence[int], payload_bytes: int, future: asyncio.Future[None]
    ) -> None:
        # Also if it is done: answers come when all requests of the turn are in flight.
        future.add_done_callback(partial(self._land, request_ids, payload_bytes))

    def _land(
        self, request_ids: Sequence[int], payload_bytes: int, future: asyncio.Future[None]
    ) -> None:
        error = BookieUnavailableError(_GIVEN_UP) if future.cancelled() else future.exception()
        landed = self._landed
        landed.append(Outcome(request_ids, payload_bytes, reported(error)))
        # Writes that end together are one event.  The last one in flight waits for no other.
        if len(landed) == self._session.writes.in_flight:
            self._end_landing()
        elif len(landed) == 1:
            self._loop.call_soon(self._end_landing)

    def _end_landing(self) -> None:
        landed, self._landed = self._landed, []
        if landed:
            self._tell(Stored(landed))
