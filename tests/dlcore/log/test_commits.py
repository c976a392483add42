"""Committed appends of a version: each once, wherever runs end, or an error.

Goal: no order of runs, crashes and late appends loses or doubles an append in silence.  Method:
exact cases, and Hypothesis over interleaved runs against a plain list of what was appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from dlcore.log.metadata.commits import (
    LOGS_REMEMBERED_MAX,
    RUNS_REMEMBERED_MAX,
    TOKENS_REMEMBERED_MAX,
    AppendRun,
    Decision,
    Verdict,
    decide,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dlcore.log.metadata.values import CommitRecord

PASSES = (Verdict.APPEND, Verdict.SKIP)


class Store:
    """Keeps the record, counts tokens and time, and notes what was appended."""

    def __init__(self) -> None:
        self.record: CommitRecord | None = None
        self.appended: list[str] = []
        self.now_ns = 100

    def append(
        self,
        what: str,
        run: str = "r",
        *,
        version: int = 1,
        began_before_ns: int = 0,
        thread: str = "",
        logs: Collection[str] | None = None,
    ) -> Verdict:
        """Decide about an append that begins now, or so much earlier, and do what was decided."""
        self.now_ns += 10
        begun_ns = self.now_ns - began_before_ns
        self.now_ns += 10
        decision = decide(
            self.record,
            version=version,
            token=f"{what}@{self.now_ns}",
            run=AppendRun(token=run, begun_ns=begun_ns, thread=thread) if run else None,
            now_ns=self.now_ns,
            logs=logs,
        )
        if decision.verdict is Verdict.APPEND:
            self.appended.append(what)
        self.record = decision.record or self.record
        return decision.verdict

    def appends(self, whats: str, run: str = "r", *, version: int = 1) -> list[Verdict]:
        """Append one after the other."""
        return [self.append(what, run, version=version) for what in whats]


def test_appends_of_a_run_are_all_committed() -> None:
    """One record tells of all of them, and of the next version's."""
    store = Store()
    assert set(store.appends("abc")) == {Verdict.APPEND}
    assert set(store.appends("de", version=2)) == {Verdict.APPEND}
    assert store.appended == list("abcde")
    assert store.record is not None
    assert (store.record.version, store.record.committed, store.record.seen) == (2, 2, 2)


@pytest.mark.parametrize("survived", range(4))
def test_a_repetition_goes_on_where_the_run_ended(survived: int) -> None:
    """Committed versions are skipped, in whichever append the run died."""
    store = Store()
    store.appends("abc"[:survived], "r1")
    verdicts = store.appends("abc", "r2")
    assert verdicts == [Verdict.SKIP] * survived + [Verdict.APPEND] * (3 - survived)
    assert store.appended == list("abc")


def test_an_appender_without_runs_commits_a_version_once() -> None:
    """The second append is skipped, and older versions are, too."""
    store = Store()
    assert store.appends("aa", "") == [Verdict.APPEND, Verdict.SKIP]
    assert store.append("a", "r") is Verdict.SKIP
    assert store.append("b", "", version=2) is Verdict.APPEND
    assert store.append("a", "", version=1) is Verdict.SKIP
    assert store.append("b", "r", version=1) is Verdict.SKIP
    assert store.appended == list("ab")


def test_overlapping_appends_of_a_run_end_the_version() -> None:
    """For every run: a repetition could take one for the other.  The next version is another."""
    store = Store()
    store.append("a", "r1")
    assert store.append("b", "r1", began_before_ns=15) is Verdict.CONFLICTING
    assert store.appends("ab", "r1") == [Verdict.CONFLICTING] * 2
    assert store.appends("ab", "r2") == [Verdict.CONFLICTING] * 2
    assert store.append("a", "") is Verdict.CONFLICTING
    assert store.appended == ["a"]
    assert store.append("c", "r2", version=2) is Verdict.APPEND


def test_overlap_shows_also_when_both_would_be_skipped() -> None:
    """Where one of them dies before it commits, the next run does not take its place."""
    store = Store()
    store.append("a", "r1")
    assert store.append("b", "r2") is Verdict.SKIP  # in truth "a"'s place: order was never reported
    assert store.append("a", "r2", began_before_ns=15) is Verdict.CONFLICTING


def test_threads_that_append_one_after_the_other_end_the_version() -> None:
    """In the next run the second may come first, and be taken for what is committed."""
    store = Store()
    store.append("a", "r1", thread="1")
    assert store.append("b", "r2", thread="2") is Verdict.SKIP
    assert store.append("a", "r2", thread="3") is Verdict.CONFLICTING
    assert store.append("b", "r3", thread="4") is Verdict.CONFLICTING
    assert store.appended == ["a"]


def test_a_thread_keeps_its_order_and_differs_in_the_next_run() -> None:
    """Its appends are counted like those of a run without threads."""
    store = Store()
    store.append("a", "r1", thread="1")
    verdicts = [store.append(what, "r2", thread="2") for what in "abc"]
    assert verdicts == [Verdict.SKIP, Verdict.APPEND, Verdict.APPEND]
    assert store.append("d", "r2", thread="3") is Verdict.CONFLICTING


def test_a_run_that_was_followed_cannot_come_back() -> None:
    """Its late append would count in the wrong run."""
    store = Store()
    store.append("a", "r1")
    assert store.append("a", "r2") is Verdict.SKIP
    assert store.append("b", "r1") is Verdict.SUPERSEDED
    assert store.append("b", "r2") is Verdict.APPEND
    assert store.appended == list("ab")


