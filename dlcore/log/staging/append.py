"""Atomic appends: staged extents enter any number of logs in one metadata transaction.

The transaction writes the heads of all logs and the record of the commit, and counts the extents in
the registrations of their ledgers.  It is planned from the result of one round trip, and planned
again if any of that changed.  After a lost reply the commit record shows the outcome: it has the
token of the append that wrote it.  `metadata/commits.py` decides by the record.  Tidying comes
after the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from dlcore.base.backoff import Wait
from dlcore.base.closing import AsyncClosing
from dlcore.base.config import require_kind
from dlcore.base.errors import (
    AppendAbortedError,
    AppendMismatchError,
    AppendSupersededError,
    ConfigurationError,
    DLError,
    DuplicateAppendError,
    LogNotFoundError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    TransactionTooLargeError,
)
from dlcore.log.metadata.changes import (
    SegmentLimits,
    plan_append,
    plan_empty,
    require_unsealed,
)
from dlcore.log.metadata.commits import Decision, Verdict, decide
from dlcore.log.metadata.staged import (
    StagedNode,
    decode_node,
    drop,
    list_staged,
    read_staged,
    settle,
)
from dlcore.log.metadata.store import UNANSWERED, persistently
from dlcore.log.metadata.values import CommitRecord, LogKey
from dlcore.log.reading.scan import CommitResult, StagedExtent
from dlcore.log.recovery import recover_log
from dlcore.log.staging.turns import held_log, wait_for_turns
from dlcore.log.staging.writer import LOGS_PER_APPEND, StagingWriter, require_few_logs
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.log.upkeep.requests import ask_for_upkeep, lssn_to_merge
from dlcore.metadata.port import Create, Op, Put, Versioned, require_request_size
from dlcore.metadata.stored import decode, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import pyarrow as pa

    from dlcore.base.config import LogConfig
    from dlcore.base.ids import DLSN
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.commits import AppendRun, SharedStaging
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.values import VersionedHead
    from dlcore.log.staging.turns import HeldLog

logger = logging.getLogger(__name__)

_ATTEMPTS_MAX = 100
_CONFLICT_DELAY_S_MAX = 0.05
IDENTITY_BYTES_MAX = 200
_NAMED_MAX = 5
"""Logs that an error names, at most."""


@dataclass(frozen=True, slots=True)
class _Plan:
    ops: tuple[Op, ...] = ()
    logs: dict[str, tuple[DLSN, DLSN]] = field(default_factory=dict)
    appended: tuple[LogKey, ...] = ()
    to_merge: dict[LogKey, int] = field(default_factory=dict)
    """Logs that will have much to merge, and the first segment of that."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The nodes that an append needs, from one round trip."""

    record: Versioned | None
    staged: dict[int, StagedNode | None]
    heads: dict[str, Versioned | None]
    locks: dict[str, Versioned | None]
    settings: dict[str, Versioned | None]


class _HeldError(Exception):
    """Writers own logs, and it is not our turn; it never leaves this module."""

    def __init__(self, held: list[HeldLog]) -> None:
        super().__init__(held)
        self.held = held


class _ChangedError(Exception):
    """Something was changed since it was read; it never leaves this module."""


