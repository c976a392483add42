"""Each method of a reader gives the same over all ways to it."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    ConfigurationError,
    EndOfStreamError,
    LogNotFoundError,
    SchemaMismatchError,
)
from dlcore.base.ids import DLSN
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from tests.fixtures.ways import Way

SCHEMA = pa.schema({"km": pa.int64()})


def txids(way: Way, reader: Any, count: int = 100) -> list[int]:
    """Return the transaction ids of what is read in bulk until it is caught up."""
    return [each.txid for each in reader.read_bulk(count, **way.caught_up)]


def test_records_are_read_in_any_portions(way: Way) -> None:
    """Up to the end; the position is that of the next record."""
    log = way.new_log(0, 1, 2, 3, 4, 5, 6)
    with log.open_reader() as reader:
        assert (reader.log_name, reader.position) == (log.name, DLSN.INITIAL)
        assert (reader.is_typed, reader.broken_entries, reader.committed) == (False, 0, None)
        first = reader.read_next(**way.caught_up)
        assert (first.txid, first.payload, first.dlsn) == (0, b"0", DLSN.INITIAL)
        assert reader.position in (DLSN(1, 0, 1), DLSN(1, 1, 0))
        assert txids(way, reader, 2) == [1, 2]
        rest = reader.read_batch(**way.caught_up)
        assert rest["txid"].to_pylist()[0] == 3
        read = 3 + rest.num_rows
        assert txids(way, reader) == list(range(read, 7))
        assert txids(way, reader) == []
        assert reader.read_next(**way.caught_up) is None
        assert reader.read_batch(**way.caught_up) is None
        assert reader.read_next(non_blocking=True) is None
        assert reader.read_bulk(3, timeout_s=0.02) == []
        way.write(log.name, 7, 8)
        assert [each.txid for each in reader.records()] == [7, 8]
        assert reader.position >= DLSN(2, 1, 1)
        assert "OPEN" in repr(reader)
        for count in (0, -1, "5", True):
            with pytest.raises(ConfigurationError, match=f"count={count!r}: expected"):
                reader.read_bulk(count)
        with pytest.raises(ConfigurationError, match="timeout_s"):
            reader.read_bulk(1, timeout_s="1")
    assert "CLOSED" in repr(reader)
    reader.close()
    for call in (reader.read_next, reader.seek, reader.read_batch):
        with pytest.raises(AlreadyClosedError):
            call()


def test_batches_have_all_columns(way: Way) -> None:
    """A typed log has batches only."""
    log, typed = way.new_log(1, 2), way.new_log(schema=SCHEMA)
    with way.making.open_log(typed.name).open_writer() as writer:
        writer.write_batch(pa.record_batch({"km": [3, 4], "_txid": [1, 2]}))
    with log.open_reader() as reader:
        table = pa.Table.from_batches(reader.batches())
    assert table.schema.names == ["log", "dlsn", "txid", "sequence_id", "timestamp", "value"]
    assert table["txid"].to_pylist() == [1, 2]
    with typed.open_reader() as reader:
        assert reader.is_typed
        for _ in range(2):
            with pytest.raises(SchemaMismatchError, match="use read_batch"):
                reader.read_bulk(2, **way.caught_up)
        table = pa.Table.from_batches(reader.batches())
    assert table.schema.names == ["_dlsn", "_txid", "_sequence_id", "_timestamp", "km"]
    assert table["km"].to_pylist() == [3, 4]


def test_a_reader_seeks_forward_and_back(way: Way) -> None:
    """By whatever names a position; the truncated ones are refused."""
    log = way.new_log(0, 1, 2, 3, 4, 5)
    with log.open_reader(dlsn=DLSN(1, 3, 0)) as reader:
        assert txids(way, reader, 2) == [3, 4]
        reader.seek(txid=2)
        assert txids(way, reader, 2) == [2, 3]
        reader.seek()
        first = reader.read_next(**way.caught_up)
        reader.seek(timestamp_ms=first.timestamp_ms)
        assert txids(way, reader)[:1] == [0]
        reader.seek(dlsn=DLSN(1, 4, 0))
        assert reader.position == DLSN(1, 4, 0)
        assert txids(way, reader) == [4, 5]
        reader.seek(txid=8)
        assert reader.read_next(**way.caught_up) is None
        way.write(log.name, 6, 7, 8, 9)
        assert txids(way, reader)[-2:] == [8, 9]
        log.truncate(txid=4)
        with pytest.raises(AlreadyTruncatedError):
            reader.seek(dlsn=DLSN(1, 1, 0))
        with pytest.raises(AlreadyTruncatedError):
            reader.seek(txid=2)
        reader.seek()
        assert txids(way, reader, 1) == [4]
    for start in ({"dlsn": DLSN(1, 1, 0)}, {"txid": 2}):
        with pytest.raises(AlreadyTruncatedError):
            log.open_reader(**start)
    with log.open_reader(dlsn=DLSN.INITIAL) as reader:
        assert txids(way, reader, 1) == [4]


def by_reader(log: Any, kind: str, start: Any) -> list[int]:
    """Return what a reader that is opened there reads."""
    with log.open_reader(**{kind: start}) as reader:
        return [each.txid for each in reader.records()]


def by_seek(log: Any, kind: str, start: Any) -> list[int]:
    """Return what a reader that is moved there reads."""
    with log.open_reader() as reader:
        reader.seek(**{kind: start})
        return [each.txid for each in reader.records()]


def by_range(log: Any, _: str, start: Any) -> list[int]:
    """Return what a range that begins there has."""
    found: list[int] = log.read(start).to_arrow()["txid"].to_pylist()
    return found


TXIDS = [5, 15, 25, 35]
NAMES = [
    (number, kind, start)
    for number, txid in enumerate(TXIDS)
    for kind, start in (
        ("dlsn", DLSN(number // 2 + 1, number % 2, 0)),
        ("txid", txid),
        ("txid", txid - 4),
    )
]
"""All names of a record in two segments, the last of which is a number between ids."""


def test_a_truncated_record_is_refused_by_all_its_names(way: Way) -> None:
    """Each that is left is read from; the very first names mean the beginning."""
    reads = cycle([by_reader, by_seek, by_range])  # each name meets all of them
    log = way.new_log(*TXIDS[:2])
    way.write(log.name, *TXIDS[2:])
    # Nothing, a part of a segment, a whole one, and all.
    for gone, end in ((0, None), (1, DLSN(1, 1, 0)), (2, DLSN(2, 0, 0)), (4, DLSN(2, 2, 0))):
        assert end is None or log.truncate(end)
        for kind, start in (("dlsn", DLSN.INITIAL), ("txid", 0)):
            assert next(reads)(log, kind, start) == TXIDS[gone:]
        for number, kind, start in NAMES:
            read = next(reads)
            if number >= gone:
                assert read(log, kind, start) == TXIDS[number:]
            elif start != DLSN.INITIAL:
                with pytest.raises(AlreadyTruncatedError, match=f"{start} was truncated"):
                    read(log, kind, start)


def test_a_loop_that_ends_early_leaves_the_rest(way: Way) -> None:
    """The next read goes on behind the last record of the loop."""
    log = way.new_log(0, 1, 2, 3, 4, 5)
    with log.open_reader(txid=1) as reader:
        for record in reader.records():
            if record.txid == 3:
                break
        if not way.has_proxies:
            assert record.position_in_segment == 4  # counted from 1
        assert txids(way, reader, 1) == [4]
        assert pa.Table.from_batches(reader.batches())["txid"].to_pylist() == [5]
        reader.seek(txid=2)
        for record in reader:
            assert record.txid == 2
            break
        assert reader.position in (record.dlsn.next_slot(), DLSN(1, 3, 0))


def test_a_reader_follows_its_log(way: Way) -> None:
    """A loop waits for what comes; one by transaction id leaves out lower ones."""
    log = way.new_log(0, 1)
    with log.open_reader() as reader, log.open_reader(txid=4) as later:
        following, waiting = reader.records(follow=True), later.records(follow=True)
        assert [next(following).txid for _ in range(2)] == [0, 1]
        way.write(log.name, 2, 3, 4)
        assert [next(following).txid for _ in range(3)] == [2, 3, 4]
        assert next(waiting).txid == 4
        way.write(log.name, 5)
        assert reader.read_bulk(1, timeout_s=30)[0].txid == 5
        log.mark_end_of_stream()
        assert list(reader.batches(follow=True)) == []


def test_the_first_position_means_what_is_left(way: Way) -> None:
    """Also for a reader that was opened before there was a record."""
    log = way.new_log()
    with log.open_reader(dlsn=DLSN.INITIAL) as early:
        way.write(log.name, 0, 1, 2)
        log.truncate(DLSN(1, 1, 0))
        with log.open_reader(dlsn=DLSN.INITIAL) as late:
            assert txids(way, late) == [1, 2]
        assert txids(way, early)[-2:] == [1, 2]  # a direct one may have read ahead
    with way.only_directly(), log.open_reader(ignore_truncation=True) as all_of_it:
        assert txids(way, all_of_it) == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 3])
def test_a_sealed_log_has_an_end(way: Way, count: int) -> None:
    """It is an error for a call that asks for the next record, and the end of a loop."""
    log = way.new_log(*range(count))
    with log.open_reader() as reader, log.open_reader() as following:
        assert len(txids(way, reader)) == count
        log.mark_end_of_stream()
        for call in (reader.read_next, reader.read_batch):
            with pytest.raises(EndOfStreamError):
                call(**way.caught_up)
        with pytest.raises(EndOfStreamError):
            reader.read_bulk(1, **way.caught_up)
        assert len(list(following.records(follow=True))) == count
        with pytest.raises(EndOfStreamError):
            following.read_next()
        assert list(following.records()) == list(following.batches()) == []
        following.seek()
        assert sum(each.num_rows for each in following.batches(follow=True)) == count
    assert log.read().to_arrow().num_rows == count
    status = log.status()
    assert (status.sealed, status.record_count, status.last is None) == (True, count, not count)


def test_a_subscriber_goes_on_where_it_committed(way: Way) -> None:
    """Inclusively; a start that is given has precedence."""
    log = way.new_log(1, 2, 3, 4)
    with log.open_reader(subscriber="s") as reader:
        assert reader.committed == DLSN.INITIAL
        assert txids(way, reader, 2) == [1, 2]
        position = reader.commit()
        assert position == reader.position == reader.committed
        assert reader.commit(DLSN(1, 1, 0)) == reader.committed == DLSN(1, 1, 0)
        with pytest.raises(ConfigurationError, match="position='1:0:0'"):
            reader.commit("1:0:0")
    assert log.get_subscriptions() == {"s": DLSN(1, 1, 0)}
    with log.open_reader(subscriber="s") as reader:
        assert txids(way, reader) == [2, 3, 4]
    with log.open_reader(subscriber="s", txid=4) as reader:
        assert txids(way, reader) == [4]
    with log.open_reader() as reader, pytest.raises(ConfigurationError, match="has no subscriber"):
        reader.commit()
    log.truncate(DLSN(1, 2, 0))
    with pytest.raises(AlreadyTruncatedError):
        log.open_reader(subscriber="s")


def test_a_reader_learns_that_its_log_is_gone(way: Way) -> None:
    """Deleted, though there is another of its name."""
    log = way.new_log(1)
    with log.open_reader() as reader:
        assert txids(way, reader) == [1]
        way.namespace.delete_log(log.name)
        way.namespace.create_log(log.name)

        def is_gone() -> bool:
            try:
                return reader.read_next(**way.caught_up) is not None
            except LogNotFoundError:
                return True

        wait_until(is_gone, timeout_s=30)
        with pytest.raises(LogNotFoundError):
            reader.seek()
