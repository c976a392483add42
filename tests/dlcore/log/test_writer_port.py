"""The promises of a log's writer to its extension, shown by one that is not that of proxies."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.config import LogConfig
from dlcore.base.errors import LogNotReadyError
from dlcore.log.entries.body import batch_of
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata, VersionedHead
    from dlcore.log.writing.lock import WriterLock
    from dlcore.log.writing.port import MarkedRows, PausableWriter


@dataclass(frozen=True)
class Letter:
    """A mark: the number of its first row."""

    number: int

    def after(self, count: int) -> Letter:
        """Return the mark of the rows behind the first `count`."""
        return Letter(self.number + count)


@dataclass
class Noting:
    """An extension that notes what the writer asks, and lets a test pause the writer."""

    seen: list[Any] = field(default_factory=list)
    writer: PausableWriter | None = None

    @property
    def stamper(self) -> Noting:
        """It stamps entries itself."""
        return self

    async def restore(self, context: LogContext, at: VersionedHead) -> None:
        """Note whether an extent is open."""
        await asyncio.sleep(0)
        self.seen.append(("restore", at.head.open_extent))

    def stamp(self, rows: Sequence[MarkedRows[Any]], *, entry_id: int, **_: Any) -> bytes:
        """Note the rows of an entry."""
        self.seen.append(("stamp", entry_id, [(each.mark.number, each.count) for each in rows]))
        return bytes(8)

    def attend(
        self, context: LogContext, log: LogMetadata, lock: WriterLock, writer: PausableWriter
    ) -> Noting:
        """Keep the writer."""
        assert lock.is_owner
        self.seen.append("attend")
        self.writer = writer
        return self

    async def aclose(self) -> None:
        """Note the end."""
        self.seen.append("end")


def test_an_extension_is_asked_in_the_order_of_the_entries() -> None:
    """The rows of one call are cut to two entries; another entry has no row with a mark."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        dead = await log.open_writer()
        await dead.write(record(0))
        await dead.abort()
        noting = Noting()
        namespace = await cluster.open("small", config=LogConfig(entry_bytes=100, lock_timeout_s=5))
        writer = await (await namespace.open_log("clicks")).open_writer(extension=noting)
        assert noting.seen == [("restore", None), "attend"]
        await writer.write_fitted(batch_of([1] * 3, [bytes(30)] * 3), mark=Letter(7))
        await writer.write(record(2))
        await writer.aclose()
        stamps = [("stamp", 0, [(7, 2)]), ("stamp", 1, [(9, 1)]), ("stamp", 2, [])]
        assert noting.seen[2:] == [*stamps, "end"]

    on_log(body)


def test_a_paused_writer_takes_no_record_until_it_continues() -> None:
    """The pause answers what was accepted before it, and closes the extent."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        noting = Noting()
        writer = await log.open_writer(extension=noting)
        assert noting.writer is not None
        written = writer.write(record(1))
        await noting.writer.pause()
        assert written.done()
        at = await cluster.namespaces[0].log_context.logs.find("clicks")
        head = await cluster.namespaces[0].log_context.logs.read(at)
        assert head.head.open_extent is None
        with pytest.raises(LogNotReadyError):
            writer.write(record(2))
        noting.writer.continue_from(head)
        assert noting.writer.head == head.head
        await writer.write(record(2))
        await writer.aclose()
        assert [each.txid for each in await read_all(log)] == [1, 2]

    on_log(body)
