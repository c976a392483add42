"""Positions of queries in logs: when they are stored, under which name, and what a failure does.

Goal: a log knows what a query has read, at little cost, and never stops it.  Method: a store and a
clock that the test makes up, and a stream reader over made-up snapshots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError, DLError, MetadataConnectionError
from dlcore.base.ids import DLSN
from dlspark.keeping import NAME_PREFIX, PAUSE_S, KeptPositions
from dlspark.offsets import LogPosition, StreamOffset
from dlspark.options import Mode, ReadOptions
from dlspark.stream import DlogStreamReader
from tests.dlspark.test_stream import MadeUpSnapshots
from tests.fixtures.snapshots import snapshot_of

if TYPE_CHECKING:
    from dlcore.sync import LogSnapshot

PAUSE_NS = int(PAUSE_S * 1e9)


class Bench:
    """A store that notes what it is asked, and a clock."""

    def __init__(self, subscription: str | None = "me", cost_ns: int = 0) -> None:
        self.stored: list[tuple[str, str, str]] = []
        self.error: DLError | None = None
        self.is_full = False
        self.now_ns = 0
        self._cost_ns = cost_ns
        self.kept = KeptPositions(lambda: self, subscription, lambda: self.now_ns)

    def store_position(self, log: str, position: LogPosition, subscriber: str) -> bool:
        """Note a position."""
        self.now_ns += self._cost_ns
        if self.error is not None:
            raise self.error
        self.stored.append((log, str(position.dlsn), subscriber))
        return not self.is_full


def offset(query: str | None = None, **positions: str) -> StreamOffset:
    """Return an offset at these positions."""
    logs = {log: LogPosition(log_id="i", dlsn=DLSN.parse(at)) for log, at in positions.items()}
    return StreamOffset(logs=logs, query=query)


def test_the_first_and_then_one_in_each_pause() -> None:
    """Positions between are left out, the newest is stored; unchanged logs are left alone."""
    bench = Bench()
    bench.kept.note(offset(a="1:1:0", b="1:0:0"))
    for n in range(2, 5):
        bench.now_ns = PAUSE_NS - 1
        bench.kept.note(offset(a=f"1:{n}:0", b="1:0:0"))
    assert bench.stored == [("a", "1:1:0", "me"), ("b", "1:0:0", "me")]
    bench.now_ns = PAUSE_NS
    bench.kept.note(offset(a="1:4:0", b="1:0:0"))
    bench.kept.note(offset(a="1:5:0", b="1:0:0"), is_last=True)
    bench.kept.note(offset(a="1:6:0", b="1:0:0"))
    bench.kept.flush()
    bench.kept.flush()
    assert bench.stored[2:] == [("a", f"1:{n}:0", "me") for n in (4, 5, 6)]


def test_slow_stores_are_asked_less() -> None:
    """They take at most a hundredth of the time."""
    bench = Bench(cost_ns=PAUSE_NS)
    bench.kept.note(offset(a="1:1:0"))
    bench.now_ns = 100 * PAUSE_NS
    bench.kept.note(offset(a="1:2:0"))
    assert len(bench.stored) == 1
    bench.now_ns += PAUSE_NS
    bench.kept.note(offset(a="1:2:0"))
    assert len(bench.stored) == 2


def test_names() -> None:
    """The user's, or one by the query's id; none where there is neither, or it is not wanted."""
    for subscription, query, name in (
        ("me", None, "me"),
        (None, "77", f"{NAME_PREFIX}77"),
        (None, None, None),
        ("none", "77", None),
    ):
        bench = Bench(subscription)
        bench.kept.note(offset(query, a="1:1:0"))
        assert [found for *_, found in bench.stored] == ([] if name is None else [name])


def test_failures_are_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """The query does not notice; logs whose loss was accepted are not asked."""
    bench = Bench()
    bench.error = MetadataConnectionError("down")
    bench.kept.note(replace(offset(a="1:1:0", b="1:1:0"), gone=frozenset("b")))
    bench.now_ns = PAUSE_NS
    bench.kept.note(offset(a="1:2:0"))
    assert len(caplog.messages) == 1
    assert "down" in caplog.text
    bench.error = None
    bench.kept.flush()
    assert bench.stored == [("a", "1:2:0", "me")]


def test_a_full_log_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The warning says how to make room."""
    bench = Bench(None)
    bench.is_full = True
    bench.kept.note(offset("77", a="1:1:0"))
    assert "dlog log subscriptions a --delete NAME" in caplog.text


