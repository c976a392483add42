"""Offsets: canonical text, exact replay of first batches, and what counts as lost.

Goal: no record is read twice or skipped, whatever Spark asks again.  Method: exact cases, and a
random walk over growing, rolling and truncated logs against a model that keeps every record's
number.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import AlreadyTruncatedError, ConfigurationError, LogNotFoundError
from dlcore.base.ids import DLSN
from dlcore.base.records import RecordPlace
from dlcore.log.reading.scan import ExtentView, LogSnapshot, SegmentView
from dlspark.lag import Lag
from dlspark.offsets import LogPosition, LogView, StreamOffset
from tests.fixtures.ledgers import metadata_of
from tests.fixtures.lengths import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator


def view(
    end: str, *, first: str = "1:0:0", log_id: str = "i", counts: tuple[Any, Any] = (None, None)
) -> LogView:
    """Return a view of a log with records from `first` to `end`."""
    return LogView(
        log_id=log_id,
        first=DLSN.parse(first),
        end=DLSN.parse(end),
        first_sequence_id=counts[0],
        end_sequence_id=counts[1],
    )


def initial(**positions: str) -> StreamOffset:
    """Return an initial offset."""
    return StreamOffset.initial(
        {log: LogPosition(log_id="i", dlsn=DLSN.parse(dlsn)) for log, dlsn in positions.items()}
    )


def as_text(ranges: list[Any]) -> list[str]:
    """Return ranges in a readable form."""
    return [f"{r.log} {r.start.dlsn}-{r.end}" for r in ranges]


def through_spark(offset: StreamOffset) -> StreamOffset:
    """Return what comes back when Spark stores an offset and gives it back."""
    return StreamOffset.from_json(json.loads(json.dumps(offset.to_json())))


def test_json_is_canonical() -> None:
    """Equal offsets have one text, whatever order their logs came in."""
    one, two = initial(b="1:0:0", a="2:1:0"), initial(a="2:1:0", b="1:0:0")
    text = (
        '{"ids": {"a": "i", "b": "i"}, "init": {"a": "2:1:0", "b": "1:0:0"}, '
        '"logs": {"a": "2:1:0", "b": "1:0:0"}, "v": 1}'
    )
    assert json.dumps(one.to_json()) == json.dumps(two.to_json()) == text
    assert through_spark(one).to_json() == one.to_json()


def test_nothing_new_gives_the_same_offset() -> None:
    """Spark starts a batch for every change of the text: an idle or rolled log changes nothing."""
    first, _ = initial(a="1:0:0").advanced({"a": view("2:5:0", counts=(0, 40))})
    again, losses = through_spark(first).advanced({"a": view("2:5:0", counts=(0, None))})
    assert again.to_json() == first.to_json()
    assert not losses


def test_replay_of_the_first_batch_ignores_the_new_initial_offset() -> None:
    """Spark asks for the initial offset again after a crash; the logged end knows the old one."""
    end, _ = initial(a="1:5:0").advanced({"a": view("1:9:0")})
    replayed = through_spark(end)
    for asked_again in ("1:2:0", "1:9:0", "3:0:0"):  # before, at and after the end
        assert as_text(initial(a=asked_again).ranges_to(replayed)) == ["a 1:5:0-1:9:0"]


def test_empty_first_batch_and_the_one_after_it() -> None:
    """A query at the latest position runs an empty batch first; then it reads what came, once."""
    start = initial(a="1:5:0")
    empty, _ = start.advanced({"a": view("1:5:0")})
    assert start.ranges_to(empty) == []
    assert initial(a="1:8:0").ranges_to(empty) == []
    second, _ = empty.advanced({"a": view("1:7:0")})
    assert as_text(empty.ranges_to(second)) == ["a 1:5:0-1:7:0"]
    third, _ = second.advanced({"a": view("1:9:0")})
    assert as_text(second.ranges_to(third)) == ["a 1:7:0-1:9:0"]
    assert not third.init


def test_start_equal_to_end_reads_nothing() -> None:
    """Also when that offset carries the start of the first batch."""
    end, _ = initial(a="1:0:0").advanced({"a": view("1:9:0")})
    assert end.init
    assert end.ranges_to(through_spark(end)) == []


def test_second_batch_does_not_read_the_first_again_for_another_log() -> None:
    """The start of a log's first batch is dropped once that batch is over, log by log."""
    first, _ = initial(a="1:0:0", b="1:0:0").advanced({"a": view("1:5:0"), "b": view("1:0:0")})
    second, _ = first.advanced({"a": view("1:5:0"), "b": view("1:3:0")})
    assert as_text(first.ranges_to(second)) == ["b 1:0:0-1:3:0"]


