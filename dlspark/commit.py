"""Exactly-once writes: the identity of an append, and the messages that tasks send back.

A streaming sink, and a write inside ``foreachBatch``, append under (query id, target, batch id),
where the target is a log, by its id, or the column of the rows that names it.  So a log that was
renamed is the target that it was, and one that was created again is another.  In ``foreachBatch``
a batch may write several times to one target: the writes of a run are counted, in their order, and
a run that repeats the batch counts again.  A run of a batch is known by the SQL execution that all
of it happens in, which Spark numbers, and which no user sets.

A batch write appends under the user's ``txnAppId``, target and ``txnVersion`` where given, else
under a token of its own.  The target is the same as of a stream: of one log the id, which the
driver looks up before the first task begins; what is staged for another log of the same name is
refused.

Over Spark Connect the function of ``foreachBatch`` is a client of the server's, and its writes know
nothing of the micro-batch.  Without a ``txnAppId`` they are refused, as far as they can be told
from others: by the session that PySpark 4.3 copies for it, by the written plan before, of which
Spark shows the first part; where that may hide such rows, the write is refused too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from dlcore import SharedStaging
from dlcore.errors import ConfigurationError, UnexpectedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.sync import StagedExtent
    from dlspark.options import Transaction, WriteOptions

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"
EXECUTION_PROPERTY = "spark.sql.execution.root.id"
"""The outermost SQL execution: of all that happens in a micro-batch, one; a number of its JVM's."""
APPLICATION_PROPERTIES = ("spark.app.id", "spark.app.startTime")
"""Together these are of one JVM."""
THREAD_PROPERTY = "dlog.thread"
"""In a thread that runs `dlspark.in_batch`: which call of it this is."""
STREAM_SESSION_PROPERTY = "spark.sql.streaming.internal.stateStore.partitions"
"""Spark sets it in the session that it copies for a streaming query, and nowhere else."""
CALL_SITE_PROPERTY = "callSite.long"
"""Spark Connect keeps the request of its client there, as text, cut where it is deep or long."""
CONNECT_OPERATION_PROPERTY = "spark.connect.operation_id"
"""Set by Spark Connect from PySpark 4.3 on, where ``foreachBatch`` has a copied session."""
_CONNECT_REQUEST = 'session_id: "'
_SERVER_FRAME = "cached_remote_relation {"
"""In a request: a DataFrame that the server keeps, as it does the rows of a micro-batch."""
_WRITE = "write_operation {"
_BEHIND_ROWS = "\n      source: "
_CUT_RELATION = re.compile(
    r"^ {14}(?:\w*input|left|right|other|root|references) \{\n(?: {16}common \{\n {16}\}\n)?"
    r" {16}(?!(?:common|range|read|sql|\w*local_relation) )",
    re.MULTILINE,
)
"""In a request: what some rows are made of, at the depth where Spark leaves out what is in it."""
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
"""Stands for a write whose rows choose their log; no log has such an id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendIdentity:
    """Under which identity and version an append commits, once.

    `run` tells the runs of a batch apart, in which writes are counted; "" where a version is
    written once.  `thread` tells the threads of a run apart.  `shared` is where a streaming query
    stages for all its targets, since the same tasks soon write again; its rounds are the batches.
    `is_unique` says that nobody will append under this identity again, `is_stream` that versions
    are the batches of a streaming query, of which only the latest is ever repeated; `is_of_log`
    that the id of the one log it appends to belongs to the identity: `committed_as` has it.
    `log_id` is of the one log that it may append to, where the identity has that id already.
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
        """Under which identity it commits, to the log of this id."""
        return _with_target(self.identity, log_id)

    @property
    def staged_as(self) -> str:
        """Under which identity its tasks stage."""
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
        options: of the write.
        properties: the local properties of its task.
        token: unique to the write.
        log_id: of the log that the options name, where they have a transaction.

    Raises:
        ConfigurationError: it is a write of a micro-batch's rows over Spark Connect, or in a
            thread, that does not know which micro-batch; repeated, it would write twice.
    """
    transaction = options.transaction
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
    # The id belongs to the identity from the first task on, not only in the commit: what another
    # write of the same application stages for another log, at the same time, has another identity,
    # and is left alone when this one tidies.
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
    # No target has a ">": the same text never comes of two appenders and two targets.
    return f"{appender}><{target}>"


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

    Raises:
        UnexpectedError: they are not of one write.
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
