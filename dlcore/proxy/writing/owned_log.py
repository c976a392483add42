"""A log that this proxy owns: one writer of the core, and the streams that write through it.

What waits goes into the next entry, whoever sent it: that is the writer's own way.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from dlcore.base.errors import (
    ConditionFailedError,
    ConfigurationError,
    LogNotReadyError,
    ProducerFencedError,
    SequenceGapError,
)
from dlcore.base.records import LogRecord
from dlcore.log.entries.batches import byte_log_batch
from dlcore.log.entries.body import present_txid
from dlcore.log.entries.stamp import TOKEN_BYTES, Claim
from dlcore.log.writing.producers import Durable, Fresh, InFlight, Mark, Producers
from dlcore.log.writing.typed import AsyncTypedLogWriter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from dlcore.base.clock import Clock
    from dlcore.base.errors import DLError
    from dlcore.base.ids import DLSN
    from dlcore.log.writing.writer import AsyncLogWriter

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

READING_MAX = 8
"""So many streams read at once when the log takes records more slowly than they come."""
_VALUE_NAMES = ("value", "payload")
"""The second is the old name, which clients of other languages may go on sending."""
_TXID = "txid"
_VALUE_KINDS = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_string,
    pa.types.is_large_string,
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A batch: the future of its last position, and how many of its last rows are written anew.

    The position is None if they were all durable before, and it is not known any more; and not
    `is_placed`, it is that of a later batch.  Futures of batches are done in their order, and call
    back in it: one that has to wait for another one has that one's.
    """

    future: asyncio.Future[DLSN] | asyncio.Future[DLSN | None]
    fresh: int
    is_placed: bool = True