def test_replay_of_a_first_batch_in_which_a_log_had_nothing() -> None:
    """Its start is kept as well, or a changed option would let the replay read more."""
    end, _ = initial(a="1:5:0", b="1:0:0").advanced({"a": view("1:5:0"), "b": view("1:3:0")})
    assert as_text(initial(a="1:0:0", b="1:1:0").ranges_to(end)) == ["b 1:0:0-1:3:0"]


def test_new_log_is_read_from_its_beginning_and_replayed_so() -> None:
    """A log found by a pattern starts at its first record, which the offset remembers."""
    start, _ = initial(a="1:5:0").advanced({"a": view("1:5:0")})
    end, losses = start.advanced({"a": view("1:5:0"), "b": view("1:4:0", counts=(0, 9))})
    assert not losses
    assert as_text(start.ranges_to(through_spark(end))) == ["b 1:0:0-1:4:0"]


def test_no_log_at_all_and_one_later() -> None:
    """An offset without logs is not a reason to start anything again."""
    nothing = initial()
    assert nothing.advanced({})[0].to_json() == nothing.to_json()
    end, _ = nothing.advanced({"a": view("1:4:0")})
    assert as_text(nothing.ranges_to(end)) == ["a 1:0:0-1:4:0"]
    kept, _ = end.advanced({})
    assert kept.to_json() == end.to_json(), "a log that a listing misses keeps its position"
    back, _ = kept.advanced({"a": view("1:6:0")})
    assert as_text(kept.ranges_to(back)) == ["a 1:4:0-1:6:0"]


def test_deleted_log_is_a_loss_and_keeps_its_position() -> None:
    """The loss names the log; a query logs it once, and again if it came back meanwhile."""
    start, _ = initial(a="1:0:0").advanced({"a": view("1:5:0")})
    end, losses = start.advanced({"a": None})
    assert (end.logs, end.gone) == (start.logs, frozenset("a"))
    assert losses[0].error is LogNotFoundError
    assert "log 'a': it was deleted" in str(losses[0])
    end = through_spark(end)
    for views in ({"a": None}, {}):  # chosen and not there, or not chosen
        assert end.advanced(views) == (end, [])
    back, losses = end.advanced({"a": view("1:5:0")})
    assert (back.logs, back.gone, losses) == (start.logs, frozenset(), [])
    assert len(back.advanced({"a": None})[1]) == 1
    new, losses = end.advanced({"a": view("1:9:0", log_id="j")})
    assert (new.logs["a"].log_id, new.gone, losses) == ("j", frozenset(), [])


def test_recreated_log_is_a_loss_and_is_read_from_its_beginning() -> None:
    """Positions of the old log mean nothing in the new one, even where they exist in both."""
    start, _ = initial(a="1:0:0").advanced({"a": view("1:5:0")})
    end, losses = start.advanced({"a": view("1:9:0", log_id="j")})
    assert "another has its name (id i, now j)" in str(losses[0])
    assert as_text(start.ranges_to(through_spark(end))) == ["a 1:0:0-1:9:0"]
    assert end.logs["a"].log_id == "j"


def test_recreated_log_belongs_to_its_new_id_from_its_first_position_on() -> None:
    """Also where the query stood at that very position of the old one."""
    start, _ = initial(a="1:0:0").advanced({"a": view("1:0:0")})
    end, _ = start.advanced({"a": view("1:9:0", log_id="j")})
    (part,) = start.ranges_to(through_spark(end))
    assert part.start == LogPosition(log_id="j", dlsn=DLSN.INITIAL)


