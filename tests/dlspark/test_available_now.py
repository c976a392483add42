"""Runs with Trigger.AvailableNow under limits: what was there when the run began, and all of it.

Method: a query over made-up logs that grow, vanish from sight or come while it runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hypothesis import given, strategies as st

from dlspark import stream
from tests.dlspark.test_stream_limits import MadeUpLogs, Query, all_of
from tests.fixtures.snapshots import RECORDS_PER_ENTRY, snapshot_of

if TYPE_CHECKING:
    import pytest

SEGMENTS = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=3)
RECORD_BYTES = 100


def records_in(segments: list[tuple[int, ...]]) -> int:
    """Return how many records a made-up log holds."""
    return RECORDS_PER_ENTRY * sum(map(sum, segments))


@given(
    logs=st.dictionaries(st.sampled_from("abc"), SEGMENTS, min_size=1),
    later=st.lists(st.sampled_from("abc"), max_size=4),
    limits=st.fixed_dictionaries(
        {},
        optional={
            "maxRecordsPerTrigger": st.integers(1, 60),
            "maxBytesPerTrigger": st.integers(1, 6000),
            "minRecordsPerTrigger": st.integers(1, 60),
        },
    ),
    restarts=st.lists(st.booleans(), max_size=3),
)
def test_a_run_reads_what_was_there_whatever_its_limits(
    logs: dict[str, list[tuple[int, ...]]],
    later: list[str],
    limits: dict[str, int],
    restarts: list[bool],
) -> None:
    """Each record once, none that came later, no batch too large, and after a restart the rest."""
    made_up = MadeUpLogs(**{log: snapshot_of(*segments) for log, segments in logs.items()})
    records_max = limits.get("maxRecordsPerTrigger", math.inf)
    bytes_max = limits.get("maxBytesPerTrigger", math.inf)
    if limits.get("minRecordsPerTrigger", 0) > records_max:
        del limits["minRecordsPerTrigger"]  # both together are refused
    query = Query(made_up, **{name: str(value) for name, value in limits.items()})
    query.reader.prepareForTriggerAvailableNow()
    wanted = {log: records_in(segments) for log, segments in logs.items()}
    batches: list[dict[str, list[int]]] = []
    while batch := query.batch():
        batches.append(batch)
        records = sum(map(len, batch.values()))
        assert records <= max(records_max, len(batch))
        assert records * RECORD_BYTES <= max(bytes_max, len(batch) * RECORD_BYTES)
        if later and (log := later.pop()) in logs:
            logs[log] = [*logs[log], (2,)]
            made_up.logs[log] = snapshot_of(*logs[log])
        if restarts and restarts.pop():
            query.restart()
            query.reader.prepareForTriggerAvailableNow()
            wanted = {log: records_in(segments) for log, segments in logs.items()}
    assert {log: all_of(batches, log) for log in wanted} == {
        log: [*range(count)] for log, count in wanted.items()
    }


def test_a_run_ends_at_its_end_though_that_is_out_of_sight_meanwhile() -> None:
    """Where bookies are away less is readable: reads end there, and nothing is lost."""
    logs = MadeUpLogs(a=snapshot_of((5,)))
    query = Query(logs, maxRecordsPerTrigger="35")
    query.reader.prepareForTriggerAvailableNow()
    logs.logs["a"] = snapshot_of((3,))
    batches = [query.batch()]
    assert all_of(batches, "a") == list(range(30))
    assert query.batch() == {}
    logs.logs["a"] = snapshot_of((5,), (2,))
    assert all_of([*batches, *query.run()], "a") == list(range(50))


def test_the_same_question_has_the_same_answer() -> None:
    """A batch that Spark asks for again begins where Spark says."""
    query = Query(MadeUpLogs(a=snapshot_of((4,))), maxRecordsPerTrigger="15")
    query.reader.prepareForTriggerAvailableNow()
    first: Any = query.reader.latestOffset(query.offset, query.limit)
    assert first["seq"] == {"a": 15}
    assert query.reader.latestOffset(query.offset, query.limit) == first
    assert query.reader.latestOffset(first, query.limit)["seq"] == {"a": 30}


def test_a_log_that_comes_in_a_run_is_behind_from_its_first_record_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run does not read it, and its progress says how much the next one has to read."""
    logs = MadeUpLogs(a=snapshot_of((1,)))
    monkeypatch.setattr(stream, "list_selected", lambda *_: list(logs.logs))
    query = Query(logs, logsPattern=".")
    query.reader.prepareForTriggerAvailableNow()
    logs.logs["b"] = snapshot_of((3,))
    assert all_of(query.run(), "b") == []
    assert {log: lag.records for log, lag in query.lag().logs.items()} == {"b": 30}