def _while_owned(
    method: Callable[Concatenate[OwnedLog, _Params], Awaitable[_Result]],
) -> Callable[Concatenate[OwnedLog, _Params], Coroutine[Any, Any, _Result]]:
    """Let a method tell what is refused by what is known here only while the log is ours.

    Whoever took it since may have written what is missed here.  A log that is ours was so before.
    """

    @wraps(method)
    async def verified(log: OwnedLog, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        try:
            return await method(log, *args, **kwargs)
        except (ConditionFailedError, ProducerFencedError, SequenceGapError):
            await log.writer.verify()
            raise

    return verified


class OwnedLog:
    """One log, from its acquisition until it is let go of.

    Each stream gives a call to be woken by.  `ending` says why nothing more is accepted, once that
    is so; with `is_lost` nothing more is acknowledged either.
    """

    def __init__(
        self,
        writer: AsyncLogWriter,
        clock: Clock,
        producers: Producers[asyncio.Future[DLSN]],
    ) -> None:
        self.writer = writer
        self._clock = clock
        self._producers = producers
        self.reading_turns = asyncio.Semaphore(READING_MAX)
        self._waiting = 0
        self._none_waits = asyncio.Event()
        self._none_waits.set()
        self._conditional = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Callable[[], None], None] = {}  # a set that keeps its order
        self._empty = asyncio.Event()
        self._empty.set()
        self.idle_since_s = self._loop.time()
        self.accepted_bytes = 0
        """How much was sent to it since it was acquired; it only grows."""
        self.acquired_at_s = self._loop.time()
        self.unreached: frozenset[str] = frozenset()
        """The proxies that its first client did not reach, which may be why it is here."""
        self.ending: DLError | None = None
        self.is_lost = False

    def __repr__(self) -> str:
        return f"<OwnedLog {self.writer.log_name!r} streams={len(self._streams)}>"

    @property
    def name(self) -> str:
        """The log's name."""
        return self.writer.log_name

    @property
    def log_id(self) -> str:
        """Its identity."""
        return self.writer.log_id

    @property
    def has_room(self) -> bool:
        """Whether it has room for what is not read yet: nothing that was read waits for it."""
        return self.writer.has_capacity and not self._waiting

    async def wait_for_room(self) -> None:
        """Wait for that."""
        while not self.has_room:
            await self._none_waits.wait()
            await self.writer.wait_for_capacity()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that a message waits meanwhile."""
        self._waiting += 1
        self._none_waits.clear()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._none_waits.set()

    @property
    def is_open(self) -> bool:
        """Whether a stream is open to it."""
        return bool(self._streams)

    def idle_s(self) -> float:
        """Return for how long no stream has written to it."""
        return 0.0 if self._streams else self._loop.time() - self.idle_since_s

    def join(self, wake: Callable[[], None]) -> None:
        """Let a stream write, which is woken when the log is let go of."""
        self._streams[wake] = None
        self._empty.clear()

    def leave(self, wake: Callable[[], None]) -> None:
        """Forget a stream that has ended."""
        self._streams.pop(wake, None)
        self.idle_since_s = self._loop.time()
        if not self._streams:
            self._empty.set()

    def end(self, error: DLError, *, is_lost: bool = False) -> None:
        """Accept nothing more, and say why; the first reason stays, unless the log is lost then.

        For a client that is sent elsewhere takes what was not acknowledged for not written.
        """
        if self.ending is None or (is_lost and not self.is_lost):
            self.ending = error
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
        values = [name for name in names if name in _VALUE_NAMES]
        others = [name for name in names if name not in (*_VALUE_NAMES, _TXID)]
        name = self.writer.log_name
        if len(values) != 1 or others or len(names) != len(set(names)):
            raise ConfigurationError(
                f"log {name!r} is of bytes: expected one column value (or payload) and, if rows "
                f"have their own transaction ids, txid; not {names}"
            )
        kind = schema.field(values[0]).type
        if not any(is_kind(kind) for is_kind in _VALUE_KINDS):
            raise ConfigurationError(
                f"log {name!r}: column {values[0]} has type {kind}, expected binary"
            )
        if _TXID in names and not pa.types.is_integer(schema.field(_TXID).type):
            raise ConfigurationError(
                f"log {name!r}: column txid has type {schema.field(_TXID).type}, expected int64"
            )

    @_while_owned
    async def begin(self, producer: str | Claim) -> tuple[Claim, int]:
        """Begin an incarnation of a producer, by its name, or let one go on.

        Returns: its claim, and the last sequence of the producer that is durable, -1 if none is.

        Raises:
            ProducerFencedError: a later incarnation writes, or this one is forgotten.
            ConfigurationError, OverCapacityError: of the name, or of too many of them.
            WriteError, AlreadyClosedError: the log is lost.
            MetadataError: it is to be refused, and whether the log is ours is not known now.
        """
        now_ms = self._clock.now_ms()
        if isinstance(producer, Claim):
            return producer, self._producers.continue_with(producer, now_ms=now_ms)
        identity = self._clock.new_token().encode()
        token = hashlib.blake2b(identity, digest_size=TOKEN_BYTES).digest()
        claim = self._producers.grant(producer, token, now_ms=now_ms)
        await self.writer.flush()  # of what earlier incarnations wrote
        await self.writer.verify()  # else the next owner may know of later ones, and more records
        return claim, claim.base - 1

    @_while_owned
    async def accept(self, batch: pa.RecordBatch, mark: Mark | None = None) -> Accepted:
        """Hand a batch with rows to the writer.

        Rows without transaction ids get the time, or the last id, if that is higher.  Of those that
        have the sequences of a `mark`, what was accepted before is not written again.

        Raises:
            ProducerFencedError, SequenceGapError: of a producer, while the log is ours.
            MetadataError: they are to be told, and whether it is ours is not known now.
            DLError: what else refuses the batch, or ends the log here.
        """
        known = 0
        while True:
            if mark is not None:
                found = self._producers.look_at(mark.claim, mark.first, batch.num_rows)
                if not isinstance(found, Fresh):
                    return _known(found)
                known = found.known
            rows = await self._fitted(batch.slice(known) if known else batch)
            if self.ending is not None:
                raise self.ending
            try:
                if mark is None:
                    return Accepted(self.writer.write_fitted(rows), batch.num_rows)
                # Another stream of the producer may have brought some of them meanwhile.
                if self._producers.look_at(mark.claim, mark.first, batch.num_rows) == found:
                    fresh = Mark(mark.claim, mark.first + known)
                    return self._write(rows, fresh, batch.num_rows - known)
            except LogNotReadyError:
                # Aside for an append; the rows' transaction ids are to follow those of the append.
                await self.writer.wait_for_capacity()

    def _write(self, rows: Any, mark: Mark, count: int, *, whole: bool = False) -> Accepted:
        future = self.writer.write_fitted(rows, mark=mark, whole=whole)
        self._producers.accepted(mark, count, future, now_ms=self._clock.now_ms())
        future.add_done_callback(partial(self._settled, mark, count))
        return Accepted(future, count)

    def _settled(self, mark: Mark, count: int, future: asyncio.Future[DLSN]) -> None:
        if future.exception() is None:  # else the log is lost
            self._producers.durable(mark, count, future.result())

    @_while_owned
    async def accept_if(
        self, batch: pa.RecordBatch, expected: DLSN | None, mark: Mark | None = None
    ) -> Accepted:
        """Hand a batch to the writer, all in one entry, if the log's last record is at `expected`.

        None: if the log holds no record.

        Raises:
            ConditionFailedError: it is not; else as `accept`.
        """
        async with self._conditional:
            while True:
                rows = await self._fitted(batch)
                last = await self.writer.find_last()
                if mark is not None:
                    found = self._producers.look_at(mark.claim, mark.first, batch.num_rows)
                    if not isinstance(found, Fresh):
                        return _known(found)
                    if found.known:
                        raise ConfigurationError(
                            f"producer {mark.claim.name!r} has written {found.known} of these, "
                            "which are to be written all or none"
                        )
                if self.ending is not None:
                    raise self.ending
                if last != expected:
                    raise ConditionFailedError(
                        f"log {self.writer.log_name!r}: expected its last record at "
                        f"{expected or 'no position'}, it is at {last or 'no position'}",
                        last=None if last is None else str(last),
                    )
                if self.writer.unwritten is not None:
                    continue  # it was handed over meanwhile
                try:
                    if mark is not None:
                        return self._write(rows, mark, batch.num_rows, whole=True)
                    return Accepted(self.writer.write_fitted(rows, whole=True), batch.num_rows)
                except LogNotReadyError:
                    await self.writer.wait_for_capacity()

    async def _fitted(self, batch: pa.RecordBatch) -> Any:
        writer = self.writer
        if not isinstance(writer, AsyncTypedLogWriter):
            return self._fitted_bytes(batch)
        return await writer.fitted_latest(batch)

    def _fitted_bytes(self, batch: pa.RecordBatch) -> pa.RecordBatch | LogRecord:
        txid = present_txid(now_ms=self._clock.now_ms(), last_txid=self.writer.last_txid)
        if batch.num_rows == batch.num_columns == 1:
            # What many small clients send costs a small part of what a batch does.
            payload = batch.column(0)[0].as_py()
            if isinstance(payload, bytes):
                return LogRecord(txid, payload)
        names = batch.schema.names
        if "payload" in names:
            batch = batch.rename_columns(["value" if name == "payload" else name for name in names])
        return byte_log_batch(batch, assigned_txid=txid)


def _known(found: InFlight[asyncio.Future[DLSN]] | Durable) -> Accepted:
    """Return a batch that was accepted before, by its verdict."""
    if isinstance(found, InFlight):
        return Accepted(found.ticket, 1, is_placed=found.is_last)
    answer: asyncio.Future[DLSN | None] = asyncio.get_running_loop().create_future()
    answer.set_result(found.dlsn)
    return Accepted(answer, 1)
