"""A replicated log service: namespaces of logs, written and read from asyncio.

`dlcore.sync` is the blocking API with the same names.  Importing this package loads neither kazoo
nor pyarrow.  Opening a namespace loads pyarrow, and kazoo if it is directly over ZooKeeper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.zookeeper import ZooKeeperAccess
from dlcore.base.config import LedgerClientConfig, LogConfig, LogSettings, QuorumConfig
from dlcore.base.errors import DLError
from dlcore.base.extras import missing_packages_explained
from dlcore.base.ids import DLSN, BookieId
from dlcore.base.records import LogRecord, LogRecordWithDLSN
from dlcore.base.statistics import NamespaceStatistics
from dlcore.log.metadata.commits import AppendRun, SharedStaging
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
from dlcore.log.reading.status import LogStatus

if TYPE_CHECKING:
    from dlcore.api.copying import copy_log
    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace
    from dlcore.backends.opening import open_namespace
    from dlcore.backends.scanning import scan
    from dlcore.log.reading.log_range import LogRange
    from dlcore.log.reading.merged import AsyncMergedReader
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.log.reading.watching import LogWatch
    from dlcore.log.staging.faces import StagedAppend, StagingWriter
    from dlcore.log.streams import AsyncAppendOnlyStreamReader, AsyncAppendOnlyStreamWriter
    from dlcore.log.writing.records_writer import AsyncLogWriter

__all__ = [
    "DLSN",
    "AppendRun",
    "AsyncAppendOnlyStreamReader",
    "AsyncAppendOnlyStreamWriter",
    "AsyncLogReader",
    "AsyncLogWriter",
    "AsyncMergedReader",
    "BookieId",
    "CommitResult",
    "DLError",
    "DistributedLogManager",
    "ExtentView",
    "LedgerClientConfig",
    "LogChange",
    "LogChangeKind",
    "LogConfig",
    "LogRange",
    "LogRecord",
    "LogRecordWithDLSN",
    "LogSettings",
    "LogSnapshot",
    "LogStatus",
    "LogWatch",
    "Namespace",
    "NamespaceStatistics",
    "QuorumConfig",
    "ScanBatch",
    "ScanRange",
    "SegmentView",
    "SharedStaging",
    "StagedAppend",
    "StagedExtent",
    "StagingWriter",
    "TlsFiles",
    "ZooKeeperAccess",
    "copy_log",
    "open_namespace",
    "scan",
]

_HEAVY = {
    "AsyncAppendOnlyStreamReader": "dlcore.log.streams",
    "AsyncAppendOnlyStreamWriter": "dlcore.log.streams",
    "AsyncLogReader": "dlcore.log.reading.rows_reader",
    "AsyncLogWriter": "dlcore.log.writing.records_writer",
    "AsyncMergedReader": "dlcore.log.reading.merged",
    "DistributedLogManager": "dlcore.api.log",
    "LogRange": "dlcore.log.reading.log_range",
    "LogWatch": "dlcore.log.reading.watching",
    "Namespace": "dlcore.api.namespace",
    "StagedAppend": "dlcore.log.staging.faces",
    "StagingWriter": "dlcore.log.staging.faces",
    "copy_log": "dlcore.api.copying",
    "open_namespace": "dlcore.backends.opening",
    "scan": "dlcore.backends.scanning",
}
"""Names that are imported at first use; most of their modules load pyarrow."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("distributed-dlog")
    module = _HEAVY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    with missing_packages_explained():
        return getattr(importlib.import_module(module), name)
