"""Fair scheduling of connections with requests: the connection that a bookie serves next.

Connections take a few requests each, round-robin, in two queues as in the network scheduler
fq_codel.  The busy queue has the connections that always have more requests; the modest queue has
the others.  A connection with few requests therefore waits for one round of the modest queue,
whatever busy connections send.  The queues alternate, so busy connections make progress as well.

Distrusted connections, whose requests are of no use, have a third queue: all of them together have
one turn in a millisecond.  Their number does not matter, and others get most of the time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

_TURN_S = 0.0003
"""After this time the event loop runs its other work: answers, syncs, received bytes."""


_DISTRUSTED_PAUSE_S = 0.001
"""Pause between two turns of distrusted connections; a turn and its answers take some 0.2 ms."""


class Taker(Protocol):
    """A connection that takes its requests when it is scheduled."""

    waits_for_turn: bool
    """Whether the connection is in a queue; `Turns` sets it."""

    @property
    def left_some(self) -> bool:
        """Whether the last `take_some` left requests because a bound was reached."""
        ...

    @property
    def is_distrusted(self) -> bool:
        """Whether many of its last requests were of no use."""
        ...

    def take_some(self) -> bool:
        """Take a few requests; return whether there are more that can be taken now."""
        ...

    def abort(self) -> None:
        """End the connection at once."""
        ...


class Turns:
    """The scheduler of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._modest: deque[Taker] = deque()
        self._busy: deque[Taker] = deque()
        self._distrusted: deque[Taker] = deque()
        self._is_due = False

    @property
    def are_free(self) -> bool:
        """Whether none waits, apart from the distrusted."""
        return not (self._modest or self._busy)

    def wait(self, taker: Taker) -> None:
        """Let a connection wait that has just taken requests, and has more of them."""
        if taker.is_distrusted:
            self._wait_distrusted(taker)
        else:
            self._wait(self._busy, taker)

    def take(self, taker: Taker) -> None:
        """Let a connection take requests: at once if none waits, otherwise in its queue's order."""
        if taker.waits_for_turn:
            return
        if taker.is_distrusted:
            self._wait_distrusted(taker)
            return
        # A connection that left requests is busy, though they did not fit: it comes back often.
        if self.are_free:
            self._serve(taker)
        else:
            self._wait(self._busy if taker.left_some else self._modest, taker)

    def _serve(self, taker: Taker) -> None:
        try:
            has_more = taker.take_some()
        except Exception as error:  # noqa: BLE001  # a defect must not stop other connections
            context = {"message": "taking a request failed", "exception": error}
            self._loop.call_exception_handler(context)
            taker.abort()
        else:
            if has_more:
                self.wait(taker)

    def _wait_distrusted(self, taker: Taker) -> None:
        taker.waits_for_turn = True
        if not self._distrusted:
            self._loop.call_later(_DISTRUSTED_PAUSE_S, self._serve_distrusted)
        self._distrusted.append(taker)

    def _serve_distrusted(self) -> None:
        taker = self._distrusted[0]
        taker.waits_for_turn = False
        self._serve(taker)
        # Only now, so that a connection that waits again does not begin a second timer.
        self._distrusted.popleft()
        if self._distrusted:
            self._loop.call_later(_DISTRUSTED_PAUSE_S, self._serve_distrusted)

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
