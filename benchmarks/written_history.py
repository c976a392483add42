"""A log with a long history at once: planned as commits plan it, each stored value written once.

The ledgers of the history hold no entries: what is measured on it reads none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.ledger.metadata.values import Ensemble, LedgerMetadata, LedgerState
from dlcore.log.metadata.changes import SegmentLimits, plan_append
from dlcore.log.metadata.segment import StagedExtent
from dlcore.log.metadata.values import (
    StagedLedger,
)
from dlcore.metadata.port import ANY_VERSION, Create, Op, Put
from dlcore.metadata.stored import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dlcore.log.context import LogContext
    from dlcore.log.metadata.values import LogMetadata

_EXTENTS_PER_LEDGER = 1_000
_EXTENTS_PER_CHANGE = 250
_BYTES_AT_ONCE = 500_000


async def write_history(
    context: LogContext, log: str, count: int, *, segment_extents: int = 2**40
) -> None:
    """Append `count` extents of one record each to the metadata of a log.

    A segment is completed once it has `segment_extents`.
    """
    limits = SegmentLimits(size_bytes_max=segment_extents, age_max_ms=2**40)
    metadata = await context.logs.find(log)
    at = await context.logs.read(metadata)
    values: dict[str, Create | Put] = {}
    for first in range(0, count, _EXTENTS_PER_LEDGER):
        size = min(_EXTENTS_PER_LEDGER, count - first)
        ledger_id = await _make_ledger(context, metadata, size)
        for low in range(0, size, _EXTENTS_PER_CHANGE):
            part = list(_extents(metadata, ledger_id, low, min(size, low + _EXTENTS_PER_CHANGE)))
            change, _, _ = plan_append(
                context.logs.paths_of(metadata),
                at,
                part,
                now_ms=context.clock.now_ms(),
                limits=limits,
            )
            at = change.after
            for op in change.ops:
                assert isinstance(op, Create | Put)
                is_new = isinstance(op, Create) or isinstance(values.get(op.path), Create)
                values[op.path] = (
                    Create(op.path, op.value) if is_new else Put(op.path, op.value, ANY_VERSION)
                )
    await _write(context, values.values())


async def _make_ledger(context: LogContext, log: LogMetadata, entry_count: int) -> int:
    ledger_id = await context.ledger_store.new_ledger_id()
    quorum = log.quorum
    bookies = [info.bookie for info in await context.registry.get_bookies()]
    metadata = LedgerMetadata(
        ledger_id=ledger_id,
        quorum=quorum,
        state=LedgerState.CLOSED,
        ensembles=(Ensemble(0, tuple(bookies[: quorum.ensemble_size])),),
        token=context.clock.new_token(),
        created_ms=context.clock.now_ms(),
        last_entry_id=entry_count - 1,
        length_bytes=entry_count,
    )
    staged = StagedLedger(
        ledger_id=ledger_id,
        identity="history",
        owner="",
        created_ms=metadata.created_ms,
        extents=entry_count,
        committed=((0, entry_count - 1),),
        settled=True,
    )
    register = Create(context.paths.staged_ledger(ledger_id), encode(staged))
    await context.ledger_store.create(metadata, extra_ops=(register,))
    return ledger_id


def _extents(log: LogMetadata, ledger_id: int, first: int, end: int) -> Iterator[StagedExtent]:
    for entry_id in range(first, end):
        yield StagedExtent(
            log=log.name,
            log_id=log.log_id,
            identity="history",
            ledger_id=ledger_id,
            first_entry_id=entry_id,
            last_entry_id=entry_id,
            record_count=1,
            size_bytes=1,
            first_txid=-1,
            last_txid=-1,
            last_timestamp_ms=log.created_ms,
        )


async def _write(context: LogContext, ops: Iterable[Create | Put]) -> None:
    batch: list[Op] = []
    size_bytes = 0
    for op in ops:
        batch.append(op)
        size_bytes += len(op.path) + len(op.value)
        if size_bytes > _BYTES_AT_ONCE:
            await context.store.multi(batch)
            batch, size_bytes = [], 0
    await context.store.multi(batch)
