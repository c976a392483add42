"""A stream's offsets: positions by log as canonical JSON, and how they advance.

An offset holds the next position to read of every log.  Its JSON has sorted keys, because Spark
compares offsets as text:

    {"ids": {"clicks": "9f…"}, "init": {"clicks": "1:0:0"}, "logs": {"clicks": "3:17:0"},
     "query": "5d0c…", "seq": {"clicks": 52113}, "v": 2}

* ``ids`` distinguishes a log from a later log with the same name, and finds a renamed log: the
  query continues with its new name, at its position.
* ``init`` holds the resolved start of the logs that the batch ending here reads for the first time.
  Spark does not store the start of a query's first batch and asks for it again on a restart; with
  ``init`` the replayed batch is the same.  Logs that a pattern finds later get theirs in the same
  way.
* ``seq`` is the number of records before the position, if it is known.  It proves that a position
  at the end of a segment that was truncated since has lost nothing.
* ``query`` is the query's own id, made with the end of its first batch: logs keep its positions
  under it.  An offset of version 1 has none, and is followed by one that has.
* ``gone`` names the logs whose loss was accepted, by ``failOnDataLoss=false``: the loss is reported
  once, and the query continues without them, even if later losses are errors again.

A log that is in an offset stays in it, also after its deletion.  Otherwise a listing that misses
the log for a moment would make it look new, and it would be read from its beginning again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import AlreadyTruncatedError, ConfigurationError, DLError, LogNotFoundError
from dlcore.base.ids import DLSN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.sync import LogSnapshot

OFFSET_VERSION = 2
_KEYS = frozenset({"gone", "ids", "init", "logs", "query", "seq", "v"})
_NAMED_MAX = 5
"""Most logs that an error names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPosition:
    """The next position to read in one log, and the number of records before it, if known."""

    log_id: str
    dlsn: DLSN
    sequence_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """The part of a log's snapshot that an offset needs.

    `first_sequence_id` and `end_sequence_id` are the numbers of records before these positions;
    they are None if the snapshot does not have them.
    """

    log_id: str
    first: DLSN
    end: DLSN
    first_sequence_id: int | None
    end_sequence_id: int | None

    @classmethod
    def of(cls, snapshot: LogSnapshot) -> LogView:
        """Return the view of a snapshot."""
        return cls(
            log_id=snapshot.log_id,
            first=snapshot.first,
            end=snapshot.end,
            first_sequence_id=_count_before(snapshot.segments, snapshot.first),
            end_sequence_id=_count_before(snapshot.segments, snapshot.end),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no record is readable."""
        return self.first >= self.end

    def has_lost_after(self, position: LogPosition) -> bool:
        """Return whether records at or after `position` were truncated away.

        If the counts are not known, a position below the first readable one counts as a loss.
        """
        if position.dlsn >= self.first:
            return False
        if position.sequence_id is None or self.first_sequence_id is None:
            return True
        return self.first_sequence_id > position.sequence_id


def _count_before(segments: Sequence[Any], position: DLSN) -> int | None:
    # A log may have thousands of segments, and each trigger calls this for each log.
    index = bisect_left(segments, position.lssn, key=lambda segment: segment.lssn)
    if index == len(segments) or segments[index].lssn != position.lssn:
        return None
    segment = segments[index]
    start: int = segment.start_sequence_id
    if (position.entry_id, position.slot_id) == (0, 0):
        return start
    if (position.entry_id, position.slot_id) == (segment.entry_count, 0):
        return start + int(segment.record_count)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoss:
    """Records that a query should read and that are gone; `str` gives the message for the user."""

    log: str
    what: str
    error: type[DLError]
    key: tuple[str, ...]
    """Identifies the loss, whatever the log holds when it is found again."""
    records: int | None = None
    """Number of lost records; None if it is not known any more."""

    def __str__(self) -> str:
        return f"log {self.log!r}: {self.what}"

    @classmethod
    def deleted(cls, log: str, position: LogPosition) -> DataLoss:
        """Describe a log that does not exist any more."""
        return cls(
            log=log,
            what=(
                "it was deleted, or renamed to a name that the query does not read, or is in "
                f"another namespace; the query has read it up to {position.dlsn} (exclusive)"
            ),
            error=LogNotFoundError,
            key=(log, position.log_id),
        )

    @classmethod
    def recreated(cls, log: str, position: LogPosition, view: LogView) -> DataLoss:
        """Describe a log that is gone, and whose name another log has now."""
        return cls(
            log=log,
            what=(
                "it was deleted and created again, or renamed, or is in another namespace, and "
                f"another has its name (id {position.log_id}, now {view.log_id}); "
                f"the query has read the old one up to {position.dlsn} (exclusive), the new one "
                f"holds {view.first} … {view.end} (exclusive)"
            ),
            error=LogNotFoundError,
            key=(log, position.log_id),
        )

    @classmethod
    def left_out(
        cls, log: str, position: LogPosition, view: LogView | None, *, chosen: str, names: list[str]
    ) -> DataLoss:
        """Describe a log that the options do not select any more.

        `chosen` is the selection of the options, `names` are all logs that it leaves out.
        """
        is_there = view is not None and view.log_id == position.log_id
        held = f"holds {view.first} … {view.end} (exclusive)" if view and is_there else "is gone"
        return cls(
            log=log,
            what=(
                f"the query's checkpoint has it, read up to {position.dlsn} (exclusive), and the "
                f"option {chosen} does not choose it; it {held}. To go on with this checkpoint "
                f"choose {_some(names)} too, to read other logs start with a new one"
            ),
            error=ConfigurationError,
            key=(log, position.log_id),
        )

    @classmethod
    def truncated(cls, log: str, start: LogPosition, view: LogView) -> DataLoss:
        """Describe the loss of records from `start` on, which were truncated."""
        records = None
        if start.sequence_id is not None and view.first_sequence_id is not None:
            records = view.first_sequence_id - start.sequence_id
        count = "" if records is None else f", {records} of them,"
        return cls(
            log=log,
            what=(
                f"records from {start.dlsn} up to {view.first} (exclusive){count} were truncated; "
                f"it holds {view.first} … {view.end} (exclusive)"
            ),
            error=AlreadyTruncatedError,
            key=(log, start.log_id, str(start.dlsn), str(view.first)),
            records=records,
        )

    @classmethod
    def of_txids(cls, snapshot: LogSnapshot, txid: int) -> DataLoss:
        """Describe the loss of records from a transaction id on, some of which were truncated."""
        return cls(
            log=snapshot.log,
            what=(
                f"records with transaction ids of {txid} or more were truncated; it holds "
                f"{snapshot.first} … {snapshot.end} (exclusive)"
            ),
            error=AlreadyTruncatedError,
            key=(snapshot.log, snapshot.log_id, f"txid {txid}", str(snapshot.first)),
        )


def _some(names: list[str]) -> str:
    named = ", ".join(map(repr, names[:_NAMED_MAX]))
    return named if len(names) <= _NAMED_MAX else f"{named} and {len(names) - _NAMED_MAX} more logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRange:
    """Records of one log that a batch reads: from `start` up to but not including `end`."""

    log: str
    start: LogPosition
    end: DLSN


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffset:
    """An offset of a stream, as the head of this module describes it."""

    logs: Mapping[str, LogPosition]
    init: Mapping[str, DLSN] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    query: str | None = None

    @classmethod
    def initial(cls, logs: Mapping[str, LogPosition]) -> StreamOffset:
        """Return the start offset of a query: nothing is read, and each log's start is resolved."""
        return cls(logs=logs, init={log: position.dlsn for log, position in logs.items()})

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value whose text is the same for equal offsets."""
        names = sorted(self.logs)
        counts = {log: self.logs[log].sequence_id for log in names}
        # Keys without a value are left out, so that offsets keep their text when a release adds a
        # key.
        value: dict[str, Any] = {"gone": sorted(self.gone)} if self.gone else {}
        value["ids"] = {log: self.logs[log].log_id for log in names}
        if self.init:
            value["init"] = {log: str(self.init[log]) for log in sorted(self.init)}
        value["logs"] = {log: str(self.logs[log].dlsn) for log in names}
        if self.query is not None:
            value["query"] = self.query
        if any(count is not None for count in counts.values()):
            value["seq"] = {log: count for log, count in counts.items() if count is not None}
        # An offset that was read as version 1 has to give the same text again, which Spark
        # compares.
        return value | {"v": 1 if self.query is None else OFFSET_VERSION}

    @classmethod
    def from_json(cls, value: object) -> StreamOffset:
        """Parse the result of `to_json`.

        Raises:
            ConfigurationError: it has another version, or is no offset of this source, for example
                because the checkpoint belongs to another query.
        """
        if not isinstance(value, dict) or "v" not in value:
            raise ConfigurationError(f"not an offset of a dlog source: {value!r}")
        version = value["v"]
        if not isinstance(version, int) or version > OFFSET_VERSION:
            raise ConfigurationError(
                f"the checkpoint holds a dlog offset of version {version}, this dlog reads up to "
                f"{OFFSET_VERSION}: it was written by a newer one, use that or another checkpoint"
            )
        if not value.keys() <= _KEYS:
            raise ConfigurationError(f"not an offset of a dlog source: {value!r}")
        try:
            return cls._parse(value)
        except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
            raise ConfigurationError(f"not an offset of a dlog source: {value!r}") from error

    @classmethod
    def _parse(cls, value: Mapping[str, Any]) -> StreamOffset:
        counts = value.get("seq", {})
        logs = {
            log: LogPosition(
                log_id=value["ids"][log],
                dlsn=DLSN.parse(text),
                sequence_id=_parse_count(counts.get(log)),
            )
            for log, text in value["logs"].items()
        }
        init = {log: DLSN.parse(text) for log, text in value.get("init", {}).items()}
        gone = frozenset(value.get("gone", ()))
        if not init.keys() | gone <= logs.keys():
            raise ConfigurationError(
                f"init and gone name other logs than logs: {sorted(init.keys() | gone)}"
            )
        return cls(logs=logs, init=init, gone=gone, query=_parse_query(value.get("query")))

    def without(self, logs: Iterable[str]) -> StreamOffset:
        """Return the offset of a query that continues without these logs and accepts the loss."""
        gone = self.gone.union(logs)
        if gone == self.gone:
            return self
        # `init` is for the batch that ends at this offset; the next offset needs it only for logs
        # of which nothing is read yet.
        init = {log: start for log, start in self.init.items() if start == self.logs[log].dlsn}
        return replace(self, gone=gone, init=init)

    def advanced(
        self,
        views: Mapping[str, LogView | None],
        ends: Mapping[str, LogPosition] | None = None,
    ) -> tuple[StreamOffset, list[DataLoss]]:
        """Return the offset after all records of `views`, and the losses since this offset.

        In a log with a position in `ends` it does not go beyond that position.  A renamed log is
        recognized by its id, and continues under its new name.

        A view of None means that the log does not exist; logs without a view are not read now and
        keep their position.  After a loss the offset continues at the first existing record, for
        callers that accept the loss.  The offset equals this one if there is nothing new, also if
        only a new segment began.
        """
        # By id first: with two renames at once, a name of this offset may belong to another log.
        step = _Step(self, ends or {})
        followed = self._followed(views)
        renamed = {was for log, was in followed.items() if was != log}
        for log in sorted(self.logs.keys() | views.keys()):
            known, view = (None if log in renamed else self.logs.get(log)), views.get(log)
            was = followed.get(log)
            if view is not None and was is not None:
                if known is not None and was != log:
                    step.lose(DataLoss.recreated(log, known, view))
                step.move(log, self.logs[was], view, was=was)
            elif log in views:
                step.take(log, known, view)
            elif known is not None:
                step.pass_over(log, known, is_gone=log in self.gone)
        moved = replace(self, logs=step.logs, init=step.init, gone=frozenset(step.gone))
        # Spark runs no batch if the offset is equal: `init` alone must not make a difference.
        is_same = (moved.logs, moved.gone) == (self.logs, self.gone)
        return (self if is_same else moved), step.losses

    def _followed(self, views: Mapping[str, LogView | None]) -> dict[str, str]:
        """Return the names of existing logs, each with its name in this offset."""
        names = {view.log_id: log for log, view in views.items() if view is not None}
        followed: dict[str, str] = {}
        for was, known in self.logs.items():
            here = views.get(was)
            is_here = here is not None and here.log_id == known.log_id
            log = was if is_here else names.get(known.log_id)
            if log is not None and (log not in followed or log == was):
                followed[log] = was
        return followed

    def ranges_to(self, end: StreamOffset) -> list[LogRange]:
        """Return the ranges of the batch from here to `end`, by log name, without empty ranges."""
        # Compared as Spark stores them: a batch between equal offsets is empty, also with `init`.
        if self.to_json() == end.to_json():
            return []
        ranges = []
        by_id = {position.log_id: position for position in self.logs.values()}
        for log in sorted(end.logs):
            start, stop = self._start_of(log, end, by_id), end.logs[log].dlsn
            if start.dlsn < stop:
                ranges.append(LogRange(log=log, start=start, end=stop))
        return ranges

    def _start_of(
        self, log: str, end: StreamOffset, by_id: Mapping[str, LogPosition]
    ) -> LogPosition:
        # By id, because between two offsets names may have moved from one log to another.
        log_id, known = end.logs[log].log_id, self.logs.get(log)
        if known is None or known.log_id != log_id:
            known = by_id.get(log_id)  # under its earlier name
        if log in end.init and (known is None or known.dlsn != end.init[log]):
            return LogPosition(log_id=log_id, dlsn=end.init[log])
        if known is None:
            raise ConfigurationError(
                f"the offset {end.to_json()} does not follow {self.to_json()}: it has no start for "
                f"log {log!r}; the checkpoint was changed by hand, or belongs to another query"
            )
        return known  # with its sequence id


def _parse_count(value: object) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise ConfigurationError(f"seq={value!r}: expected a number of records")
    return value


def _parse_query(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"query={value!r}: expected a text")
    return value


class _Step:
    """Collects the positions after one step of `StreamOffset.advanced`."""

    def __init__(self, start: StreamOffset, ends: Mapping[str, LogPosition]) -> None:
        self.logs: dict[str, LogPosition] = {}
        self.init: dict[str, DLSN] = {}
        self.gone: set[str] = set()
        self.losses: list[DataLoss] = []
        self._start = start
        self._ends = ends

    def take(self, log: str, known: LogPosition | None, view: LogView | None) -> None:
        """Begin with a new log, or note that the log that had this name is gone."""
        if view is not None:
            if known is not None:
                self.lose(DataLoss.recreated(log, known, view))
            self._begin(log, view)
        elif known is not None:
            self.lose(DataLoss.deleted(log, known))
            self.pass_over(log, known, is_gone=True)

    def lose(self, loss: DataLoss) -> None:
        """Note the loss of a log, unless it was reported before."""
        # A loss that was accepted is reported once, and the log stays in the offset for ever.
        if loss.log not in self._start.gone:
            self.losses.append(loss)

    def _begin(self, log: str, view: LogView) -> None:
        # A new log is read from its first record ever; truncated ones before our first look are
        # a loss as well.
        if view.first_sequence_id:
            start = LogPosition(log_id=view.log_id, dlsn=DLSN.INITIAL, sequence_id=0)
            self.losses.append(DataLoss.truncated(log, start, view))
        self.init[log] = view.first
        self.logs[log] = self._end_of(log, view)

    def pass_over(self, log: str, known: LogPosition, *, is_gone: bool) -> None:
        """Keep the position of a log that is not read."""
        self.keep(log, known, was=log)
        if is_gone:
            self.gone.add(log)

    def keep(self, log: str, known: LogPosition, *, was: str) -> None:
        """Keep the position of a log whose name was `was`."""
        self.logs[log] = known
        if self._start.init.get(was) == known.dlsn:
            self.init[log] = known.dlsn

    def _end_of(self, log: str, view: LogView) -> LogPosition:
        end = LogPosition(log_id=view.log_id, dlsn=view.end, sequence_id=view.end_sequence_id)
        wanted = self._ends.get(log, end)
        # A limit beyond the readable end would promise records that a batch cannot read.
        return wanted if wanted.dlsn < end.dlsn else end

    def move(self, log: str, known: LogPosition, view: LogView, *, was: str) -> None:
        """Advance a log whose name was `was`."""
        # Without a readable record a loss cannot be recognized yet, and nothing is skipped.
        if not view.is_empty and view.has_lost_after(known):
            self.losses.append(DataLoss.truncated(log, known, view))
        end = self._end_of(log, view)
        if view.is_empty or end.dlsn <= known.dlsn:
            self.keep(log, known, was=was)
            return
        self.logs[log] = end
        if self._start.init.get(was) == known.dlsn:
            self.init[log] = known.dlsn
