"""Bugs of the stream reader of Spark that named tests catch: limits, and runs that end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from dlspark import stream
from dlspark.limits import Limits
from dlspark.offsets import LogPosition, StreamOffset, _Step
from dlspark.stream import DlogStreamReader
from tests.simulation.tested import caught_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlspark.offsets import LogRange, LogView

_RUNS = "dlspark/test_available_now.py"
_LIMITS = "dlspark/test_stream_limits.py"
_WHATEVER = f"{_RUNS}::test_a_run_reads_what_was_there_whatever_its_limits"


@caught_by(_WHATEVER)
def a_run_that_ends_waits_for_more_records() -> Iterator[None]:
    """Its last records are fewer than `minRecordsPerTrigger`, so it ends without them."""
    limited = DlogStreamReader._limited

    def holding(self: DlogStreamReader, since: StreamOffset, *others: Any) -> StreamOffset:
        offset, target = limited(self, since, *others), self._target
        self._target = None
        held_back = limited(self, since, *others)
        self._target = target
        return since if held_back == since else offset

    with patch.object(DlogStreamReader, "_limited", holding):
        yield


@caught_by(_WHATEVER)
def a_run_goes_beyond_its_end_where_a_batch_is_cut() -> Iterator[None]:
    """A batch that a limit cuts in one log takes the others to where they end by now."""
    limited = DlogStreamReader._limited

    def endless(self: DlogStreamReader, *arguments: Any) -> StreamOffset:
        with patch.object(DlogStreamReader, "_ends", lambda *_: {}):
            return limited(self, *arguments)

    with patch.object(DlogStreamReader, "_limited", endless):
        yield


@caught_by(_WHATEVER)
def a_run_has_no_end_of_its_own() -> Iterator[None]:
    """Each batch goes to where the logs end when it is asked for."""
    with patch.object(DlogStreamReader, "_ends", lambda *_: {}):
        yield


@caught_by(f"{_RUNS}::test_a_run_ends_at_its_end_though_that_is_out_of_sight_meanwhile")
def a_batch_ends_beyond_what_is_readable() -> Iterator[None]:
    """It goes to the end of its run, whatever is readable there."""
    end_of = _Step._end_of

    def unseen(self: _Step, log: str, view: LogView) -> LogPosition:
        return self._ends.get(log) or end_of(self, log, view)

    with patch.object(_Step, "_end_of", unseen):
        yield


@caught_by(f"{_RUNS}::test_the_same_question_has_the_same_answer")
def a_batch_begins_where_the_last_answer_ended() -> Iterator[None]:
    """Whether Spark has read that batch or asks for it again."""
    latest_offset = DlogStreamReader.latestOffset

    def eager(self: DlogStreamReader, start: Any = None, limit: Any = None) -> dict[str, Any]:
        return latest_offset(self, self._known.to_json() if self._known else start, limit)

    with patch.object(DlogStreamReader, "latestOffset", eager):
        yield


@caught_by(f"{_RUNS}::test_a_log_that_comes_in_a_run_is_behind_from_its_first_record_on")
def a_log_that_comes_in_a_run_counts_as_read() -> Iterator[None]:
    """The progress of the run shows nothing of it."""
    report = DlogStreamReader.reportLatestOffset

    def silent(self: DlogStreamReader) -> dict[str, Any] | None:
        known = (
            set() if self._known is None else {each.log_id for each in self._known.logs.values()}
        )
        whole = self._snapshots
        self._snapshots = {log: each for log, each in whole.items() if each.log_id in known}
        outcome = report(self)
        self._snapshots = whole
        return outcome

    with patch.object(DlogStreamReader, "reportLatestOffset", silent):
        yield


@caught_by(f"{_LIMITS}::test_records_lost_under_a_limit_are_counted_and_nothing_is_doubled")
def what_was_truncated_takes_room_in_a_batch() -> Iterator[None]:
    """A limited batch counts records from its start on, though the first of them are gone."""

    def unread(wanted: LogRange, _: LogView | None) -> LogPosition:
        return wanted.start

    with patch.object(stream, "_readable_start", unread):
        yield


@caught_by(f"{_LIMITS}::test_spark_knows_whether_batches_are_limited")
def a_limit_of_bytes_gives_way_to_a_minimum() -> Iterator[None]:
    """Spark gets no limit where both are given."""
    with patch.object(stream, "default_read_limit", lambda limits: _limited(limits)):
        yield


def _limited(limits: Limits) -> Any:
    from dlspark.admission import default_read_limit

    if limits.min_records is not None:
        return default_read_limit(Limits(min_records=limits.min_records))
    return default_read_limit(limits)