@pytest.mark.parametrize("text", ["", "x" * 201, "spark:7"])
def test_wrong_names(text: str) -> None:
    """The error names the option and what would be right."""
    given = {"uri": "distributedlog://h:1/p", "log": "a", "subscription": text}
    with pytest.raises(ConfigurationError, match="option subscription="):
        ReadOptions.parse(given, Mode.STREAM)


def test_a_batch_has_no_subscription() -> None:
    """It goes on nowhere."""
    given = {"uri": "distributedlog://h:1/p", "log": "a", "subscription": "me"}
    with pytest.raises(ConfigurationError, match="option subscription="):
        ReadOptions.parse(given, Mode.BATCH)


class KeepingSnapshots(MadeUpSnapshots):
    """Made-up snapshots that note the positions that they are to keep."""

    def __init__(self, *snapshots: LogSnapshot) -> None:
        super().__init__(*snapshots)
        self.stored: list[tuple[str, str]] = []

    def store_position(self, log: str, position: LogPosition, subscriber: str) -> bool:
        """Note a position and a name."""
        self.stored.append((str(position.dlsn), subscriber))
        return True


def test_a_reader_keeps_what_has_ended() -> None:
    """Not the end of the batch that it plans; after a restart under the same name."""
    source = KeepingSnapshots(snapshot_of(()), snapshot_of((4,)), snapshot_of((6,)))
    given = {"uri": "distributedlog://h:1/p", "log": "clicks", "startingOffsets": "earliest"}
    options = ReadOptions.parse(given, Mode.STREAM)
    reader = DlogStreamReader(options, source)
    start = reader.initialOffset()
    first = reader.latestOffset(start)
    assert not source.stored
    second = reader.latestOffset(first)
    assert second["query"] == first["query"]
    name = NAME_PREFIX + first["query"]
    assert source.stored == [("1:4:0", name)]
    reader.commit(second)
    DlogStreamReader(options, source).commit(second)
    assert source.stored == [("1:4:0", name), ("1:6:0", name)]


def test_a_run_with_an_end_keeps_its_last_position() -> None:
    """At once, however short it was."""
    source = KeepingSnapshots(snapshot_of((4,)))
    given = {"uri": "distributedlog://h:1/p", "log": "clicks", "startingOffsets": "earliest"}
    given |= {"subscription": "me"}
    reader = DlogStreamReader(ReadOptions.parse(given, Mode.STREAM), source)
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    reader.commit(start)
    end = reader.latestOffset(start)
    reader.latestOffset(end)
    assert [position for position, _ in source.stored] == ["1:0:0", "1:4:0"]


def test_an_offset_of_the_first_version_gets_an_id_with_its_next_batch() -> None:
    """Without a new record Spark must not see another offset."""
    source = KeepingSnapshots(snapshot_of((4,)), snapshot_of((6,)))
    given = {"uri": "distributedlog://h:1/p", "log": "clicks"}
    reader = DlogStreamReader(ReadOptions.parse(given, Mode.STREAM), source)
    old = offset(clicks="1:4:0").to_json()
    assert old["v"] == 1
    assert reader.latestOffset(old) == old
    later = reader.latestOffset(old)
    assert later["v"] == 2
    assert StreamOffset.from_json(later).query == later["query"]
    with pytest.raises(ConfigurationError, match="not an offset"):
        StreamOffset.from_json(later | {"query": 7})
