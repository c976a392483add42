"""Answers of the HTTP door: no record ends its line or event, and answers are bounded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from dlcore.base.records import EntryPlace, LogRecordWithDLSN
from dlcore.ops.cli.console import door_answers as answers
from dlcore.ops.cli.console.door_answers import Page, event, events_of, line_of
from dlcore.ops.cli.rows import TypedRow

if TYPE_CHECKING:
    import pytest

PLACE = EntryPlace(3, 17, 40, None, 1000)


def record(slot: int, payload: bytes) -> LogRecordWithDLSN:
    """Return a record of an entry."""
    return LogRecordWithDLSN(7, payload, slot, PLACE)


def test_lines() -> None:
    """Each has a position, a transaction id, a number, a time, and a value or columns."""
    assert line_of({"a": "grün\n"}) == '{"a":"grün\\n"}\n'.encode()
    page = Page(10)
    page.add([record(0, b"one"), record(1, b"\xff")])
    page.add([TypedRow(DLSN(3, 18, 0), 8, 42, 1001, b'{"city": "Rome"}')])
    assert [json.loads(line) for line in page.lines] == [
        {"dlsn": "3:17:0", "txid": 7, "sequence_id": 40, "timestamp_ms": 1000, "value": "one"},
        {
            "dlsn": "3:17:1",
            "txid": 7,
            "sequence_id": 41,
            "timestamp_ms": 1000,
            "value_base64": "/w==",
        },
        {
            "dlsn": "3:18:0",
            "txid": 8,
            "sequence_id": 42,
            "timestamp_ms": 1001,
            "row": {"city": "Rome"},
        },
    ]
    assert page.last == DLSN(3, 18, 0)
    assert not page.is_full


def test_pages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, and by bytes; one record always fits."""
    page = Page(2)
    page.add([record(n, b"") for n in range(5)])
    assert (len(page.lines), page.last, page.is_full) == (2, DLSN(3, 17, 1), True)
    monkeypatch.setattr(answers, "PAGE_BYTES", 100)
    page = Page(10)
    page.add([record(n, bytes(100)) for n in range(5)])
    assert (len(page.lines), page.is_full) == (1, True)
    page.add([record(9, b"")])
    assert page.last == DLSN(3, 17, 0)


def test_events() -> None:
    """Each has its position as its id; the value cannot begin another event."""
    hostile = b"\n\nevent: end\ndata: null\r\n\r\nid: 9:9:9</script>"
    data = events_of([record(0, hostile), record(1, b"two")])
    blocks = data.decode().split("\n\n")
    assert blocks[-1] == ""
    assert [block.split("\n")[0] for block in blocks[:-1]] == ["id: 3:17:0", "id: 3:17:1"]
    assert all(len(block.split("\n")) == 2 for block in blocks[:-1])
    assert "\r" not in data.decode()
    value = json.loads(blocks[0].split("\n")[1].removeprefix("data: "))
    assert value["value"].encode() == hostile
    assert event("end", None) == b"event: end\ndata: null\n\n"
    assert event("failed", {"error": "a\nb"}) == b'event: failed\ndata: {"error": "a\\nb"}\n\n'
