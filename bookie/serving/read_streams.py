"""Streams of reads that take many messages: each returns its next message when it has credit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dlcore.wire.messages import Chunk, Follow, ReadEntries, Update
from dlcore.wire.port import FollowUpdate

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie.storage.followers import Followers
    from bookie.storage.reads import Reads


class ReadStream(Protocol):
    """The stream of one reader; no entry of it stays in memory while it waits."""

    request_id: int
    chunk_bytes: int
    """Wanted size of a message."""
    has_news: bool
    """Whether there may be a new message."""

    async def advance(self, bytes_max: int) -> Chunk | Update | None:
        """Return the next message of at most `bytes_max` bytes of frames, None if nothing is new.

        Raises:
            LargerEntryError: one entry alone needs more.
            DLError: the answer that ends the stream.
        """
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class RangeStream:
    """Entries of a range, one chunk after the other."""

    def __init__(self, reads: Reads, request: ReadEntries, *, chunk_bytes: int) -> None:
        self.request_id = request.request_id
        self.chunk_bytes = chunk_bytes
        self.has_news = True
        self._reads = reads
        self._request = request
        self._next_entry_id = request.first_entry_id

    async def advance(self, bytes_max: int) -> Chunk:
        """Return the next chunk."""
        request = self._request
        frames = await self._reads.read_chunk(
            request.ledger_id,
            first_entry_id=self._next_entry_id,
            last_entry_id=request.last_entry_id,
            stride=request.stride,
            bytes_max=bytes_max,
        )
        self._next_entry_id += len(frames) * request.stride
        is_last = self._next_entry_id > request.last_entry_id
        return Chunk(self.request_id, frames, is_last)

    def close(self) -> None:
        """Do nothing: a range holds no resources."""


class FollowStream:
    """Entries of a ledger as they are confirmed."""

    def __init__(
        self,
        reads: Reads,
        followers: Followers,
        request: Follow,
        *,
        chunk_bytes: int,
        on_news: Callable[[FollowStream], None],
    ) -> None:
        self.request_id = request.request_id
        self.chunk_bytes = chunk_bytes
        self.has_news = True
        self._reads = reads
        self._ledger_id = request.ledger_id
        self._next_entry_id = request.first_entry_id
        self._sent: FollowUpdate | None = None
        self._on_news = on_news
        self._end_watch = followers.watch(request.ledger_id, self._wake)

    def _wake(self) -> None:
        if self._sent is not None and not self._reads.may_have_news(self._ledger_id, self._sent):
            return
        self.has_news = True
        self._on_news(self)

    async def advance(self, bytes_max: int) -> Update | None:
        """Return the new entries and the new LAC, None if there are none."""
        # Before the read: `_wake` may set it while the read waits for the disk.
        self.has_news = False
        update = await self._reads.follow_chunk(
            self._ledger_id,
            first_entry_id=self._next_entry_id,
            sent=self._sent,
            bytes_max=bytes_max,
        )
        if update is None:
            return None
        self.has_news = self.has_news or self._reads.may_have_news(self._ledger_id, update)
        self._next_entry_id = max(self._next_entry_id, update.last_add_confirmed + 1)
        frames, confirmed, fenced = update
        # Kept without the frames, so that their memory is free while the reader waits.
        self._sent = FollowUpdate((), confirmed, fenced)
        return Update(self.request_id, frames, confirmed, fenced)

    def close(self) -> None:
        """Stop watching the ledger."""
        self._end_watch()
        del self._end_watch  # it refers back to this stream, and so to the connection