@pytest.mark.parametrize(
    ("position", "first", "counts", "is_loss"),
    [
        ("1:5:0", "1:5:0", (None, None), False),
        ("1:5:0", "1:6:0", (None, None), True),
        ("1:5:0", "2:0:0", (40, 90), False),  # all 40 records before were read
        ("1:5:0", "2:0:0", (41, 90), True),
        ("1:5:0", "2:1:0", (None, 90), True),
        ("3:0:0", "2:0:0", (40, 90), False),
    ],
)
def test_truncation_is_a_loss_only_where_records_were_not_read(
    position: str, first: str, counts: tuple[Any, Any], *, is_loss: bool
) -> None:
    """Counts tell that a position at the end of a dropped segment has lost nothing."""
    start = StreamOffset(
        logs={"a": LogPosition(log_id="i", dlsn=DLSN.parse(position), sequence_id=40)}
    )
    _, losses = start.advanced({"a": view("4:9:0", first=first, counts=counts)})
    assert bool(losses) == is_loss
    if is_loss:
        assert losses[0].error is AlreadyTruncatedError
        assert first in str(losses[0])
        assert position in str(losses[0])


def test_wholly_truncated_log_is_no_loss_until_something_follows() -> None:
    """With no readable record nothing is skipped yet."""
    start = StreamOffset(logs={"a": LogPosition(log_id="i", dlsn=DLSN(1, 5, 0), sequence_id=40)})
    same, losses = start.advanced({"a": view("2:0:0", first="2:0:0")})
    assert not losses
    assert same.to_json() == start.to_json()


def test_position_beyond_the_end_waits() -> None:
    """A start beyond what a log holds is kept until the log gets there."""
    start = initial(a="5:0:0")
    same, losses = start.advanced({"a": view("1:9:0")})
    assert same.to_json() == start.to_json()
    assert not losses
    assert start.ranges_to(same) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"v": 3, "logs": {}}, ["version 3", "up to 2"]),
        ({"v": "1"}, ["version 1"]),
        ({"logs": {}}, ["not an offset"]),
        ([1], ["not an offset"]),
        ({"v": 1, "logs": {"a": "1:0:0"}}, ["not an offset"]),
        ({"v": 1, "logs": {"a": "1:0"}, "ids": {"a": "i"}}, ["not an offset"]),
        ({"v": 1, "logs": {}, "ids": {}, "init": {"a": "1:0:0"}}, ["not an offset"]),
        ({"v": 1, "logs": {}, "ids": {}, "gone": ["a"]}, ["not an offset"]),
        ({"v": 1, "logs": {"a": "1:0:0"}, "ids": {"a": "i"}, "seq": {"a": "7"}}, ["not an offset"]),
        ({"v": 1, "logs": {}, "ids": {}, "limits": {}}, ["not an offset"]),
    ],
)
def test_foreign_offsets_are_refused(value: object, words: list[str]) -> None:
    """A checkpoint of another source, or of a newer version, is named as such."""
    with pytest.raises(ConfigurationError) as caught:
        StreamOffset.from_json(value)
    for word in words:
        assert word in str(caught.value)


def test_offsets_that_do_not_follow_each_other_are_refused() -> None:
    """A log in the end without any start means that the checkpoint is not this query's."""
    start, _ = initial(a="1:0:0").advanced({"a": view("1:5:0")})
    end = StreamOffset(logs={"b": LogPosition(log_id="b", dlsn=DLSN(1, 1, 0))})
    with pytest.raises(ConfigurationError, match="does not follow"):
        start.ranges_to(end)


def grow(rng: random.Random, logs: dict[str, list[int]]) -> None:
    """Add entries to some logs, and segments."""
    for segments in logs.values():
        if rng.random() < 0.3:
            segments.append(0)
        segments[-1] += rng.choice([0, 0, 1, 3])


