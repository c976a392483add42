"""Goal: the judges of logs refuse what breaks a promise, and nothing else.

Method: they learn what a reader got, record by record; no run is needed.
"""

from __future__ import annotations

import pytest

from dlcore.base.ids import DLSN
from dlcore.metadata.paths import NamespacePaths
from tests.fixtures.aio import run
from tests.fixtures.simulated_store import SimulatedTree
from tests.simulation.log_checkers import LogCheckers
from tests.simulation.truth import InvariantViolatedError


@pytest.mark.parametrize(
    ("start", "truncated", "is_refused"),
    [
        (DLSN.INITIAL, DLSN(3, 0, 0), False),
        (DLSN.INITIAL, DLSN(2, 0, 0), True),  # 2:0:0 is there, and was left out
        (DLSN(1, 0, 0), None, True),
        (DLSN(1, 1, 0), DLSN(3, 0, 0), True),
    ],
)
def test_only_truncated_records_are_left_out_by_who_reads_from_the_start(
    start: DLSN, truncated: DLSN | None, *, is_refused: bool
) -> None:
    """A reader from the start passes records that are truncated meanwhile; others get an error."""

    async def scenario() -> None:
        checkers = LogCheckers(
            tree=SimulatedTree(),
            paths=NamespacePaths("/d"),
            grace_s=1.0,
            tier_grace_s=1.0,
            epoch_ms=0,
        )
        places = [DLSN(1, 1, 0), DLSN(2, 0, 0), DLSN(3, 0, 0)]
        payloads = [b"one", b"two", b"three"]
        writing = checkers.new_writing("id", "log")
        writing.on_write(payloads)
        everything = checkers.new_reading("id", "log", DLSN(1, 1, 0))
        for number, (dlsn, payload) in enumerate(zip(places, payloads, strict=True)):
            everything.on_record(payload, dlsn, number, 7, 7)
        if truncated is not None:
            checkers.on_truncate("id", "log", truncated)
        reading = checkers.new_reading("id", "log", start)
        reading.on_record(b"one", DLSN(1, 1, 0), 0, 7, 7)
        if is_refused:
            with pytest.raises(InvariantViolatedError, match="L1"):
                reading.on_record(b"three", DLSN(3, 0, 0), 2, 7, 7)
        else:
            reading.on_record(b"three", DLSN(3, 0, 0), 2, 7, 7)

    run(scenario())
