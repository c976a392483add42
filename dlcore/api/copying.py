"""Copying a log to another exactly once: the position is stored with the copied records."""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from dlcore.base.errors import (
    AlreadyTruncatedError,
    AppendMismatchError,
    ConfigurationError,
    LogRenamedError,
)
from dlcore.base.records import NotLessThan, RecordField

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace

logger = logging.getLogger(__name__)

_BYTES_COLUMNS = ["txid", "value"]
_COMMIT_BYTES = 16 * 1024 * 1024
"""Bytes of the source that are copied with one commit; at least one entry."""


async def copy_log(
    source: DistributedLogManager,
    namespace: Namespace,
    target: str,
    *,
    report: Callable[[int], None] = lambda _: None,
) -> int:
    """Copy the readable records of a log to another; return how many this call copied.

    Transaction ids and payloads are kept.  Rows of a typed log are copied, with their transaction
    ids, to a log whose schema holds all its columns.  Each record is copied once, however often
    this is called, wherever a call died, and if several calls run at once.  This is how: the
    version of each commit is the number of the source's records that it reaches, and it must follow
    the version from which the copier continued.  The first call begins at the first record that is
    not truncated.  The record of commits is kept for 90 days after the last one; after a longer
    pause the copy begins again.

    Args:
        source: the log to copy, of this namespace or another.
        namespace: the namespace of the target.
        target: an existing log; other writers may write to it, if transaction ids still rise.
        report: called after each commit with the number of records copied so far.

    Raises:
        AlreadyTruncatedError: records after the copied ones were truncated since.
        TransactionIdOutOfOrderError: the target has a higher transaction id than the next record.
        ConfigurationError: the target is the source, or the source has fewer records than were
            copied of it.
        LogRenamedError: the name belongs to another log now; a call with the target's new name
            continues.
    """
    async with await namespace.open_log(target) as log:
        if log.log_id == source.log_id:
            raise ConfigurationError(f"log {target!r} cannot be copied to itself")
        target_id = log.log_id
        identity = f"copy/{source.log_id}/{target_id}"
    total = 0
    while True:
        done = await namespace.last_version(identity)
        copied = await _copy_some(source, namespace, target, target_id, identity, done)
        if copied == 0:
            return total
        if copied is None:
            logger.info("log=%s: another copier to %s was faster", source.name, target)
        total += copied or 0
        report(total)


async def _copy_some(
    source: DistributedLogManager,
    namespace: Namespace,
    target: str,
    target_id: str,
    identity: str,
    done: int,
) -> int | None:
    """Copy some records after the first `done`; return how many, None if another copier did."""
    first, batches = await _next_batches(source, done)
    count = sum(batch.num_rows for batch in batches)
    if not count:
        return 0
    append = await namespace.begin_append(identity, first + count, after=done)
    async with append:
        for batch in batches:
            await append.write_batch(target, batch)
        extents = await append.stage()
        if any(extent.log_id != target_id for extent in extents):
            raise LogRenamedError(
                f"log {target!r} (id {target_id}) was renamed or deleted while records were copied "
                "to it: another log has that name"
            )
        try:
            result = await append.commit(extents)
        except AppendMismatchError:
            return None
    return count if result.committed else None


async def _next_batches(
    source: DistributedLogManager, done: int
) -> tuple[int, list[pa.RecordBatch]]:
    """Return the next sequence id, and some MB of the records from it on.

    The sequence id is `done`.  A negative `done` means that nothing was copied: then it is that of
    the first existing record.
    """
    place = await source.find_place(NotLessThan(RecordField.SEQUENCE_ID, max(done, 0)))
    if place.sequence_id > done >= 0:
        raise AlreadyTruncatedError(
            f"log {source.name!r}: the records {done} to {place.sequence_id - 1} were truncated "
            "before they were copied"
        )
    if place.sequence_id < done:
        raise ConfigurationError(
            f"log {source.name!r} has {place.sequence_id} records, expected at least the {done} "
            "that were copied of it; if it was replaced or restored, copy it into a new log"
        )
    batches: list[pa.RecordBatch] = []
    size_bytes = 0
    schema = await source.get_schema()
    columns = _BYTES_COLUMNS if schema is None else [*schema.names, "_txid"]
    async with aclosing(aiter(await source.read(place.dlsn, columns=columns))) as found:
        async for batch in found:
            batches.append(batch)
            size_bytes += batch.nbytes
            if size_bytes >= _COMMIT_BYTES:
                break
    return place.sequence_id, batches
