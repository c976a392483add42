"""The commit of an atomic append: staged extents enter any number of logs in one transaction.

Theory of operation.  One look reads the commit record, the registrations of the extents' ledgers,
and the head, lock and settings of each log.  From that alone one transaction is planned: it writes
the heads of all logs and the record, and counts the extents in the registrations.  Each operation
is guarded by a version.  If any of it changed meanwhile nothing is stored, and all is read and
planned again.  docs/architecture/machines.md shows `TRANSITIONS` as a diagram.

Promises:

* The version is committed once.  The record is stored with the changes of the logs or not at all,
  and `metadata/commits.py` decides by it.
* If an answer is lost, the next look shows the outcome: the record has this append's token.
* A log whose writer lives is changed only in the writer's turn for appends, and only while the
  writer has no extent open.  The transaction ends the turn.
* An append asks for its turn at all writers at once, and waits until all have answered.  It waits
  for a writer that gives no turns as long as the caller allows, and for others `ASKING_S` at least.
* An extent that a dead writer left open is recovered first.

The driver (in `append.py`) performs the effects and feeds the answers back.  Each event has one
effect, because an append does one thing at a time.  A call of the caller may end at any moment, by
a cancellation too; the next `Begin` goes on with what was tried before.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, assert_never

from msgspec.structs import replace

from dlcore.base.backoff import Wait
from dlcore.base.errors import (
    AppendAbortedError,
    AppendMismatchError,
    AppendSupersededError,
    ConfigurationError,
    DLError,
    DuplicateAppendError,
    LogNotFoundError,
    OwnershipAcquireFailedError,
    TransactionTooLargeError,
)
from dlcore.base.machines import CallFailed, Ended, Pause, State, StepMachine, Transitions
from dlcore.log.metadata.changes import (
    SegmentLimits,
    lssn_to_merge,
    plan_append,
    plan_empty,
    require_unsealed,
)
from dlcore.log.metadata.commits import Decision, Verdict, decide
from dlcore.log.metadata.nodes import decode_node, head_of, settings_of
from dlcore.log.metadata.values import CommitRecord, LockHolder, LogKey
from dlcore.log.reading.scan import CommitResult
from dlcore.metadata.attempts import Attempts, Store, pause_after
from dlcore.metadata.port import Create, Op, Put, Versioned, require_request_size
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dlcore.base.config import LogConfig
    from dlcore.base.ids import DLSN
    from dlcore.log.metadata.commits import AppendRun
    from dlcore.log.metadata.nodes import StagedNode
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.log.metadata.values import Turn, VersionedHead
    from dlcore.metadata.paths import NamespacePaths

LOGS_PER_APPEND = 1000
"""One append to this many logs fits into a transaction, whatever the logs hold."""
ASKING_S = 15.0
"""The shortest time-out for a turn: it comes soon, if the proxy lives."""
LOOKS_EVERY_S = 1.0
"""How often awaited locks are read again, in case a notification was lost."""
_NAMED_MAX = 5
"""Logs that an error names, at most."""


class CommitState(State):
    """The state of the machine; DECIDED is final."""

    READY = "no caller waits; the append may be committed, or tried again"
    LOOKING = "the record, the registrations, the heads and the locks are read"
    WAITING = "writers own some of the logs, and are asked for a turn or waited for"
    RECOVERING = "the extent that a dead writer left open is recovered"
    STORING = "the transaction is being stored"
    PAUSING = "the transaction had a conflict, or no answer; all is read again"
    DECIDED = "the outcome is known"


_S = CommitState
_AGAIN = {_S.LOOKING: "commit again, the caller had left"}
TRANSITIONS = Transitions(
    _S.READY,
    {
        _S.READY: {_S.LOOKING: "commit"},
        _S.LOOKING: {
            _S.DECIDED: "known, or nothing to store",
            _S.WAITING: "owned by writers",
            _S.RECOVERING: "left open by a dead writer",
            _S.STORING: "planned",
            _S.READY: "refused, or waited too long",
            **_AGAIN,
        },
        _S.WAITING: {
            _S.LOOKING: "locks changed, or some time passed",
            _S.READY: "the namespace is closed",
        },
        _S.RECOVERING: {_S.LOOKING: "recovered", _S.READY: "not recovered"},
        _S.STORING: {
            _S.DECIDED: "stored",
            _S.PAUSING: "conflict, or no answer",
            _S.READY: "refused, or too many attempts",
            **_AGAIN,
        },
        _S.PAUSING: {_S.LOOKING: "later"},
        _S.DECIDED: {},
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendTerms:
    """The terms of an append, fixed when it begins.

    Args:
        identity: the appender.
        version: its number of the append; the versions of an identity go up.
        token: unique to the append, the same in all its attempts.
        staged_as: the identity under which its extents were staged.
        run: the run of an appender that appends a version several times.
        strict: whether a repetition must be of the latest version, to the same logs.
        after: the version that must be the last committed one, -1 for none; None: any.
        lock_timeout_s: how long to wait for a log's writer.
    """

    identity: str
    version: int
    token: str
    staged_as: str
    run: AppendRun | None = None
    strict: bool = False
    after: int | None = None
    lock_timeout_s: float = 0.0

    def __str__(self) -> str:
        return f"append {self.identity!r} version {self.version}"


@dataclass(frozen=True, slots=True)
class HeldLog:
    """A log that a writer holds, and the node of its lock as it was read."""

    log: LogKey
    path: str
    holder: LockHolder
    version: int

    def gives_turn_at(self, at: VersionedHead) -> bool:
        """Return whether the log may be changed at this head, which was read with the lock."""
        return self.holder.turn == "given" and at.head.open_extent is None

    def turned(self, turn: Turn) -> Put:
        """Return the operation that sets the turn, unless the lock has changed meanwhile."""
        return Put(self.path, encode(replace(self.holder, turn=turn)), self.version)


def held_log(paths: NamespacePaths, log: LogKey, lock: Versioned | None) -> HeldLog | None:
    """Return the holder in the node of a log's lock; None if there is none."""
    if lock is None:
        return None
    path = paths.log_of(log.log_id).lock
    return HeldLog(log, path, decode(LockHolder, lock.value, source=path), lock.version)


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes of the logs in one transaction, and what follows from them."""

    ops: tuple[Op, ...] = ()
    logs: dict[str, tuple[DLSN, DLSN]] = field(default_factory=dict)
    """The positions of the appended records, [first, end), by the names of the logs."""
    appended: tuple[LogKey, ...] = ()
    to_merge: dict[LogKey, int] = field(default_factory=dict)
    """Logs that will have much to merge, and the first segment of that."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Event: the caller commits these extents, in the given order per log.

    `replaces` are the logs whose earlier records are all truncated: their names by id.  `now` is
    any clock's time in seconds; it is that of `AppendRun.begun_ns` too.
    """

    extents: tuple[StagedExtent, ...]
    replaces: Mapping[str, str]
    now: float


@dataclass(frozen=True, slots=True)
class Looked:
    """Event: the nodes of `Look`, and the ledgers that it listed; `now_ms` is the wall clock's."""

    nodes: Sequence[Versioned | None]
    listed: Sequence[int]
    now: float
    now_ms: int


