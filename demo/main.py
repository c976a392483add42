"""The main job: real records into a log, a stream over it, a bookie killed, everything compared.

Exits with 0 if nothing differs, 1 if something does or fails, 130 if interrupted; in each case no
process and no data is left but the plot.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from pyspark.sql import SparkSession

import dlspark
from demo.failure import describe_failure
from demo.flights import FLIGHT_COUNT, differences, load_flights, statistics
from demo.processes import mark_children, stop_spark, wait_until_alone
from demo.report import Progress, save_plot, writable
from demo.stream import (
    CLOSING_ID,
    DELAYS_LOG,
    FLIGHTS_LOG,
    TYPED_LOG,
    FlightJobs,
    wait_for_rows,
    wait_until_drained,
)
from dlcore.base.config import LogConfig, QuorumConfig
from dlcore.ops.sandbox.cluster import Sandbox
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    import pandas as pd
    from pyspark.sql.streaming.query import StreamingQuery

    from dlcore.sync import Namespace

BOOKIES = 4
"""One more than a ledger uses, so that another can take the place of the one that is killed."""
FIRST_SHARE = 0.5
"""How much of the year is in the log before the stream starts; the rest arrives while it runs."""
LIVE_PARTS = 4
STEP_TIMEOUT_S = 120.0
PLOT = Path("artifacts/delays.png")
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_T = TypeVar("_T")


class Outcome(NamedTuple):
    """The differences, and the text to print."""

    problems: list[str]
    summary: list[str]


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--secure", action="store_true", help="with TLS between all processes")
    is_secure = parser.parse_args().secure
    progress = Progress()
    mark_children()
    signal.signal(signal.SIGTERM, _interrupt)
    outcome = failure = None
    is_interrupted = False
    try:
        with ExitStack() as stack:
            try:
                outcome = _run(progress, stack, is_secure=is_secure)
            except BaseException as error:
                if not _was_interrupted(error):
                    failure = describe_failure(error)  # before the stack stops Spark
                raise
    except BaseException as error:  # noqa: BLE001 - whatever it was, what is below must still happen
        is_interrupted = _was_interrupted(error)
        if is_interrupted:
            progress.say("interrupted: stopped everything")
        else:
            failure = failure or describe_failure(error)
            print(failure.trace, file=sys.stderr, flush=True)
    _ignore_interrupts()
    left = wait_until_alone(timeout_s=30)
    problems = [f"process {pid} is left: {command}" for pid, command in left.items()]
    if failure is not None:
        problems.append(failure.cause)  # the last line: the stack above it may be long
    is_right = _tell(progress, outcome, problems)
    if is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if is_right else EXIT_FAILED


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind `error`: py4j, interrupted while it sends, fails in its clean-up."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _ignore_interrupts() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _run(progress: Progress, stack: ExitStack, *, is_secure: bool) -> Outcome:
    progress.step(f"1. Start a ZooKeeper and {BOOKIES} bookies")

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlog-demo-")))
    with progress.waiting("starting the cluster"):
        sandbox = stack.enter_context(
            Sandbox(
                bookies=BOOKIES, data_dir=folder / "cluster", autorecovery=False, secure=is_secure
            )
        )
    for bookie in sandbox.bookies:
        progress.say(f"{bookie.name} on {bookie.address}, process {bookie.pid}")
    tls = sandbox.tls
    namespace = stack.enter_context(open_namespace(sandbox.uri, tls=tls))
    for log in (FLIGHTS_LOG, DELAYS_LOG):
        namespace.create_log(log, config=LogConfig(quorum=QuorumConfig()))
    stack.callback(stop_spark)
    # The first to run when the stack unwinds: what stops must not be torn by a second Ctrl-C.
    stack.callback(_ignore_interrupts)
    with progress.waiting("starting Spark"):
        spark = _start_spark(folder)
    progress.say(f"namespace {sandbox.uri}, Spark {spark.version}")

    options = {"uri": sandbox.uri}
    if tls is not None:
        options |= {"tlsCa": tls.ca, "tlsCert": tls.cert, "tlsKey": tls.key}
        progress.say("bookies let only clients with a certificate in")
    jobs = FlightJobs(spark, options, folder / "checkpoint")
    flights = load_flights()
    story = _Story(progress, sandbox, namespace, jobs, flights, folder)
    story.write_first_share()
    story.stream_the_rest()
    story.compare()
    return story.go_without_json()


def _start_spark(folder: Path) -> SparkSession:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["SPARK_LOCAL_DIRS"] = str(folder / "spark")
    os.environ["PYSPARK_PYTHON"] = sys.executable  # else workers are the python3 of the PATH
    # It logs a traceback of its own when Ctrl-C interrupts a call.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    settings = {
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # The hours of the statistics are those of pandas, which counts in UTC.
        "spark.sql.session.timeZone": "UTC",
        # As many as cores: the default of 200 tasks for each batch would be most of the time.
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    builder = SparkSession.Builder().master("local[2]").appName("dlog demo")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    dlspark.register(spark)  # Spark does not find it where the path of this Python has a blank
    return spark


class _Story:
    """Steps 2 to 5, on a running cluster."""

    def __init__(
        self,
        progress: Progress,
        sandbox: Sandbox,
        namespace: Namespace,
        jobs: FlightJobs,
        flights: pd.DataFrame,
        folder: Path,
    ) -> None:
        self._progress = progress
        self._sandbox = sandbox
        self._namespace = namespace
        self._jobs = jobs
        self._flights = flights
        self._table = folder / "flights.parquet"
        self._written = 0
        self._problems: list[str] = []
        self._summary: list[str] = []

    def write_first_share(self) -> None:
        """Step 2: the first half of the year in one batch write."""
        self._progress.step(f"2. Write {FLIGHT_COUNT:,} flights into the log flights")
        self._flights.assign(row=range(len(self._flights))).to_parquet(self._table)
        first = int(len(self._flights) * FIRST_SHARE)
        with self._progress.waiting(f"writing the first {first:,}"):
            seconds = self._write_until(first)
        self._progress.say(f"{first:,} written in {seconds:.1f} s; the rest arrives in step 3")
        self._summary.append(f"batch write: {first / seconds:,.0f} records/s")

    def _write_until(self, stop: int) -> float:
        started = self._progress.seconds
        self._jobs.write_flights(self._table, start=self._written, stop=stop)
        self._written = stop
        return self._progress.seconds - started

    def stream_the_rest(self) -> None:
        """Step 3: the stream runs while the rest arrives, is stopped, goes on, loses a bookie."""
        self._progress.step("3. Stream: statistics per carrier and hour into the log delays")
        started = self._progress.seconds
        total = len(self._flights)
        first = self._written
        ends = [first + (total - first) * part // LIVE_PARTS for part in range(1, LIVE_PARTS + 1)]
        query = self._jobs.start_statistics()
        self._arrive(ends[0])
        with self._progress.waiting("the stream reads the first half"):
            wait_for_rows(query, first, STEP_TIMEOUT_S)
        self._arrive(ends[1])
        query.stop()
        self._progress.say("stopped the stream in the middle")
        self._arrive(ends[2])
        query = self._jobs.start_statistics()
        self._progress.say("started it again from its checkpoint")
        self._kill_a_bookie()
        for end in ends[3:]:
            self._arrive(end)
        self._jobs.write_closing_record(int(self._flights["txid"].iloc[-1]))
        with self._progress.waiting("the stream reads the rest"):
            self._wait_for_statistics(query)
        query.stop()
        seconds = self._progress.seconds - started
        self._summary.append(
            f"stream: {total:,} records, all its stops included, in {seconds:.1f} s"
        )

    def _arrive(self, stop: int) -> None:
        count = stop - self._written
        seconds = self._write_until(stop)
        self._progress.say(
            f"{count:,} more flights arrived in {seconds:.1f} s; {self._written:,} in the log"
        )

    def _kill_a_bookie(self) -> None:
        """Kill one that holds what the stream is about to read."""
        with self._namespace.open_log(FLIGHTS_LOG) as log:
            extent = log.get_log_segments()[-1].extents[-1]
        names = {
            bookie.name
            for bookie in self._namespace.get_ledger(extent.ledger_id).last_ensemble.bookies
        }
        victim = next(bookie for bookie in self._sandbox.bookies if bookie.name in names)
        text = f"{victim.name}, process {victim.pid}, with SIGKILL"
        victim.kill()
        self._progress.say(f"killed {text}; it holds a copy of ledger {extent.ledger_id}")
        self._summary.append(f"killed: {text}")

    def _wait_for_statistics(self, query: StreamingQuery) -> None:
        """Wait until every hour is out, and until nothing more comes."""
        expected = len(statistics(self._flights))
        with self._namespace.open_log(DELAYS_LOG) as log:
            wait_until_drained(query, log.get_log_record_count, expected, STEP_TIMEOUT_S)

    def compare(self) -> None:
        """Step 4: both logs against pandas on the original table."""
        self._progress.step("4. Read both logs back and compare them with pandas")
        self._problems += self._compare_flights()
        read, problems = self._compare_statistics()
        self._problems += problems
        plot = writable(PLOT)
        save_plot(read, plot)
        self._summary.append(f"plot: {plot.resolve()}")

    def go_without_json(self) -> Outcome:
        """Step 5: the same flights as columns of a typed log, and what that saves."""
        self._progress.step("5. Write them as columns of a typed log, and ask both logs the same")
        with self._progress.waiting(f"writing {len(self._flights):,} typed flights"):
            seconds = self._timed(lambda: self._jobs.write_typed_flights(self._table))[0]
        self._progress.say(f"{len(self._flights) / seconds:,.0f} records/s written")
        typed = self._jobs.read_typed_flights()
        self._problems += [f"typed: {text}" for text in differences(typed, self._flights)]
        costs = {}
        answers = []
        for log, ask in ((FLIGHTS_LOG, self._jobs.ask_json), (TYPED_LOG, self._jobs.ask_typed)):
            with self._progress.waiting(f"asking {log}"):
                costs[log], answer = self._timed(ask)
            answers.append(answer)
        if answers[0] != answers[1]:
            self._problems.append(f"typed: {answers[1]} instead of {answers[0]}")
        json_s, typed_s = costs.values()
        self._progress.say(
            f"flights, delay and miles by carrier: {json_s:.1f} s by from_json, {typed_s:.1f} s of "
            "columns, and the same answer"
        )
        self._summary.append(
            f"typed: {len(self._flights) / seconds:,.0f} records/s written; a question that takes "
            f"{json_s:.1f} s of JSON takes {typed_s:.1f} s"
        )
        return Outcome(self._problems, [*self._summary, *self._sizes()])

    def _timed(self, work: Callable[[], _T]) -> tuple[float, _T]:
        started = self._progress.seconds
        result = work()
        return self._progress.seconds - started, result

    def _compare_flights(self) -> list[str]:
        started = self._progress.seconds
        with self._progress.waiting("reading flights"):
            actual = self._jobs.read_flights()
        seconds = self._progress.seconds - started
        self._summary.append(f"batch read and parse: {len(actual) / seconds:,.0f} records/s")
        closing = actual[actual["id"] == CLOSING_ID]
        problems = []
        if len(closing) != 1 or closing.index[0] != len(actual) - 1:
            problems.append(f"{len(closing)} closing records, expected one, the last record")
        if list(actual["sequence_id"]) != list(range(len(actual))):
            problems.append("the sequence ids of flights are not 0, 1, 2, …")
        flights = actual[actual["id"] != CLOSING_ID].drop(columns="sequence_id")
        problems += [f"flights: {text}" for text in differences(flights, self._flights)]
        if len(self._flights) != FLIGHT_COUNT:
            problems.append(f"the table has {len(self._flights)} rows, expected {FLIGHT_COUNT}")
        if not problems:
            self._progress.say(
                f"flights: {len(flights):,} records, every one once, in order, "
                f"{len(self._flights.columns)} fields equal"
            )
        return problems

    def _compare_statistics(self) -> tuple[pd.DataFrame, list[str]]:
        expected = statistics(self._flights)
        with self._progress.waiting("reading delays"):
            actual = self._jobs.read_statistics()
        actual = actual.sort_values(["carrier", "hour_ms"], ignore_index=True)
        problems = [f"delays: {text}" for text in differences(actual, expected)]
        if not problems:
            self._progress.say(
                f"delays: {len(actual):,} hours, every one once, all statistics equal"
            )
        return actual, problems

    def _sizes(self) -> list[str]:
        lines = []
        for name in (FLIGHTS_LOG, DELAYS_LOG, TYPED_LOG):
            with self._namespace.open_log(name) as log:
                segments = log.get_log_segments()
                size_bytes = sum(segment.closed_size_bytes for segment in segments)
                lines.append(
                    f"log {name}: {log.get_log_record_count():,} records, {size_bytes:,} bytes "
                    f"in {len(segments)} segments, three copies of each"
                )
        return lines


def _tell(progress: Progress, outcome: Outcome | None, problems: list[str]) -> bool:
    """Say how it ended; return whether it ran to its end and nothing is wrong."""
    wrong = list(problems)
    if outcome is not None:
        progress.step("Summary")
        for line in outcome.summary:
            progress.say(line)
        wrong = [*outcome.problems, *problems]
    for problem in wrong:
        progress.say(f"WRONG: {problem}")
    if wrong or outcome is None:
        return False
    progress.say("nothing differs, and no process is left")
    return True


if __name__ == "__main__":
    sys.exit(main())
