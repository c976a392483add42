"""The blocking API of staged appends."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dlcore.sync.staging_calls import StagedAppendCalls, StagingWriterCalls

if TYPE_CHECKING:
    from dlcore.log.staging.faces import (
        StagedAppend as AsyncStagedAppend,
        StagingWriter as AsyncStagingWriter,
    )
    from dlcore.sync.portal import Portal


class StagingWriter(StagingWriterCalls):
    """Writes durable records that belong to no log until an append commits them."""

    def __init__(self, portal: Portal, writer: AsyncStagingWriter) -> None:
        super().__init__(portal, writer.aclose)
        self._writer = writer

    def close(self, *, delete: bool = False) -> None:
        """Close the ledgers; with `delete` delete them, unless a log holds entries of them.

        Raises: MetadataError: the leftovers are cleaned up as those of a dead process.
        """
        self._aclose = partial(self._writer.aclose, delete=delete)
        super().close()


class StagedAppend(StagedAppendCalls):
    """One atomic append to any number of logs."""

    def __init__(self, portal: Portal, append: AsyncStagedAppend) -> None:
        super().__init__(portal, append.aclose)
        self._append = append
