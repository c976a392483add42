"""Auto-recovery of one process: a candidate for auditor, and a worker.

Any number of these processes may run.  One is the auditor; all of them repair.  Safety depends on
none of them, and none can harm it: replicas are added before the metadata changes, and the metadata
changes only by compare-and-set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from dlcore.backends.direct.metrics import METRICS as CLIENT_METRICS, samples
from dlcore.backends.direct.trial import trial_log, try_log
from dlcore.base.background import BackgroundTasks, end_tasks, reported_to_callers
from dlcore.base.errors import MetadataConnectionError, MetadataError, NodeExistsError, NoNodeError
from dlcore.base.features import own_release
from dlcore.base.http_options import http_address_of, require_http
from dlcore.base.listening.operator_port import Operated
from dlcore.metadata.binding import read_binding
from dlcore.metadata.operated import METRICS as METADATA_METRICS, session_check, source_of
from dlcore.metadata.session_node import SessionNode
from dlcore.metadata.stored import decode_or_tell, encode
from dlcore.ops.autorecovery.auditor import Auditor
from dlcore.ops.autorecovery.listing import RepairList
from dlcore.ops.autorecovery.metrics import METRICS, RecoveryFigures
from dlcore.ops.autorecovery.runner import PausableRunner, run_together
from dlcore.ops.autorecovery.values import ElectedAuditor, RecoveryMember
from dlcore.ops.autorecovery.worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
    from typing import Any

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.backends.direct.ports import NamespacePorts
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore
    from dlcore.ops.autorecovery.config import AutoRecoveryConfig
    from dlcore.ops.autorecovery.repair import Mend

logger = logging.getLogger(__name__)


def operated_recovery(
    namespace: DirectNamespace,
    config: AutoRecoveryConfig,
    figures: RecoveryFigures,
    tls: TlsInUse | None,
) -> Operated:
    """Return what the port of an auto-recovery process shows.

    Raises:
        ConfigurationError: its options are wrong, or need a certificate that is not there.
    """
    require_http(config, has_certificate=tls is not None and bool(tls.files.cert))
    context, address = namespace.log_context, http_address_of(config)
    name = trial_log("autorecovery", socket.gethostname(), address.port if address else 0)
    return Operated(
        role="autorecovery",
        metrics=(*METADATA_METRICS, *METRICS, *CLIENT_METRICS),
        sources=[
            source_of(context.store),
            figures.samples,
            partial(samples, context, namespace.get_statistics),
        ],
        checks={"metadata_store": session_check(context.store)},
        trial=partial(try_log, namespace, name),
    )


@asynccontextmanager
async def joined(ports: NamespacePorts, *, owner: str) -> AsyncGenerator[None, None]:
    """Be registered meanwhile, so that others see the release.

    `owner` is the name of the process, as its auditor has it.

    Raises:
        UnsupportedError: this release lacks a feature of the cluster.
        MetadataError: the store failed.
    """
    node = SessionNode(
        ports.store,
        ports.paths.recovery_member(ports.clock.new_token()),
        until_then="an upgrade may be finalized without asking this process",
    )
    node.value = encode(RecoveryMember(owner=owner, release=own_release()))
    try:
        await node.ensure()
        # An upgrade that is finalized from now on has asked this process, too.
        await read_binding(ports.store, ports.paths, fresh=True)
        yield
    finally:
        await node.aclose()


class Election:
    """Holds the auditor's role for one process, by an ephemeral node, or waits for it.

    For a moment two processes may both believe that they are the auditor.  This does no harm: each
    of their writes is a compare-and-set, or may be repeated.
    """

    def __init__(
        self, store: MetadataStore, paths: NamespacePaths, candidate: ElectedAuditor
    ) -> None:
        self._store = store
        self._path = paths.auditor
        self._candidate = candidate

    async def serve(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the role and do `work` in it, until it fails or the role is lost.

        Raises:
            MetadataError: the store failed.
            DLError: `work` failed.
        """
        changed = asyncio.Event()
        unsubscribe = self._store.watch(self._path, changed.set)
        try:
            while not await self._take():
                await changed.wait()
                changed.clear()
            logger.info("auditor: %s", self._candidate.owner)
            await run_together(work(), self._wait_until_lost(changed))
        finally:
            unsubscribe()
            await self._leave()

    async def _take(self) -> bool:
        """Try to create the node; return whether it belongs to this process."""
        try:
            await self._store.create(
                self._path, encode(self._candidate), ephemeral=True, make_parents=True
            )
        except NodeExistsError:
            return await self._is_ours()
        except MetadataConnectionError:
            if not await self._is_ours():
                raise  # the create may not have been sent, so no change of the node would come
        return True

    async def _is_ours(self) -> bool:
        node = await self._store.get(self._path)
        # A damaged node belongs to another process; it is removed with that session.
        tell = partial(logger.warning, "cannot read which process is the auditor: %s")
        found = decode_or_tell(ElectedAuditor, node, source=self._path, tell=tell)
        return found is not None and found.token == self._candidate.token

    async def _wait_until_lost(self, changed: asyncio.Event) -> None:
        while await self._is_ours():
            await changed.wait()
            changed.clear()
        logger.warning(
            "auditor: %s lost the role; to do: nothing, another process takes it; see to "
            "ZooKeeper if this comes often",
            self._candidate.owner,
        )

    async def _leave(self) -> None:
        """Remove the node if it is ours; without an answer it is removed with the session."""
        with contextlib.suppress(MetadataError):
            if await self._is_ours():
                with contextlib.suppress(NoNodeError):
                    await self._store.delete(self._path)


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
                    context,
                    self._repairs,
                    config,
                    on_publish=worker.look_now,
                    figures=figures.audit,
                ).run
            )

        runner = PausableRunner(context.store, context.paths, self._repairs, figures)
        await runner.run([audit, worker.run, *self._also])

    async def aclose(self) -> None:
        """Stop, and release the role and all locks.  Idempotent."""
        self._is_closed = True
        if self._task is not None:
            await end_tasks(self._task)
