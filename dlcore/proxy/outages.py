"""Times without the metadata store: what needs it then is refused soon, and does not hang.

While the session is suspended a request to the store waits for it to be back, which nobody knows
when.  A client that is told so may ask another proxy, or come again.
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
"""So long a call waits for a session that was lost; the next ones only for what is left of it."""
_RETRY_AFTER_S = 1.0


class Outages:
    """Ends what waits for a metadata store that is away."""

    def __init__(self, store: MetadataStore) -> None:
        self._loop = asyncio.get_running_loop()
        self._until_s: float | None = None
        self._begun_s = 0.0
        self._timeouts: set[asyncio.Timeout] = set()
        self._unsubscribe = store.on_session(self._session_changed)
        self._session_changed(store.session_state)

    @property
    def reason(self) -> str | None:
        """What to tell of an outage; None: there is none."""
        if self._until_s is None:
            return None
        away_s = self._loop.time() - self._begun_s
        return f"the metadata store has not answered for {away_s:.0f} s"

    @asynccontextmanager
    async def bounded(self) -> AsyncGenerator[None, None]:
        """Do what may need the metadata store.

        Raises: LogNotReadyError: it is away.
        """
        timeout = asyncio.timeout_at(self._until_s)
        self._timeouts.add(timeout)
        try:
            async with timeout:
                yield
        except (TimeoutError, MetadataConnectionError) as error:
            if not (timeout.expired() or (self.reason and isinstance(error, DLError))):
                raise
            raise LogNotReadyError(
                f"{self.reason or 'the metadata store was away'}, and what was asked for needs "
                "it; it may have been done: try again, here or at another proxy",
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
        """Look no more."""
        self._unsubscribe()
