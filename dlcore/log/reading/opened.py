"""A final extent whose entries are requested before they are due."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.base.background import forget_frames

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.log.reading.cursor import ReadExtent
    from dlcore.wire.digest import EntryFrame


class OpenedExtent:
    """The entries of `step`; the first chunk is fetched as soon as this is created.

    Further chunks are fetched when `chunks` is iterated over, except the one that a range read has
    on its way.  Errors are raised by `chunks` too.
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
        """Yield the entries in order, many at a time; only once."""
        yield await self._first
        async for frames in self._chunks:
            yield frames

    async def aclose(self) -> None:
        """Stop fetching, also if the caller that waits here is cancelled."""
        self._first.cancel()
        try:
            await asyncio.gather(self._first, return_exceptions=True)
        finally:
            forget_frames(self._first)
            await self._chunks.aclose()
