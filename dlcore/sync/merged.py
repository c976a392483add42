"""The blocking reader over many logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.sync.twin import Blocking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.base.ids import DLSN
    from dlcore.log.reading.merged import AsyncMergedReader, MergedRecord
    from dlcore.sync.portal import Portal

_RECORDS_AT_ONCE = 1_000


class MergedReader(Blocking):
    """Reads many logs as one, by transaction id; use `Namespace.open_merged_reader`.

    `for log, record in reader` yields all readable records.  Not thread-safe.
    """

    def __init__(self, portal: Portal, reader: AsyncMergedReader) -> None:
        super().__init__(portal, reader.aclose)
        self._reader = reader

    def __repr__(self) -> str:
        return repr(self._reader).replace("AsyncMergedReader", "MergedReader")

    @property
    def positions(self) -> dict[str, DLSN]:
        """The next position in each log.

        Raises: ConfigurationError: it was opened before a fork, in another process.
        """

        # On the loop, because a cancelled read may be ending there.
        return self._call_on_loop(lambda: self._reader.positions)

    def read_bulk(
        self, count: int, *, follow: bool = False, patience_s: float | None = None
    ) -> list[MergedRecord]:
        """Return up to `count` records, none when all that were readable have been returned.

        `follow` and `patience_s` are those of the async method.

        Raises: DLError: the reader of a log failed; records of the other logs are kept for the next
            call.
        """
        # In two steps, because an interrupt may come after records were gathered and before the
        # result is known.
        self._call(self._reader.gather(count, follow=follow, patience_s=patience_s))
        return self._reader._take_gathered(count)

    def records(
        self, *, follow: bool = False, patience_s: float | None = None
    ) -> Iterator[MergedRecord]:
        """Yield records until every readable one was returned; with `follow` as `read_bulk`.

        A yielded record counts as read: after a loop that ends early, reading continues behind it.

        Raises: as `read_bulk`.
        """
        reader = self._reader
        while True:
            self._call(reader.gather(_RECORDS_AT_ONCE, follow=follow, patience_s=patience_s))
            if not reader.gathered:
                return
            while reader.gathered:
                yield reader.gathered.popleft()

    def __iter__(self) -> Iterator[MergedRecord]:
        return self.records()
