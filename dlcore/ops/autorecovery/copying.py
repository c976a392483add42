"""Copying entries from intact replicas to one bookie, verified and byte for byte."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from dlcore.base.background import side_tasks
from dlcore.base.errors import (
    BookieOverloadedError,
    BookieStorageError,
    BookieUnavailableError,
    DLError,
    LedgerReadError,
)
from dlcore.wire.frames import decode_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.base.background import BackgroundTasks
    from dlcore.base.ids import BookieId
    from dlcore.ops.autorecovery.config import AutoRecoveryConfig
    from dlcore.ops.autorecovery.plan import CopyLane

_OVERLOAD_PAUSE_S = 0.05
_DEBT_S = 0.02
"""Shortest sleep of the throttle; shorter waits add up until they reach it."""


class Throttle:
    """Limits the average rate of bytes."""

    def __init__(self, *, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._loop = asyncio.get_running_loop()
        self._paid_until = 0.0

    async def take(self, size: int) -> None:
        """Wait until `size` more bytes are allowed."""
        now = self._loop.time()
        self._paid_until = max(self._paid_until, now) + size / self._bytes_per_s
        if self._paid_until - now >= _DEBT_S:
            await asyncio.sleep(self._paid_until - now)


class EntryCopier:
    """Copies lanes of entries, at one pace for all ledgers."""

    def __init__(self, context: NamespacePorts, config: AutoRecoveryConfig) -> None:
        self._bookies = context.bookies
        self._client_config = context.client_config
        self._in_flight_max = config.copy_bytes_in_flight
        self._throttle = Throttle(bytes_per_s=config.copy_bytes_per_s)

    async def copy(self, ledger_id: int, lane: CopyLane, *, target: BookieId) -> None:
        """Copy a lane; return when `target` has acknowledged every entry as durable.

        Raises:
            LedgerReadError: no source has an intact copy of an entry; the message has each source's
                answer.
            BookieError: `target` refused an entry.
        """
        async with side_tasks() as tasks:
            adds = _Adds(self, target, tasks)
            next_entry_id = lane.first_entry_id
            answers: dict[BookieId, DLError] = {}  # answers of the sources for the next entry
            while next_entry_id <= lane.last_entry_id:
                source = next((each for each in lane.sources if each not in answers), None)
                if source is None:
                    raise _unreadable(ledger_id, next_entry_id, answers)
                chunks = self._bookies.read_entries(
                    source,
                    ledger_id=ledger_id,
                    first_entry_id=next_entry_id,
                    last_entry_id=lane.last_entry_id,
                    stride=lane.stride,
                )
                try:
                    while next_entry_id <= lane.last_entry_id and source not in answers:
                        frames, error = await self._next_frames(
                            chunks, ledger_id, next_entry_id, lane.stride
                        )
                        # A source that failed at an earlier entry may have the next ones.
                        if frames:
                            answers.clear()
                        for frame in frames:
                            await self._throttle.take(len(frame))
                            await adds.send(frame)
                            next_entry_id += lane.stride
                        if error is not None:
                            answers[source] = error
                finally:
                    await _close(chunks)
            await adds.finish()

    async def _next_frames(
        self,
        chunks: AsyncIterator[Sequence[bytes | memoryview]],
        ledger_id: int,
        next_entry_id: int,
        stride: int,
    ) -> tuple[list[bytes], DLError | None]:
        """Return the intact frames of the next chunk, and the error that ends the stream then."""
        timeout_s = self._client_config.read_timeout_s
        frames: list[bytes] = []
        try:
            async with asyncio.timeout(timeout_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                return [], BookieStorageError("the stream ended before its last entry")
            for frame in chunk:
                decode_frame(
                    frame, ledger_id=ledger_id, entry_id=next_entry_id + len(frames) * stride
                )
                frames.append(bytes(frame))
        except TimeoutError:
            return frames, BookieUnavailableError(f"no answer within {timeout_s} s")
        except DLError as error:
            return frames, error
        return frames, None

    async def add(self, target: BookieId, frame: bytes) -> None:
        """Add one frame; while the bookie is overloaded, try again."""
        timeout_s = self._client_config.add_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        # As a recovery, because a fenced ledger refuses other adds.
                        return await self._bookies.add_entry(target, frame, is_recovery=True)
                    except BookieOverloadedError:
                        await asyncio.sleep(_OVERLOAD_PAUSE_S)
        except TimeoutError as error:
            raise BookieUnavailableError(
                f"{target} did not take an entry within {timeout_s} s"
            ) from error

    @property
    def in_flight_max(self) -> int:
        """Most bytes sent and not yet acknowledged, per lane."""
        return self._in_flight_max


class _Adds:
    """Adds in flight to one bookie; the first failure ends all."""

    def __init__(self, copier: EntryCopier, target: BookieId, tasks: BackgroundTasks) -> None:
        self._copier = copier
        self._target = target
        self._tasks = tasks
        self._sent: deque[tuple[asyncio.Task[None], int]] = deque()
        self._bytes = 0

    async def send(self, frame: bytes) -> None:
        """Send a frame, after a wait if too many bytes are in flight."""
        while self._sent and self._bytes + len(frame) > self._copier.in_flight_max:
            await self._await_oldest()
        task = self._tasks.start(self._copier.add(self._target, frame))
        self._sent.append((task, len(frame)))
        self._bytes += len(frame)

    async def finish(self) -> None:
        """Wait for all acknowledgements."""
        while self._sent:
            await self._await_oldest()

    async def _await_oldest(self) -> None:
        task, size = self._sent[0]
        await task
        self._sent.popleft()
        self._bytes -= size


async def _close(chunks: AsyncIterator[Sequence[bytes | memoryview]]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


def _unreadable(ledger_id: int, entry_id: int, answers: dict[BookieId, DLError]) -> LedgerReadError:
    reasons = "; ".join(
        f"{bookie}: {type(error).__name__}: {error}" for bookie, error in answers.items()
    )
    return LedgerReadError(
        f"entry {entry_id} of ledger {ledger_id} cannot be read from any other replica: "
        f"{reasons or 'there is none'}"
    )
