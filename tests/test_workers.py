"""The scheduler of the tests' workers: every test once, those that share a session on one of them.

Method: workers that note what they are given, and run it in an order drawn by a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.workers import Scheduling

if TYPE_CHECKING:
    from collections.abc import Sequence

WITH_SESSION = "tests/spark/test_batch_read.py::test_it"
OTHERS = ("tests/spark/test_forks.py::test_a_notebook", "tests/bookie/test_replay.py::test_it")


class Worker:
    """Knows what it was given, and what of that it has run."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id=self)
        self.queue: list[int] = []
        self.ran: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        """Take tests."""
        assert not self.shutting_down
        self.queue += indices

    def shutdown(self) -> None:
        """Take no more."""
        self.shutting_down = True

    @property
    def can_run(self) -> bool:
        """A worker begins a test when it knows the next one, or that there is none."""
        return len(self.queue) >= 2 or (self.shutting_down and bool(self.queue))


Start = Callable[[list[str], int], tuple[Any, list[Worker]]]


@pytest.fixture
def start(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a run of tests on so many workers."""

    def start_on(tests: list[str], count: int) -> tuple[Any, list[Worker]]:
        monkeypatch.setattr(pytestconfig.option, "tx", [f"{count}*popen"])
        scheduling = Scheduling(pytestconfig, None)
        workers = [Worker() for _ in range(count)]
        for worker in workers:
            scheduling.add_node(worker)
        for worker in workers:
            scheduling.add_node_collection(worker, tests)
        scheduling.schedule()
        return scheduling, workers

    return start_on


def run_one(scheduling: Any, worker: Worker, *, duration: float) -> None:
    """Let a worker run its next test."""
    index = worker.queue.pop(0)
    worker.ran.append(index)
    scheduling.mark_test_complete(worker, index, duration)


def names_of(with_session: int, others: int) -> list[str]:
    """Return names, the ones that need a session among the others."""
    names = [f"{WITH_SESSION}[{number}]" for number in range(with_session)]
    names += [f"{OTHERS[number % 2]}[{number}]" for number in range(others)]
    random.Random(1).shuffle(names)
    return names


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    ("with_session", "others"), [(0, 0), (0, 1), (1, 0), (3, 0), (7, 3), (0, 40), (30, 200)]
)
def test_every_test_runs_once(start: Start, count: int, with_session: int, others: int) -> None:
    """On some worker, those with a session on one; and no worker waits in vain."""
    tests = names_of(with_session, others)
    scheduling, workers = start(tests, count)
    rng = random.Random(count)
    while able := [worker for worker in workers if worker.can_run]:
        run_one(scheduling, rng.choice(able), duration=rng.choice([0.001, 5.0]))
    assert sorted(index for worker in workers for index in worker.ran) == list(range(len(tests)))
    assert not scheduling.has_pending
    ran = [{tests[index].startswith(WITH_SESSION) for index in worker.ran} for worker in workers]
    assert sum(True in kinds for kinds in ran) <= 1
    for worker in workers:
        needs = [tests[index].startswith(WITH_SESSION) for index in worker.ran]
        assert needs == sorted(needs, reverse=True), "other tests before one with a session"


def test_a_long_test_keeps_one_behind_it(start: Start) -> None:
    """Not more, for no other worker could take them; short ones have some."""
    scheduling, (first, second) = start(names_of(0, 100), 2)
    run_one(scheduling, first, duration=5.0)
    run_one(scheduling, second, duration=0.001)
    assert len(first.queue) == 2
    assert len(second.queue) > 2


def test_a_worker_stays_in_a_file(start: Start) -> None:
    """While there are tests of it; the last worker begins at the end, and idle ones help."""
    tests = [f"tests/test_{number}.py::test[{each}]" for number in range(6) for each in range(20)]
    scheduling, workers = start(tests, 3)
    while able := [worker for worker in workers if worker.can_run]:
        run_one(scheduling, min(able, key=lambda each: len(each.ran)), duration=5.0)
    ran = [[tests[index].partition("::")[0][-4] for index in each.ran] for each in workers]
    visited = [list(dict.fromkeys(files)) for files in ran]
    assert [files[:2] for files in visited] == [["0", "2"], ["1", "3"], ["5", "4"]]
    assert all(
        files == sorted(files, key=visit.index) for files, visit in zip(ran, visited, strict=True)
    )
    assert {len(each.ran) for each in workers} == {40}


def test_tests_of_a_crashed_worker_run_elsewhere(start: Start) -> None:
    """But for the test that crashed it; another worker then takes those with a session."""
    tests = names_of(10, 20)
    scheduling, workers = start(tests, 3)
    crashed = scheduling.remove_node(workers[0])
    assert crashed.startswith(WITH_SESSION)
    while able := [worker for worker in workers[1:] if worker.can_run]:
        run_one(scheduling, able[0], duration=5.0)
    ran = [tests[index] for worker in workers[1:] for index in worker.ran]
    assert sorted([*ran, crashed]) == sorted(tests)
