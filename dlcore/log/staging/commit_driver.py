"""Commits an append: performs the effects of a `Commit`, and feeds the answers back."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from dlcore.base.background import together
from dlcore.base.errors import MetadataVersionError, NoNodeError
from dlcore.base.steps import Pause, run_to_end
from dlcore.log.metadata.staged import list_staged
from dlcore.log.metadata.store import persistently
from dlcore.log.recovery import recover_log
from dlcore.log.staging.commit import (
    AwaitedLock,
    AwaitLocks,
    Begin,
    Event,
    Look,
    Looked,
    RecoverLog,
    Signal,
    Work,
)
from dlcore.metadata.attempts import Store
from dlcore.metadata.port import UNANSWERED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlcore.log.context import LogContext
    from dlcore.log.reading.scan import CommitResult, StagedExtent
    from dlcore.log.staging.commit import Commit
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
            return await asyncio.gather(
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
        unsubscribe = context.store.watch(path, changed.set, children=False)
        try:
            if lock.ask is not None:
                try:
                    await context.store.multi([lock.ask])
                except (MetadataVersionError, NoNodeError, *UNANSWERED):
                    return
            while await context.logs.read_lock(lock.log) == lock.holder:
                await changed.wait()
                changed.clear()
        finally:
            unsubscribe()
