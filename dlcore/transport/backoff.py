"""The pause before a bookie whose connection failed is tried again."""

from __future__ import annotations

import asyncio

_FIRST_S = 0.05
_MAX_S = 1.0


class Backoff:
    """One bookie's back-off: doubling delays from 50 ms to 1 s, none after an answer."""

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._retry_s = 0.0

    async def wait(self) -> None:
        """Wait until the next attempt is due."""
        delay_s = self._retry_s - asyncio.get_running_loop().time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def failed(self) -> None:
        """Note a failure; failures of one outage count once per attempt that was due."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._retry_s:
            self._delay_s = min(max(2 * self._delay_s, _FIRST_S), _MAX_S)
            self._retry_s = now_s + self._delay_s

    def succeeded(self) -> None:
        """Note an answer."""
        self._delay_s = self._retry_s = 0.0
