"""What makes a write exactly-once: the identity of an append, and the messages tasks send back.

A streaming sink appends under (query id, batch id); a write inside ``foreachBatch`` under the
same, and the log it writes to, because one batch may write to several.  A batch write appends
under the user's ``txnAppId`` and ``txnVersion`` where given, and the log as well, else under a
token of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from dlcore.errors import UnexpectedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.sync import StagedExtent
    from dlspark.options import WriteOptions

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"
RUN_ID_PROPERTY = "spark.jobGroup.id"
_IDENTITY_BYTES_MAX = 200
_ANY_LOG = "<column>"
"""Stands for a write whose rows choose their log; no log has such a name."""
TASK_PROPERTIES = (QUERY_ID_PROPERTY, BATCH_ID_PROPERTY, RUN_ID_PROPERTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendIdentity:
    """Under which identity and version an append commits, once.

    `run_id` tells the replay of a batch in another run of its query, which is skipped, from a
    second write in the same run, which is an error.  `recurs` says that the same tasks soon append
    under this identity again, so what writes for it is worth keeping open; `is_unique`, that nobody
    ever will.
    """

    identity: str
    version: int
    run_id: str = ""
    recurs: bool = False
    is_unique: bool = False


def stream_identity(properties: Mapping[str, str | None]) -> AppendIdentity:
    """Return the identity of a streaming sink's batch, from the local properties of its task."""
    query_id, batch_id = properties.get(QUERY_ID_PROPERTY), properties.get(BATCH_ID_PROPERTY)
    if not query_id or not batch_id:
        raise UnexpectedError(
            f"the task of a streaming write lacks the properties {QUERY_ID_PROPERTY} and "
            f"{BATCH_ID_PROPERTY}, found {dict(properties)}: this version of Spark is not supported"
        )
    return AppendIdentity(
        identity=f"stream:{query_id}",
        version=int(batch_id),
        run_id=properties.get(RUN_ID_PROPERTY) or "",
        recurs=True,
    )


def batch_identity(
    options: WriteOptions, properties: Mapping[str, str | None], *, token: str
) -> AppendIdentity:
    """Return the identity of a batch write; `token` is unique to the write."""
    if options.transaction is not None:
        # What was written to one log says nothing of another.
        return AppendIdentity(
            identity=_with_target(f"txn:{options.transaction.app_id}", options.log),
            version=options.transaction.version,
        )
    if properties.get(QUERY_ID_PROPERTY) and properties.get(BATCH_ID_PROPERTY):
        within = stream_identity(properties)
        return AppendIdentity(
            identity=_with_target(within.identity, options.log),
            version=within.version,
            run_id=within.run_id,
            recurs=True,
        )
    return AppendIdentity(identity=f"write:{token}", version=0, is_unique=True)


def _with_target(appender: str, log: str | None) -> str:
    # No log's name has a ">": the same text never comes of two appenders and two logs.
    identity = f"{appender}>{log or _ANY_LOG}"
    if len(identity.encode()) <= _IDENTITY_BYTES_MAX:
        return identity
    assert log is not None, "every appender leaves room for the other word"
    return f"{appender}>{hashlib.sha256(log.encode()).hexdigest()}"


class StagedTask(WriterCommitMessage):
    """What one task staged."""

    def __init__(
        self, *, append: AppendIdentity, partition_id: int, extents: Sequence[StagedExtent]
    ) -> None:
        self.append = append
        self.partition_id = partition_id
        self.extents = tuple(extents)

    def __repr__(self) -> str:
        return f"StagedTask({self.append}, partition {self.partition_id}, {self.extents})"


def join_messages(
    messages: Iterable[WriterCommitMessage | None],
) -> tuple[AppendIdentity, list[StagedExtent]] | None:
    """Return the append of a write and its extents in the order of partitions.

    Messages of failed tasks are None and left out; without any message the result is None.
    """
    staged = [message for message in messages if message is not None]
    if not staged:
        return None
    tasks = [message for message in staged if isinstance(message, StagedTask)]
    appends = {task.append for task in tasks}
    if len(tasks) < len(staged) or len(appends) > 1:
        raise UnexpectedError(f"the messages of one write are not of one append: {staged}")
    tasks.sort(key=lambda task: task.partition_id)
    return tasks[0].append, [extent for task in tasks for extent in task.extents]