@for_each(range(60))
def test_random_walk_reads_every_record_once(seed: int) -> None:
    """Logs grow, roll, appear, are renamed, left out; batches are replayed from re-asked starts."""
    rng = random.Random(seed)
    logs: dict[str, list[int]] = {"a": [0], "b": [0]}  # entries by segment, segments from 1 on
    ids = {"a": 0, "b": 1}

    def views() -> dict[str, LogView | None]:
        found: dict[str, LogView | None] = {}
        for log, segments in logs.items():
            filled = [number for number, count in enumerate(segments, 1) if count]
            end = DLSN(filled[-1], segments[filled[-1] - 1], 0) if filled else DLSN.INITIAL
            found[log] = view(str(end), log_id=f"i{ids[log]}", counts=(0, sum(segments)))
        return found

    def positions() -> dict[str, LogPosition]:
        found = ((log, v) for log, v in views().items() if v)
        return {log: LogPosition(log_id=v.log_id, dlsn=v.end) for log, v in found}

    def read(start: StreamOffset, end: StreamOffset) -> list[tuple[int, int, int]]:
        return [
            (ids[part.log], segment, entry)
            for part in start.ranges_to(end)
            for segment, count in enumerate(logs[part.log], 1)
            for entry in range(count)
            if part.start.dlsn <= DLSN(segment, entry, 0) < part.end
        ]

    offset = StreamOffset.initial(positions())
    batches: list[list[tuple[int, int, int]]] = []
    for number in range(30):
        grow(rng, logs)
        if rng.random() < 0.1:
            new = f"c{len(ids)}"
            logs[new], ids[new] = [0], len(ids)
        if rng.random() < 0.2:  # some to names that others had until now
            names = rng.sample(sorted({*logs, "d", "e"}), len(logs))
            logs = dict(zip(names, logs.values(), strict=True))
            ids = dict(zip(names, ids.values(), strict=True))
        gone = {log: None for log in offset.logs if log not in logs}
        seen, since = {**views(), **gone}, through_spark(offset)
        have_their_names = all(at.log_id == f"i{ids.get(log)}" for log, at in offset.logs.items())
        if number < 29 and have_their_names and rng.random() < 0.3:
            left_out = rng.choice(sorted(logs))
            del seen[left_out]
            since = since.without({left_out} & offset.logs.keys())
        end, losses = since.advanced(seen)
        assert not losses
        batch = read(offset, end)
        if batches:
            assert read(through_spark(offset), through_spark(end)) == batch
        else:
            assert read(StreamOffset.initial(positions()), end) == batch
        batches.append(batch)
        offset = end
    every = [
        (ids[log], segment, entry)
        for log, segments in logs.items()
        for segment, count in enumerate(segments, 1)
        for entry in range(count)
    ]
    assert sorted(itertools.chain(*batches)) == sorted(every)


def test_a_renamed_log_goes_on_under_its_new_name() -> None:
    """From its position, also in a batch that is replayed; the old name is free for another log."""
    start = initial(a="1:2:0", b="1:0:0")
    both = {"a": view("1:5:0"), "b": view("1:4:0", log_id="b")}
    first, _ = StreamOffset(
        logs={**start.logs, "b": LogPosition(log_id="b", dlsn=DLSN.INITIAL)}, init=start.init
    ).advanced(both)
    new = view("1:3:0", log_id="new", counts=(0, 3))
    renamed = {"a": new, "b": view("1:4:0", log_id="b"), "c": view("1:9:0")}
    second, losses = through_spark(first).advanced(renamed)
    assert not losses
    assert as_text(first.ranges_to(through_spark(second))) == ["a 1:0:0-1:3:0", "c 1:5:0-1:9:0"]
    assert sorted(second.logs) == ["a", "b", "c"]
    alone, losses = first.advanced({"c": view("1:9:0")})  # the query reads no a and no b any more
    assert (sorted(alone.logs), list(losses)) == (["b", "c"], [])
    third, losses = second.advanced({"a": None, "b": view("1:9:0"), "c": None})
    assert as_text(second.ranges_to(third)) == []  # what was c is b now, and has nothing new
    gone, replaced = (str(loss) for loss in losses)
    assert "log 'a': it was deleted, or renamed to a name that the query does not read" in gone
    assert "log 'b': it was deleted and created again, or renamed, or is in another" in replaced
    assert sorted(third.logs) == ["a", "b"]


def test_a_log_that_is_renamed_before_the_first_batch_ends_keeps_its_start() -> None:
    """Spark asks for the first offset again after a crash, when the log has its new name."""
    end, losses = initial(a="1:5:0").advanced({"a": None, "c": view("1:9:0")})
    assert not losses
    assert as_text(initial(c="1:9:0").ranges_to(through_spark(end))) == ["c 1:5:0-1:9:0"]
    idle, _ = initial(a="1:5:0").advanced({"a": None, "c": view("1:5:0")})
    assert as_text(initial(c="1:0:0").ranges_to(through_spark(idle))) == []


