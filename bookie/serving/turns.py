"""Turns of connections that have requests: which a bookie takes next.

Each takes a few, in turn.  One that had none left comes before those that always have more, as with
queues of a fair network scheduler (fq_codel): who asks for little waits for a round of those that
do likewise, whatever the others send.  So that these come forward too, they have every other turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

_TURN_S = 0.0003
"""After so long the event loop does what else there is: answers, syncs, new bytes."""


class Taker(Protocol):
    """What has requests."""

    waits_for_turn: bool
    """Whether it stands in a queue; `Turns` sets it."""
    left_some: bool
    """Whether it stopped with requests left, that it has no room for, when it took some last."""

    def take_some(self) -> bool:
        """Take a few requests; return whether there are more that may be taken now."""
        ...

    def abort(self) -> None:
        """End at once."""
        ...


class Turns:
    """The turns of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._modest: deque[Taker] = deque()
        self._busy: deque[Taker] = deque()
        self._is_due = False

    def take(self, taker: Taker) -> None:
        """Let somebody take requests: at once if nobody else waits, else when its turn comes."""
        if taker.waits_for_turn:
            return
        if self._modest or self._busy:
            self._wait(self._busy if taker.left_some else self._modest, taker)
        else:
            self._serve(taker)

    def _serve(self, taker: Taker) -> None:
        try:
            has_more = taker.take_some()
        except Exception as error:  # noqa: BLE001  # a defect, at whose end the others go on
            told = {"message": "taking a request failed", "exception": error}
            self._loop.call_exception_handler(told)
            taker.abort()
        else:
            if has_more:
                self._wait(self._busy, taker)

    def _wait(self, queue: deque[Taker], taker: Taker) -> None:
        taker.waits_for_turn = True
        queue.append(taker)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        until_s = self._loop.time() + _TURN_S
        while self._modest or self._busy:
            for queue in (self._modest, self._busy):
                if queue:
                    taker = queue.popleft()
                    taker.waits_for_turn = False
                    self._serve(taker)
            if self._loop.time() >= until_s:
                break
        self._is_due = bool(self._modest or self._busy)
        if self._is_due:
            self._loop.call_soon(self._run)
