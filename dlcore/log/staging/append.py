"""Atomic appends over ZooKeeper and bookies: the driver of the commit, and the tidying after it.

`commit.py` is the protocol of the commit.  Tidying comes after the answer to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, assert_never

from typing_extensions import override

from dlcore.base.background import together
from dlcore.base.errors import (
    AppendAbortedError,
    DLError,
    LogNotFoundError,
    MetadataVersionError,
    NoNodeError,
)
from dlcore.base.machines import Pause, run_to_end
from dlcore.log.metadata.values import CommitRecord
from dlcore.log.recovery import recover_log
from dlcore.log.staging.commit import (
    AppendTerms,
    AwaitedLock,
    AwaitLocks,
    Begin,
    Commit,
    Event,
    Look,
    Looked,
    RecoverLog,
    Signal,
    Work,
)
from dlcore.log.staging.faces import StagedAppend
from dlcore.log.staging.writer import DirectStagingWriter
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.log.upkeep.requests import ask_for_upkeep
from dlcore.log.upkeep.staged import drop, list_staged, read_staged, settle
from dlcore.metadata.attempts import Store
from dlcore.metadata.one_node import persistently
from dlcore.metadata.port import UNANSWERED
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pyarrow as pa

    from dlcore.base.config import LogConfig
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.commits import AppendRun, SharedStaging
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.log.reading.scan import CommitResult
    from dlcore.metadata.port import Versioned

logger = logging.getLogger(__name__)


class CommitDriver:
    """Runs the commit of one append, for one caller at a time."""

    def __init__(self, context: LogContext, commit: Commit) -> None:
        self._context = context
        self._commit = commit
        self._turn = asyncio.Lock()

    async def commit(
        self, extents: Sequence[StagedExtent], replaces: Mapping[str, str]
    ) -> CommitResult:
        """Append `extents` to their logs; those of `replaces`, by id, lose their earlier records.

        Raises:
            DLError: as `StagedAppend.commit`.
        """
        async with self._turn:
            if self._commit.result is not None:
                return self._commit.result
            begin = Begin(tuple(extents), replaces, asyncio.get_running_loop().time())
            return await run_to_end(self._commit, begin, self._answer_of)

    async def _answer_of(self, work: Work) -> Event:
        context = self._context
        match work:
            case Look(paths, lists):
                return await self._look(paths, lists)
            case AwaitLocks():
                await self._await_locks(work)
                return Signal.WAIT_OVER
            case RecoverLog(at):
                await recover_log(context, at, only_this=True)
                return Signal.RECOVERED
            case Store(ops):
                await context.store.multi(ops)
                return Signal.STORED
            case Pause(s_max, error):
                logger.info("%s is tried again: %s", self._commit.terms, error)
                await asyncio.sleep(context.rng.uniform(0, s_max))
                return Signal.PAUSE_OVER
            case _:
                assert_never(work)

    async def _look(self, paths: tuple[str, ...], lists: str | None) -> Looked:
        context = self._context

        async def read() -> tuple[list[Versioned | None], list[int]]:
            if lists is None:
                return await context.store.get_many(paths, fresh=True), []
            return await together(
                context.store.get_many(paths, fresh=True), list_staged(context, lists)
            )

        nodes, listed = await persistently(read)
        now = asyncio.get_running_loop().time()
        return Looked(nodes, listed, now, context.clock.now_ms())

    async def _await_locks(self, wanted: AwaitLocks) -> None:
        if wanted.report is not None:
            logger.warning(
                "%s; to do: if the writer hangs, end it; else nothing, the append goes on when it "
                "has the lock",
                wanted.report,
            )
        try:
            async with asyncio.timeout(wanted.at_most_s):
                await together(*map(self._await_lock, wanted.locks))
        except TimeoutError:
            logger.debug("locks have not changed: %s", [each.log.name for each in wanted.locks[:5]])

    async def _await_lock(self, lock: AwaitedLock) -> None:
        context, changed = self._context, asyncio.Event()
        path = context.logs.paths_of(lock.log).lock
        # Before the look at the holder, so that a change after it is not missed.
        unsubscribe = context.store.watch(path, changed.set, children=False)
        try:
            if lock.ask is not None:
                try:
                    await context.store.multi([lock.ask])
                # The lock has probably changed: the machine looks again.
                except (MetadataVersionError, NoNodeError, *UNANSWERED):
                    return
            while await context.logs.locks.holder_of(lock.log) == lock.holder:
                await changed.wait()
                changed.clear()
        finally:
            unsubscribe()


class DirectStagedAppend(StagedAppend):
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
        super().__init__(identity, version, shared=shared, run=run, lock_timeout_s=lock_timeout_s)
        staged_as = identity if shared is None else shared.identity
        self._context = context
        self._round = "" if shared is None else shared.round
        self._keep_record = keep_record
        self._terms = AppendTerms(
            identity=identity,
            version=version,
            token=token or context.clock.new_token(),
            staged_as=staged_as,
            run=run,
            strict=strict,
            after=after,
            lock_timeout_s=lock_timeout_s,
        )
        self._commit = Commit(context.paths, self._terms, config, context.client_id)
        self._driver = CommitDriver(context, self._commit)
        self._writer = DirectStagingWriter(context, owner, staged_as, config)
        self._staged: list[StagedExtent] = []
        self._aborted = False

    def __repr__(self) -> str:
        return f"<StagedAppend {self._terms.identity!r} version={self._terms.version}>"

    @override
    async def write_batch(self, log: str, batch: pa.RecordBatch) -> None:
        self._require_alive()
        await self._writer.write_batch(log, batch)

    @override
    async def commit(
        self, extents: Sequence[StagedExtent] | None = None, *, replaces: Collection[str] = ()
    ) -> CommitResult:
        self._require_alive()
        if self._commit.result is None:
            if extents is None:
                extents = await self.stage()
            found = [await self._context.logs.find(name) for name in sorted(replaces)]
            await self._driver.commit(extents, {log.log_id: log.name for log in found})
            # In the background: the append is decided, and an error of this must not reach its
            # caller.
            await self._context.tidier.submit(f"tidying after {self!r}", self._tidy)
        assert self._commit.result is not None
        return self._commit.result

    @override
    async def stage(self) -> list[StagedExtent]:
        self._staged += await self._writer.stage()
        return list(self._staged)

    @override
    async def abort(self, extents: Sequence[StagedExtent] | None = None) -> None:
        self._aborted = True
        await self.aclose()
        self._context.lifetime.require_open()
        if not self._round:
            ledger_ids = sorted({extent.ledger_id for extent in extents or ()})
            for node in (await read_staged(self._context, ledger_ids)).values():
                if not node.staged.owner and not node.staged.extents:
                    await drop(self._context, node)
        listed = await list_staged(self._context, self._terms.staged_as)
        await settle(self._context, listed, in_round=self._round)

    async def _tidy(self) -> None:
        """Close and settle ledgers that are not needed after the decision."""
        context, commit = self._context, self._commit
        await self._writer.aclose()
        # This process closed the ledgers, so no further commit can use them.
        unsettled = {*(commit.listed or ()), *(extent.ledger_id for extent in self._staged)}
        await settle(context, sorted(unsettled), in_round=self._round)
        if commit.result is not None and commit.result.committed:
            await ask_for_upkeep(context, commit.planned.to_merge)
            for log in commit.planned.appended if commit.replaces else ():
                with contextlib.suppress(LogNotFoundError):  # it was deleted meanwhile
                    await remove_truncated(context, await context.logs.read(log))
            if not self._keep_record:
                await self._drop_record()

    async def _drop_record(self) -> None:
        """Remove the commit record if it is this append's; a record that stays does no harm."""
        store, path = self._context.store, self._context.paths.commit(self._terms.identity)
        try:
            node = await persistently(lambda: store.get(path, fresh=True))
            if node is None:
                return
            if decode(CommitRecord, node.value, source=path).token == self._terms.token:
                await store.delete(path, version=node.version)
        except DLError as error:
            logger.warning(
                "the record of %s stays: %s; to do: nothing, dlog staging clean or auto-recovery "
                "removes it",
                self._terms,
                error,
            )

    def _require_alive(self) -> None:
        self._context.lifetime.require_open()
        if self._aborted:
            raise AppendAbortedError(f"{self._terms} was aborted")

    @override
    async def aclose(self) -> None:
        if self._commit.result is None:
            await self._writer.aclose(delete=True)
