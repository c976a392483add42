"""The delivery of records to one reader: older ones from bookies, the latest from the log's ring.

The state of a reader is its position, and the message that is being sent.  If the position is
before the ring, the reader gets the messages that are kept from there on, and where none is, a
reader of `dlcore` catches up with the ring.  The number of such readers is bounded.
If a client receives nothing for a while, or for a shorter while if others wait, it gives its reader
up, and gets another one when it receives again.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from dlcore.base.clock import steady_s
from dlcore.base.config import MIB
from dlcore.base.errors import AlreadyTruncatedError, EndOfStreamError
from dlcore.base.ids import DLSN
from dlcore.base.metrics import Durations
from dlcore.base.places import Places
from dlcore.proxy.reading.awaited import first_not_less
from dlcore.proxy.reading.kept import Series
from dlcore.proxy.reading.outgoing import STALL_S, Outgoing
from dlcore.proxy.reading.ring import fetched
from dlcore.proxy.reading.rows import key_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sized

    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.records import NotLessThan
    from dlcore.proxy.reading.following import FollowedLog, FollowedLogs
    from dlcore.proxy.reading.kept import KeptMessages
    from dlcore.proxy.reading.outgoing import Send
    from dlcore.proxy.reading.ring import Fetched, Ring, RingReader
    from dlcore.proxy.reading.rows import View

HURRIED_S = STALL_S / 10
"""A client that catches up and receives nothing for this time makes room for a waiting one."""
_LOOK_S = 1.0
_FIRST_BYTES = (64 * 1024, 256 * 1024, MIB)
"""Sizes of a reader's first messages: small ones, because a client may never receive any."""
TURN_BYTES = 64 * 1024 * 1024
"""After this many bytes, a client that catches up makes room for a waiting one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The request of a client: the records in [start, end); they are readable unless it follows.

    If it follows, `awaited` may name a future record, behind `start`: delivery begins with it.
    """

    log: DirectLog
    view: View
    start: DLSN
    end: DLSN
    known_end: DLSN
    """The log's end, as far as it is known: what is before it is readable."""
    follow: bool
    rewrites: int = 0
    """How often extents of the log had been replaced when `start` was looked up."""
    awaited: NotLessThan | None = None

    @property
    def series(self) -> Series:
        """The messages into which readers like this one divide the log."""
        return Series(self.log.log_id, self.log.name, key_of(self.view), self.rewrites)