class Signal(enum.Enum):
    """Events that carry nothing."""

    WAIT_OVER = "the locks of `AwaitLocks` have changed, or its time has passed"
    RECOVERED = "the log of `RecoverLog` has no open extent"
    STORED = "the transaction was applied"
    PAUSE_OVER = "the pause is over"


Event: TypeAlias = Begin | Looked | Signal | CallFailed


@dataclass(frozen=True, slots=True)
class Look:
    """Effect: read these nodes in one round trip; answer with `Looked`.

    With `lists` the ledgers staged under that identity are listed beside them.
    """

    paths: tuple[str, ...]
    lists: str | None


@dataclass(frozen=True, slots=True)
class AwaitedLock:
    """A lock that is waited for while `holder` is in its node; `ask` is stored there first."""

    log: LogKey
    holder: LockHolder
    ask: Put | None


@dataclass(frozen=True, slots=True)
class AwaitLocks:
    """Effect: say `WAIT_OVER` once all the locks have changed, at the latest after `at_most_s`.

    If an `ask` is not stored, its lock has changed.  `report` is a warning to log first.
    """

    locks: tuple[AwaitedLock, ...]
    at_most_s: float
    report: str | None


@dataclass(frozen=True, slots=True)
class RecoverLog:
    """Effect: recover the open extent of this head; answer with `RECOVERED`, or `CallFailed`."""

    at: VersionedHead