def test_superseded_runs_are_bounded() -> None:
    """The newest are remembered."""
    store = Store()
    for number in range(3 * RUNS_REMEMBERED_MAX):
        store.append("a", f"r{number}")
    assert store.record is not None
    assert len(store.record.superseded) == RUNS_REMEMBERED_MAX
    assert store.append("b", f"r{3 * RUNS_REMEMBERED_MAX - 2}") is Verdict.SUPERSEDED


def test_an_append_knows_its_own_record() -> None:
    """The reply was lost: whatever it tried is done."""
    run = AppendRun(token="r", begun_ns=0)
    first = decide(None, version=1, token="t", run=run, now_ns=1)
    assert first.record is not None
    conflicting = replace(first.record, conflicting=True)
    for record, verdict in (
        (first.record, Verdict.KNOWN),
        (conflicting, Verdict.CONFLICTING),  # also in another process
    ):
        again = decide(record, version=1, token="t", run=run, now_ns=2)
        assert again == Decision(verdict)


def test_a_late_try_of_an_earlier_append_is_known() -> None:
    """Its run has gone on: it is done, and overlaps nothing.  The oldest are forgotten."""
    store = Store()
    run = AppendRun(token="r", begun_ns=0)
    tokens = []
    for number in range(TOKENS_REMEMBERED_MAX + 2):
        assert store.append(str(number)) is Verdict.APPEND
        assert store.record is not None
        tokens.append(store.record.token)
    verdicts = [
        decide(store.record, version=1, token=token, run=run, now_ns=2).verdict for token in tokens
    ]
    assert verdicts == [Verdict.CONFLICTING] + [Verdict.KNOWN] * (TOKENS_REMEMBERED_MAX + 1)
    assert store.append("0", "r2") is Verdict.SKIP
    late = decide(store.record, version=1, token=tokens[-1], run=run, now_ns=2)
    assert late == Decision(Verdict.SUPERSEDED)


@given(
    runs=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    order=st.lists(st.integers(0, 4), max_size=24),
    count=st.integers(1, 4),
)
def test_runs_that_interleave(runs: Sequence[int], order: Sequence[int], count: int) -> None:
    """Each run makes its appends in order, dies after some, or is late: a run that passes all of
    them passed each exactly once, and an append is never there twice.
    """
    store = Store()
    done = [0] * len(runs)
    passed = [True] * len(runs)
    for turn in order:
        run = turn % len(runs)
        if passed[run] and done[run] < min(runs[run], count):
            passed[run] = store.append(str(done[run]), f"r{run}") in PASSES
            done[run] += 1
    assert len(set(store.appended)) == len(store.appended)
    if any(ok and made == count for ok, made in zip(passed, done, strict=True)):
        assert store.appended == [str(number) for number in range(count)]


def test_a_strict_appender_repeats_its_latest_version_only() -> None:
    """An older one is from a process that goes on from an old state."""
    store = Store()
    for version in (1, 2):
        assert store.append("a", "", version=version, logs={"x"}) is Verdict.APPEND
    assert store.append("a", "", version=1, logs={"x"}) is Verdict.OLDER
    assert store.append("a", "", version=1) is Verdict.SKIP
    assert store.append("a", "", version=2, logs={"x"}) is Verdict.SKIP


@pytest.mark.parametrize("run", ["", "r2"])
def test_a_strict_appender_repeats_a_version_to_the_same_logs(run: str) -> None:
    """A run that shares no committed log is another's; an empty one loses nothing."""
    store = Store()
    store.append("a", run and "r1", logs={"x", "y"})
    before = store.record
    assert store.append("a", run, logs={"z"}) is Verdict.ELSEWHERE
    assert store.record == before
    assert store.append("a", run and "r3", logs=()) is Verdict.SKIP
    assert store.append("a", run and "r4", logs={"y", "z"}) is Verdict.SKIP
    assert store.append("b", run, version=2, logs=()) is Verdict.APPEND
    assert store.append("b", run and "r5", version=2, logs={"x"}) is Verdict.ELSEWHERE
    assert store.appended == ["a", "b"]


def test_the_logs_of_all_appends_of_a_version_count() -> None:
    """Which of them a repetition makes first is known by their number only."""
    store = Store()
    assert store.append("a", "r1", logs={"x"}) is Verdict.APPEND
    assert store.append("b", "r1", logs={"y"}) is Verdict.APPEND
    assert store.append("a", "r2", logs={"x"}) is Verdict.SKIP
    assert store.append("b", "r2", logs={"y"}) is Verdict.SKIP
    assert store.append("c", "r2", logs={"z"}) is Verdict.APPEND
    assert store.append("a", "r3", logs={"u"}) is Verdict.ELSEWHERE


def test_too_many_logs_are_not_remembered() -> None:
    """The record stays small; an unknown version is skipped, as its append was acknowledged."""
    store = Store()
    names = [f"log-{number}" for number in range(LOGS_REMEMBERED_MAX)]
    assert store.append("a", "r1", logs=names) is Verdict.APPEND
    assert store.record is not None
    assert len(store.record.logs or b"") == 4 * LOGS_REMEMBERED_MAX
    assert store.append("b", "r1", logs={"one more"}) is Verdict.APPEND
    assert store.record.logs is None
    assert store.append("a", "r2", logs={"another"}) is Verdict.SKIP
