"""Atomic appends: staged extents enter any number of logs in one metadata transaction.

The transaction writes the segments of all logs, their guards, and the record of the commit, and
marks the staged ledgers.  It is planned from what is stored; if anything of that changed, it is
planned again. A lost reply is classified by the commit record, which carries the token of the
append that wrote it.  What the record means for an append is decided in `commits.py`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from dlcore.errors import (
    AppendAbortedError,
    ConfigurationError,
    DLError,
    DuplicateAppendError,
    MetadataConnectionError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    OwnershipAcquireFailedError,
)
from dlcore.log import codec
from dlcore.log.changes import SegmentLimits, plan_append
from dlcore.log.commits import Decision, Verdict, decide
from dlcore.log.reaping import drop_staged, read_staged, reap
from dlcore.log.recovery import recover_log
from dlcore.log.scan import CommitResult, StagedExtent
from dlcore.log.staging import StagingOwner, StagingWriter
from dlcore.log.store import UNANSWERED, persistently, require_change_size
from dlcore.metadata.port import Check, Create, Op, Put, Versioned

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from dlcore.config import LogConfig
    from dlcore.ids import DLSN
    from dlcore.log.commits import AppendRun
    from dlcore.log.context import LogContext
    from dlcore.log.metadata import CommitRecord, LockHolder, LogState

logger = logging.getLogger(__name__)

_ATTEMPTS_MAX = 100
_CONFLICT_DELAY_S_MAX = 0.05
_LOCK_LOOKS_EVERY_S = 1.0
"""How often a lock that is waited for is looked at, should no watch tell that it is gone."""
IDENTITY_BYTES_MAX = 200


@dataclass(frozen=True, slots=True)
class _Plan:
    ops: tuple[Op, ...]
    logs: dict[str, tuple[DLSN, DLSN]]


class _LockedError(Exception):
    """A writer owns a log; never leaves this module."""

    def __init__(self, log: str, holder: LockHolder) -> None:
        super().__init__(log, holder)
        self.log = log
        self.holder = holder


class StagedAppend:
    """One atomic append, named by an identity, a version, and its place among the run's appends.

    Of one identity the versions go up; what was committed of a version is not committed again, and
    `commit` says so.  Use `Namespace.begin_append`.
    """

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        identity: str,
        version: int,
        *,
        run: AppendRun | None,
        lock_timeout_s: float,
        config: LogConfig,
        keep_record: bool = True,
    ) -> None:
        check_identity(identity)
        if not 0 <= version < 2**63:
            raise ConfigurationError(f"version={version}: expected 0 … 2**63-1")
        self._context = context
        self._owner = owner
        self._identity = identity
        self._version = version
        self._run = run
        self._lock_timeout_s = lock_timeout_s
        self._keep_record = keep_record
        self._result: CommitResult | None = None
        self._config = config
        self._limits = SegmentLimits(
            size_bytes_max=config.segment_bytes_max,
            age_max_ms=int(config.segment_age_max_s * 1000),
        )
        self._token = context.clock.new_token()
        self._writers: list[StagingWriter] = []
        self._staged: list[StagedExtent] = []
        self._tried = Decision(Verdict.APPEND)
        self._logs: dict[str, tuple[DLSN, DLSN]] = {}
        self._aborted = False

    def __repr__(self) -> str:
        return f"<StagedAppend {self._identity!r} version={self._version}>"

    async def open_writer(self, log: str) -> StagingWriter:
        """Open a staging writer; `commit` without extents takes what all of them staged."""
        self._require_alive()
        state = await self._context.logs.read(log)
        writer = StagingWriter(
            self._context, self._owner, state.metadata, self._identity, self._config
        )
        self._writers.append(writer)
        return writer

    async def commit(self, extents: Sequence[StagedExtent] | None = None) -> CommitResult:
        """Append `extents`, in the given order per log: all or nothing, once.

        Args:
            extents: what to append; None for what this append's own writers hold.

        Raises:
            AppendAbortedError: it was aborted, or staged data is gone.
            DuplicateAppendError: appends of this version overlapped, or another run of the appender
                has followed this one: whether it was committed cannot be told.
            OwnershipAcquireFailedError: a writer owned one of the logs during `lock_timeout_s`.
            EndOfStreamError: one of the logs is sealed.
            TransactionIdOutOfOrderError: the extents' own transaction ids do not follow the log's.
            MetadataConnectionError: whether it was committed is unknown; calling again tells.
        """
        self._require_alive()
        if self._result is None:
            if extents is None:
                extents = await self._stage_own()
            _check_extents(extents, self._identity)
            # Remembered here too, for the record that tells of it may be removed now.
            self._result = await self._commit(extents)
        await self._tidy()
        return self._result

    async def _stage_own(self) -> list[StagedExtent]:
        for writer in self._writers:
            extent = await writer.stage()
            if extent is not None:
                self._staged.append(extent)
        return self._staged

    async def _commit(self, extents: Sequence[StagedExtent]) -> CommitResult:
        loop = asyncio.get_running_loop()
        begun_ns = int(loop.time() * 1e9)
        deadline = loop.time() + self._lock_timeout_s
        attempts = 0
        while attempts < _ATTEMPTS_MAX:
            node = await self._read_record()
            decision = decide(
                self._record_of(node),
                version=self._version,
                token=self._token,
                run=self._run,
                now_ns=begun_ns,
            )
            if decision.verdict is Verdict.KNOWN:
                return self._conclude(self._tried)
            plan = _Plan((), {})
            if decision.verdict is Verdict.APPEND:
                try:
                    plan = await self._plan(extents)
                except _LockedError as locked:
                    await self._wait_for_lock(locked, deadline=deadline)
                    continue
            ops = (*plan.ops, *self._record_ops(decision.record, node))
            if not ops:
                return self._conclude(decision)
            require_change_size(ops)
            self._tried, self._logs = decision, plan.logs
            attempts += 1
            try:
                await self._context.store.multi(ops)
            except (MetadataVersionError, NodeExistsError, NoNodeError) as error:
                logger.info("append %s v%d overtaken: %s", self._identity, self._version, error)
            except UNANSWERED as error:
                logger.info("append %s v%d unanswered: %s", self._identity, self._version, error)
            else:
                return self._conclude(decision)
            await asyncio.sleep(self._context.rng.uniform(0, _CONFLICT_DELAY_S_MAX))
        raise MetadataConnectionError(
            f"append {self._identity!r} version {self._version}: {_ATTEMPTS_MAX} attempts to "
            "commit were overtaken or not answered"
        )

    async def _read_record(self) -> Versioned | None:
        path = self._context.paths.commit(self._identity)

        async def read() -> Versioned | None:
            await self._context.store.sync(path)
            return await self._context.store.get(path)

        return await persistently(read)

    def _record_of(self, node: Versioned | None) -> CommitRecord | None:
        if node is None:
            return None
        return codec.decode_commit(node.value, path=self._context.paths.commit(self._identity))

    def _conclude(self, decision: Decision) -> CommitResult:
        """Return the outcome of a decision that is stored."""
        match decision.verdict:
            case Verdict.APPEND:
                return CommitResult(committed=True, already_committed=False, logs=self._logs)
            case Verdict.SKIP:
                return CommitResult(committed=False, already_committed=True)
            case Verdict.CONFLICTING:
                why = (
                    "appends of this version overlapped; they have no order that a repetition "
                    "could keep, so which of them were committed cannot be told"
                )
            case Verdict.SUPERSEDED:
                why = "a later run of the appender has begun to append this version"
            case Verdict.KNOWN:
                raise AssertionError("what is known was decided before")
            case _:
                assert_never(decision.verdict)
        raise DuplicateAppendError(f"append {self._identity!r} version {self._version}: {why}")

    async def _wait_for_lock(self, locked: _LockedError, *, deadline: float) -> None:
        """Wait until the lock may be free, or raise if the time is up.

        The lock of a dead writer goes with its session.
        """
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise OwnershipAcquireFailedError(
                f"log {locked.log!r} is owned by the writer {locked.holder.owner} (waited "
                f"{self._lock_timeout_s:g} s)",
                owner=locked.holder.owner,
            )
        logs, changed = self._context.logs, asyncio.Event()
        unsubscribe = self._context.store.watch(logs.paths_of(locked.log).lock, changed.set)
        try:
            async with asyncio.timeout(min(left_s, _LOCK_LOOKS_EVERY_S)):
                while await logs.read_lock(locked.log) == locked.holder:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            logger.debug("log=%s is still owned by %s", locked.log, locked.holder.owner)
        finally:
            unsubscribe()

    async def _plan(self, extents: Sequence[StagedExtent]) -> _Plan:
        ops: list[Op] = []
        logs: dict[str, tuple[DLSN, DLSN]] = {}
        for log in sorted({extent.log for extent in extents}):
            part = [extent for extent in extents if extent.log == log]
            state = await self._appendable_state(log, part)
            change, first, end = plan_append(
                self._context.logs.paths_of(log),
                state,
                part,
                now_ms=self._context.clock.now_ms(),
                limits=self._limits,
            )
            ops += change.ops
            logs[log] = (first, end)
        for ledger_id in sorted({extent.ledger_id for extent in extents}):
            ops.append(await self._mark(ledger_id))
        return _Plan(tuple(ops), logs)

    async def _appendable_state(self, log: str, extents: Sequence[StagedExtent]) -> LogState:
        """Return the log's state, recovered: nobody writes to it."""
        state = await self._context.logs.read(log)
        stale = [extent for extent in extents if extent.log_id != state.metadata.log_id]
        if stale:
            raise AppendAbortedError(
                f"log {log!r} was deleted and created again since records were staged for it"
            )
        # After the state: what is open in it and has no owner now was left by a dead writer.
        holder = await self._context.logs.read_lock(log)
        if holder is not None:
            raise _LockedError(log, holder)
        _check_not_appended(state, extents)
        return await recover_log(self._context, state)

    async def _mark(self, ledger_id: int) -> Op:
        node = await read_staged(self._context, self._identity, ledger_id)
        if node is None:
            raise AppendAbortedError(
                f"append {self._identity!r} version {self._version}: staged ledger {ledger_id} is "
                "gone; it was aborted, or reaped after its process ended"
            )
        if node.staged.committed:
            return Check(node.path, node.version)
        return Put(node.path, codec.encode_staged(node.as_committed()), node.version)

    def _record_ops(self, record: CommitRecord | None, node: Versioned | None) -> tuple[Op, ...]:
        if record is None:
            return ()
        path = self._context.paths.commit(self._identity)
        value = codec.encode_commit(record)
        return (Create(path, value) if node is None else Put(path, value, node.version),)

    async def abort(self, extents: Sequence[StagedExtent] | None = None) -> None:
        """Give the append up: it can never commit.

        Drops what this append's writers staged, and of `extents` those whose process is gone or has
        closed its writer; a writer that lives drops its own.
        """
        self._aborted = True
        for writer in self._writers:
            await writer.aclose(delete=True)
        for ledger_id in sorted({extent.ledger_id for extent in extents or ()}):
            node = await read_staged(self._context, self._identity, ledger_id)
            if node is not None and not node.staged.owner and not node.staged.committed:
                await drop_staged(self._context, node)
        await self._tidy()

    async def _tidy(self) -> None:
        try:
            for writer in self._writers:
                await writer.aclose()
            await reap(self._context, self._identity)
        except DLError as error:
            # The append is decided; what is left over is reaped with the next one.
            logger.warning("reaping after append %s failed: %s", self._identity, error)
        if self._result is not None and self._result.committed and not self._keep_record:
            await self._drop_record()

    async def _drop_record(self) -> None:
        """Remove the commit record if it is this append's; what is left over harms nobody."""
        path = self._context.paths.commit(self._identity)
        try:
            node = await self._read_record()
            record = self._record_of(node)
            if node is not None and record is not None and record.token == self._token:
                await self._context.store.delete(path, version=node.version)
        except DLError as error:
            logger.warning("the record of append %s stays: %s", self._identity, error)

    def _require_alive(self) -> None:
        if self._aborted:
            raise AppendAbortedError(
                f"append {self._identity!r} version {self._version} was aborted"
            )

    async def aclose(self) -> None:
        """Close the writers; what was staged and not committed is dropped."""
        for writer in self._writers:
            await writer.aclose(delete=True)

    async def __aenter__(self) -> StagedAppend:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def check_identity(identity: str) -> None:
    """Raise `ConfigurationError` unless `identity` can name appends."""
    size = len(identity.encode())
    if not 0 < size <= IDENTITY_BYTES_MAX:
        raise ConfigurationError(
            f"identity={identity!r}: expected 1 … {IDENTITY_BYTES_MAX} bytes, not {size}"
        )


