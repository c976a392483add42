"""The port through which a log's writer is extended for those who write through a proxy.

A `WriterExtension` adds stamps to entries, restores what they say before the first record, and
works beside the writer while that is open.  `dlcore.log.proxied` has the one that proxies use.  The
entries of a writer without an extension have no stamps, and it refuses turns to appends.

Promises of the writer:

* `restore` has returned before a record is accepted.  The log is recovered and not sealed.
* `stamp` is called once for each entry, in the order of entries, and its entry is sent next.
* Entries that another writer may have stamped end this one, since the state is not known any more.
* The extension reads marks; the writer does not.  It calls `after` on one whose rows it has cut.
* `PausableWriter` is the only way in which work beside the writer changes what that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from dlcore.base.errors import DLError
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogHead, LogMetadata, VersionedHead
    from dlcore.log.writing.lock import WriterLock


class RowMark(Protocol):
    """A value that a caller writes rows with, and that `Stamper.stamp` gets with them."""

    def after(self, count: int) -> Self:
        """Return the mark of the rows behind the first `count`."""
        ...


_Mark = TypeVar("_Mark", bound=RowMark)


@dataclass(frozen=True, slots=True)
class MarkedRows(Generic[_Mark]):
    """`count` rows of an entry: the first has the mark, the last is at `last_slot`."""

    mark: _Mark
    count: int
    last_slot: int


class Stamper(Protocol):
    """Makes the stamps of a log's entries.  No I/O."""

    def stamp(
        self,
        rows: Sequence[MarkedRows[Any]],
        *,
        lssn: int,
        entry_id: int,
        size_bytes: int,
        now_ms: int,
        is_first: bool,
        is_last: bool,
    ) -> bytes:
        """Return the stamp of the log's next entry, which holds these rows; b"" for none.

        `is_first`: it is the first entry of an extent; others' extents may come before it in the
        segment.  `is_last`: it is the last one of this writer, which is being closed.
        """
        ...


class PausableWriter(Protocol):
    """A writer that lets others change its log."""

    @property
    def head(self) -> LogHead:
        """The log's head as the writer knows it."""
        ...

    async def pause(self) -> None:
        """Answer all that was accepted, and close the extent; take no record from now on.

        Raises: DLError: the writer has ended, or its log is sealed.
        """
        ...

    def continue_from(self, at: VersionedHead) -> None:
        """End the pause: the others left this head."""
        ...

    def fail(self, error: DLError) -> None:
        """End the writer with its first failure."""
        ...


class Attendant(Protocol):
    """Works beside a writer until it is closed with it."""

    async def aclose(self) -> None:
        """Stop."""
        ...


class WriterExtension(Protocol):
    """Extends one writer."""

    @property
    def stamper(self) -> Stamper:
        """Makes the stamps of its entries."""
        ...

    async def restore(self, context: LogContext, at: VersionedHead) -> None:
        """Find out what the stamps of a log say, whose head is `at` and has no open extent.

        Raises:
            InvalidEntryError: the stamp of an entry is impossible.
            LedgerReadError, MetadataError: the stamps cannot be read now.
        """
        ...

    def attend(
        self, context: LogContext, log: LogMetadata, lock: WriterLock, writer: PausableWriter
    ) -> Attendant:
        """Begin the work beside the writer of a log that has this lock."""
        ...
