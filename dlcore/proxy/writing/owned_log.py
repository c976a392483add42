"""A log that this proxy owns: one writer of the core, and the streams that write through it.

What waits goes into the next entry, whoever sent it: that is the writer's own way.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore.errors import ConfigurationError, SchemaMismatchError
from dlcore.ids import TXID_MAX
from dlcore.log.entries.batches import byte_log_batch
from dlcore.log.entries.body import with_txid
from dlcore.log.writing.typed import AsyncTypedLogWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.clock import Clock
    from dlcore.errors import DLError
    from dlcore.ids import DLSN
    from dlcore.log.writing.writer import AsyncLogWriter

_PAYLOAD_NAMES = ("payload", "value")
_TXID = "txid"
_PAYLOAD_KINDS = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_string,
    pa.types.is_large_string,
)


class OwnedLog:
    """One log, from its acquisition until it is let go of.

    Each stream gives a call to be woken by.  `ending` says why nothing more is accepted, once that
    is so; with `is_lost` nothing more is acknowledged either.
    """

    def __init__(self, writer: AsyncLogWriter, clock: Clock) -> None:
        self.writer = writer
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._streams: set[Callable[[], None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.idle_since_s = self._loop.time()
        self.ending: DLError | None = None
        self.is_lost = False

    def __repr__(self) -> str:
        return f"<OwnedLog {self.writer.log_name!r} streams={len(self._streams)}>"

    def idle_s(self) -> float:
        """Return for how long no stream has written to it."""
        return 0.0 if self._streams else self._loop.time() - self.idle_since_s

    def join(self, wake: Callable[[], None]) -> None:
        """Let a stream write, which is woken when the log is let go of."""
        self._streams.add(wake)
        self._empty.clear()

    def leave(self, wake: Callable[[], None]) -> None:
        """Forget a stream that has ended."""
        self._streams.discard(wake)
        self.idle_since_s = self._loop.time()
        if not self._streams:
            self._empty.set()

    def end(self, error: DLError, *, is_lost: bool = False) -> None:
        """Accept nothing more, and say why; the first reason stays."""
        self.ending = self.ending or error
        self.is_lost |= is_lost
        for wake in list(self._streams):
            wake()

    async def wait_left(self) -> None:
        """Wait until no stream is left."""
        await self._empty.wait()

    def check(self, schema: pa.Schema) -> None:
        """Raise if batches of this schema cannot be written here.

        A typed log's writer tells with each batch, for its schema may be a later one by then.

        Raises:
            ConfigurationError: it says what is missing, or too much.
        """
        if isinstance(self.writer, AsyncTypedLogWriter):
            return
        names = schema.names
        payloads = [name for name in names if name in _PAYLOAD_NAMES]
        others = [name for name in names if name not in (*_PAYLOAD_NAMES, _TXID)]
        name = self.writer.log_name
        if len(payloads) != 1 or others or len(names) != len(set(names)):
            raise ConfigurationError(
                f"log {name!r} is of bytes: expected one column payload (or value) and, if rows "
                f"have their own transaction ids, txid; not {names}"
            )
        kind = schema.field(payloads[0]).type
        if not any(is_kind(kind) for is_kind in _PAYLOAD_KINDS):
            raise ConfigurationError(
                f"log {name!r}: column {payloads[0]} has type {kind}, expected binary"
            )
        if _TXID in names and not pa.types.is_integer(schema.field(_TXID).type):
            raise ConfigurationError(
                f"log {name!r}: column txid has type {schema.field(_TXID).type}, expected int64"
            )

    async def accept(self, batch: pa.RecordBatch) -> asyncio.Future[DLSN]:
        """Hand a batch with rows to the writer; return the future of its last position.

        Rows without transaction ids get the time, or the last id, if that is higher.

        Raises: what refuses the batch, or ends the log here.
        """
        rows = await self._fitted(batch)
        if self.ending is not None:
            raise self.ending
        return self.writer.write_fitted(rows)

    async def _fitted(self, batch: pa.RecordBatch) -> Any:
        writer = self.writer
        if not isinstance(writer, AsyncTypedLogWriter):
            return self._fitted_bytes(batch)
        with contextlib.suppress(SchemaMismatchError):
            return writer.fitted(batch, last_txid=writer.last_txid)
        # It knows the latest version of the schema then; others may have written meanwhile.
        await writer.fitted_latest(batch, last_txid=writer.last_txid)
        return writer.fitted(batch, last_txid=writer.last_txid)

    def _fitted_bytes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = ["payload" if name == "value" else name for name in batch.schema.names]
        batch = pa.RecordBatch.from_arrays(batch.columns, names=names)
        if _TXID in names:
            return byte_log_batch(batch)
        txid = min(max(self._clock.now_ms(), self.writer.last_txid, 0), TXID_MAX)
        return with_txid(byte_log_batch(batch, txid_required=False), txid)
