"""Goal: every transition and every refusal of the machine that commits atomic appends.

Method: exact effects over a tree of nodes; then seeded chance with lost answers, overtaking and a
writer that gives turns, against the number of times that the records are in the log.
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from dlcore.base.backoff import REPORTED_AFTER_S
from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    AlreadyClosedError,
    AppendAbortedError,
    AppendMismatchError,
    AppendSupersededError,
    ConfigurationError,
    DLError,
    DuplicateAppendError,
    EndOfStreamError,
    LedgerRecoveryError,
    LogNotFoundError,
    MetadataConnectionError,
    MetadataError,
    MetadataVersionError,
    OwnershipAcquireFailedError,
    TransactionTooLargeError,
)
from dlcore.base.ids import DLSN
from dlcore.base.steps import CallFailed, Ended, Pause
from dlcore.log.metadata.changes import plan_settings
from dlcore.log.metadata.commits import AppendRun
from dlcore.log.metadata.nodes import decode_node, head_of, register_merged, release
from dlcore.log.metadata.values import (
    LockHolder,
    LogHead,
    LogKey,
    StagedLedger,
)
from dlcore.log.reading.scan import CommitResult
from dlcore.log.staging.commit import (
    ASKING_S,
    LOGS_PER_APPEND,
    LOOKS_EVERY_S,
    TRANSITIONS,
    AppendTerms,
    AwaitedLock,
    AwaitLocks,
    Begin,
    CommitState,
    Effect,
    Look,
    RecoverLog,
    Signal,
)
from dlcore.metadata.attempts import ATTEMPTS_MAX, Store
from dlcore.metadata.port import Create, Delete, Put
from dlcore.metadata.stored import decode, encode
from tests.fixtures.commits import CLICKS, PATHS, TERMS, VIEWS, Bench, Namespace, extent_of
from tests.fixtures.nodes import refused

RUN = AppendRun(token="run-1", begun_ns=0)
AWAY = MetadataConnectionError("no answer")
CHANGED = MetadataVersionError("changed")
COMMITTED = CommitResult(committed=True, already_committed=False)
SKIPPED = CommitResult(committed=False, already_committed=True)


def test_an_append_is_one_look_and_one_transaction() -> None:
    """The record, the heads and the count change together; the ledgers are listed once."""
    bench = Bench()
    extents = [extent_of(), extent_of(first=1), extent_of(first=2, log=VIEWS)]
    look = bench.handle(Begin(tuple(extents), {}, 1.5))
    logs = [PATHS.log_of(each.log_id) for each in (CLICKS, VIEWS)]
    assert look == Look(
        (
            PATHS.commit("job"),
            PATHS.staged_ledger(7),
            *(each.head for each in logs),
            *(each.lock for each in logs),
            *(each.settings for each in logs),
        ),
        "job",
    )
    assert isinstance(look, Look)
    store = bench.look(look, now=1.5)
    assert bench.machine.listed == [7]
    ended = bench.store(store)
    places = {"clicks": (DLSN(1, 0, 0), DLSN(1, 2, 0)), "views": (DLSN(1, 0, 0), DLSN(1, 1, 0))}
    assert ended == Ended(replace(COMMITTED, logs=places))
    assert bench.machine.result == replace(COMMITTED, logs=places)
    assert bench.machine.planned.appended == (CLICKS, VIEWS)
    assert not bench.machine.replaces
    record = bench.at.record()
    assert (record.token, record.committed_ms, record.last_ns) == ("t1", 1000, 1_500_000_000)
    node = bench.at.read(PATHS.staged_ledger(7))
    assert node is not None
    assert decode(StagedLedger, node.value, source="").committed == ((0, 2),)
    assert bench.machine.state is CommitState.DECIDED


def test_a_version_that_is_committed_is_skipped() -> None:
    """By a run that repeats it the record is written again; else nothing is."""
    at = Namespace()
    assert Bench(at).commit(extent_of()) == replace(
        COMMITTED, logs={"clicks": (DLSN(1, 0, 0), DLSN(1, 1, 0))}
    )
    other = Bench(at, replace(TERMS, token="t2"))
    assert other.begin(extent_of(first=1)) == Ended(SKIPPED)
    run = Bench(at, replace(TERMS, token="t3", run=replace(RUN, commits_ns=77)))
    assert run.commit(extent_of(first=1)) == SKIPPED
    assert (at.record().token, at.record().last_ns) == ("t3", 77)
    assert at.head().head.end == (1, 1)


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_lost_answer(is_applied: bool) -> None:
    """The record shows the outcome: it is known, or tried again."""
    bench = Bench()
    store = bench.begin(extent_of())
    assert isinstance(store, Store)
    if is_applied:
        bench.at.apply(store.ops)
    pause = bench.handle(CallFailed(AWAY))
    assert isinstance(pause, Pause)
    assert pause.error is AWAY
    look = bench.handle(Signal.PAUSE_OVER)
    assert isinstance(look, Look)
    assert look.lists is None
    effect = bench.look(look)
    if not is_applied:
        effect = bench.store(effect)
    places = {"clicks": (DLSN(1, 0, 0), DLSN(1, 1, 0))}
    assert effect == Ended(replace(COMMITTED, logs=places))


def test_another_try_of_the_append_is_known() -> None:
    """Its record has this token, so that it is done, without a place."""
    at = Namespace()
    Bench(at).commit(extent_of())
    assert Bench(at).begin(extent_of()) == Ended(SKIPPED)


def test_attempts_end() -> None:
    """Then it is unknown whether it was committed; the next call finds out."""
    bench = Bench()
    effect = bench.begin(extent_of())
    for _ in range(ATTEMPTS_MAX - 1):
        assert isinstance(bench.handle(CallFailed(CHANGED)), Pause)
        effect = bench.look(bench.handle(Signal.PAUSE_OVER))
    assert isinstance(effect, Store)
    bench.at.apply(effect.ops)
    error = refused(bench.handle(CallFailed(AWAY)))
    assert isinstance(error, MetadataConnectionError)
    assert "100 attempts to commit were overtaken" in str(error)
    again = bench.begin(extent_of())
    assert isinstance(again, Ended)
    assert isinstance(again.outcome, CommitResult)
    assert again.outcome.committed


def test_other_failures_end_the_call() -> None:
    """Those of the look, of a recovery, of the wait, and what the store refuses for good."""
    closed = AlreadyClosedError("closed")
    bench = Bench()
    bench.handle(Begin((extent_of(),), {}, 0.0))
    assert refused(bench.handle(CallFailed(AWAY))) is AWAY
    bench.begin(extent_of())
    assert refused(bench.handle(CallFailed(closed))) is closed
    bench.at.hold("free")
    assert isinstance(bench.begin(extent_of()), AwaitLocks)
    assert refused(bench.handle(CallFailed(closed))) is closed
    bench.at.free()
    bench.at.open_extent()
    assert isinstance(bench.begin(extent_of()), RecoverLog)
    error = LedgerRecoveryError("too few")
    assert refused(bench.handle(CallFailed(error))) is error


def test_a_call_may_end_anywhere() -> None:
    """The caller was cancelled: the next one goes on, and knows what was tried."""
    bench = Bench()
    bench.handle(Begin((extent_of(),), {}, 0.0))
    bench.at.hold("asked")
    assert isinstance(bench.begin(extent_of()), AwaitLocks)
    bench.at.free()
    bench.at.open_extent()
    assert isinstance(bench.begin(extent_of()), RecoverLog)
    bench.at.complete()
    assert isinstance(bench.begin(extent_of()), Store)
    store = bench.begin(extent_of())
    assert isinstance(store, Store)
    bench.handle(CallFailed(CHANGED))
    store = bench.begin(extent_of())
    assert isinstance(store, Store)
    bench.at.apply(store.ops)
    ended = bench.begin(extent_of())
    assert isinstance(ended, Ended)
    assert isinstance(ended.outcome, CommitResult)
    assert ended.outcome.committed


def test_the_extent_of_a_dead_writer_is_recovered_first() -> None:
    """All is read again afterwards."""
    bench = Bench()
    bench.at.open_extent()
    assert bench.begin(extent_of()) == RecoverLog(bench.at.head())
    bench.at.complete()
    look = bench.handle(Signal.RECOVERED)
    assert isinstance(bench.store(bench.look(look)), Ended)


@pytest.mark.parametrize("turn", ["free", "given"])
def test_a_writer_is_asked_for_a_turn(turn: str) -> None:
    """Also one whose turn was given while it has an extent open: it is of a turn that is over."""
    bench = Bench()
    bench.at.open_extent()
    holder = bench.at.hold(turn)
    asked = msgspec.structs.replace(holder, turn="asked")
    path = PATHS.log_of("log-1").lock
    wait = bench.begin(extent_of())
    lock = AwaitedLock(CLICKS, asked, Put(path, encode(asked), 0))
    assert wait == AwaitLocks((lock,), LOOKS_EVERY_S, None)
    bench.at.hold("asked")
    wait = bench.look(bench.handle(Signal.WAIT_OVER))
    assert wait == AwaitLocks((AwaitedLock(CLICKS, asked, None),), LOOKS_EVERY_S, None)
    bench.at.complete()
    bench.at.hold("given")
    store = bench.look(bench.handle(Signal.WAIT_OVER))
    assert isinstance(bench.store(store), Ended)
    node = bench.at.read(path)
    assert node is not None
    assert decode(LockHolder, node.value, source="").turn == "free"


def test_the_wait_for_writers_ends() -> None:
    """A long one is reported once; one that gives turns gets `ASKING_S` at least."""
    bench = Bench(terms=replace(TERMS, lock_timeout_s=REPORTED_AFTER_S + 1.5))
    holder = bench.at.hold("refused")
    lock = (AwaitedLock(CLICKS, holder, None),)
    wait = bench.begin(extent_of(), now=10.0)
    assert wait == AwaitLocks(lock, LOOKS_EVERY_S, None)
    text = "log 'clicks' is owned by the writer writer"
    look = bench.handle(Signal.WAIT_OVER)
    wait = bench.look(look, now=10.0 + REPORTED_AFTER_S)
    assert wait == AwaitLocks(lock, LOOKS_EVERY_S, f"{text}; waiting for 2 s more")
    wait = bench.look(bench.handle(Signal.WAIT_OVER), now=10.0 + REPORTED_AFTER_S + 1)
    assert wait == AwaitLocks(lock, 0.5, None)
    look = bench.handle(Signal.WAIT_OVER)
    error = refused(bench.look(look, now=10.0 + REPORTED_AFTER_S + 1.5))
    assert isinstance(error, OwnershipAcquireFailedError)
    assert (str(error), error.owner) == (f"{text} (waited 6.5 s)", "writer")
    bench.at.hold("asked", owner="me")
    bench.begin(extent_of(), now=50.0)
    assert isinstance(bench.look(bench.handle(Signal.WAIT_OVER), now=64.9), AwaitLocks)
    error = refused(bench.look(bench.handle(Signal.WAIT_OVER), now=50.0 + ASKING_S))
    assert "this client itself (waited 15 s)" in str(error)


def test_all_writers_are_waited_for_at_once() -> None:
    """A log whose turn is given is not asked again; one that refuses turns sets the time-out."""
    bench = Bench()
    bench.at.hold("given")
    refuses = bench.at.hold("refused", VIEWS)
    extents = [extent_of(), extent_of(first=1, log=VIEWS)]
    wait = bench.begin(*extents)
    assert wait == AwaitLocks((AwaitedLock(VIEWS, refuses, None),), LOOKS_EVERY_S, None)
    look = bench.handle(Signal.WAIT_OVER)
    assert "(waited 2 s)" in str(refused(bench.look(look, now=2.0)))


def test_records_are_replaced() -> None:
    """Logs without an extent are emptied; an empty one needs no change."""
    bench = Bench()
    bench.commit(extent_of(), extent_of(first=1, log=VIEWS))
    second = Bench(bench.at, replace(TERMS, version=2, token="t2"))
    result = second.commit(extent_of(first=2), replaces=(CLICKS, VIEWS))
    assert result == replace(COMMITTED, logs={"clicks": (DLSN(1, 1, 0), DLSN(1, 2, 0))})
    assert bench.at.head().head.first_active == (1, 1, 0)
    assert bench.at.head(VIEWS).head.first_active == (1, 1, 0)
    assert second.machine.replaces
    third = Bench(bench.at, replace(TERMS, version=3, token="t3"))
    assert third.commit(replaces=(VIEWS,)) == COMMITTED


def test_settings_of_a_log_go_before_the_namespace_s() -> None:
    """Its segments may be shorter; a segment that ends asks for upkeep."""
    bench = Bench()
    settings = LogSettings(segment_bytes_max=10)
    bench.at.apply(plan_settings(PATHS, CLICKS, None, settings))
    bench.commit(extent_of())
    second = Bench(bench.at, replace(TERMS, version=2, token="t2"))
    result = second.commit(extent_of(first=1))
    assert result == replace(COMMITTED, logs={"clicks": (DLSN(2, 0, 0), DLSN(2, 1, 0))})
    assert second.machine.planned.to_merge == {CLICKS: 1}


@pytest.mark.parametrize(
    ("terms", "error", "text"),
    [
        (replace(TERMS, version=0, strict=True), AppendMismatchError, "version 1 was committed"),
        (replace(TERMS, version=2, after=0), AppendMismatchError, "the last committed one is 1"),
        (replace(TERMS, strict=True), AppendMismatchError, "but nothing of it to 'views'"),
        (replace(TERMS, run=replace(RUN, token="run-0")), AppendSupersededError, "a later run"),
        (replace(TERMS, run=replace(RUN, thread="t")), DuplicateAppendError, "have no order"),
    ],
)
def test_a_version_of_another_append_is_refused(
    terms: AppendTerms, error: type[DLError], text: str
) -> None:
    """Nothing of it is appended, now or later."""
    at = Namespace()
    Bench(at, replace(TERMS, token="t0", strict=True, run=replace(RUN, token="run-0"))).commit(
        extent_of()
    )
    Bench(at, replace(TERMS, token="t00", strict=True, run=RUN)).commit(extent_of(first=1))
    bench = Bench(at, replace(terms, token="late"))
    for _ in range(2):
        outcome = bench.commit(extent_of(first=2, log=VIEWS))
        assert isinstance(outcome, error)
        assert text in str(outcome)
    assert at.head(VIEWS).head.end == (1, 0)


def test_the_first_version_follows_none() -> None:
    """An append that says which one it follows finds that there is none."""
    bench = Bench(terms=replace(TERMS, version=6, after=5))
    assert "the last committed one is none" in str(refused(bench.begin(extent_of())))


def test_an_error_names_a_few_logs() -> None:
    """There may be a thousand."""
    at = Namespace()
    Bench(at, replace(TERMS, strict=True)).commit(extent_of())
    logs = [LogKey(name=f"log{n}", log_id=f"id-{n}") for n in range(7)]
    bench = Bench(at, replace(TERMS, token="t2", strict=True))
    error = refused(bench.begin(*(extent_of(first=n, log=log) for n, log in enumerate(logs))))
    assert str(error).endswith("to 'log0', 'log1', 'log2', 'log3', 'log4' and 2 more logs")


def test_extents_that_cannot_be_committed() -> None:
    """Parts of another append, given twice, for a log that is gone, or for two logs of one name."""
    bench = Bench()
    strange = bench.handle(Begin((extent_of(identity="thief"),), {}, 0.0))
    assert "an extent staged as 'thief'" in str(refused(strange))
    twice = bench.handle(Begin((extent_of(), extent_of()), {}, 0.0))
    assert "the same entries are given twice" in str(refused(twice))
    other = LogKey(name="clicks", log_id="log-2")
    both = bench.begin(extent_of(), extent_of(first=1, log=other))
    assert "records were staged for two logs 'clicks'" in str(refused(both))
    many = tuple(
        extent_of(first=n, log=LogKey(name=f"log{n}", log_id=f"id-{n}"))
        for n in range(LOGS_PER_APPEND + 1)
    )
    error = refused(bench.handle(Begin(many, {}, 0.0)))
    assert isinstance(error, TransactionTooLargeError)
    assert "staged ledger 8 is gone" in str(refused(bench.begin(extent_of(ledger_id=8))))
    for change, kind, text in (
        ({"settled": True}, AppendAbortedError, "staged ledger 7 is gone"),
        ({"identity": "thief"}, ConfigurationError, "is of 'thief'"),
        ({"committed": ((0, 0),)}, AppendAbortedError, "are in a log already"),
    ):
        bench.at.put(PATHS.staged_ledger(7), encode(bench.at.registration(**change)))
        error = refused(bench.begin(extent_of()))
        assert isinstance(error, kind)
        assert text in str(error)
    bench.at.put(PATHS.log_of("log-1").head, encode(LogHead(deleted=True)))
    error = refused(bench.begin(extent_of()))
    assert isinstance(error, AppendAbortedError)
    assert "records were staged for a log, but log 'clicks' was deleted" in str(error)


def test_a_sealed_log_is_refused_before_its_writer_is_waited_for() -> None:
    """The wait would be useless."""
    bench = Bench()
    bench.at.hold("refused")
    bench.at.complete(seal=True)
    assert isinstance(refused(bench.begin(extent_of())), EndOfStreamError)


def test_too_many_extents_for_one_transaction() -> None:
    """The error says what fits."""
    bench = Bench()
    extents = [extent_of(first=n, size_bytes=2**50 * (n % 2 + 1)) for n in range(0, 90_000, 2)]
    error = refused(bench.begin(*extents))
    assert isinstance(error, TransactionTooLargeError)
    assert "1000 logs with one extent each fit" in str(error)


def test_the_table_has_no_transition_that_nothing_makes() -> None:
    """Chance makes them all: overtaken, unanswered, waiting, recovering and cancelled commits."""
    made: set[tuple[CommitState, CommitState]] = set()
    for seed in range(300):
        made |= _life(random.Random(seed))
    expected = {
        (before, after) for before, afters in TRANSITIONS.causes.items() for after in afters
    }
    assert made == expected


def _life(rng: random.Random) -> set[tuple[CommitState, CommitState]]:
    """Commit one version by several tries among disturbances; return the transitions made."""
    at, made = Namespace(), set[tuple[CommitState, CommitState]]()
    bench = Bench(at, replace(TERMS, lock_timeout_s=rng.choice([0.0, 3.0])))
    now, effect, late = 0.0, None, list[Store]()
    for _ in range(60):
        before, now = bench.machine.state, now + 0.5
        if before is CommitState.DECIDED:
            break
        if effect is None or isinstance(effect, Ended) or rng.random() < 0.1:
            if isinstance(effect, Store) and rng.random() < 0.5:
                late.append(effect)
            effect = bench.handle(Begin((extent_of(),), {}, now))
        else:
            _disturb(at, rng)
            if late and rng.random() < 0.3:
                _apply(at, late.pop())
            effect = _answer(bench, effect, rng, now)
        made.add((before, bench.machine.state))
    for store in late:
        _apply(at, store)
    # The records are in the log once if it was said so, and never twice.
    entries = at.head().head.end[1] if at.head().head.max_lssn else 0
    assert entries <= 1
    result = bench.machine.result
    assert result is None or entries == 1
    return made


def _apply(at: Namespace, store: Store) -> bool:
    try:
        at.apply(store.ops)
    except MetadataError:
        return False
    return True


def _disturb(at: Namespace, rng: random.Random) -> None:
    """Let a writer come, give its turn, die, or be recovered."""
    lock, is_open = at.read(PATHS.log_of("log-1").lock), at.head().head.open_extent is not None
    match rng.randrange(8):
        case 0 if lock is None and not is_open:
            at.hold(rng.choice(["free", "refused"]))
            if rng.random() < 0.5 and not at.head().head.segment:
                at.open_extent()
        case 1 if lock is not None:
            at.free()
        case 2 | 3 if lock is not None:
            if is_open:
                at.complete()
            at.hold("given")
        case 4 if lock is None and is_open:
            at.complete()
        case _:
            pass


def _answer(  # noqa: C901 - one case for each kind
    bench: Bench, effect: Effect, rng: random.Random, now: float
) -> Effect:
    """Answer an effect, well or badly."""
    fails = rng.random() < 0.15
    match effect:
        case Look():
            return bench.handle(CallFailed(AWAY)) if fails else bench.look(effect, now=now)
        case AwaitLocks():
            for lock in effect.locks:
                if lock.ask is not None and rng.random() < 0.8:
                    _apply(bench.at, Store((lock.ask,)))
            closed = AlreadyClosedError("closed")
            return bench.handle(CallFailed(closed) if fails else Signal.WAIT_OVER)
        case RecoverLog():
            error = LedgerRecoveryError("too few")
            if not fails and bench.at.head().head.open_extent is not None:
                bench.at.complete()
            return bench.handle(CallFailed(error) if fails else Signal.RECOVERED)
        case Store():
            if fails and rng.random() < 0.3:
                return bench.handle(CallFailed(AlreadyClosedError("closed")))
            if fails:
                is_applied = rng.random() < 0.5 and _apply(bench.at, effect)
                return bench.handle(CallFailed(AWAY if is_applied else CHANGED))
            return bench.store(effect)
        case Pause():
            return bench.handle(Signal.PAUSE_OVER)
        case Ended():
            raise AssertionError("there is nothing to answer")


def test_registrations_of_ledgers() -> None:
    """A settled one goes with its last extent; later if a merge took it."""
    ledger = Namespace.registration(extents=1)
    with pytest.raises(LogNotFoundError, match="was deleted"):
        head_of(PATHS, CLICKS, None)
    bench = Bench()
    node = bench.at.read(PATHS.staged_ledger(7))
    assert node is not None
    staged = decode_node(PATHS, 7, node)
    assert staged is not None
    assert decode_node(PATHS, 7, None) is None
    assert release(PATHS, staged, ledger) == [staged.put(ledger)]
    settled = Namespace.registration(settled=True)
    assert release(PATHS, staged, settled) == [
        Delete(staged.path, 0),
        Delete(PATHS.ledger(7)),
    ]
    merged = Namespace.registration(settled=True, released_ms=5)
    assert release(PATHS, staged, merged) == [
        staged.put(merged),
        Create(PATHS.merged_ledger(7)),
    ]
    written = register_merged(PATHS, 9, now_ms=4)
    assert [op.path for op in written] == [PATHS.staged_ledger(9), PATHS.merged_ledger(9)]
    with pytest.raises(DLError, match="holds the registration of 7"):
        decode_node(PATHS, 8, node)
