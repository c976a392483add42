"""Exactly-once writes: the identity of an append, and the messages that tasks send back.

A streaming sink, and a write inside ``foreachBatch``, append under (query id, target, batch id).
The target is the id of the log, or, if a column of the rows names the log, the name of this column.
Therefore a renamed log stays the same target, and a log that was created again is another target.
In ``foreachBatch`` a batch may write several times to one target.  The writes of a run are counted
in their order, and a run that repeats the batch counts again from the start.  A run of a batch is
identified by the SQL execution that contains all of it.  Spark numbers these executions, and no
user sets the number.

A batch write appends under the user's ``txnAppId``, target and ``txnVersion`` if these are given,
else under its own token.  The target is the same as for a stream.  If it is one log, the driver
looks up its id before the first task begins; rows that were staged for another log of the same name
are refused.

Over Spark Connect the function of ``foreachBatch`` is a client of the server, and its writes do not
know the micro-batch.  Without a ``txnAppId`` they are refused, as far as they can be recognized.
From PySpark 4.3 on they are recognized by the session that Spark copies.  Before, they are
recognized by the plan of the write.  Spark shows only its first part; if the rest may contain such
rows, the write is refused too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from dlcore import SharedStaging
from dlcore.base.errors import ConfigurationError, UnexpectedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.sync import StagedExtent
    from dlspark.options import Transaction, WriteOptions

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"
EXECUTION_PROPERTY = "spark.sql.execution.root.id"
"""The outermost SQL execution, one for all work in a micro-batch; its number is unique in a JVM."""
APPLICATION_PROPERTIES = ("spark.app.id", "spark.app.startTime")
"""Together these identify a JVM."""
THREAD_PROPERTY = "dlog.thread"
"""Set in a thread that runs `dlspark.in_batch`; identifies the call."""
STREAM_SESSION_PROPERTY = "spark.sql.streaming.internal.stateStore.partitions"
"""Spark sets it in the session that it copies for a streaming query, and nowhere else."""
CALL_SITE_PROPERTY = "callSite.long"
"""Spark Connect stores the request of its client there as text, cut where it is deep or long."""
CONNECT_OPERATION_PROPERTY = "spark.connect.operation_id"
"""Set by Spark Connect from PySpark 4.3 on; there ``foreachBatch`` has a copied session."""
_CONNECT_REQUEST = 'session_id: "'
"""The beginning of such a request, which is a protobuf message as text."""
_SERVER_FRAME = "cached_remote_relation {"
"""In a request: a DataFrame that the server keeps, as the rows of a micro-batch are kept."""
_WRITE = "write_operation {"
_BEHIND_ROWS = "\n      source: "
"""In a request: the field behind the rows of a write.  If it is there, the text was not cut
before."""
_CUT_RELATION = re.compile(
    r"^ {14}(?:\w*input|left|right|other|root|references) \{\n(?: {16}common \{\n {16}\}\n)?"
    r" {16}(?!(?:common|range|read|sql|\w*local_relation) )",
    re.MULTILINE,
)
"""In a request: an input of the rows, at the depth where Spark leaves out its details."""
TASK_PROPERTIES = (
    QUERY_ID_PROPERTY,
    BATCH_ID_PROPERTY,
    EXECUTION_PROPERTY,
    *APPLICATION_PROPERTIES,
    THREAD_PROPERTY,
    STREAM_SESSION_PROPERTY,
    CALL_SITE_PROPERTY,
    CONNECT_OPERATION_PROPERTY,
)
_ANY_LOG = "column"
"""Target of a write whose rows choose their log; no log has this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendIdentity:
    """Identity and version under which an append commits once.

    `run` identifies a run of a batch, in which writes are counted; "" if a version is written once.
    `thread` identifies a thread of a run.  `shared` is the staging that a streaming query uses for
    all its targets, because the same tasks soon write again; its rounds are the batches.  With
    `is_unique`, no other append will have this identity.  With `is_stream`, versions are the
    batches of a streaming query, and only the latest of them is ever repeated.  With `is_of_log`,
    the append goes to one log, and the id of this log belongs to the identity: see `committed_as`.
    If the identity contains the log's id already, `log_id` is the id of the only log that it may
    append to.
    """

    identity: str
    version: int
    run: str = ""
    thread: str = ""
    shared: SharedStaging | None = None
    is_unique: bool = False
    is_stream: bool = False
    is_of_log: bool = False
    log_id: str = ""

    def committed_as(self, log_id: str) -> str:
        """Return the identity under which it commits to the log with this id."""
        return _with_target(self.identity, log_id)

    @property
    def staged_as(self) -> str:
        """The identity under which its tasks stage."""
        return self.identity if self.shared is None else self.shared.identity


def stream_identity(options: WriteOptions, properties: Mapping[str, str | None]) -> AppendIdentity:
    """Return the identity of a streaming sink's batch, from the local properties of its task."""
    query_id, batch_id = _require(properties, QUERY_ID_PROPERTY, BATCH_ID_PROPERTY)
    return _stream_identity(options, query_id, batch_id)


