"""Goal: the judges of programs over proxies refuse what breaks a promise, and nothing else.

Method: they learn the answers to a writer, a reader and a planner; no run is needed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ProducerFencedError
from dlcore.base.ids import DLSN
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.scan import LogSnapshot
from dlcore.metadata.paths import NamespacePaths
from tests.fixtures.simulated_store import SimulatedTree
from tests.simulation.log_checkers import LogCheckers
from tests.simulation.loop import run
from tests.simulation.proxy_checkers import ProxyCheckers
from tests.simulation.remote_checkers import KEPT_S, Remote
from tests.simulation.truth import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

KEY = LogKey(name="log", log_id="id")
VIOLATIONS: list[BaseException] = []


def on_program(body: Callable[[ProxyCheckers, Remote], Awaitable[None]]) -> None:
    """Run `body` with a program that wrote three records, two of which are acknowledged."""

    async def scenario() -> None:
        logs = LogCheckers(
            tree=SimulatedTree(),
            paths=NamespacePaths("/d"),
            grace_s=1.0,
            tier_grace_s=1.0,
            epoch_ms=0,
        )
        checkers = ProxyCheckers(logs)
        del VIOLATIONS[:]
        remote = Remote(checkers, KEY, "program", VIOLATIONS.append)
        remote.on_begin(0)
        remote.on_write(3)
        answer: asyncio.Future[DLSN | None] = asyncio.get_running_loop().create_future()
        answer.set_result(DLSN(1, 0, 1))
        remote.on_answer([0, 1], answer)
        await body(checkers, remote)

    run(scenario())


@pytest.mark.parametrize(
    ("next_sequence", "is_refused"), [(1, True), (2, False), (3, False), (4, True)]
)
def test_a_writer_goes_on_behind_what_was_acknowledged(
    next_sequence: int, *, is_refused: bool
) -> None:
    """And not beyond what was written."""

    async def body(_: ProxyCheckers, remote: Remote) -> None:
        if is_refused:
            with pytest.raises(InvariantViolatedError, match="P1"):
                remote.on_begin(next_sequence)
        else:
            remote.on_begin(next_sequence)
            assert len(remote.durable()) == next_sequence

    on_program(body)


@pytest.mark.parametrize("silent_s", [0.9 * KEPT_S, 1.1 * KEPT_S])
def test_a_producer_is_forgotten_after_its_time(silent_s: float) -> None:
    """Not before."""

    async def body(_: ProxyCheckers, remote: Remote) -> None:
        await asyncio.sleep(silent_s)
        if silent_s < KEPT_S:
            with pytest.raises(InvariantViolatedError, match="forgotten"):
                remote.on_fenced(ProducerFencedError("it is not known"))
        else:
            remote.on_fenced(ProducerFencedError("it is not known"))

    on_program(body)


@pytest.mark.parametrize("found", [(b"program/id/0", b"program/id/1"), (b"program/id/0",)])
def test_a_reader_gets_all_that_was_committed(found: tuple[bytes, ...]) -> None:
    """Each of them, unless it was truncated."""

    async def body(checkers: ProxyCheckers, remote: Remote) -> None:
        reading = checkers.logs.new_reading("id", "log")
        for slot, payload in enumerate(found):
            reading.on_record(payload, DLSN(1, 0, slot), slot, 7, 7)
        if len(found) == 2:
            remote.on_read_back(remote.durable(), reading)
            return
        with pytest.raises(InvariantViolatedError, match="does not read it"):
            remote.on_read_back(remote.durable(), reading)
        checkers.logs.on_truncate("id", "log", DLSN(2, 0, 0))
        remote.on_read_back(remote.durable(), reading)

    on_program(body)


def test_an_exact_position_is_held_against_the_log() -> None:
    """The position of the last record that was written together."""

    async def body(checkers: ProxyCheckers, _: Remote) -> None:
        assert not VIOLATIONS
        reading = checkers.logs.new_reading("id", "log")
        reading.on_record(b"program/id/0", DLSN(1, 0, 0), 0, 7, 7)
        with pytest.raises(InvariantViolatedError, match="L1"):
            reading.on_record(b"program/id/1", DLSN(1, 1, 0), 1, 7, 7)

    on_program(body)


def snapshot(first: DLSN, end: DLSN) -> LogSnapshot:
    """Return one of the log without segments."""
    return LogSnapshot(log="log", log_id="id", first=first, end=end, segments=())


@pytest.mark.parametrize(
    ("first", "end", "is_refused"),
    [
        (DLSN(1, 0, 1), DLSN(1, 1, 0), False),
        (DLSN(1, 0, 1), DLSN(1, 0, 1), True),  # 1:0:1 was acknowledged before it was asked for
        (DLSN(1, 0, 0), DLSN(1, 1, 0), True),  # one began at 1:0:1 before
        (DLSN(1, 0, 1), DLSN(2, 5, 0), False),
    ],
)
def test_a_snapshot_is_not_behind_an_earlier_one(
    first: DLSN, end: DLSN, *, is_refused: bool
) -> None:
    """By acknowledgements, and by other snapshots."""

    async def body(checkers: ProxyCheckers, _: Remote) -> None:
        snapshots = checkers.snapshots
        checkers.logs.life._names["/path"] = ("log", "id")
        snapshots.begin(["log"]).on_answered({"log": snapshot(DLSN(1, 0, 1), DLSN(1, 1, 0))})
        looking = snapshots.begin(["log"])
        if is_refused:
            with pytest.raises(InvariantViolatedError, match="P3"):
                looking.on_answered({"log": snapshot(first, end)})
        else:
            looking.on_answered({"log": snapshot(first, end)})

    on_program(body)


def test_a_snapshot_is_of_the_log_that_has_the_name() -> None:
    """As long as that does not change meanwhile."""

    async def body(checkers: ProxyCheckers, _: Remote) -> None:
        names = checkers.logs.life._names
        names["/path"] = ("log", "other")
        looking = checkers.snapshots.begin(["log"])
        given = {"log": snapshot(DLSN(1, 0, 0), DLSN(1, 1, 0))}
        with pytest.raises(InvariantViolatedError, match="is of log id id"):
            looking.on_answered(given)
        names["/path"] = ("log", "id")
        looking.on_answered(given)

    on_program(body)


def test_a_snapshot_names_what_there_is() -> None:
    """All of it, and nothing else."""

    async def body(checkers: ProxyCheckers, _: Remote) -> None:
        logs = checkers.logs
        whole, part = (logs.new_reading("id", "log") for _ in range(2))
        for slot in range(2):
            whole.on_record(b"program/id/%d" % slot, DLSN(1, 0, slot), slot, 7, 7)
        part.on_record(b"program/id/0", DLSN(1, 0, 0), 0, 7, 7)
        given = snapshot(DLSN(1, 0, 0), DLSN(1, 1, 0))
        checkers.snapshots.on_scanned(given, whole)
        with pytest.raises(InvariantViolatedError, match="names or leaves out"):
            checkers.snapshots.on_scanned(given, part)
        with pytest.raises(InvariantViolatedError, match="names or leaves out"):
            checkers.snapshots.on_scanned(snapshot(DLSN(1, 0, 0), DLSN(1, 0, 1)), whole)

    on_program(body)