Work: TypeAlias = Look | AwaitLocks | RecoverLog | Store | Pause
Effect: TypeAlias = Work | Ended[CommitResult]
"""`PAUSE_OVER` answers `Pause`; `Ended` is for the caller of `Begin`."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of the commit: its event, its wait for locks, and how often it tried to store."""

    begin: Begin
    wait: Wait
    attempts: Attempts


class Commit(StepMachine[CommitState, Event, Work, CommitResult]):
    """The commit of one append.

    Args:
        paths: the namespace's nodes.
        terms: what is fixed when the append begins.
        config: the namespace's; settings of the logs go before it.
        client_id: the client that commits, for error texts.
    """

    transitions = TRANSITIONS

    def __init__(
        self, paths: NamespacePaths, terms: AppendTerms, config: LogConfig, client_id: str
    ) -> None:
        self.terms = terms
        self.state = CommitState.READY
        self.result: CommitResult | None = None
        """The result; it is remembered, because the commit record may be removed afterwards."""
        self.planned = Plan()
        """The changes of the logs in the last transaction."""
        self.listed: Sequence[int] | None = None
        """The ledgers of the identity that were not settled at the first look."""
        self._paths = paths
        self._config = config
        self._client_id = client_id
        attempts = Attempts(str(terms), "to commit")
        self._run = _Run(Begin((), {}, 0.0), Wait(0.0), attempts)
        self._tried = Decision(Verdict.SKIP)  # the decision in the last transaction with this token

    def handle(self, event: Event) -> Effect:
        """Take one event."""
        try:
            match event:
                case Begin():
                    return self._begun(event)
                case Looked():
                    return self._looked(event)
                case Signal():
                    return self._on_signal(event)
                case CallFailed(error):
                    return self._call_failed(error)
                case _:
                    assert_never(event)
        except DLError as error:
            return self._refuse(error)

    def _on_signal(self, signal: Signal) -> Effect:
        match signal:
            case Signal.STORED:
                return self._concluded(self._tried)
            case Signal.WAIT_OVER | Signal.RECOVERED | Signal.PAUSE_OVER:
                return self._look()
            case _:
                assert_never(signal)

    @property
    def replaces(self) -> bool:
        """Whether records of logs are replaced."""
        return bool(self._run.begin.replaces)

    def _names(self) -> dict[str, str]:
        """Return the logs of this append: their names by id."""
        begin = self._run.begin
        return {**begin.replaces, **{extent.log_id: extent.log for extent in begin.extents}}

    # The look

    def _begun(self, begin: Begin) -> Effect:
        self._run = _Run(begin, Wait(begin.now), self._run.attempts.none())
        # First the change of state: a refusal by the checks is a transition from LOOKING.
        effect = self._look()
        _check_extents(begin.extents, self.terms.staged_as)
        require_few_logs(self._names())
        return effect

    def _look(self) -> Effect:
        self._become(CommitState.LOOKING)
        paths = self._paths
        logs = [paths.log_of(log_id) for log_id in sorted(self._names())]
        wanted = (
            paths.commit(self.terms.identity),
            *map(paths.staged_ledger, self._ledger_ids()),
            *(each.head for each in logs),
            *(each.lock for each in logs),
            *(each.settings for each in logs),
        )
        # The ledgers that no process fills any more can be settled once this append is decided.
        return Look(wanted, self.terms.staged_as if self.listed is None else None)

    def _ledger_ids(self) -> list[int]:
        return sorted({extent.ledger_id for extent in self._run.begin.extents})

    def _looked(self, seen: Looked) -> Effect:
        if self.listed is None:
            self.listed = seen.listed
        node, *nodes = seen.nodes
        decision = self._decide(node)
        if decision.verdict is Verdict.KNOWN:
            return self._concluded(self._tried)
        planned = Plan()
        if decision.verdict is Verdict.APPEND:
            at = _LogNodes.of(self._paths, sorted(self._names()), self._ledger_ids(), nodes)
            found = self._plan(at, seen)
            if not isinstance(found, Plan):
                return found
            planned = found
        # One transaction: the record says that the version is committed, so it is stored with the
        # changes of the logs or not at all.
        ops = (*planned.ops, *self._record_ops(decision.record, node, now_ms=seen.now_ms))
        if not ops:
            return self._concluded(decision)
        # ZooKeeper ends the connection of a client whose request is too large.
        self._require_fit(ops)
        # Before the attempt: if its answer is lost, the next look finds our token in the record,
        # and this is the decision that was stored.
        self._tried, self.planned = decision, planned
        self._become(CommitState.STORING)
        return Store(ops)

    def _decide(self, node: Versioned | None) -> Decision:
        """Decide by the record; raise if the version belongs to another append."""
        terms, logs = self.terms, self._names()
        record: CommitRecord | None = None
        if node is not None:
            path = self._paths.commit(terms.identity)
            record = decode(CommitRecord, node.value, source=path)
        given_ns = None if terms.run is None else terms.run.commits_ns
        decision = decide(
            record,
            version=terms.version,
            token=terms.token,
            run=terms.run,
            now_ns=int(self._run.begin.now * 1e9) if given_ns is None else given_ns,
            logs=logs.keys() if terms.strict else None,
            after=terms.after,
        )
        last = "none" if record is None else record.version
        if decision.verdict is Verdict.OLDER:
            raise AppendMismatchError(
                f"{terms}: version {last} was committed before; an appender that goes on from its "
                f"last commit repeats version {last} or writes a later one"
            )
        if decision.verdict is Verdict.AHEAD:
            raise AppendMismatchError(
                f"{terms} must follow version {terms.after}, but the last committed one is {last}"
            )
        if decision.verdict is Verdict.ELSEWHERE:
            raise AppendMismatchError(
                f"{terms} was committed before, but nothing of it to {_name_some(logs.values())}"
            )
        return decision

    # The plan

    def _plan(self, nodes: _LogNodes, seen: Looked) -> Plan | Effect:
        """Return the plan for the logs as they were read, or what has to happen first."""
        parts = self._by_log()
        heads = {log: self._head_of(log, nodes) for log in parts}
        held = {log: held_log(self._paths, log, nodes.locks[log.log_id]) for log in parts}
        waiting = [
            each for each in held.values() if each and not each.gives_turn_at(heads[each.log])
        ]
        if waiting:
            return self._await_locks(waiting, seen.now)
        for log, at in heads.items():
            # It was read together with the lock: a dead writer left the extent open.
            if held[log] is None and at.head.open_extent is not None:
                self._become(CommitState.RECOVERING)
                return RecoverLog(at)
        ops: list[Op] = []
        logs: dict[str, tuple[DLSN, DLSN]] = {}
        to_merge: dict[LogKey, int] = {}
        for log, part in parts.items():
            at, owner, paths = heads[log], held[log], self._paths.log_of(log.log_id)
            # The commit ends the turn in the same transaction: the writer goes on behind it.
            if owner is not None:
                ops.append(owner.turned("free"))
            if not part:
                ops += plan_empty(paths, at)
                continue
            settings = settings_of(self._paths, log, nodes.settings[log.log_id])
            change, first, end = plan_append(
                paths,
                at,
                part,
                now_ms=seen.now_ms,
                limits=SegmentLimits.of(self._config.with_settings(settings)),
                replaces=log.log_id in self._run.begin.replaces,
            )
            ops += change.ops
            logs |= dict.fromkeys((extent.log for extent in part), (first, end))
            lssn = lssn_to_merge(at.head, change.after.head)
            if lssn is not None:
                to_merge[log] = lssn
        ops += [self._count(ledger_id, node) for ledger_id, node in nodes.staged.items()]
        return Plan(tuple(ops), logs, tuple(parts), to_merge)

    def _by_log(self) -> dict[LogKey, list[StagedExtent]]:
        """Return the extents of each log, the logs by name; the id decides which log it is."""
        begin = self._run.begin
        parts: dict[str, list[StagedExtent]] = {log_id: [] for log_id in begin.replaces}
        ids = {name: log_id for log_id, name in begin.replaces.items()}
        for extent in begin.extents:
            parts.setdefault(extent.log_id, []).append(extent)
            if ids.setdefault(extent.log, extent.log_id) != extent.log_id:
                raise AppendAbortedError(
                    f"{self.terms}: records were staged for two logs {extent.log!r} (ids "
                    f"{ids[extent.log]}, {extent.log_id}), for it was renamed or deleted, and "
                    "created again, meanwhile: stage them again"
                )
        names = self._names()
        return {
            LogKey(name=names[log_id], log_id=log_id): parts[log_id]
            for log_id in sorted(parts, key=lambda log_id: names[log_id])
        }

    def _head_of(self, log: LogKey, nodes: _LogNodes) -> VersionedHead:
        try:
            at = head_of(self._paths, log, nodes.heads[log.log_id])
        except LogNotFoundError as error:
            raise AppendAbortedError(f"records were staged for a log, but {error}") from error
        require_unsealed(at)  # before the wait for its writer
        return at

    def _await_locks(self, held: Sequence[HeldLog], now: float) -> Effect:
        """Wait until the locks change, for a while; ask holders that give turns for one.

        The lock of a dead writer vanishes with its session.
        """
        timeout_s = self.terms.lock_timeout_s
        # A proxy answers soon, so its turn is worth more time than the caller gives to a writer
        # that may keep its log for hours.
        if all(each.holder.turn != "refused" for each in held):
            timeout_s = max(timeout_s, ASKING_S)
        left_s = self._run.wait.begun_s + timeout_s - now
        first = held[0].holder
        text = f"log {held[0].log.name!r} is owned by the writer {first.described(self._client_id)}"
        if left_s <= 0:
            raise OwnershipAcquireFailedError(f"{text} (waited {timeout_s:g} s)", owner=first.owner)
        is_due = self._run.wait.is_due(now)
        self._become(CommitState.WAITING)
        return AwaitLocks(
            tuple(map(_awaited, held)),
            min(left_s, LOOKS_EVERY_S),
            f"{text}; waiting for {left_s:.0f} s more" if is_due else None,
        )

    def _count(self, ledger_id: int, node: StagedNode | None) -> Op:
        """Return the operation that counts the extents of a ledger as committed."""
        terms = self.terms
        if node is None or node.staged.settled:
            raise AppendAbortedError(
                f"{terms}: staged ledger {ledger_id} is gone; it was aborted, or removed after its "
                "process ended"
            )
        if node.staged.identity != terms.staged_as:
            raise ConfigurationError(
                f"staged ledger {ledger_id} is of {node.staged.identity!r}: it cannot be committed "
                f"by an append that is staged as {terms.staged_as!r}"
            )
        extents = self._run.begin.extents
        taken = [(e.first_entry_id, e.last_entry_id) for e in extents if e.ledger_id == ledger_id]
        # A second append with the same extents would show their records twice in a log.
        staged = node.staged.with_committed(taken)
        if staged is None:
            raise AppendAbortedError(
                f"{terms}: entries {taken} of staged ledger {ledger_id} are in a log already, of "
                f"{node.staged.committed}"
            )
        return node.put(staged)

    def _record_ops(
        self, record: CommitRecord | None, node: Versioned | None, *, now_ms: int
    ) -> tuple[Op, ...]:
        if record is None:
            return ()
        path = self._paths.commit(self.terms.identity)
        value = encode(replace(record, committed_ms=now_ms))
        return (Create(path, value) if node is None else Put(path, value, node.version),)

    def _require_fit(self, ops: Sequence[Op]) -> None:
        try:
            require_request_size(ops)
        except TransactionTooLargeError as error:
            extents = self._run.begin.extents
            logs = len({extent.log_id for extent in extents})
            raise TransactionTooLargeError(
                f"an append of {len(extents)} extents to {logs} logs is too large: {error}. "
                f"Nothing was appended; {LOGS_PER_APPEND} logs with one extent each fit: let fewer "
                "tasks write or write to fewer logs at once"
            ) from error

    # The outcome

    def _call_failed(self, error: DLError) -> Effect:
        if self.state is not CommitState.STORING:
            raise error
        run = self._run
        self._run = _Run(run.begin, run.wait, run.attempts.failed(error))
        self._become(CommitState.PAUSING)
        return pause_after(error)

    def _concluded(self, decision: Decision) -> Effect:
        """Return the outcome of a stored decision."""
        verdict = decision.verdict
        if verdict is Verdict.CONFLICTING:
            raise DuplicateAppendError(
                f"{self.terms}: threads appended at the same time, so their appends have no order, "
                "and a repetition cannot find out which of them were committed"
            )
        if verdict is Verdict.SUPERSEDED:
            raise AppendSupersededError(
                f"{self.terms}: a later run of the appender has begun to append this version"
            )
        assert verdict in (Verdict.APPEND, Verdict.SKIP), "others end before an attempt"
        is_new = verdict is Verdict.APPEND
        self.result = CommitResult(
            committed=is_new,
            already_committed=not is_new,
            logs=self.planned.logs if is_new else {},
        )
        self._become(CommitState.DECIDED)
        return Ended(self.result)

    def _refuse(self, error: DLError) -> Effect:
        self._become(CommitState.READY)
        return Ended(error)

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert (self.result is not None) == (self.state is CommitState.DECIDED)
        if self.state is CommitState.PAUSING:
            assert self._run.attempts.count > 0
        if self.state is CommitState.STORING:
            is_append = self._tried.verdict is Verdict.APPEND
            assert self._tried.record is not None
            assert self._tried.record.token == self.terms.token
            assert is_append or not self.planned.ops


