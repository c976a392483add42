"""The events of a stream of entries, for the machine that reads a log along its tail."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.base.background import in_turn
from dlcore.base.errors import DLError
from dlcore.log.reading.tail import Fetched, Signal, StreamFailed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.log.reading.tail import Event
    from dlcore.wire.frames import EntryFrame


async def entry_events(
    entries: AsyncGenerator[Sequence[EntryFrame], None], goes_on: asyncio.Event
) -> AsyncGenerator[Event, None]:
    """Yield entries as events, then the end or the failure; each when `goes_on` is set.

    It is cleared before each event with entries.  The stream's first entries are fetched at once.
    """
    try:
        # The next entries are not fetched before their turn: the buffer bounds what is in memory.
        async with aclosing(in_turn(entries, goes_on)) as chunks:
            async for frames in chunks:
                yield Fetched(frames)
    except DLError as error:
        await goes_on.wait()
        yield StreamFailed(error)
    else:
        yield Signal.STREAM_ENDED