def _stream_identity(
    options: WriteOptions, query_id: str, batch_id: str, *, run: str = "", thread: str = ""
) -> AppendIdentity:
    stream = _name_stream(query_id)
    return AppendIdentity(
        identity=_with_target(stream, _ANY_LOG) if options.log is None else stream,
        version=int(batch_id),
        run=run,
        thread=thread,
        shared=SharedStaging(identity=stream, round=batch_id),
        is_stream=True,
        is_of_log=options.log is not None,
    )


def batch_identity(
    options: WriteOptions,
    properties: Mapping[str, str | None],
    *,
    token: str,
    log_id: str | None = None,
) -> AppendIdentity:
    """Return the identity of a batch write.

    Args:
        options: options of the write.
        properties: the local properties of its task.
        token: unique to the write.
        log_id: id of the log that the options name, if they have a transaction.

    Raises:
        ConfigurationError: rows of a micro-batch are written over Spark Connect, or in a thread,
            and the micro-batch is not known; if the batch is repeated, they would be written twice.
    """
    transaction = options.transaction
    # Spark sets it for all that a micro-batch runs, so this is a write inside `foreachBatch`.
    if properties.get(QUERY_ID_PROPERTY):
        query_id, batch_id, *run = _require(
            properties,
            QUERY_ID_PROPERTY,
            BATCH_ID_PROPERTY,
            *APPLICATION_PROPERTIES,
            EXECUTION_PROPERTY,
        )
        if transaction is not None:
            shared = SharedStaging(identity=_name_stream(query_id), round=batch_id)
            return _transaction_identity(transaction, options, log_id, shared=shared)
        thread = properties.get(THREAD_PROPERTY) or ""
        return _stream_identity(options, query_id, batch_id, run="/".join(run), thread=thread)
    if transaction is not None:
        return _transaction_identity(transaction, options, log_id)
    request = properties.get(CALL_SITE_PROPERTY) or ""
    if request.startswith(_CONNECT_REQUEST):
        _refuse_unknown_batch(properties, request)
    elif properties.get(STREAM_SESSION_PROPERTY):
        raise ConfigurationError(
            "rows of a micro-batch are written in a thread that does not know of which: the write "
            "could not be recognised when the batch is repeated. Write in the function that "
            "foreachBatch calls, or in a thread that runs dlspark.in_batch(function, "
            "batch.sparkSession), or give the write a txnAppId of its own and the batch id as "
            "txnVersion"
        )
    # No later write has this token, so nothing has to be remembered of it.
    return AppendIdentity(identity=f"write:{token}", version=0, is_unique=True)


def _refuse_unknown_batch(properties: Mapping[str, str | None], request: str) -> None:
    if properties.get(STREAM_SESSION_PROPERTY):
        what = "rows of a micro-batch are written"
    elif properties.get(CONNECT_OPERATION_PROPERTY):
        return
    elif _SERVER_FRAME in request:
        what = "rows of a micro-batch, or of a checkpoint, are written"
    elif _WRITE in request and (_BEHIND_ROWS not in request or _CUT_RELATION.search(request)):
        what = "rows that may be of a micro-batch, for Spark tells only in part how they are made,"
        what += " are written"
    else:
        return
    raise ConfigurationError(
        f"{what} over Spark Connect, which does not tell of which batch: the write could not be "
        "recognised when the batch is repeated. Give it a txnAppId of its own and the batch id as "
        "txnVersion"
    )


def _transaction_identity(
    transaction: Transaction,
    options: WriteOptions,
    log_id: str | None,
    *,
    shared: SharedStaging | None = None,
) -> AppendIdentity:
    # The id belongs to the identity from the first task on, not only in the commit.  Another write
    # of the same application may stage for another log at the same time.  Its identity is
    # different, so its staged rows are left alone when this write cleans up.
    assert (options.log is None) == (log_id is None), "a log that is named has an id"
    return AppendIdentity(
        identity=_with_target(f"txn:{transaction.app_id}", log_id or _ANY_LOG),
        version=transaction.version,
        shared=shared,
        log_id=log_id or "",
    )


def _require(properties: Mapping[str, str | None], *names: str) -> list[str]:
    found = [properties.get(name) or "" for name in names]
    if not all(found):
        missing = ", ".join(name for name in names if not properties.get(name))
        raise UnexpectedError(
            f"the task of a write in a stream lacks the properties {missing}, found "
            f"{dict(properties)}: this version of Spark is not supported"
        )
    return found


def _name_stream(query_id: str) -> str:
    return f"stream:{query_id}"


def _with_target(appender: str, target: str) -> str:
    # No target contains ">", so different pairs of appender and target give different texts.
    return f"{appender}><{target}>"


class StagedTask(WriterCommitMessage):
    """The staged extents of one task."""

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

    Messages of failed tasks are None and are ignored; without any other message the result is None.

    Raises:
        UnexpectedError: the messages belong to different writes.
    """
    staged = [message for message in messages if message is not None]
    if not staged:
        return None
    tasks = [message for message in staged if isinstance(message, StagedTask)]
    appends = {task.append for task in tasks}
    if len(tasks) < len(staged) or len(appends) > 1:
        raise UnexpectedError(f"the messages of one write are not of one append: {staged}")
    # Spark's interface promises no order of the messages.
    tasks.sort(key=lambda task: task.partition_id)
    return tasks[0].append, [extent for task in tasks for extent in task.extents]
