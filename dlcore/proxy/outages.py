"""Outages of the metadata store: calls that need the store are refused soon, and do not hang.

While the session is suspended, a request to the store waits until the session is back, for an
unknown time.  A client that gets a refusal can ask another proxy, or retry.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dlcore.base.errors import DLError, LogNotReadyError, MetadataConnectionError
from dlcore.metadata.port import SessionState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.metadata.port import MetadataStore

PATIENCE_S = 2.0
"""A call waits for a suspended session until this time has passed since the suspension."""
_RETRY_AFTER_S = 1.0


class Outages:
    """Ends calls that wait for a metadata store during an outage."""

    def __init__(self, store: MetadataStore) -> None:
        self._loop = asyncio.get_running_loop()
        self._until_s: float | None = None
        self._begun_s = 0.0
        self._timeouts: set[asyncio.Timeout] = set()
        self._unsubscribe = store.on_session(self._session_changed)
        self._session_changed(store.session_state)

    @property
    def reason(self) -> str | None:
        """The description of the present outage, None if there is none."""
        if self._until_s is None:
            return None
        away_s = self._loop.time() - self._begun_s
        return f"the metadata store has not answered for {away_s:.0f} s"

    @asynccontextmanager
    async def bounded(self) -> AsyncGenerator[None, None]:
        """Bound a block that may need the metadata store.

        Raises: LogNotReadyError: the store has an outage.
        """
        timeout = asyncio.timeout_at(self._until_s)
        self._timeouts.add(timeout)
        try:
            async with timeout:
                yield
        except (TimeoutError, MetadataConnectionError) as error:
            # Another timeout of the block, or an error while the store answers, has another reason.
            if not (timeout.expired() or (self.reason and isinstance(error, DLError))):
                raise
            raise LogNotReadyError(
                f"{self.reason or 'the metadata store was not reachable'}, and the request needs "
                "it.  The request may have taken effect: try again, here or at another proxy",
                retry_after_s=_RETRY_AFTER_S,
            ) from error
        finally:
            self._timeouts.discard(timeout)

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._until_s = None
        elif self._until_s is None:
            self._begun_s = self._loop.time()
            self._until_s = self._begun_s + PATIENCE_S
        else:
            return
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(self._until_s)

    def close(self) -> None:
        """Stop watching the session."""
        self._unsubscribe()
