"""The followers of each ledger, who wait for news of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, KeysView


class Followers:
    """Callbacks that are told of changes of a ledger; nothing is queued for anybody.

    Args:
        call_soon: calls its argument in the next turn of the loop.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._callbacks: dict[int, dict[Callable[[], None], None]] = {}
        self._to_wake: dict[int, None] = {}

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` at every change of the ledger, until what is returned is called."""
        callbacks = self._callbacks.setdefault(ledger_id, {})
        callbacks[callback] = None

        def end() -> None:
            callbacks.pop(callback, None)
            if not callbacks and self._callbacks.get(ledger_id) is callbacks:
                del self._callbacks[ledger_id]

        return end

    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that are followed."""
        return self._callbacks.keys()

    def wake_soon(self, ledger_id: int) -> None:
        """Tell the ledger's followers in the next turn of the loop, once for all that is new."""
        if ledger_id not in self._callbacks:
            return
        if not self._to_wake:
            self._call_soon(self._wake_due)
        self._to_wake[ledger_id] = None

    def _wake_due(self) -> None:
        to_wake, self._to_wake = self._to_wake, {}
        for ledger_id in to_wake:
            self.wake(ledger_id)

    def wake(self, ledger_id: int) -> None:
        """Tell the ledger's followers."""
        for callback in tuple(self._callbacks.get(ledger_id, ())):
            callback()

    def wake_all(self) -> None:
        """Tell every follower."""
        for ledger_id in tuple(self._callbacks):
            self.wake(ledger_id)
