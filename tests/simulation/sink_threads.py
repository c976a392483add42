"""Blocking code of the product on the virtual clock.

It runs in a thread of its own.  The loop waits while the thread runs, and the thread waits while
the loop runs what the thread asked for, so that a seed still gives one order of events.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_Result = TypeVar("_Result")


class KilledError(BaseException):
    """The process of the thread is dead: nothing that it asks for is carried out."""


class _Here(threading.local):
    """The thread's own call; None in the thread of the loop."""

    call: BlockingCall[Any] | None = None


_here = _Here()


class HandingPortal:
    """Stands for `dlcore.sync.portal.Portal`: asks the loop that waits for the thread."""

    is_inherited = False

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Let the loop run a coroutine, and return its result."""
        assert _here.call is not None, "blocking code runs in a thread of its own"
        result: _Result = _here.call.ask(coroutine)
        return result


class BlockingCall(Generic[_Result]):
    """One call of a blocking function."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self._asked: SimpleQueue[Coroutine[Any, Any, Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._outcome: list[_Result] = []
        self._error: BaseException | None = None
        self._is_killed = False

    async def run(self) -> _Result:
        """Return the function's result; a task that is cancelled kills the thread.

        Raises: as the function.
        """
        thread = threading.Thread(target=self._run_in_thread, daemon=True)
        thread.start()
        death: BaseException | None = None
        while (coroutine := self._asked.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = await coroutine
            except Exception as raised:  # noqa: BLE001  # the thread raises it
                error = raised
            except BaseException as raised:  # noqa: BLE001  # raised below
                self._is_killed, death, error = True, raised, KilledError()
            self._answers.put((result, error))
        thread.join()
        if death is not None:
            raise death
        if self._error is not None:
            raise self._error
        return self._outcome[0]

    def ask(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine that the loop runs; called by the thread."""
        if self._is_killed:
            coroutine.close()
            raise KilledError
        self._asked.put(coroutine)
        result, error = self._answers.get()
        if error is not None:
            raise error
        return result

    def _run_in_thread(self) -> None:
        _here.call = self
        try:
            self._outcome.append(self._work())
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            self._error = error
        self._asked.put(None)
