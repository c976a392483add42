"""Mistakes of a beginner: each is refused by an error that names the value.

Goal: users need not read the code to learn that text is no position.  Method: calls with values of
the wrong kind, on a log in memory; what a program may write is not changed by any of them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import ConfigurationError, DLError
from dlcore.base.ids import DLSN
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace

WRONG: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda space, log: space.create_log(5), "invalid log name 5: expected text"),
    (lambda space, log: space.open_log(None), "invalid log name None: expected text"),
    (lambda space, log: space.get_logs(5), "prefix=5: expected the start of log names"),
    (
        lambda space, log: space.create_log("x", settings={"retention_s": 5}),
        "settings={'retention_s': 5}: expected a LogSettings",
    ),
    (
        lambda space, log: space.open_log("clicks", config={"entry_bytes": 5}),
        "config={'entry_bytes': 5}: expected a LogConfig",
    ),
    (lambda space, log: space.open_merged_reader("clicks"), "names='clicks': expected a list"),
    (lambda space, log: space.get_snapshots("clicks"), "names='clicks': expected a list"),
    (lambda space, log: space.begin_append("me", "1"), "version='1': expected a whole number"),
    (lambda space, log: space.begin_append(7, 1), "identity=7: expected text"),
    (
        lambda space, log: log.open_reader(dlsn="1:0:0"),
        "dlsn='1:0:0': expected a DLSN, as of DLSN.parse",
    ),
    (lambda space, log: log.open_reader(txid="5"), "txid='5': expected a whole number"),
    (
        lambda space, log: log.open_reader(timestamp_ms=datetime(2020, 1, 1, tzinfo=UTC)),
        "timestamp_ms=datetime.datetime(2020, 1, 1, 0, 0, tzinfo=datetime.timezone.utc): expected",
    ),
    (lambda space, log: log.open_reader(subscriber=5), "subscriber=5: expected text"),
    (lambda space, log: log.truncate("1:0:0"), "dlsn='1:0:0': expected a DLSN, as of DLSN"),
    (lambda space, log: log.truncate(txid=1.5), "txid=1.5: expected a whole number"),
    (lambda space, log: log.read("1:0:0"), "'1:0:0': expected a DLSN, a transaction id, or a time"),
    (lambda space, log: log.get_dlsn_not_less_than_txid(True), "txid=True: expected a whole"),
    (lambda space, log: log.get_dlsn_not_less_than_timestamp("now"), "timestamp_ms='now'"),
]


@pytest.mark.parametrize(("call", "reason"), WRONG, ids=[reason[:30] for _, reason in WRONG])
def test_a_value_of_the_wrong_kind_is_named(call: Callable[[Any, Any], Any], reason: str) -> None:
    """With what would be right."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(record(1))
        namespace: DirectNamespace = cluster.namespaces[0]
        with pytest.raises(DLError) as caught:
            await call(namespace, log)
        assert reason in str(caught.value)
        assert [r.txid async for r in await log.open_reader()] == [1]

    on_log(body)


def test_a_reader_checks_how_many_and_how_long() -> None:
    """Before it waits; and what is here can still be read."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await writer.write(record(1))
        async with await log.open_reader() as reader:
            for count in ("5", 0, True):
                with pytest.raises(ConfigurationError, match=f"count={count!r}: expected a "):
                    await reader.read_bulk(count)  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match="timeout_s='1': expected a number"):
                await reader.read_bulk(5, timeout_s="1")  # type: ignore[arg-type]
            assert len(await reader.read_bulk(5)) == 1

    on_log(body)


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
