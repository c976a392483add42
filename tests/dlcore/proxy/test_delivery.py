"""Catching a reader up where bookies know of less than was known before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from dlcore.base.errors import AlreadyTruncatedError, EndOfStreamError
from dlcore.base.ids import DLSN
from dlcore.proxy.reading import delivery
from dlcore.proxy.reading.delivery import Deliveries, Reading
from dlcore.proxy.reading.kept import KeptMessages
from dlcore.proxy.reading.outgoing import Outgoing
from dlcore.proxy.reading.rows import RowView
from tests.dlcore.proxy.test_runs import entry, values

if TYPE_CHECKING:
    from dlcore.log.reading.entry_rows import EntryRows

VIEW = RowView("a", None, ["dlsn", "value"])


class Log:
    """A log whose readers get its entries in these portions."""

    name = log_id = "a"

    def __init__(self, portions: list[list[EntryRows]], first: DLSN = DLSN.INITIAL) -> None:
        self.portions = portions
        self.first = first
        self.position = DLSN.INITIAL
        self.readers = self

    async def open_part(self, start: DLSN, end: DLSN) -> Log:
        """Read from the first portion on."""
        assert start == DLSN.INITIAL < end
        return self

    async def get_first_active_dlsn(self) -> DLSN:
        """Return what is left."""
        return self.first

    async def take_entries(self, *, timeout_s: float) -> list[EntryRows]:
        """Return the next portion."""
        assert timeout_s > 0
        return self.portions.pop(0)

    async def __aenter__(self) -> Log:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def delivered(log: Log, end: DLSN) -> list[bytes]:
    """Return what a client gets of what is before `end`."""
    return [each for message in messages(log, end) for each in values(message)]


def messages(log: Log, end: DLSN) -> list[bytes]:
    """Return what a client is sent of what is before `end`."""
    got: list[bytes] = []

    async def send(message: bytes) -> None:
        got.append(message)

    reading = Reading(
        log=cast("Any", log), view=VIEW, start=DLSN.INITIAL, end=end, known_end=end, follow=False
    )
    deliveries = Deliveries(cast("Any", None), Outgoing(1), KeptMessages(0), catching_up_max=1)
    asyncio.run(deliveries.deliver(reading, send))
    return got


def test_readable_records_are_waited_for() -> None:
    """An answer that knows of less ends nothing."""
    log = Log([[entry(0, 1)], [], [entry(1, 2), entry(2, 2)]])
    assert delivered(log, DLSN(1, 2, 1)) == [b"0:0", b"1:0", b"1:1", b"2:0"]


def test_entries_without_a_wanted_row_are_passed() -> None:
    """A start behind the last record of an entry waits for nothing."""
    log = Log([[]])
    log.position = DLSN(1, 1, 0)
    assert delivered(log, DLSN(1, 1, 0)) == []


def test_a_truncation_meanwhile_is_reported() -> None:
    """It is not taken for what never was."""
    with pytest.raises(AlreadyTruncatedError, match="log 'a': the records before 1:2:0"):
        delivered(Log([[entry(0, 1)], []], first=DLSN(1, 2, 0)), DLSN(1, 2, 0))


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_reader_is_sent_little_at_first(at_once: int) -> None:
    """One that takes nothing holds little; later entries go in few messages."""
    entries = [entry(number, 600, size=1024) for number in range(4)]
    log = Log([entries[first : first + at_once] for first in range(0, 4, at_once)])
    sent = messages(log, DLSN(1, 4, 0))
    assert [each for message in sent for each in values(message)] == [
        b"%d:%d" % (number, slot) for number in range(4) for slot in range(600)
    ]
    assert len(sent[0]) < 150_000
    assert len(sent[-1]) > 600 * 1024
    assert len(sent) < 12


def test_readers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has had its share makes room for a waiting one; a lone reader goes on."""
    monkeypatch.setattr(delivery, "TURN_BYTES", 1)
    first, second = ([entry(number, 1)] for number in range(2))

    class Again(Log):
        async def open_part(self, start: DLSN, end: DLSN) -> Log:
            self.portions = [first] if start == DLSN.INITIAL else [second]
            return self

    assert delivered(Again([]), DLSN(1, 2, 0)) == [b"0:0", b"1:0"]


def test_a_reader_that_has_taken_nothing_gets_one_entry_while_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After it the rest is read ahead, and at once where a segment ends and no entry follows."""
    monkeypatch.setattr(Outgoing, "is_short", property(lambda _: True))
    asked: list[tuple[DLSN, DLSN]] = []
    portions: dict[int, list[list[EntryRows]]] = {}

    class Parts(Log):
        async def open_part(self, start: DLSN, end: DLSN) -> Log:
            asked.append((start, end))
            self.portions = list(portions[start.entry_id])
            return self

        async def take_entries(self, *, timeout_s: float) -> list[EntryRows]:
            if not self.portions:
                raise EndOfStreamError("the segment ended before")
            return await super().take_entries(timeout_s=timeout_s)

    portions.update({0: [[entry(0, 1)]], 1: [[entry(1, 1)], [entry(2, 1)]]})
    assert delivered(Parts([]), DLSN(1, 3, 0)) == [b"0:0", b"1:0", b"2:0"]
    ends = [DLSN(1, 1, 0), DLSN(1, 3, 0)]
    assert asked == list(zip([DLSN.INITIAL, *ends], ends, strict=False))
    asked.clear()
    portions.update({0: [], 1: [[entry(1, 1)], [entry(2, 1)]]})
    assert delivered(Parts([]), DLSN(2, 3, 0)) == [b"1:0", b"2:0"]
    ends = [DLSN(1, 1, 0), DLSN(2, 3, 0)]
    assert asked == list(zip([DLSN.INITIAL, *ends], ends, strict=False))
