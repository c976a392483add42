"""Goal: the judges of the sink refuse what breaks a promise, and nothing else.

Method: they learn requests of drivers, answers to them, and a reader's rows; no run is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import AppendMismatchError
from dlcore.base.ids import DLSN
from dlcore.log.reading.scan import CommitResult
from dlcore.metadata.paths import NamespacePaths
from tests.fixtures.simulated_store import SimulatedTree
from tests.simulation.log_checkers import LogCheckers
from tests.simulation.loop import run
from tests.simulation.sink_checkers import SinkCheckers, WriteId
from tests.simulation.truth import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOG = ("log", "id")
ROWS = [b"one", b"two"]
AGAIN = [b"two again", b"one again"]


class Play:
    """A query's first batch was asked for twice, by two runs; a reader reads the log."""

    def __init__(self) -> None:
        self.logs = LogCheckers(
            tree=SimulatedTree(),
            paths=NamespacePaths("/d"),
            grace_s=1.0,
            tier_grace_s=1.0,
            epoch_ms=0,
        )
        self.sinks = SinkCheckers(self.logs)
        self.write = WriteId("query", 0, 0, "id")
        self.first = self.sinks.begin(self.write, {LOG: ROWS})
        self.second = self.sinks.begin(self.write, {LOG: AGAIN})

    def read(self, payloads: Sequence[bytes], *, first: int = 0) -> None:
        """Let a reader get records, one an entry, from the entry `first` on."""
        reading = self.logs.new_reading("id", "log", DLSN(1, first, 0))
        for number, payload in enumerate(payloads, first):
            reading.on_record(payload, DLSN(1, number, 0), number, 7, 7)

    def answered(self, *, first: int = 0, end: int = 2) -> None:
        """Let the first run learn that its rows are there."""
        places = {"log": (DLSN(1, first, 0), DLSN(1, end, 0))}
        result = CommitResult(committed=True, already_committed=False, logs=places)
        self.sinks.on_answered(self.write, self.first, result, newest=-1)

    def judge(self, *, log_ids: Sequence[str] = ("id",)) -> None:
        """Judge what is there."""
        self.sinks.check_whole(log_ids)


def on_play(body: Callable[[Play], None], *, refused: str = "") -> None:
    """Run `body`, and judge; a promise is broken if one is named."""

    async def scenario() -> None:
        play = Play()
        body(play)
        if not refused:
            play.judge()
            return
        with pytest.raises(InvariantViolatedError, match=refused):
            play.judge()

    run(scenario())


@pytest.mark.parametrize(
    ("payloads", "refused"),
    [
        (ROWS, ""),
        (AGAIN, ""),
        ([], ""),  # no driver learned that it is there
        (ROWS[:1], "S1"),
        (ROWS[::-1], "S1"),
        ([*ROWS, *AGAIN], "S1"),
    ],
)
def test_a_batch_is_there_once_whole_and_in_its_order(
    payloads: Sequence[bytes], refused: str
) -> None:
    """As one of its runs staged it."""
    on_play(lambda play: play.read(payloads), refused=refused)


@pytest.mark.parametrize(
    ("payloads", "first", "end", "refused"),
    [
        (ROWS, 0, 2, ""),
        (ROWS, 0, 1, "S2"),
        (ROWS, 1, 3, "S2"),
        (AGAIN, 0, 2, "S1"),  # and not the reported ones
        ([], 0, 2, "S1"),
    ],
)
def test_a_batch_is_where_its_answer_said(
    payloads: Sequence[bytes], first: int, end: int, refused: str
) -> None:
    """There are its rows, and no others."""

    def body(play: Play) -> None:
        play.answered(first=first, end=end)
        play.read(payloads)

    on_play(body, refused=refused)


def test_a_batch_that_failed_is_not_there() -> None:
    """A driver with that answer may write its rows elsewhere."""

    def body(play: Play) -> None:
        play.first.has_failed = True
        play.read(ROWS)

    on_play(body, refused="S1")


@pytest.mark.parametrize("fate", ["truncated", "deleted"])
def test_records_cut_before_any_read_need_not_be_there(fate: str) -> None:
    """No one can tell."""

    async def scenario() -> None:
        play = Play()
        play.answered()
        if fate == "truncated":
            play.logs.on_truncate("id", "log", DLSN(1, 2, 0))
        play.judge(log_ids=() if fate == "deleted" else ("id",))

    run(scenario())


def test_batches_of_a_query_follow_each_other() -> None:
    """In each log."""

    def body(play: Play) -> None:
        play.sinks.begin(WriteId("query", 1, 0, "id"), {LOG: [b"next"]})
        play.read([b"next", *ROWS])

    on_play(body, refused="S1")


@pytest.mark.parametrize(("newest", "is_refused"), [(-1, False), (0, False), (1, True)])
def test_an_older_run_must_not_be_called_committed(newest: int, *, is_refused: bool) -> None:
    """A later batch was committed before it asked."""

    async def scenario() -> None:
        play = Play()
        assert play.sinks.newest(play.write) == -1
        if is_refused:
            with pytest.raises(InvariantViolatedError, match="S3"):
                play.sinks.on_answered(play.write, play.first, None, newest=newest)
        else:
            play.sinks.on_answered(play.write, play.first, None, newest=newest)
            assert play.sinks.newest(play.write) == 0

    run(scenario())


def test_the_newest_run_is_not_refused() -> None:
    """Unless another one may have the batch."""

    async def scenario() -> None:
        play = Play()
        error = AppendMismatchError("no")
        play.sinks.on_refused(play.write, error, may_be=True)
        with pytest.raises(InvariantViolatedError, match="S3"):
            play.sinks.on_refused(play.write, error, may_be=False)

    run(scenario())
