"""The blocking face over its async twins, which are stood in for: what it adds by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import LedgerReadError
from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace
from dlcore.log.entries.body import PlainRecords
from dlcore.log.reading.entry_rows import EntryRows
from dlcore.sync.portal import Portal
from dlcore.sync.reader import LogReader
from dlcore.sync.staging import StagingWriter
from dlcore.sync.stream import AppendOnlyStreamReader
from dlcore.sync.twin import iterate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


@pytest.fixture
def portal() -> Iterator[Portal]:
    """A loop in a thread of its own."""
    found = Portal()
    yield found
    found.stop()


def lone(number: int) -> EntryRows:
    """Return the rows of an entry of one record."""
    place = EntryPlace(
        lssn=1, entry_id=number, sequence_id=number, segment_sequence_id=0, timestamp_ms=0
    )
    payload = b"%d" % number
    records = PlainRecords([number], [0, len(payload)], memoryview(payload))
    return EntryRows.plain(
        records, place, 0, decode=lambda: pytest.fail("no batch is asked for"), size_bytes=1
    )


def test_values_of_an_async_iterator_are_fetched_one_by_one(portal: Portal) -> None:
    """Nothing is fetched before it is asked for; the end ends it."""
    given: list[int] = []

    async def numbers() -> AsyncIterator[int]:
        for number in (1, 2):
            given.append(number)
            yield number

    found = iterate(portal, numbers())
    assert given == []
    assert next(found) == 1
    assert given == [1]
    assert list(found) == [2]


def test_records_that_are_here_come_before_an_error(portal: Portal) -> None:
    """A bulk that has some keeps the error for the next call."""
    answers: list[Any] = [[lone(0), lone(1), lone(2)]]

    async def _gather_rows(**_: object) -> None:
        if not answers:
            raise LedgerReadError("no replica answers")

    async def aclose() -> None:
        pass

    twin: Any = SimpleNamespace(
        _gather_rows=_gather_rows,
        _take_gathered=answers.pop,
        is_typed=False,
        aclose=aclose,
        position=DLSN(1, 0, 0),
        log_name="clicks",
    )
    reader = LogReader(portal, twin)
    assert reader.log_name == "clicks"
    assert [each.txid for each in reader.read_bulk(1)] == [0]
    assert [each.txid for each in reader.read_bulk(1)] == [1], "it was here"
    assert [each.txid for each in reader.read_bulk(2)] == [2]
    with pytest.raises(LedgerReadError):
        reader.read_bulk(1)


def test_the_twin_discards_written_records(portal: Portal) -> None:
    """The staging writer hands it on."""
    calls: list[str] = []

    async def discard() -> None:
        calls.append("discard")

    async def aclose() -> None:
        pass

    twin: Any = SimpleNamespace(discard=discard, aclose=aclose)
    StagingWriter(portal, twin).discard()
    assert calls == ["discard"]


@pytest.mark.parametrize("kind", [AppendOnlyStreamReader, StagingWriter])
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_twin_in_a_forked_child_closes_nothing_of_its_parent(
    kind: Callable[[Any, Any], Any], *, is_inherited: bool
) -> None:
    """Its loop is not there any more."""
    calls: list[str] = []

    def call(coroutine: Any) -> None:
        coroutine.close()
        calls.append("closed")

    async def aclose(**_: bool) -> None:
        pass

    portal: Any = SimpleNamespace(is_inherited=is_inherited, call=call)
    twin: Any = SimpleNamespace(aclose=aclose, tell=int)
    face = kind(portal, twin)
    face.close()
    face.close()
    assert calls == ([] if is_inherited else ["closed"])
