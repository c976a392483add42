"""Serving one reader: what lies behind it from the bookies, what comes from the ring of its log.

A reader is somewhere in its log, and holds no more than that and the message that it is being sent.
Behind the ring it is caught up by a core reader of its own, of which there are so many at most; one
whose client takes nothing for a while, a short one if others wait, gives its up, and gets another
once the client goes on.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING

from dlcore.base.config import MIB
from dlcore.base.errors import AlreadyTruncatedError, EndOfStreamError
from dlcore.base.ids import DLSN
from dlcore.proxy.reading.awaited import first_not_less
from dlcore.proxy.reading.outgoing import STALL_S, Outgoing
from dlcore.proxy.reading.runs import PART_BYTES, fetched

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from dlcore.api.manager import DistributedLogManager
    from dlcore.base.records import NotLessThan
    from dlcore.proxy.reading.following import FollowedLog, FollowedLogs
    from dlcore.proxy.reading.outgoing import Send
    from dlcore.proxy.reading.ring import Ring, RingReader
    from dlcore.proxy.reading.rows import RowView
    from dlcore.proxy.reading.runs import Fetched

_LOOK_S = 1.0
_FIRST_BYTES = (64 * 1024, 256 * 1024, MIB)
"""A reader's first messages are small, and soon larger: one that takes none holds little."""
TURN_BYTES = 64 * 1024 * 1024
"""After so much a reader that is caught up makes room for one that waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a client gets: the records in [start, end), all of them readable unless it follows.

    Of one who follows, `awaited` is yet to come: it begins with that record, behind `start`.
    """

    log: DistributedLogManager
    view: RowView
    start: DLSN
    end: DLSN
    follow: bool
    awaited: NotLessThan | None = None


class Deliveries:
    """Serves the readers of a proxy.

    Args:
        followed: the logs that are followed.
        outgoing: what is being sent to them.
        catching_up_max: how many are caught up at once; each reads some way ahead.
    """

    def __init__(self, followed: FollowedLogs, outgoing: Outgoing, *, catching_up_max: int) -> None:
        self._followed = followed
        self._outgoing = outgoing
        self._turns = asyncio.Semaphore(catching_up_max)

    async def deliver(self, reading: Reading, send: Send) -> None:
        """Send a client the records that it asked for; return when it has them all.

        Raises: AlreadyTruncatedError, ReaderStalledError, and as `AsyncLogReader.read_next`.
        """
        if not reading.follow:
            await self._catch_up(reading, reading.start, reading.end, send)
            return
        async with (
            self._followed.follow(reading.log) as followed,
            followed.ring(reading.view) as ring,
        ):
            start = reading.start
            if reading.awaited is not None:
                start = await self._found(reading, reading.awaited, followed)
            await self._follow(replace(reading, start=start), followed, ring, send)

    async def _found(self, reading: Reading, wanted: NotLessThan, followed: FollowedLog) -> DLSN:
        """Return where a record is, once it is there; at the end of a sealed log that is its end.

        What came before the log was followed here is looked at apart; it is little.
        """
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
        """Send whole runs, until the reader is behind, or at `end`, or the log is sealed.

        Returns: where the part of the next run ends that is wanted, if that is not all of it.
        """
        while reader.position < end and not reader.is_behind:
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
        return None

    @property
    def _others_wait(self) -> bool:
        """Whether another client waits to be caught up."""
        return self._turns.locked() or self._outgoing.readers_waiting > 0

    async def _catch_up(self, reading: Reading, position: DLSN, end: DLSN, send: Send) -> None:
        """Send what lies in [position, end), which is readable.

        While memory is short a client that has taken nothing yet is sent one entry, and nothing is
        read ahead for it: most of those that fill memory never take anything.
        """
        has_taken = is_empty = False
        while position < end:
            until = end
            # Behind the last entry of a segment there is none to send: the next one is elsewhere.
            if self._outgoing.is_short and not has_taken and not is_empty:
                until = min(end, DLSN(position.lssn, position.entry_id + 1, 0))
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
                        position = reached
                        sending = await self._outgoing.begin(send, message)
                        patience_s = STALL_S / 10 if self._others_wait else STALL_S
                        done, _ = await asyncio.wait({sending}, timeout=patience_s)
                        left -= len(message)
                        if not done or (left < 0 and self._others_wait):
                            break
                        await sending
                        has_taken = True
                    else:
                        position = max(position, until)
                        continue
                await sending
                has_taken = True
            finally:
                if sending is not None:
                    sending.cancel()
                sending = None  # its error holds this frame, and with it the message


async def _messages(
    reading: Reading, position: DLSN, end: DLSN
) -> AsyncGenerator[tuple[bytes, DLSN], None]:
    """Yield the messages with [position, end), and where each ends."""
    async with aclosing(_parts(reading, position, end)) as parts:
        async for part in parts:
            message = part.part(reading.view, end)
            if message is not None:
                yield message, part.end


async def _parts(reading: Reading, position: DLSN, end: DLSN) -> AsyncGenerator[Fetched, None]:
    """Yield what [position, end) holds, the last of it perhaps with more.

    All of it was readable when its end was learned.  Bookies that are asked later may know of less
    for a moment; that is waited for, and nothing is left out, nor given twice.
    """
    async with await reading.log.open_part(position, end) as reader:
        sizes = chain(_FIRST_BYTES, repeat(PART_BYTES))
        with suppress(EndOfStreamError):
            while position < end:
                rows = await reader.take_rows(timeout_s=_LOOK_S)
                if not rows and await reading.log.get_first_active_dlsn() >= end:
                    raise AlreadyTruncatedError(
                        f"log {reading.log.name!r}: the records before {end} were truncated while "
                        "they were read"
                    )
                for each in fetched(rows, log=reading.log.name, sizes=sizes):
                    position = each.end
                    yield each
                    if position >= end:
                        return
