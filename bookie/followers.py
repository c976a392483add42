"""Who waits for news of which ledger."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView


class Followers:
    """One event per follower, set when its ledger changed; nothing is queued for anybody."""

    def __init__(self) -> None:
        self._events: dict[int, set[asyncio.Event]] = {}

    @contextlib.contextmanager
    def watch(self, ledger_id: int) -> Iterator[asyncio.Event]:
        """Return an event that is set by every change of the ledger, while the context lasts."""
        event = asyncio.Event()
        events = self._events.setdefault(ledger_id, set())
        events.add(event)
        try:
            yield event
        finally:
            events.discard(event)
            if not events:
                self._events.pop(ledger_id, None)

    def ledgers(self) -> KeysView[int]:
        """Return the ledgers that are followed."""
        return self._events.keys()

    def wake(self, ledger_id: int) -> None:
        """Wake the ledger's followers."""
        for event in self._events.get(ledger_id, ()):
            event.set()

    def wake_all(self) -> None:
        """Wake every follower."""
        for ledger_id in self._events:
            self.wake(ledger_id)
