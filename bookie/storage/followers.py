"""The followers of each ledger, which wait for its new entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, KeysView


class Followers:
    """Callbacks for changes of a ledger; nothing is queued for a follower."""

    def __init__(self) -> None:
        self._callbacks: dict[int, dict[Callable[[], None], None]] = {}

    def watch(self, ledger_id: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` at every change of the ledger, until the returned function is called."""
        callbacks = self._callbacks.setdefault(ledger_id, {})
        callbacks[callback] = None

        def end() -> None:
            callbacks.pop(callback, None)
            if not callbacks and self._callbacks.get(ledger_id) is callbacks:
                del self._callbacks[ledger_id]

        return end

    def __len__(self) -> int:
        return sum(map(len, self._callbacks.values()))

    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that are followed."""
        return self._callbacks.keys()

    def wake(self, ledger_id: int) -> None:
        """Call the callbacks of the ledger's followers."""
        # A copy, because a callback may end its own watch.
        for callback in tuple(self._callbacks.get(ledger_id, ())):
            callback()

    def wake_all(self) -> None:
        """Call the callbacks of all followers."""
        for ledger_id in tuple(self._callbacks):
            self.wake(ledger_id)
