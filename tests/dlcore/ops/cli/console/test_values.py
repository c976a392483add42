"""The console's answers: what they tell, and that they stay small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlcore.base.config import QuorumConfig
from dlcore.base.ids import DLSN
from dlcore.base.records import RecordPlace
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.log.reading.status import LogStatus
from dlcore.ops.cli.console import values
from tests.fixtures.snapshots import snapshot_of


def test_a_bookie() -> None:
    """Its space is unknown until it has reported it."""
    info = BookieRegistration(name="b", incarnation="1" * 32, address="h:1")
    shown = values.bookie_value(info)
    assert (shown["state"], shown["free_bytes"], shown["total_bytes"]) == ("writable", None, None)
    full = BookieRegistration(
        name="b", incarnation="1" * 32, address="h:1", read_only=True, total_bytes=9
    )
    shown = values.bookie_value(full)
    assert (shown["state"], shown["free_bytes"], shown["total_bytes"]) == ("read-only", 0, 9)


def test_rates() -> None:
    """Records since the last look, over its time; not at the first look, and of few logs."""
    rates = values.Rates(period_s=2)
    assert rates.of("a", 100, now_s=0) is None
    assert rates.of("a", 150, now_s=1) is None
    assert rates.of("a", 200, now_s=4) == 25
    assert rates.of("a", 900, now_s=5) == 25
    assert rates.of("a", 200, now_s=6) == 0
    for n in range(3000):
        rates.of(f"b{n}", 1, now_s=6)
    assert rates.of("a", 900, now_s=99) is None


def test_the_end_of_a_log() -> None:
    """Truncated records count; a log without readable ones has those that were."""
    assert values.end_count(snapshot_of((2,), (3,), ())) == 50
    assert values.end_count(replace(snapshot_of(()), next_sequence_id=7)) == 7


def test_a_line_of_the_list() -> None:
    """The furthest subscriber counts; positions that are not reported are none."""
    snapshot = snapshot_of((4,), (6,))
    row = values.log_row(snapshot, rate=1.5, positions={"ann": DLSN(2, 0, 0), "bob": DLSN(1, 2, 0)})
    assert (row["records"], row["records_behind"], row["subscribers"]) == (100, 80, 2)
    assert (row["typed"], row["sealed"], row["records_per_s"]) == (False, False, 1.5)
    row = values.log_row(snapshot, rate=None, positions=None)
    assert (row["records_behind"], row["subscribers"]) == (None, None)
    assert values.log_row(snapshot, rate=None, positions={})["subscribers"] == 0


def test_a_status() -> None:
    """Values that proxies do not know are null."""
    known = LogStatus(
        name="a", log_id="i", first=DLSN(1, 0, 0), last=DLSN(1, 0, 1), last_txid=3, record_count=2,
        size_bytes=5, segment_count=1, sealed=False, last_timestamp_ms=1000, now_ms=3000,
        ledger_count=1, under_replicated_ledgers=0, quorum=QuorumConfig(), writer="w",
    )  # fmt: skip
    shown = values.status_value(known)
    assert (shown["first"], shown["idle_s"], shown["quorum"]) == ("1:0:0", 2.0, "3/3/2")
    shown = values.status_value(replace(known, first=None, last=None, quorum=None))
    assert (shown["first"], shown["last"], shown["quorum"]) == (None, None, None)


def test_a_picture() -> None:
    """Extents in their segments, with the bookies of their ledgers, and what is truncated."""
    snapshot = replace(snapshot_of((1, 2), (3,)), first=DLSN(1, 1, 0))
    shown = values.picture_value(snapshot)
    one, two = shown["segments"]
    assert [extent["truncated"] for extent in one["extents"]] == [True, False]
    assert [extent["start"] for extent in one["extents"]] == ["1:0:0", "1:1:0"]
    assert two["extents"][0]["bookies"] == ["bookie-1", "bookie-2", "bookie-3"]
    assert (one["grows"], two["grows"], shown["older"]["segments"]) == (False, True, 0)
    sealed = replace(snapshot, sealed=True, segments=(replace(snapshot.segments[1], ledgers={}),))
    (only,) = values.picture_value(sealed)["segments"]
    assert (only["grows"], only["extents"][0]["bookies"]) == (False, [])


def test_a_picture_is_bounded() -> None:
    """The last segments and extents are shown one by one, those before as sums."""
    many = values.picture_value(snapshot_of(*[(1,)] * (values.SEGMENTS_MAX + 3)))
    assert len(many["segments"]) == values.SEGMENTS_MAX
    assert many["older"] == {"segments": 3, "records": 30, "bytes": 3000}
    wide = values.picture_value(snapshot_of((1,) * values.EXTENTS_MAX, (1,) * 5))
    assert [each["lssn"] for each in wide["segments"]] == [2]
    alone = values.picture_value(snapshot_of((1,) * (values.EXTENTS_MAX + 5)))
    assert len(alone["segments"][0]["extents"]) == values.EXTENTS_MAX


def test_subscribers() -> None:
    """The furthest behind comes first; queries of Spark are known by their names."""

    def place(sequence_id: int, timestamp_ms: int) -> RecordPlace:
        return RecordPlace(DLSN(1, 0, 0), sequence_id, timestamp_ms)

    positions = {"ann": DLSN(1, 2, 0), "spark:77": DLSN(1, 1, 0)}
    places = {"ann": place(20, 9000), "spark:77": place(10, 4000)}
    shown = values.subscriber_values(positions, places, place(20, 9000))
    assert [(each["subscriber"], each["records_behind"]) for each in shown] == [
        ("spark:77", 10),
        ("ann", 0),
    ]
    assert [(each["is_query"], each["seconds_behind"]) for each in shown] == [
        (True, 5.0),
        (False, 0.0),
    ]
    many = {f"s{n}": DLSN(1, 0, 0) for n in range(values.SUBSCRIBERS_MAX + 1)}
    found = values.subscriber_values(many, dict.fromkeys(many, place(0, 0)), place(0, 0))
    assert len(found) == values.SUBSCRIBERS_MAX


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"<b>x</b>", {"text": "<b>x</b>", "cut": False}),
        (b"\xff\x00", {"base64": "/wA=", "cut": False}),
        (b"a" * 2001, {"text": "a" * 2000, "cut": True}),
    ],
)
def test_payloads(payload: bytes, shown: dict[str, object]) -> None:
    """As they are, up to a length; bytes that are no text in base64."""
    assert values.payload_value(payload) == shown


def test_large_bytes_are_cut() -> None:
    """Before they are encoded."""
    shown = values.payload_value(b"\xff" * 10_000)
    assert (len(shown["base64"]), shown["cut"]) == (values.TEXT_MAX, True)


def test_rows() -> None:
    """Numbers as text, since the page would round them; long values are cut."""
    row = {"n": 2**60, "b": True, "x": None, "s": "a" * 3000, "l": [1, None]}
    shown = values.row_value(row)
    assert (shown["n"], shown["b"], shown["x"]) == (str(2**60), True, None)
    assert (len(shown["s"]), shown["l"]) == (values.TEXT_MAX + 1, "[1, None]")


def test_pages_of_names() -> None:
    """In order, each once, with a sign that there are more."""
    names = [f"log-{n:03}" for n in range(values.LOGS_MAX + 1)]
    page, more = values.matching([*reversed(names), "other"], "log", "")
    assert (page, more) == (names[:-1], True)
    assert values.matching(names, "log", page[-1]) == (names[-1:], False)
