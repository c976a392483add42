"""Values that are no records or positions; `tests/contracts/test_refusals.py` has all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import DLSN
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog


def test_a_value_that_is_no_record_ends_no_writer() -> None:
    """In a bulk its future tells of it."""

    async def body(_: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            with pytest.raises(ConfigurationError, match="'x': expected a LogRecord"):
                writer.write("x")  # type: ignore[arg-type]
            first, second = writer.write_bulk([record(1), b"x"])  # type: ignore[list-item]
            assert await first == DLSN.INITIAL
            with pytest.raises(ConfigurationError, match="b'x': expected a LogRecord"):
                await second

    on_log(body)


def test_texts_that_are_no_position() -> None:
    """A position is made of three whole numbers."""
    with pytest.raises(ConfigurationError, match="whole numbers, not '1', 0, 0"):
        DLSN("1", 0, 0)  # type: ignore[arg-type]
