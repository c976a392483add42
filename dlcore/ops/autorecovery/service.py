"""Auto-recovery of one process: a candidate for auditor, and a worker.

Any number of these processes may run.  One is the auditor; all of them repair.  Safety depends on
none of them, and none can harm it: replicas are added before the metadata changes, and the metadata
changes only by compare-and-set.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.base.background import BackgroundTasks, end_tasks, reported_to_callers
from dlcore.ops.autorecovery.auditor import Auditor
from dlcore.ops.autorecovery.election import Election
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.metrics import RecoveryFigures
from dlcore.ops.autorecovery.runner import PausableRunner
from dlcore.ops.autorecovery.values import ElectedAuditor
from dlcore.ops.autorecovery.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.ops.autorecovery.config import AutoRecoveryConfig
    from dlcore.ops.autorecovery.repair import Mend

logger = logging.getLogger(__name__)


class AutoRecovery:
    """Runs on one event loop; the owner that opened the ports closes them.

    Args:
        context: the ports, the clock and the source of chance.
        config: delays, intervals and limits.
        owner: the auditor's name, for people.
        also: other works to run, which are paused and restarted like its own.
        figures: the counts of the process.
        mend: mends cold ledgers that are on the list; without it they are left as they are.
    """

    def __init__(
        self,
        context: NamespacePorts,
        *,
        config: AutoRecoveryConfig,
        owner: str,
        also: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
        figures: RecoveryFigures | None = None,
        mend: Mend | None = None,
    ) -> None:
        self._context = context
        self._config = config
        self._figures = figures or RecoveryFigures()
        self._candidate = ElectedAuditor(owner=owner, token=context.clock.new_token())
        self._also = also
        self._mend = mend
        self._repairs = RepairList(context.store, context.paths, context.clock)
        self._tasks = BackgroundTasks(reported_to_callers)
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<AutoRecovery {self._candidate.owner}>"

    async def run(self) -> None:
        """Audit and repair until cancelled or closed.

        It works only while it is not paused.  When its session with the metadata store ends, its
        work is cancelled at once, and begins again in a new session.
        """
        assert self._task is None, "it runs already"
        if self._is_closed:
            return
        self._task = self._tasks.start(self._run())
        try:
            await asyncio.wait([self._task])
        finally:
            await self.aclose()
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        context, config, figures = self._context, self._config, self._figures
        worker = Worker(
            context,
            self._repairs,
            config,
            token=self._candidate.token,
            figures=figures,
            mend=self._mend,
        )
        election = Election(context.store, context.paths, self._candidate)

        async def audit() -> None:
            await election.serve(
                Auditor(
                    context, self._repairs, config, on_publish=worker.look_now, figures=figures
                ).run
            )

        runner = PausableRunner(context.store, context.paths, self._repairs, figures)
        await runner.run([audit, worker.run, *self._also])

    async def aclose(self) -> None:
        """Stop, and release the role and all locks.  Idempotent."""
        self._is_closed = True
        if self._task is not None:
            await end_tasks(self._task)
