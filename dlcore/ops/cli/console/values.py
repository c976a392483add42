"""The console's answers as JSON values, each bounded however large the cluster is."""

from __future__ import annotations

import base64
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dlcore.base.records import RecordPlace
    from dlcore.ledger.metadata.values import BookieRegistration, LedgerMetadata
    from dlcore.log.reading.scan import ExtentView, LogSnapshot, SegmentView
    from dlcore.log.reading.status import LogStatus

LOGS_MAX = 50
"""Logs of an answer."""
SEGMENTS_MAX = 200
"""The last segments of a log that an answer has one by one; of more only their number and sums."""
EXTENTS_MAX = 2_000
"""Extents of one log in an answer, the last ones."""
SUBSCRIBERS_MAX = 200
"""Subscribers of a log in an answer, those that are furthest behind."""
TEXT_MAX = 2_000
"""Characters of a value in an answer; a value that is cut is marked."""
_RATES_MAX = 2_000


def bookie_value(info: BookieRegistration) -> dict[str, Any]:
    """Return a bookie; its space is null if it is not known."""
    return {
        "name": info.bookie.name,
        "address": info.address,
        "rack": info.rack,
        "state": "read-only" if info.read_only else "writable",
        "free_bytes": info.free_bytes if info.total_bytes else None,
        "total_bytes": info.total_bytes or None,
    }


def end_count(snapshot: LogSnapshot) -> int:
    """Return how many records precede the end of a log, truncated ones too."""
    for segment in reversed(snapshot.segments):
        if segment.extents:
            return segment.start_sequence_id + segment.record_count
    return snapshot.next_sequence_id


@dataclass(slots=True)
class _Sample:
    at_s: float
    count: int
    rate: float | None = None


class Rates:
    """Records per second of each log, between two looks at it; of the logs looked at last."""

    def __init__(self, *, period_s: float = 2.0) -> None:
        self._period_s = period_s
        self._samples: OrderedDict[str, _Sample] = OrderedDict()

    def of(self, log_id: str, count: int, *, now_s: float) -> float | None:
        """Return the rate of a log with so many records so far; None at the first look."""
        sample = self._samples.setdefault(log_id, _Sample(now_s, count))
        self._samples.move_to_end(log_id)
        # Several pages may look within moments, and a rate of so short a time would jump.
        if now_s - sample.at_s >= self._period_s:
            sample.rate = max(0, count - sample.count) / (now_s - sample.at_s)
            sample.at_s, sample.count = now_s, count
        while len(self._samples) > _RATES_MAX:
            self._samples.popitem(last=False)
        return sample.rate


def log_row(
    snapshot: LogSnapshot, *, rate: float | None, positions: Mapping[str, DLSN] | None
) -> dict[str, Any]:
    """Return a line of the list of logs; `positions` of its subscribers, None if none are given.

    How far the furthest subscriber is behind is about right, as it is counted by entries.
    """
    behind = [
        snapshot.count_records(position, snapshot.end) for position in (positions or {}).values()
    ]
    return {
        "log": snapshot.log,
        "log_id": snapshot.log_id,
        "typed": snapshot.schema is not None,
        "sealed": snapshot.sealed,
        "records": snapshot.count_records(snapshot.first, snapshot.end),
        "bytes": sum(segment.size_bytes for segment in snapshot.segments),
        "segments": len(snapshot.segments),
        "end": str(snapshot.end),
        "records_per_s": rate,
        "subscribers": None if positions is None else len(positions),
        "records_behind": max(behind, default=None),
    }


def status_value(status: LogStatus) -> dict[str, Any]:
    """Return the status of a log; what proxies do not know is null."""
    return {
        "log": status.name,
        "log_id": status.log_id,
        "first": None if status.first is None else str(status.first),
        "last": None if status.last is None else str(status.last),
        "last_txid": status.last_txid,
        "records": status.record_count,
        "bytes": status.size_bytes,
        "sealed": status.sealed,
        "idle_s": status.idle_s,
        "ledgers": status.ledger_count,
        "under_replicated": status.under_replicated_ledgers,
        "quorum": None if status.quorum is None else str(status.quorum),
        "writer": status.writer,
        "created_ms": status.created_ms,
    }