def _check_extents(extents: Sequence[StagedExtent], identity: str) -> None:
    taken: dict[int, list[StagedExtent]] = {}
    for extent in extents:
        if extent.identity != identity:
            raise ConfigurationError(
                f"an extent staged for {extent.identity!r} cannot be committed by {identity!r}"
            )
        for other in taken.setdefault(extent.ledger_id, []):
            if _overlap(extent, other.first_entry_id, other.last_entry_id):
                raise ConfigurationError(f"the same entries are given twice: {other!r}, {extent!r}")
        taken[extent.ledger_id].append(extent)


def _check_not_appended(state: LogState, extents: Sequence[StagedExtent]) -> None:
    """Refuse entries that the log holds already: they would be there twice."""
    staged: dict[int, list[StagedExtent]] = {}
    for each in extents:
        staged.setdefault(each.ledger_id, []).append(each)
    for segment in state.segments:
        for extent in segment.closed_extents:
            last = extent.last_entry_id
            assert last is not None
            if any(
                _overlap(other, extent.first_entry_id, last)
                for other in staged.get(extent.ledger_id, ())
            ):
                raise AppendAbortedError(
                    f"log {state.name!r} holds entries {extent.first_entry_id} … {last} of staged "
                    f"ledger {extent.ledger_id} already"
                )


def _overlap(extent: StagedExtent, first: int, last: int) -> bool:
    return extent.first_entry_id <= last and first <= extent.last_entry_id
