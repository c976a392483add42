"""A final extent whose entries are asked for before it is their turn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.background import forget_frames

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.log.reading.cursor import ReadExtent
    from dlcore.wire.digest import EntryFrame


class OpenedExtent:
    """The entries that `step` is about; the first chunk is fetched as soon as this is made.

    No other is fetched before `chunks` is iterated over, but for the one that a range read has on
    its way.  An error waits for `chunks` too.
    """

    def __init__(
        self, step: ReadExtent, chunks: AsyncGenerator[Sequence[EntryFrame], None]
    ) -> None:
        self.step = step
        self._chunks = chunks
        self._first = asyncio.create_task(self._fetch_first())

    async def _fetch_first(self) -> Sequence[EntryFrame]:
        return await anext(self._chunks)

    async def chunks(self) -> AsyncGenerator[Sequence[EntryFrame], None]:
        """Yield the entries in order, many at a time; once."""
        yield await self._first
        async for frames in self._chunks:
            yield frames

    async def aclose(self) -> None:
        """Fetch nothing more, also if whoever waits here is cancelled."""
        self._first.cancel()
        try:
            await asyncio.gather(self._first, return_exceptions=True)
        finally:
            forget_frames(self._first)
            await self._chunks.aclose()