class StagedAppend(AsyncClosing):
    """One atomic append, named by an identity, a version, and its place among the run's appends.

    The versions of one identity go up.  If an append of a version was committed before, it is not
    committed again, and the result of `commit` says so.  Use `Namespace.begin_append`.
    """

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None,
        run: AppendRun | None,
        lock_timeout_s: float,
        config: LogConfig,
        keep_record: bool = True,
        strict: bool = False,
        after: int | None = None,
        token: str | None = None,
    ) -> None:
        check_identity(identity)
        staged_as = identity if shared is None else shared.identity
        check_identity(staged_as)
        require_kind("version", version, int)
        if not 0 <= version < 2**63:
            raise ConfigurationError(f"version={version}: expected 0 … 2**63-1")
        self._context = context
        self._owner = owner
        self._identity = identity
        self._version = version
        self._staged_as = staged_as
        self._round = "" if shared is None else shared.round
        self._run = run
        self._lock_timeout_s = lock_timeout_s
        self._keep_record = keep_record
        self._strict = strict
        self._after = after
        self._result: CommitResult | None = None
        self._config = config
        self._token = token or context.clock.new_token()
        self._writer: StagingWriter | None = None
        self._staged: list[StagedExtent] = []
        self._listed: list[int] | None = None
        self._tried = Decision(Verdict.SKIP)  # of an earlier attempt with this token, if known
        self._plan_tried = _Plan()
        self._aborted = False
        self._replaces: dict[str, str] = {}
        """The names of these logs, by id."""

    def __repr__(self) -> str:
        return f"<StagedAppend {self._identity!r} version={self._version}>"

    async def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        """Stage rows for a log; `commit` without extents appends all of them.

        Raises: as `StagingWriter.write_batch`.
        """
        self._require_alive()
        if self._writer is None:
            self._writer = StagingWriter(self._context, self._owner, self._staged_as, self._config)
        await self._writer.write_batch(log, batch)

    async def commit(
        self, extents: Sequence[StagedExtent] | None = None, *, replaces: Collection[str] = ()
    ) -> CommitResult:
        """Append `extents`, in the given order per log: all or nothing, once.

        Args:
            extents: the extents to append; None: those of this append's own writers.
            replaces: the names of logs whose earlier records are all truncated in the same
                transaction; those of them without an extent are empty afterwards.

        Raises:
            AppendAbortedError: it was aborted, or staged data or one of the logs is gone.
            TransactionTooLargeError: more logs or extents than one transaction takes.
            DuplicateAppendError: appends of this version overlapped, and it is unknown which of
                them are committed.
            AppendSupersededError: a later run of the appender appends this version.
            AppendMismatchError: a strict append is older than the last one committed, or its
                version was committed to other logs.
            OwnershipAcquireFailedError: a writer owned one of the logs during `lock_timeout_s`.
            EndOfStreamError: one of the logs is sealed.
            LogNotFoundError: there is no log of a name in `replaces`.
            TransactionIdOutOfOrderError: the extents' own transaction ids do not follow the log's.
            MetadataConnectionError: it is unknown whether it was committed; call again to find
                out.
        """
        self._require_alive()
        if self._result is None:
            if extents is None:
                extents = await self.stage()
            _check_extents(extents, self._staged_as)
            found = [await self._context.logs.find(name) for name in sorted(replaces)]
            self._replaces = {log.log_id: log.name for log in found}
            require_few_logs(self._names(extents))
            # Remembered here too, because the commit record may be removed now.
            self._result = await self._commit(extents)
            await self._context.tidier.submit(f"tidying after {self!r}", self._tidy)
        return self._result

    async def stage(self) -> list[StagedExtent]:
        """Make all rows written here durable, and return their extents, the default of `commit`.

        Raises: as `StagingWriter.stage`.
        """
        if self._writer is not None:
            self._staged += await self._writer.stage()
        return list(self._staged)

    async def _commit(self, extents: Sequence[StagedExtent]) -> CommitResult:
        wait = Wait(asyncio.get_running_loop().time())
        begun_ns = _clock_of(self._run, wait.begun_s)
        attempts = 0
        while attempts < _ATTEMPTS_MAX:
            found = await self._look(extents)
            decision = self._decide(extents, found.record, now_ns=begun_ns)
            if decision.verdict is Verdict.KNOWN:
                return self._conclude(self._tried)
            plan = _Plan()
            if decision.verdict is Verdict.APPEND:
                try:
                    plan = await self._plan(extents, found)
                except _HeldError as error:
                    await wait_for_turns(
                        self._context, error.held, wait, timeout_s=self._lock_timeout_s
                    )
                    continue
                except _ChangedError:
                    continue
            # One transaction: the record says that the version is committed, so it is stored with
            # the changes of the logs or not at all.
            ops = (*plan.ops, *self._record_ops(decision.record, found.record))
            if not ops:
                return self._conclude(decision)
            _require_fit(ops, extents)
            # Before the attempt: if its answer is lost, the next look finds our token in the
            # record, and this is the decision that was stored.
            self._tried, self._plan_tried = decision, plan
            attempts += 1
            try:
                await self._context.store.multi(ops)
            except (MetadataVersionError, NodeExistsError, NoNodeError) as error:
                logger.info("append %s v%d conflicts: %s", self._identity, self._version, error)
            except UNANSWERED as error:
                logger.info("append %s v%d unanswered: %s", self._identity, self._version, error)
            else:
                return self._conclude(decision)
            await asyncio.sleep(self._context.rng.uniform(0, _CONFLICT_DELAY_S_MAX))
        raise MetadataConnectionError(
            f"append {self._identity!r} version {self._version}: {_ATTEMPTS_MAX} attempts to "
            "commit had a conflict, or got no answer"
        )

    def _decide(
        self, extents: Sequence[StagedExtent], node: Versioned | None, *, now_ns: int
    ) -> Decision:
        """Decide by the record; raise if the version belongs to another append."""
        record = self._record_of(node)
        logs = self._names(extents)
        decision = decide(
            record,
            version=self._version,
            token=self._token,
            run=self._run,
            now_ns=now_ns,
            logs=logs.keys() if self._strict else None,
            after=self._after,
        )
        what = f"append {self._identity!r} version {self._version}"
        if decision.verdict is Verdict.OLDER:
            assert record is not None, "something is newer"
            raise AppendMismatchError(
                f"{what}: version {record.version} was committed before; an appender that goes on "
                f"from its last commit repeats version {record.version} or writes a later one"
            )
        if decision.verdict is Verdict.AHEAD:
            last = "none" if record is None else record.version
            raise AppendMismatchError(
                f"{what} must follow version {self._after}, but the last committed one is {last}"
            )
        if decision.verdict is Verdict.ELSEWHERE:
            raise AppendMismatchError(
                f"{what} was committed before, but nothing of it to {_name_some(logs.values())}"
            )
        return decision

    async def _look(self, extents: Sequence[StagedExtent]) -> _Found:
        """Read the record, registrations, heads and locks in one round trip.

        The first call also lists the ledgers of its identity: those that no process fills any more
        can be settled once this append is decided.
        """
        paths = self._context.paths
        ledger_ids = sorted({extent.ledger_id for extent in extents})
        log_ids = sorted(self._names(extents))
        wanted = [
            paths.commit(self._identity),
            *(paths.staged_ledger(ledger_id) for ledger_id in ledger_ids),
            *(paths.log_of(log_id).head for log_id in log_ids),
            *(paths.log_of(log_id).lock for log_id in log_ids),
            *(paths.log_of(log_id).settings for log_id in log_ids),
        ]

        async def read() -> tuple[list[Versioned | None], list[int]]:
            if self._listed is not None:
                return await self._context.store.get_many(wanted, fresh=True), self._listed
            return await asyncio.gather(
                self._context.store.get_many(wanted, fresh=True),
                list_staged(self._context, self._staged_as),
            )

        (record, *nodes), self._listed = await persistently(read)
        rest = iter(nodes)
        return _Found(
            record,
            {ledger_id: decode_node(paths, ledger_id, next(rest)) for ledger_id in ledger_ids},
            *({log_id: next(rest) for log_id in log_ids} for _ in range(3)),
        )

    def _record_of(self, node: Versioned | None) -> CommitRecord | None:
        if node is None:
            return None
        return decode(CommitRecord, node.value, source=self._context.paths.commit(self._identity))

    def _conclude(self, decision: Decision) -> CommitResult:
        """Return the outcome of a stored decision."""
        what = f"append {self._identity!r} version {self._version}"
        match decision.verdict:
            case Verdict.APPEND:
                return CommitResult(
                    committed=True, already_committed=False, logs=self._plan_tried.logs
                )
            case Verdict.SKIP:
                return CommitResult(committed=False, already_committed=True)
            case Verdict.CONFLICTING:
                raise DuplicateAppendError(
                    f"{what}: threads appended at the same time, so their appends have no order, "
                    "and a repetition cannot find out which of them were committed"
                )
            case Verdict.SUPERSEDED:
                raise AppendSupersededError(
                    f"{what}: a later run of the appender has begun to append this version"
                )
            case Verdict.KNOWN | Verdict.OLDER | Verdict.ELSEWHERE | Verdict.AHEAD:
                raise AssertionError(f"{decision.verdict} ends an append before it is tried")
            case _:
                assert_never(decision.verdict)

    async def _plan(self, extents: Sequence[StagedExtent], found: _Found) -> _Plan:
        """Return the plan that appends `extents` to the logs as they were read.

        Raises:
            _HeldError: writers own some of the logs, and it is not our turn.
            _ChangedError: a dead writer's log was recovered: read again.
        """
        ops: list[Op] = []
        logs: dict[str, tuple[DLSN, DLSN]] = {}
        to_merge: dict[LogKey, int] = {}
        now_ms = self._context.clock.now_ms()
        parts = self._by_log(extents)
        heads = {log: self._head_of(log, found) for log in parts}
        held = {log: held_log(self._context, log, found.locks[log.log_id]) for log in parts}
        waiting = [
            each for each in held.values() if each and not each.gives_turn_at(heads[each.log])
        ]
        if waiting:
            raise _HeldError(waiting)
        for log, part in parts.items():
            at, owner = heads[log], held[log]
            # The commit ends the turn in the same transaction: the writer goes on behind it.
            if owner is not None:
                ops.append(owner.turned(self._context, "free"))
            elif at.head.open_extent is not None:
                # It was read together with the lock: a dead writer left the extent open.
                await recover_log(self._context, at, only_this=True)
                raise _ChangedError
            paths = self._context.logs.paths_of(log)
            if not part:
                ops += plan_empty(paths, at)
                continue
            settings = self._context.logs.settings_of(log, found.settings[log.log_id])
            limits = SegmentLimits.of(self._config.with_settings(settings))
            change, first, end = plan_append(
                paths,
                at,
                part,
                now_ms=now_ms,
                limits=limits,
                replaces=log.log_id in self._replaces,
            )
            ops += change.ops
            logs |= dict.fromkeys((extent.log for extent in part), (first, end))
            lssn = lssn_to_merge(at.head, change.after.head)
            if lssn is not None:
                to_merge[log] = lssn
        for ledger_id, node in found.staged.items():
            ops.append(self._count(ledger_id, node, extents))
        return _Plan(tuple(ops), logs, tuple(parts), to_merge)

    def _by_log(self, extents: Sequence[StagedExtent]) -> dict[LogKey, list[StagedExtent]]:
        """Return the extents of each log, the logs by name; the id decides which log it is."""
        parts: dict[str, list[StagedExtent]] = {log_id: [] for log_id in self._replaces}
        ids = {name: log_id for log_id, name in self._replaces.items()}
        for extent in extents:
            parts.setdefault(extent.log_id, []).append(extent)
            if ids.setdefault(extent.log, extent.log_id) != extent.log_id:
                raise AppendAbortedError(
                    f"append {self._identity!r} version {self._version}: records were staged for "
                    f"two logs {extent.log!r} (ids {ids[extent.log]}, {extent.log_id}), for it was "
                    "renamed or deleted, and created again, meanwhile: stage them again"
                )
        names = self._names(extents)
        return {
            LogKey(name=names[log_id], log_id=log_id): parts[log_id]
            for log_id in sorted(parts, key=lambda log_id: names[log_id])
        }

    def _names(self, extents: Sequence[StagedExtent]) -> dict[str, str]:
        """Return the logs of this append: their names by id."""
        return self._replaces | {extent.log_id: extent.log for extent in extents}

    def _head_of(self, log: LogKey, found: _Found) -> VersionedHead:
        try:
            at = self._context.logs.head_of(log, found.heads[log.log_id])
        except LogNotFoundError as error:
            raise AppendAbortedError(f"records were staged for a log, but {error}") from error
        require_unsealed(at)  # before the wait for its writer
        return at

    def _count(
        self, ledger_id: int, node: StagedNode | None, extents: Sequence[StagedExtent]
    ) -> Op:
        """Return the operation that counts the extents of a ledger as committed."""
        if node is None or node.staged.settled:
            raise AppendAbortedError(
                f"append {self._identity!r} version {self._version}: staged ledger {ledger_id} is "
                "gone; it was aborted, or removed after its process ended"
            )
        if node.staged.identity != self._staged_as:
            raise ConfigurationError(
                f"staged ledger {ledger_id} is of {node.staged.identity!r}: it cannot be committed "
                f"by an append that is staged as {self._staged_as!r}"
            )
        taken = [(e.first_entry_id, e.last_entry_id) for e in extents if e.ledger_id == ledger_id]
        # A second append with the same extents would show their records twice in a log.
        staged = node.staged.with_committed(taken)
        if staged is None:
            raise AppendAbortedError(
                f"append {self._identity!r} version {self._version}: entries {taken} of staged "
                f"ledger {ledger_id} are in a log already, of {node.staged.committed}"
            )
        return node.put(staged)

    def _record_ops(self, record: CommitRecord | None, node: Versioned | None) -> tuple[Op, ...]:
        if record is None:
            return ()
        path = self._context.paths.commit(self._identity)
        value = encode(replace(record, committed_ms=self._context.clock.now_ms()))
        return (Create(path, value) if node is None else Put(path, value, node.version),)

    async def abort(self, extents: Sequence[StagedExtent] | None = None) -> None:
        """Give the append up: it can never commit.

        It drops the ledgers of this append's writers, and those ledgers of `extents` whose process
        is gone or has closed its writer; a live writer drops its own.  It settles shared ledgers
        only if an earlier round found them abandoned.  Raises: MetadataError.
        """
        self._aborted = True
        await self.aclose()
        self._context.lifetime.require_open()
        if not self._round:
            ledger_ids = sorted({extent.ledger_id for extent in extents or ()})
            for node in (await read_staged(self._context, ledger_ids)).values():
                if not node.staged.owner and not node.staged.extents:
                    await drop(self._context, node)
        listed = await list_staged(self._context, self._staged_as)
        await settle(self._context, listed, in_round=self._round)

    async def _tidy(self) -> None:
        """Close and settle ledgers that are not needed after the decision."""
        if self._writer is not None:
            await self._writer.aclose()
            # Committed and closed by this process: no more of it can be committed.
            self._listed = [*(self._listed or ()), *(e.ledger_id for e in self._staged)]
        await settle(self._context, sorted(set(self._listed or ())), in_round=self._round)
        if self._result is not None and self._result.committed:
            await ask_for_upkeep(self._context, self._plan_tried.to_merge)
            for log in self._plan_tried.appended if self._replaces else ():
                with contextlib.suppress(LogNotFoundError):  # it was deleted meanwhile
                    await remove_truncated(self._context, await self._context.logs.read(log))
            if not self._keep_record:
                await self._drop_record()

    async def _drop_record(self) -> None:
        """Remove the commit record if it is this append's; a record that stays does no harm."""
        path = self._context.paths.commit(self._identity)
        try:
            node = await persistently(lambda: self._context.store.get(path, fresh=True))
            record = self._record_of(node)
            if node is not None and record is not None and record.token == self._token:
                await self._context.store.delete(path, version=node.version)
        except DLError as error:
            logger.warning("the record of append %s stays: %s", self._identity, error)

    def _require_alive(self) -> None:
        self._context.lifetime.require_open()
        if self._aborted:
            raise AppendAbortedError(
                f"append {self._identity!r} version {self._version} was aborted"
            )

    async def aclose(self) -> None:
        """Close the writer; staged records that were not committed are dropped."""
        if self._writer is not None and self._result is None:
            await self._writer.aclose(delete=True)


def _clock_of(run: AppendRun | None, now_s: float) -> int:
    """Return the time of the appender's clock: ours, unless another machine passed its own."""
    told_ns = None if run is None else run.commits_ns
    return int(now_s * 1e9) if told_ns is None else told_ns


def check_identity(identity: str) -> None:
    """Raise `ConfigurationError` unless `identity` can name appends."""
    require_kind("identity", identity, str)
    size = len(identity.encode())
    if not 0 < size <= IDENTITY_BYTES_MAX:
        raise ConfigurationError(
            f"identity={identity!r}: expected 1 … {IDENTITY_BYTES_MAX} bytes, not {size}"
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


def _require_fit(ops: Sequence[Op], extents: Sequence[StagedExtent]) -> None:
    try:
        require_request_size(ops)
    except TransactionTooLargeError as error:
        logs = len({extent.log_id for extent in extents})
        raise TransactionTooLargeError(
            f"an append of {len(extents)} extents to {logs} logs is too large: {error}. Nothing "
            f"was appended; {LOGS_PER_APPEND} logs with one extent each fit: let fewer tasks write "
            "or write to fewer logs at once"
        ) from error