class Deliveries:
    """Serves the readers of a proxy.

    Args:
        followed: the logs that the proxy follows.
        outgoing: the messages in transit to readers.
        kept: the messages of older records that are kept for the next readers.
        catching_up_max: most readers of older records at once; each reads ahead.
    """

    def __init__(
        self,
        followed: FollowedLogs,
        outgoing: Outgoing,
        kept: KeptMessages,
        *,
        catching_up_max: int,
    ) -> None:
        self._followed = followed
        self._outgoing = outgoing
        self._kept = kept
        self._turns = Places(catching_up_max)
        self.times = Durations()
        """Times of messages from rings, from the arrival of their records until they are sent."""
        self.catch_up_messages = 0
        """Messages of older records, which were read from bookies for one client."""
        self.kept_messages = 0
        """Messages of older records, which another client had been sent before."""
        self.catching_up = 0
        """Clients that are behind the rings now."""

    def resize(self, catching_up_max: int) -> None:
        """Let this many read older records at once from now on; none is ended for it."""
        self._turns.resize(catching_up_max)

    async def deliver(self, reading: Reading, send: Send) -> None:
        """Send a client the requested records; return when it has received all of them.

        Raises: AlreadyTruncatedError, ReaderStalledError, and as `AsyncLogReader.read_next`.
        """
        if not reading.follow:
            await self._catch_up(reading, reading.start, reading.end, send)
            return
        with (
            self._followed.follow(reading.log, reading.known_end) as followed,
            followed.ring(reading.view) as ring,
        ):
            start = reading.start
            if reading.awaited is not None:
                start = await self._found(reading, reading.awaited, followed)
            await self._follow(replace(reading, start=start), followed, ring, send)

    async def _found(self, reading: Reading, wanted: NotLessThan, followed: FollowedLog) -> DLSN:
        """Wait for a record, and return its position; if the log is sealed, return its end.

        Records between `reading.start` and the begin of our following are few, and are read here.
        """
        # First wait, then read: a record that comes in between is found by one of the two.
        with followed.awaiting(wanted) as found:
            begun = followed.end
            if reading.start < begun:
                async with self._turns, aclosing(_parts(reading, reading.start, begun)) as parts:
                    async for part in parts:
                        for position in (first_not_less(rows, wanted) for rows in part.rows):
                            if position is not None and position < begun:
                                return position
            return await found

    async def _follow(
        self, reading: Reading, followed: FollowedLog, ring: Ring, send: Send
    ) -> None:
        position = reading.start
        while position < reading.end:
            until = min(ring.begin, reading.end)
            reader = ring.join(position)
            if reader is not None:
                try:
                    end = await self._send_runs(followed, reader, reading.end, send)
                    position = reader.position
                    if reader.is_behind:
                        continue
                finally:
                    reader.leave()
                if end is None:
                    return
                until = end
            await self._catch_up(reading, position, until, send)
            position = max(position, until)

    async def _send_runs(
        self, followed: FollowedLog, reader: RingReader, end: DLSN, send: Send
    ) -> DLSN | None:
        """Send whole runs until the reader is behind, or at `end`, or the log is sealed.

        Returns: the end of the wanted part of the next run, if only a part of it is wanted.
        """
        while reader.position < end and not reader.is_behind:
            # The event before the ring: a run that comes after `peek` then sets this event.
            news, found = followed.news, reader.peek()
            if found is None:
                followed.require_unbroken()
                if followed.has_ended:
                    return None
                await news.wait()
                continue
            run, skipped = found
            if skipped < run.row_count and (skipped or run.end > end):
                return min(run.end, end)
            reader.advance()
            if not skipped:
                await self._outgoing.send(send, run.data)
                self.times.note(steady_s() - run.came_s)
        return None

    @property
    def _others_wait(self) -> bool:
        """Whether another client waits to catch up."""
        return self._turns.locked() or self._outgoing.readers_waiting > 0

    async def _catch_up(self, reading: Reading, position: DLSN, end: DLSN, send: Send) -> None:
        """Send the records in [position, end), which are readable.

        While memory is short, a client that has received nothing yet gets one entry, without
        read-ahead: most clients that fill memory never receive anything.
        """
        self.catching_up += 1
        try:
            await self._caught_up(reading, position, end, send)
        finally:
            self.catching_up -= 1

    async def _caught_up(self, reading: Reading, position: DLSN, end: DLSN, send: Send) -> None:
        has_taken = is_empty = False
        series = reading.series
        while position < end:
            until = end
            # Without an entry at this position, as behind a segment's last one, look further.
            if self._outgoing.is_short and not has_taken and not is_empty:
                until = min(end, DLSN(position.lssn, position.entry_id + 1, 0))
            kept = self._kept.find((series, position), until, steady_s())
            if kept is not None:
                message, position = kept
                await self._outgoing.send(send, message)
                self.kept_messages += 1
                has_taken, is_empty = True, False
                continue
            is_empty = True
            sending: asyncio.Future[None] | None = None
            try:
                async with (
                    self._turns,
                    self._outgoing.reading(),
                    aclosing(_messages(reading, position, until)) as messages,
                ):
                    left = TURN_BYTES
                    async for message, reached in messages:
                        is_empty = False
                        if reached <= until:  # else it has a part of these records
                            self._kept.keep((series, position), message, reached, steady_s())
                        position = reached
                        sending = await self._outgoing.begin(send, message)
                        self.catch_up_messages += 1
                        patience_s = HURRIED_S if self._others_wait else STALL_S
                        done, _ = await asyncio.wait({sending}, timeout=patience_s)
                        left -= len(message)
                        if not done or (left < 0 and self._others_wait):
                            break
                        await sending
                        has_taken = True
                    else:
                        position = max(position, until)
                        continue
                # Outside of the block above: the memory of the read-ahead is free during this wait.
                await sending
                has_taken = True
            finally:
                if sending is not None:
                    sending.cancel()
                sending = None  # its error holds this frame, and with it the message


async def _messages(
    reading: Reading, position: DLSN, end: DLSN
) -> AsyncGenerator[tuple[Sized, DLSN], None]:
    """Yield the messages with the records in [position, end), and the end of each."""
    async with aclosing(_parts(reading, position, end)) as parts:
        async for part in parts:
            message = part.part(reading.view, end)
            if message is not None:
                yield message, part.end


async def _parts(reading: Reading, position: DLSN, end: DLSN) -> AsyncGenerator[Fetched, None]:
    """Yield the records in [position, end); the last part may have records behind `end`.

    All of them were readable when `end` was found.  A bookie that is asked later may not know this
    yet; then we wait.  No record is left out or yielded twice.
    """
    async with await reading.log.readers.open_part(position, end) as reader:
        sizes = chain(_FIRST_BYTES, repeat(reading.view.part_bytes))
        with suppress(EndOfStreamError):
            while position < end:
                rows = await reader.take_entries(timeout_s=_LOOK_S)
                # Without this look the reader would wait without an end for records that are gone.
                if not rows and await reading.log.get_first_active_dlsn() >= end:
                    raise AlreadyTruncatedError(
                        f"log {reading.log.name!r}: the records before {end} were truncated while "
                        "they were read"
                    )
                if not rows:  # it has passed entries without a row from `position` on
                    position = max(position, reader.position)
                for each in fetched(rows, row_bytes=reading.view.row_bytes, sizes=sizes):
                    position = each.end
                    yield each
                    if position >= end:
                        return
