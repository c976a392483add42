"""What the metadata store knows of logs, appends and staged ledgers: immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.errors import UnexpectedError
from dlcore.ids import DLSN
from dlcore.log.segment import LogSegment, SegmentState, Truncation

if TYPE_CHECKING:
    from dlcore.config import QuorumConfig
    from dlcore.log.segment import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMetadata:
    """What is fixed when a log is created.

    `log_id` is fresh each time: a log that is deleted and created again is another log.
    """

    name: str
    log_id: str
    created_ms: int
    quorum: QuorumConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxLssn:
    """Highest segment number in use (0: none yet), and whether the log is sealed."""

    max_lssn: int
    sealed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """Who holds a log's writer lock: `owner` is for people, `token` names one acquisition."""

    owner: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """The last version that an identity committed, and how far; `commits.py` decides by it.

    `token` names the append that wrote this. `committed` appends of the version are in the logs.
    `run` is the run that appended or skipped last ("": of an appender that appends each version
    once), `seen` how many of the version's appends it has made, and `last_ns` when it began to
    commit the last one, by its own monotonic clock.  `superseded` are the runs before it, and
    `conflicting` says that two appends of one run overlapped.
    """

    version: int
    token: str
    committed: int
    run: str
    seen: int
    last_ns: int
    superseded: tuple[str, ...] = ()
    conflicting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLedger:
    """A ledger that a staging writer fills; `owner` is "" once nobody appends to it any more."""

    ledger_id: int
    log: str
    log_id: str
    owner: str
    created_ms: int
    committed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """A consistent view of one log: everything was read at one version of `max_lssn`.

    Every change of the segment list writes `max_lssn`, so its version guards them all.  Segments
    are in ascending order; truncated ones come first, and those that were removed are missing at
    the front.
    """

    metadata: LogMetadata
    max_lssn: MaxLssn
    version: int
    max_txid: int
    segments: tuple[LogSegment, ...]

    def __post_init__(self) -> None:
        name = self.metadata.name
        found = [segment.lssn for segment in self.segments]
        last = self.max_lssn.max_lssn
        if found != list(range(last - len(found) + 1, last + 1)):
            raise UnexpectedError(
                f"log {name!r}: its segments are {found}, expected consecutive numbers up to {last}"
            )
        if last > 0 and not found:
            raise UnexpectedError(f"log {name!r}: segment {last} is missing")
        open_early = [s.lssn for s in self.segments[:-1] if s.state is SegmentState.IN_PROGRESS]
        if open_early:
            raise UnexpectedError(
                f"log {name!r}: segments {open_early} are in progress, not the last"
            )

    @property
    def name(self) -> str:
        """The log's name."""
        return self.metadata.name

    @property
    def last_segment(self) -> LogSegment | None:
        """The segment with the highest number."""
        return self.segments[-1] if self.segments else None

    @property
    def open_segment(self) -> LogSegment | None:
        """The segment a writer is appending to, or was when it died."""
        last = self.last_segment
        return last if last is not None and last.has_open_extent else None

    def is_open_over(self, ledger_id: int) -> bool:
        """Return whether the log ends with an open extent over this ledger."""
        segment = self.open_segment
        return segment is not None and segment.extents[-1].ledger_id == ledger_id

    def ends_with(self, extent: Extent) -> bool:
        """Return whether this extent is the last one that is final."""
        last = self.last_segment
        return last is not None and bool(last.closed_extents) and last.closed_extents[-1] == extent

    @property
    def first_active(self) -> DLSN:
        """The first position that is not truncated."""
        for segment in self.segments:
            if segment.truncation is not Truncation.TRUNCATED:
                return segment.min_active
        return DLSN(self.max_lssn.max_lssn + 1, 0, 0)

    @property
    def next_sequence_id(self) -> int:
        """The sequence id after all records of final extents."""
        last = self.last_segment
        return last.start_sequence_id + last.closed_record_count if last is not None else 0

    @property
    def last_timestamp_ms(self) -> int:
        """The highest timestamp in final extents."""
        return max(
            (extent.last_timestamp_ms for s in self.segments for extent in s.closed_extents),
            default=0,
        )
