"""The blocking watch of a namespace's logs."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from dlcore.base.errors import AlreadyClosedError, DLError
from dlcore.sync.twin import Blocking

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.log.metadata.names import LogChange
    from dlcore.log.reading.watching import LogWatch as AsyncLogWatch
    from dlcore.sync.portal import Portal

logger = logging.getLogger(__name__)

_RETRY_DELAY_S = 1.0


class LogWatch(Blocking):
    """The changes of a namespace's logs: an iterator that waits, until it is closed.

    It begins with the existing logs, each as a creation.
    """

    def __init__(self, portal: Portal, watch: AsyncLogWatch) -> None:
        super().__init__(portal, watch.aclose)
        self._watch = watch
        self._changes: deque[LogChange] = deque()
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return repr(self._watch)

    def close(self) -> None:
        """Stop watching: loops end, and listeners get no more changes."""
        self._ended.set()
        super().close()

    def get_names(self) -> list[str]:
        """Return the sorted names of the existing logs, as far as the watch has read them.

        Raises: AlreadyClosedError: its namespace was closed.
        """

        return self._call_on_loop(lambda: self._watch.names)

    def take(self, *, timeout_s: float | None = None) -> list[LogChange]:
        """Return the next changes, as many as were found; none if the time is over before.

        Raises:
            AlreadyClosedError: the watch, or its namespace, was closed.
            MetadataConnectionError: no answer for longer than a session lives; another call
                continues, and no change is lost.
        """

        async def fetch() -> None:  # an interrupt may come before the result is known
            self._changes.extend(await self._watch.take(timeout_s=timeout_s))

        if not self._changes:
            self._call(fetch())
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def listen(self, callback: Callable[[list[LogChange]], None]) -> None:
        """Call `callback` with all following changes, in its own thread, until it is closed.

        While the metadata store does not answer, it is asked again and again; an error of the
        callback is logged.
        """
        threading.Thread(
            target=self._tell, args=(callback,), name="dlcore-log-watch", daemon=True
        ).start()

    def _tell(self, callback: Callable[[list[LogChange]], None]) -> None:
        while True:
            try:
                changes = self.take()
            except AlreadyClosedError:
                return
            except DLError as error:
                logger.warning(
                    "%r goes on: %s: %s; to do: see to the reason if it comes again; nothing is "
                    "missed",
                    self._watch,
                    type(error).__name__,
                    error,
                )
                self._ended.wait(_RETRY_DELAY_S)
                continue
            try:
                callback(changes)
            except Exception:
                logger.exception(
                    "%r: its listener failed; to do: correct the function that the program passed",
                    self._watch,
                )

    def __iter__(self) -> LogWatch:
        return self

    def __next__(self) -> LogChange:
        if not self._changes:
            try:
                self._changes.extend(self.take())
            except AlreadyClosedError:
                if self._closed:
                    raise StopIteration from None
                raise
        return self._changes.popleft()
