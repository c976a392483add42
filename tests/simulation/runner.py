"""Runs many seeds on all cores, and tells what came of them."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation import coverage
from tests.simulation.mutants import focused
from tests.simulation.workload import run_seed

if TYPE_CHECKING:
    from tests.simulation.clients import Deaths

_SEEDS_PER_TASK = 10
_PROGRESS_S = 10.0


class Failure(NamedTuple):
    """A seed that failed."""

    seed: int
    invariant: str
    explanation: str


@dataclass(slots=True)
class Tally:
    """The results of some seeds."""

    seeds: int = 0
    acks: int = 0
    steps: int = 0
    failures: list[Failure] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    deaths: Deaths = field(default_factory=Counter)
    transitions: Counter[coverage.Transition] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Take over another tally."""
        self.seeds += other.seeds
        self.acks += other.acks
        self.steps += other.steps
        self.failures += other.failures
        self.faults.update(other.faults)
        self.deaths.update(other.deaths)
        self.transitions.update(other.transitions)


def run_some(seeds: range, focus: str | None = None) -> Tally:
    """Run seeds in this process, those of a focus if one is given."""
    tally = Tally()
    with coverage.watching() as seen, focused(focus) if focus else nullcontext():
        for seed in seeds:
            run = run_seed(seed)
            tally.seeds += 1
            tally.acks += run.acks
            tally.steps += run.steps
            tally.faults.update(run.faults)
            tally.deaths.update(run.deaths)
            if run.failure is not None:
                tally.failures.append(Failure(seed, run.invariant, run.explain()))
    tally.transitions = seen
    return tally


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    logging.disable(logging.CRITICAL)


def run_many(
    seeds: range,
    *,
    jobs: int,
    keep_going: bool,
    learns: bool = False,
    focus: str | None = None,
) -> int:
    """Run `seeds` in `jobs` processes and print what came of them; return 1 if one failed.

    Ctrl-C ends the search early and reports what was done until then.  With `learns` the new
    transitions are kept as known ones.
    """
    parts = [
        range(first, min(first + _SEEDS_PER_TASK, seeds.stop))
        for first in range(seeds.start, seeds.stop, _SEEDS_PER_TASK)
    ]
    total = Tally()
    began = printed = time.perf_counter()
    # Each seed makes its own loop and chance, so that it matters to none which process runs it.
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_prepare_worker) as pool:
        try:
            for tally in pool.imap_unordered(partial(run_some, focus=focus), parts):
                total.add(tally)
                for failure in tally.failures:
                    print(failure.explanation.splitlines()[0], flush=True)
                if tally.failures and not keep_going:
                    break
                if time.perf_counter() - printed > _PROGRESS_S:
                    printed = time.perf_counter()
                    rate = total.seeds / (printed - began)
                    print(
                        f"{total.seeds} of {len(seeds)} seeds, {rate:.1f} a second, "
                        f"{len(total.failures)} failed",
                        flush=True,
                    )
        except KeyboardInterrupt:
            print("interrupted")
    _print(total, time.perf_counter() - began, keep_going=keep_going)
    if learns:
        coverage.write_known({*coverage.read_known(), *total.transitions})
    return int(bool(total.failures))


def _print(total: Tally, took_s: float, *, keep_going: bool) -> None:
    failures = sorted(total.failures)
    if failures and not keep_going:
        print(failures[0].explanation)
    print("faults: " + ", ".join(f"{kind} {n}" for kind, n in sorted(total.faults.items())))
    print(f"{total.deaths.total()} deaths at requests, at {len(total.deaths)} points")
    roles: Counter[str] = Counter()
    for (role, _, _), count in total.deaths.items():
        roles[role] += count
    print("of them: " + ", ".join(f"{role} {count}" for role, count in roles.most_common()))
    print("\n".join(coverage.report(total.transitions, coverage.read_known())))
    print(
        f"{total.seeds} seeds in {took_s:.1f} s, {total.seeds / took_s:.1f} seeds a second; "
        f"{total.acks} acks, {total.steps} steps; failed: {[each.seed for each in failures]}"
    )