def snapshot(first: DLSN, end: DLSN, *segments: tuple[int, int, int, int]) -> LogSnapshot:
    """Return a snapshot with segments (lssn, first sequence id, entries, records)."""
    views = []
    for lssn, start, entries, records in segments:
        extent = ExtentView(
            ledger_id=1,
            first_entry_id=0,
            last_entry_id=entries - 1,
            base_entry_id=0,
            start_sequence_id=start,
            record_count=records,
            size_bytes=1,
            first_txid=0,
            last_txid=0,
        )
        ledgers = {1: metadata_of((0, "ABC"))}
        views.append(
            SegmentView(lssn=lssn, start_sequence_id=start, extents=(extent,), ledgers=ledgers)
        )
    return LogSnapshot(log="clicks", log_id="i", first=first, end=end, segments=tuple(views))


@pytest.mark.parametrize(
    ("first", "end", "counts"),
    [
        (DLSN(2, 0, 0), DLSN(3, 4, 0), (20, 58)),
        (DLSN(2, 3, 0), DLSN(3, 0, 0), (50, 50)),  # the end of a segment, and a beginning
        (DLSN(2, 1, 0), DLSN(3, 4, 2), (None, None)),  # within entries
        (DLSN(1, 0, 0), DLSN(4, 0, 0), (None, None)),  # of segments that are not there
    ],
)
def test_records_before_a_position_are_counted_where_segments_tell(
    first: DLSN, end: DLSN, counts: tuple[int | None, int | None]
) -> None:
    """Where they do not, nothing is read to find out."""
    found = LogView.of(snapshot(first, end, (2, 20, 3, 30), (3, 50, 4, 8)))
    assert (found.log_id, found.first, found.end) == ("i", first, end)
    assert (found.first_sequence_id, found.end_sequence_id) == counts
    assert not found.is_empty
    assert LogView.of(snapshot(first, first)).is_empty


class Looked(tuple[SegmentView, ...]):
    """Segments that count how many of them are looked at."""

    __slots__ = ()
    looks = 0

    def __getitem__(self, index: Any) -> Any:
        """Count one."""
        Looked.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[SegmentView]:
        """Count each."""
        return map(self.__getitem__, range(len(self)))

    def __reversed__(self) -> Iterator[SegmentView]:
        """Count each."""
        return map(self.__getitem__, reversed(range(len(self))))


def test_the_requests_of_a_trigger_do_not_grow_with_a_logs_history() -> None:
    """It is asked for each log, however many segments that has."""
    many = [(lssn, 10 * lssn, 2, 10) for lssn in range(1, 1001)]
    found = snapshot(DLSN(1, 0, 0), DLSN(1000, 2, 0), *many)
    found = replace(found, segments=Looked(found.segments))
    counted = LogView.of(found)
    assert (counted.first_sequence_id, counted.end_sequence_id) == (10, 10_010)
    place = RecordPlace(dlsn=DLSN(1000, 0, 0), sequence_id=10_000, timestamp_ms=0)
    assert Lag.of(found, place).records == 10
    assert Looked.looks < 50


def test_a_new_log_whose_first_records_are_gone_is_a_loss() -> None:
    """It was written and truncated between two batches: the query has missed records."""
    start = initial(a="1:0:0")
    moved, losses = start.advanced({"b": view("2:9:0", first="2:3:0", log_id="b", counts=(30, 90))})
    (loss,) = losses
    assert str(loss) == (
        "log 'b': records from 1:0:0 up to 2:3:0 (exclusive), 30 of them, were truncated; it "
        "holds 2:3:0 … 2:9:0 (exclusive)"
    )
    assert loss.error is AlreadyTruncatedError
    assert as_text(start.ranges_to(moved)) == ["b 2:3:0-2:9:0"]
    assert moved.logs["a"] == start.logs["a"]


def test_a_log_that_is_followed_and_was_never_there_is_nothing() -> None:
    """Deleted before the query heard of it."""
    start = initial(a="1:0:0")
    moved, losses = start.advanced({"a": view("1:0:0"), "b": None})
    assert moved is start
    assert losses == []
