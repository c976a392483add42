"""Sealing a log without a writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import EndOfStreamError, OwnershipAcquireFailedError
from dlcore.log.writing.append import CompleteSegment, Ending, Overtaken, RecoverLog
from tests.fixtures.appenders import EMPTY, appender, opened_by_another
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog


def test_a_log_is_sealed_without_a_writer() -> None:
    """An empty one, one whose writer closed or died; not while a writer owns it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        for name, ends in (("empty", None), ("closed", "aclose"), ("dead", "abort")):
            await namespace.create_log(name)
            sealed = await namespace.open_log(name)
            if ends is not None:
                writer = await sealed.open_writer()
                await writer.write(record(1))
                await getattr(writer, ends)()
            await sealed.mark_end_of_stream()
            assert await sealed.is_end_of_stream_marked()
            assert len(await read_all(sealed)) == (0 if ends is None else 1)
            with pytest.raises(EndOfStreamError):
                await sealed.open_writer()
            with pytest.raises(EndOfStreamError):
                await sealed.mark_end_of_stream()
        other = await (await cluster.open("b")).open_log("clicks")
        async with await log.open_writer():
            with pytest.raises(OwnershipAcquireFailedError):
                await other.mark_end_of_stream()

    on_log(body)


def test_a_seal_completes_what_another_left_open_first() -> None:
    """Its records stay in the log."""
    machine = appender()
    machine.end_with(Ending.SEAL, "seal")
    assert machine.next_step(now_ms=0) == CompleteSegment(EMPTY, None, seal=True)
    assert machine.feed(Overtaken(opened_by_another(EMPTY), 0)) == []
    assert machine.next_step(now_ms=0) == RecoverLog(machine.log.at)
