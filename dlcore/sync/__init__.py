"""The blocking API: the same names as the async one, over one background event loop.

Each method only runs its async twin on the portal, and raises the twin's errors.  Any method raises
`AlreadyClosedError` once its object or namespace is closed, and `MetadataError` or `BookieError`
while the cluster does not answer.  Only one thing is added: `LogWriter.write` buffers records in
the calling thread and passes them on in bulk.

Objects that are open when the process exits are closed once all non-daemon threads have ended, but
not after `os._exit` or a signal's default action.  For SIGTERM, ``signal.signal(signal.SIGTERM,
lambda *_: sys.exit(143))`` makes it a normal exit.  In a forked child the use of the parent's
objects raises `ConfigurationError`, and closing them does nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dlcore.backends.opening import open_namespace as open_async
from dlcore.base.config import SESSION_TIMEOUT_S
from dlcore.base.statistics import NamespaceStatistics
from dlcore.log.metadata.commits import AppendRun, CommitStatus, SharedStaging
from dlcore.log.metadata.names import LogChange, LogChangeKind
from dlcore.log.metadata.segment import StagedExtent
from dlcore.log.reading.scan import (
    CommitResult,
    ExtentView,
    LogSnapshot,
    ScanBatch,
    ScanRange,
    SegmentView,
)
from dlcore.log.reading.scan_run import ScanRun
from dlcore.log.reading.status import LogStatus
from dlcore.sync.buffering import WritersNamespace
from dlcore.sync.log_range import LogRange
from dlcore.sync.manager import DistributedLogManager
from dlcore.sync.merged import MergedReader
from dlcore.sync.namespace_calls import NamespaceCalls
from dlcore.sync.portal import Portal, shared_portal
from dlcore.sync.prefetch import scan, scan_runs
from dlcore.sync.reader import LogReader
from dlcore.sync.staging import StagedAppend, StagingWriter
from dlcore.sync.stream import AppendOnlyStreamReader, AppendOnlyStreamWriter
from dlcore.sync.watch import LogWatch
from dlcore.sync.writer import LogWriter

if TYPE_CHECKING:
    from dlcore.api import namespace as aio
    from dlcore.backends.flight.bearer import Token
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.access.zookeeper import ZooKeeperAccess
    from dlcore.base.config import LedgerClientConfig, LogConfig

__all__ = [
    "AppendOnlyStreamReader",
    "AppendOnlyStreamWriter",
    "AppendRun",
    "CommitResult",
    "CommitStatus",
    "DistributedLogManager",
    "ExtentView",
    "LogChange",
    "LogChangeKind",
    "LogRange",
    "LogReader",
    "LogSnapshot",
    "LogStatus",
    "LogWatch",
    "LogWriter",
    "MergedReader",
    "Namespace",
    "NamespaceStatistics",
    "ScanBatch",
    "ScanRange",
    "ScanRun",
    "SegmentView",
    "SharedStaging",
    "StagedAppend",
    "StagedExtent",
    "StagingWriter",
    "copy_log",
    "open_namespace",
    "scan",
    "scan_runs",
]

logger = logging.getLogger(__name__)


def open_namespace(
    uri: str,
    *,
    config: LogConfig | None = None,
    client_config: LedgerClientConfig | None = None,
    create: bool = False,
    client_id: str | None = None,
    tls: TlsFiles | None = None,
    zookeeper: ZooKeeperAccess | None = None,
    token: Token | None = None,
    capabilities: bool = False,
    encryption_keys: str | None = None,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    connect_timeout_s: float = SESSION_TIMEOUT_S,
    patience_s: float | None = None,
) -> Namespace:
    """Open the namespace at `uri`, ``distributedlog://zk1:2181/path`` or ``grpc://proxy1:4190``.

    Arguments and errors are those of `dlcore.open_namespace`.
    """
    opening = open_async(
        uri,
        config=config,
        client_config=client_config,
        create=create,
        client_id=client_id,
        tls=tls,
        zookeeper=zookeeper,
        token=token,
        capabilities=capabilities,
        encryption_keys=encryption_keys,
        session_timeout_s=session_timeout_s,
        connect_timeout_s=connect_timeout_s,
        patience_s=patience_s,
    )
    portal = shared_portal()
    return Namespace(portal, portal.call(opening))


class Namespace(NamespaceCalls, WritersNamespace):
    """A collection of logs."""

    def __init__(self, portal: Portal, namespace: aio.Namespace) -> None:
        super().__init__(portal, namespace)
        self._namespace = namespace

    def open_log(
        self, name: str, *, config: LogConfig | None = None, create_if_missing: bool = False
    ) -> DistributedLogManager:
        """Open a log; if it does not exist, create it with `create_if_missing`.

        Raises: InvalidLogNameError, LogNotFoundError, MetadataError.
        """
        opening = self._namespace.open_log(name, config=config, create_if_missing=create_if_missing)
        manager = self._call(opening)
        return DistributedLogManager(self._portal, manager, self._writers)


def copy_log(source: DistributedLogManager, namespace: Namespace, target: str) -> int:
    """Copy the readable records of a log to another, each once however often this is called.

    Return how many records this call copied.  Errors are those of `dlcore.copy_log`.
    """
    from dlcore.api.copying import copy_log as copy_async

    return source._call(copy_async(source._manager, namespace._namespace, target))
