"""The bridge from blocking code to asyncio: one event loop per process, in its own thread."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: TC003  # it cannot be imported first at exit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias, TypeVar

from dlcore.base import event_loop
from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import AlreadyClosedError, ConfigurationError

logger = logging.getLogger(__name__)

Closer: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
_Result = TypeVar("_Result")
_STOP_TIMEOUT_S = 10.0
_CLOSERS_TIMEOUT_S = 30.0
"""Longer than any closer takes; it keeps a defect from blocking the exit."""


class Portal:
    """Runs coroutines on a background event loop for callers in other threads.

    It belongs to the process that created it.  After a fork the thread is gone, and the child must
    open its own objects.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = event_loop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dlcore-portal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to a parent process, from which this one was forked."""
        return self._pid != os.getpid()

    @property
    def is_usable(self) -> bool:
        """Whether it runs, in this process."""
        return not self.is_inherited and not self._loop.is_closed()

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
        """Schedule a call of `callback` on the loop."""
        self._check()
        self._loop.call_soon_threadsafe(callback)

    def check_process(self) -> None:
        """Raise `ConfigurationError` if this process inherited it by a fork."""
        if self.is_inherited:
            raise ConfigurationError(
                f"this object was opened in process {self._pid} and used after a fork, in process "
                f"{os.getpid()}: open the namespace in the process that uses it"
            )

    def _check(self) -> None:
        self.check_process()
        if threading.get_ident() == self._thread.ident:
            raise ConfigurationError(
                "the blocking API was called from its own event loop, which would wait for itself: "
                "use the async API there"
            )
        if self._loop.is_closed() or not self._thread.is_alive():
            raise AlreadyClosedError("the background event loop has stopped")

    def stop(self) -> None:
        """Stop the loop and its thread; harmless if it has stopped, or in a forked child."""
        if not self.is_usable or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)


class _Shared:
    """The process's portal, and the objects to close before it stops."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.portal: Portal | None = None
        self.closers: dict[int, Closer] = {}
        self._exit: _Exit | None = None

    def get(self) -> Portal:
        with self.lock:
            if self._exit is None:
                self._exit = _Exit(self.close)
                self._exit.start()
            # A closed portal is replaced: objects opened after its end get a loop that runs.
            if self.portal is None or not self.portal.is_usable:
                self.portal = Portal()
                self.closers = {}
            return self.portal

    def close(self) -> None:
        """Run all closers at the same time, and stop the portal."""
        portal = self.portal
        if portal is None or not portal.is_usable:
            return

        async def close_all() -> None:
            tasks = BackgroundTasks(partial(logger.warning, "not closed cleanly at exit: %r"))
            for each in self.closers.values():
                tasks.start(each())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSERS_TIMEOUT_S):
                    await tasks.finish()
            for task in tasks:
                logger.warning(
                    "not closed within %g s at exit: %r; to do: close namespaces, readers and "
                    "writers before the program ends",
                    _CLOSERS_TIMEOUT_S,
                    task,
                )
            await tasks.aclose()

        try:
            # Twice the time after which `close_all` ends by itself: then the loop does not run at
            # all.
            portal.submit(close_all()).result(2 * _CLOSERS_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the event loop hangs at exit; to do: report this as a defect")
        portal.stop()


class _Exit(threading.Thread):
    """Closes open objects when the process exits, once all other threads have ended.

    Other threads may still write after the main thread has ended.  After that, Python waits for
    every thread that is no daemon, and then calls the functions registered with `atexit`; by then
    kazoo has stopped.  Therefore closing has its own thread, which Python waits for.  It starts at
    the first use, because Python 3.12 starts no thread after the main thread has ended.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__(name="dlcore-exit", daemon=False)
        self._close = close
        self._main = threading.main_thread()

    def run(self) -> None:
        self._main.join()
        while others := [
            thread
            for thread in threading.enumerate()
            if not thread.daemon and thread is not self._main and not isinstance(thread, _Exit)
        ]:
            for thread in others:
                thread.join()
        self._close()


_shared = _Shared()


class _FailingStream:
    """Replaces a standard stream so that its last flush fails."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        raise OSError("records were not written")


_exit_fails = False


def fail_exit() -> None:
    """Make the ending process return a status that says that data was lost."""
    # No hook can change the status, and `os._exit` would skip the remaining exit handlers.  But
    # Python documents that it ends with status 120 if the last flush of a standard stream fails.
    # For stderr this happens without a message.
    global _exit_fails
    _exit_fails = True


def _spoil_stderr() -> None:
    if _exit_fails:
        sys.stderr = _FailingStream(sys.stderr)


def _let_pyarrow_finish() -> None:
    # The first array made by pyarrow imports pandas under pyarrow's own lock.  If another thread
    # does this during a fork, the child would wait for the lock for ever.
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].array([])


def _start_afresh() -> None:
    # Another thread may have held the lock during the fork.
    global _shared
    _shared = _Shared()


atexit.register(_spoil_stderr)  # early, so it is called late
os.register_at_fork(before=_let_pyarrow_finish, after_in_child=_start_afresh)


def shared_portal() -> Portal:
    """Return this process's portal, starting it at first use."""
    return _shared.get()


def close_at_exit(owner: object, closer: Closer) -> None:
    """Run `closer` on the portal when the process exits, unless `forget` comes first.

    It runs beside other closers, and must end by itself within a few seconds.
    """
    _shared.closers[id(owner)] = closer


def forget(owner: object) -> None:
    """Remove the closer that `close_at_exit` registered for `owner`."""
    _shared.closers.pop(id(owner), None)
