"""Readers that are left in the middle of a log drop their read-ahead at once.

Goal: memory of readers that come and go, as a proxy has them, does not wait for Python's collector.
Method: it is switched off, and what it would have to free is looked for by its kind.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.config import LogConfig
from dlcore.base.records import LogRecord
from dlcore.ledger.reading.follow_driver import LedgerFollower
from dlcore.ledger.reading.range_read_driver import RangeRead
from dlcore.log.reading.tail_driver import Fetcher
from dlcore.wire.connection import Incoming
from dlcore.wire.frames import EntryFrame
from tests.fixtures.aio import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.ops.sandbox.cluster import Sandbox

pytestmark = pytest.mark.integration

KINDS = (Fetcher, Incoming, RangeRead, LedgerFollower, EntryFrame)
RECORDS, RECORD_BYTES = 40, 400_000


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Let nothing be freed but by its count of references."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left() -> list[object]:
    """Return what there is of readers."""
    return [each for each in gc.get_objects() if type(each) in KINDS]


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.usefixtures("uncollected")
def test_the_read_ahead_is_freed_when_a_reader_is_left(sandbox: Sandbox, *, is_open: bool) -> None:
    """Readers of a segment that is written, and of a complete one."""

    async def scenario() -> None:
        others = frozenset(map(id, left()))  # of tests before, whose readers are not judged here
        async with await open_namespace(sandbox.uri) as namespace:
            name = f"left/{uuid4().hex}"
            await namespace.create_log(name)
            log = await namespace.open_log(
                name, config=LogConfig(read_ahead_bytes=2 * RECORD_BYTES)
            )
            writer = await log.open_writer()
            for number in range(RECORDS):
                await writer.write(LogRecord(number, bytes(RECORD_BYTES)))
            if not is_open:
                await writer.aclose()
            for _ in range(3):
                async with await log.open_reader() as reader:
                    await reader.read_next()
                    await asyncio.sleep(0)
                del reader
            await until(lambda: others.issuperset(map(id, left())))
            await writer.aclose()

    asyncio.run(scenario())