@dataclass(frozen=True, slots=True)
class _LogNodes:
    """The nodes of an append's ledgers and logs, from one round trip."""

    staged: dict[int, StagedNode | None]
    heads: dict[str, Versioned | None]
    locks: dict[str, Versioned | None]
    settings: dict[str, Versioned | None]

    @classmethod
    def of(
        cls,
        paths: NamespacePaths,
        log_ids: Sequence[str],
        ledger_ids: Sequence[int],
        nodes: Sequence[Versioned | None],
    ) -> _LogNodes:
        """Return the nodes in the order of `Look`."""
        rest = iter(nodes)
        return cls(
            {each: decode_node(paths, each, next(rest)) for each in ledger_ids},
            *({log_id: next(rest) for log_id in log_ids} for _ in range(3)),
        )


def _awaited(held: HeldLog) -> AwaitedLock:
    if held.holder.turn in ("free", "given"):
        return AwaitedLock(held.log, replace(held.holder, turn="asked"), held.turned("asked"))
    return AwaitedLock(held.log, held.holder, None)


def require_few_logs(logs: Collection[str]) -> None:
    """Raise `TransactionTooLargeError` if these logs may not fit one append."""
    if len(logs) > LOGS_PER_APPEND:
        raise TransactionTooLargeError(
            f"one append would change {len(logs)} logs: {LOGS_PER_APPEND} fit one transaction, "
            "whatever they hold; write to fewer logs at once"
        )


def _name_some(logs: Collection[str]) -> str:
    named = ", ".join(map(repr, sorted(logs)[:_NAMED_MAX]))
    return named if len(logs) <= _NAMED_MAX else f"{named} and {len(logs) - _NAMED_MAX} more logs"


def _check_extents(extents: Sequence[StagedExtent], staged_as: str) -> None:
    for extent in extents:
        if extent.identity != staged_as:
            raise ConfigurationError(
                f"an extent staged as {extent.identity!r} cannot be committed by an append that is "
                f"staged as {staged_as!r}"
            )
    by_place = sorted(extents, key=lambda extent: (extent.ledger_id, extent.first_entry_id))
    for one, other in pairwise(by_place):
        if one.ledger_id == other.ledger_id and other.first_entry_id <= one.last_entry_id:
            raise ConfigurationError(f"the same entries are given twice: {one!r}, {other!r}")
