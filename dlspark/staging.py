"""The writing half of both sinks: tasks stage rows in their own ledgers, a driver commits them.

No record of a task is visible before `commit_staged` appends all of them in one transaction.
Therefore failed attempts, late attempts and aborted batches leave no record in a log.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from dlcore import AppendRun
from dlcore.base.errors import (
    AppendAbortedError,
    AppendMismatchError,
    ConfigurationError,
    DuplicateAppendError,
    LogNotFoundError,
    OwnershipAcquireFailedError,
    TransactionIdOutOfOrderError,
)
from dlspark.arrow import batches_by_log
from dlspark.commit import AppendIdentity, StagedTask, join_messages
from dlspark.sessions import (
    log_id_of,
    open_shared_namespace,
    require_logs,
    staging_writer,
)
from dlspark.typed import log_schema_of
from dlspark.workers import freeze_imports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage

    from dlcore.sync import StagedExtent
    from dlspark.options import Address, WriteOptions
    from dlspark.schema import WriteColumns

logger = logging.getLogger(__name__)


def stage_rows(
    batches: Iterable[pa.RecordBatch],
    *,
    options: WriteOptions,
    columns: WriteColumns,
    append: AppendIdentity,
    partition_id: int,
) -> StagedTask:
    """Stage the rows of one task; return the message for the driver.

    Raises:
        ConfigurationError: a row has no value or log, or only some rows have a txid; all rows of
            the task are dropped.
        LogNotFoundError: a log named by a row does not exist.
        TransactionIdOutOfOrderError: transaction ids decrease within the task.
    """
    freeze_imports()
    schema = None if columns.typed is None else log_schema_of(columns.typed)
    txid = "txid" if columns.typed is None else "_txid"
    logs: set[str] = set()
    kinds: set[bool] = set()
    try:
        with staging_writer(options.address, append) as writer, _advice_on_txids():
            for batch in batches:
                parts = batches_by_log(batch, columns, log=options.log)
                kinds |= {txid in rows.schema.names for _, rows in parts}
                _require_one_kind(kinds, "batches")
                new = {log for log, _ in parts} - logs
                if options.create_log:
                    require_logs(options.address, new, create=True, schema=schema)
                logs |= new
                writer.write_batches(parts)
            return StagedTask(append=append, partition_id=partition_id, extents=writer.stage())
    except LogNotFoundError as error:
        if options.create_log:
            raise LogNotFoundError(
                f"{error}; it was deleted during the write: write again to create it again"
            ) from error
        require_logs(options.address, logs)  # this error says how to create the missing log
        raise


def commit_staged(
    messages: Sequence[WriterCommitMessage | None],
    *,
    options: WriteOptions,
    begun_ns: int = 0,
    replaces: bool = False,
) -> None:
    """Append all staged rows in the order of partitions, all or nothing, once.

    An append that was committed before, by an earlier run of the same batch, is skipped.

    Args:
        messages: messages of the tasks.
        options: options of the write.
        begun_ns: start of the write, by the monotonic clock of this machine.
        replaces: truncate the earlier records of the log in the same transaction.

    Raises:
        AppendAbortedError: the name in the options belongs to another log since the write began.
        AppendMismatchError: a query continues from a checkpoint that is not its latest one.
        ConfigurationError: only some rows have transaction ids.
        DuplicateAppendError: threads wrote to the same target in one batch.
        OwnershipAcquireFailedError: a writer owned one of the logs for longer than the options
            allow.
        TransactionIdOutOfOrderError: transaction ids decrease between partitions, or are below the
            log's last one.
    """
    freeze_imports()
    joined = join_messages(messages)
    if joined is None:
        return
    append, extents = joined
    _require_one_kind({extent.has_txids for extent in extents}, "tasks")
    # Any other append without rows commits all the same, for a repetition has to find its version.
    if append.is_unique and not extents and not replaces:
        return
    identity = _committed_as(append, extents, options)
    replaced = [options.log] if replaces and options.log is not None else []
    assert len(replaced) == replaces, "only a log that is named is overwritten"
    with (
        _advice_on_txids(replaces=replaces, is_sorted=not replaces and _are_in_order(extents)),
        _advice_on_duplicates(append),
        _advice_on_checkpoints(append),
        _advice_on_locks(),
        open_shared_namespace(options.address).begin_append(
            identity,
            append.version,
            shared=append.shared,
            run=AppendRun(token=append.run, begun_ns=begun_ns, thread=append.thread)
            if append.run
            else None,
            lock_timeout_s=options.lock_timeout_s,
            keep_record=not append.is_unique,
            strict=append.is_stream,
        ) as staged,
    ):
        result = staged.commit(extents, replaces=replaced)
    if result.already_committed:
        logger.info("append=%s version=%d was committed before, skipped", identity, append.version)
    else:
        logger.info("append=%s version=%d committed: %s", identity, append.version, result.logs)


def _require_one_kind(kinds: set[bool], of: str) -> None:
    """Raise unless all rows have transaction ids, or none has one."""
    if len(kinds) > 1:
        raise ConfigurationError(
            f"the column of transaction ids (txid, of typed logs _txid) is null in all rows of "
            f"some {of}, and in none of others: leave it out to have them assigned, or fill it in "
            "every row; nothing was written"
        )


def _committed_as(
    append: AppendIdentity, extents: Sequence[StagedExtent], options: WriteOptions
) -> str:
    """Return the identity under which a write commits; without rows, the log's id is looked up.

    If extents belong to two logs of one name, the commit refuses them.

    Raises:
        AppendAbortedError: rows were staged for another log than the write began with.
    """
    for extent in extents:
        if append.log_id and extent.log_id != append.log_id:
            raise AppendAbortedError(
                f"log {extent.log!r}: it was renamed, or deleted and created again, during the "
                f"write (id {append.log_id}, now {extent.log_id}): nothing was written; write "
                "again"
            )
    if not append.is_of_log:
        return append.identity
    if extents:
        return append.committed_as(extents[0].log_id)
    assert options.log is not None, "what appends to one log names it"
    return append.committed_as(log_id_of(options.address, options.log))


def abort_staged(
    messages: Sequence[WriterCommitMessage | None],
    *,
    address: Address,
    append: AppendIdentity | None = None,
) -> None:
    """Drop the staged rows of a failed write, unless it was committed after all.

    If no task sent a message, `append` names the write whose attempts may have left rows.
    """
    extents: list[StagedExtent] = []
    joined = join_messages(messages)
    if joined is not None:
        append, extents = joined
    if append is None:
        return
    namespace = open_shared_namespace(address)
    with namespace.begin_append(append.identity, append.version, shared=append.shared) as staged:
        staged.abort(extents)
    logger.info("append=%s version=%d aborted", append.identity, append.version)


def _are_in_order(extents: Iterable[StagedExtent]) -> bool:
    """Return whether the rows to write have ascending transaction ids in each log."""
    last: dict[str, int] = {}
    for extent in extents:
        if extent.has_txids and extent.first_txid < last.get(extent.log, 0):
            return False
        last[extent.log] = extent.last_txid
    return True


@contextlib.contextmanager
def _advice_on_txids(*, replaces: bool = False, is_sorted: bool = False) -> Iterator[None]:
    try:
        yield
    except TransactionIdOutOfOrderError as error:
        way_out = 'sort with orderBy("txid") before the write'
        if replaces:
            way_out = "also those that replace what it held: write higher ones"
        elif is_sorted:
            way_out = (
                "if this repeats a write, give each write a txnAppId and a txnVersion, with which "
                "a repetition adds nothing; else write higher ones"
            )
        raise TransactionIdOutOfOrderError(
            f"{error}. A log takes transaction ids in order only: {way_out}, or leave the column "
            "txid out to have them assigned"
        ) from error


@contextlib.contextmanager
def _advice_on_duplicates(append: AppendIdentity) -> Iterator[None]:
    try:
        yield
    except DuplicateAppendError as error:
        raise DuplicateAppendError(
            f"{error}. Writes of one micro-batch to the same log, made in several threads, have no "
            "order: make them one after the other, or give each of them a txnAppId of its own and "
            f"the batch id as txnVersion. Batch {append.version} can only go on in the second way, "
            "which writes again what it has written to the log already"
        ) from error


@contextlib.contextmanager
def _advice_on_checkpoints(append: AppendIdentity) -> Iterator[None]:
    try:
        yield
    except AppendMismatchError as error:
        raise AppendMismatchError(
            f"{error}. The query's checkpoint is an old one or a copy, or its rows go to other logs"
            f" than when it wrote batch {append.version}: skipped, their records would be lost. Go "
            "on with the newest checkpoint and the column log as it was, or start with a new "
            "checkpoint at the startingOffsets that are wanted"
        ) from error


@contextlib.contextmanager
def _advice_on_locks() -> Iterator[None]:
    try:
        yield
    except OwnershipAcquireFailedError as error:
        raise OwnershipAcquireFailedError(
            f"{error}. Close that writer, or let the sink wait longer with the option "
            "lockTimeoutMs",
            owner=error.owner,
        ) from error