def picture_value(snapshot: LogSnapshot) -> dict[str, Any]:
    """Return the segments and extents of a log, the last ones, for a picture and a table."""
    shown = list(snapshot.segments[-SEGMENTS_MAX:])
    while len(shown) > 1 and sum(len(each.extents) for each in shown) > EXTENTS_MAX:
        del shown[0]
    older = snapshot.segments[: len(snapshot.segments) - len(shown)]
    return {
        "first": str(snapshot.first),
        "end": str(snapshot.end),
        "older": {
            "segments": len(older),
            "records": sum(each.record_count for each in older),
            "bytes": sum(each.size_bytes for each in older),
        },
        "segments": [_segment(each, snapshot) for each in shown],
    }


def _segment(segment: SegmentView, snapshot: LogSnapshot) -> dict[str, Any]:
    extents = segment.extents[-EXTENTS_MAX:]
    is_last = segment is snapshot.segments[-1]
    return {
        "lssn": segment.lssn,
        "records": segment.record_count,
        "bytes": segment.size_bytes,
        "start_sequence_id": segment.start_sequence_id,
        "grows": is_last and not snapshot.sealed,
        "extents": [_extent(each, segment, snapshot.first) for each in extents],
    }


def _extent(extent: ExtentView, segment: SegmentView, first: DLSN) -> dict[str, Any]:
    ledger = segment.ledgers.get(extent.ledger_id)
    return {
        "ledger": extent.ledger_id,
        "start": str(DLSN(segment.lssn, extent.base_entry_id, 0)),
        "records": extent.record_count,
        "bytes": extent.size_bytes,
        "last_timestamp_ms": extent.last_timestamp_ms,
        "truncated": DLSN(segment.lssn, extent.end_entry_id, 0) <= first,
        "bookies": [] if ledger is None else bookies_of(ledger),
    }


def bookies_of(ledger: LedgerMetadata) -> list[str]:
    """Return the names of the bookies that a ledger has now, or the folder of a cold one."""
    return sorted(ledger.home)


def subscriber_values(
    positions: Mapping[str, DLSN], places: Mapping[str, RecordPlace], end: RecordPlace
) -> list[dict[str, Any]]:
    """Return subscribers with their lag, the furthest behind first.

    Args:
        positions: their stored positions.
        places: the next records that they read.
        end: the end of the log.
    """
    found: list[dict[str, Any]] = [
        {
            "subscriber": name,
            "dlsn": str(position),
            "sequence_id": places[name].sequence_id,
            "records_behind": end.sequence_id - places[name].sequence_id,
            "seconds_behind": max(0, end.timestamp_ms - places[name].timestamp_ms) / 1000,
            "is_query": name.startswith("spark:"),
        }
        for name, position in positions.items()
    ]
    found.sort(key=lambda each: (-each["records_behind"], each["subscriber"]))
    return found[:SUBSCRIBERS_MAX]


def payload_value(payload: bytes) -> dict[str, Any]:
    """Return a payload as text, or in base64 if it is not UTF-8; `cut` if some is left out."""
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        text = base64.b64encode(payload[: TEXT_MAX // 4 * 3]).decode("ascii")
        return {"base64": text, "cut": len(payload) > TEXT_MAX // 4 * 3}
    return {"text": text[:TEXT_MAX], "cut": len(text) > TEXT_MAX}


def row_value(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row, as texts, numbers, booleans or null; long texts are cut."""
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    text = str(value)  # numbers too: the page would round large ones
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"


def matching(names: Iterable[str], part: str, after: str) -> tuple[list[str], bool]:
    """Return a page of sorted names with `part` in them, after `after`, and if there are more."""
    found = sorted(name for name in names if part in name and name > after)
    return found[:LOGS_MAX], len(found) > LOGS_MAX
