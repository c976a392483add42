"""The lag of a query behind the ends of its logs, as its progress shows it.

Spark lets a Python source report its latest offset, in any form, and shows it in the progress of
the query, in ``sources[n].latestOffset``.  A dlog source reports the ends of its logs, and the
records that the query has not read yet:

    {"behind": {"bytes": 4096, "records": 40, "seconds": 1.5},
     "behindByLog": {"clicks": {"bytes": 4096, "records": 40, "seconds": 1.5}},
     "logs": {"clicks": "3:17:0", "views": "1:2:0"},
     "skipped": {"losses": 1, "records": 12}, "v": 1}

``behindByLog`` names the logs that have unread records.  ``skipped`` is present once lost records
have been skipped.  It counts the losses since the run began, and their records as far as the number
is known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlspark.limits import Backlog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.base.records import RecordPlace
    from dlcore.sync import LogSnapshot

LAG_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Records that are left to read.

    Attributes:
        records: number of records.
        size_bytes: about the size of their entries.
        seconds: time between the writing of the next record to read and of the last record.
    """

    records: int = 0
    size_bytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, snapshot: LogSnapshot, place: RecordPlace) -> Lag:
        """Return the lag of a reader at `place` behind the end of a snapshot."""
        backlog = Backlog.of(snapshot, place.sequence_id)
        if not backlog.runs:
            return cls()
        # Times never decrease, and a log may have thousands of segments.
        last = next(s.extents[-1] for s in reversed(snapshot.segments) if s.extents)
        return cls(
            records=backlog.records,
            size_bytes=backlog.size_bytes,
            seconds=max(0, last.last_timestamp_ms - place.timestamp_ms) / 1000,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {"bytes": self.size_bytes, "records": self.records, "seconds": self.seconds}


def total(lags: Mapping[str, Lag]) -> Lag:
    """Return the lag of a query over several logs: the sum of records, and the longest time."""
    return Lag(
        records=sum(lag.records for lag in lags.values()),
        size_bytes=sum(lag.size_bytes for lag in lags.values()),
        seconds=max((lag.seconds for lag in lags.values()), default=0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReport:
    """The lag that a source reports."""

    logs: Mapping[str, Lag]
    """Lags of the logs that have unread records."""
    ends: Mapping[str, str]
    skipped_records: int = 0
    losses: int = 0

    @property
    def behind(self) -> Lag:
        """The lag of all logs together."""
        return total(self.logs)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value that the head of this module describes."""
        value: dict[str, Any] = {
            "behind": self.behind.to_json(),
            "behindByLog": {log: self.logs[log].to_json() for log in sorted(self.logs)},
            "logs": {log: self.ends[log] for log in sorted(self.ends)},
        }
        if self.losses:
            value["skipped"] = {"losses": self.losses, "records": self.skipped_records}
        return value | {"v": LAG_VERSION}

    @classmethod
    def parse(cls, text: str | None) -> LagReport | None:
        """Return the report in a progress; None if the source is not dlog, or has no report."""
        try:
            value = json.loads(text or "null")
            logs = {log: _parse(each) for log, each in value["behindByLog"].items()}
            skipped = value.get("skipped", {})
            return cls(
                logs=logs,
                ends=value["logs"],
                skipped_records=skipped.get("records", 0),
                losses=skipped.get("losses", 0),
            )
        # Sources of other kinds report offsets in forms of their own.
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _parse(value: Mapping[str, Any]) -> Lag:
    return Lag(records=value["records"], size_bytes=value["bytes"], seconds=value["seconds"])
