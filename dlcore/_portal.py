"""The bridge from blocking code to asyncio: one event loop in a thread of its own per process."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from dlcore.errors import AlreadyClosedError, ConfigurationError

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine

_Result = TypeVar("_Result")
_STOP_TIMEOUT_S = 10.0


class Portal:
    """Runs coroutines on a background event loop for callers in other threads.

    It belongs to the process that made it: after a fork the thread is gone, and what was opened
    through it must be opened again in the child.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dlcore-portal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    @property
    def is_usable(self) -> bool:
        """Whether it runs, in this process."""
        return self._pid == os.getpid() and not self._loop.is_closed()

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `coroutine` on the loop and return its result; an interrupt cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> concurrent.futures.Future[_Result]:
        """Start `coroutine` on the loop and return at once."""
        try:
            self._check()
        except BaseException:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the loop soon."""
        self._check()
        self._loop.call_soon_threadsafe(callback)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ConfigurationError(
                f"this object was opened in process {self._pid} and used after a fork, in process "
                f"{os.getpid()}: open the namespace in the process that uses it"
            )
        if threading.get_ident() == self._thread.ident:
            raise ConfigurationError(
                "the blocking API was called from its own event loop, which would wait for itself: "
                "use the async API there"
            )
        if self._loop.is_closed() or not self._thread.is_alive():
            raise AlreadyClosedError("the background event loop has stopped")

    def stop(self) -> None:
        """Stop the loop and its thread; harmless when it has stopped, or in a forked child."""
        if not self.is_usable or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)


class _Shared:
    """The process's portal, and what to close before it stops."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.portal: Portal | None = None
        self.closers: dict[int, Callable[[], None]] = {}

    def get(self) -> Portal:
        with self.lock:
            if self.portal is None or not self.portal.is_usable:
                self.portal = Portal()
                self.closers = {}
            return self.portal

    def close(self) -> None:
        portal = self.portal
        if portal is None or not portal.is_usable:
            return
        for closer in list(self.closers.values()):
            closer()
        portal.stop()


_shared = _Shared()


def _close_at_exit() -> None:
    _shared.close()


def _start_afresh() -> None:
    # A fork may have happened while another thread held the lock.
    global _shared
    _shared = _Shared()


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_start_afresh)


def shared_portal() -> Portal:
    """Return this process's portal, starting it at first use."""
    return _shared.get()


def close_at_exit(owner: object, closer: Callable[[], None]) -> None:
    """Call `closer` before the portal stops when the process exits, unless `forget` comes first."""
    _shared.closers[id(owner)] = closer


def forget(owner: object) -> None:
    """Drop what `close_at_exit` registered for `owner`."""
    _shared.closers.pop(id(owner), None)
