"""A log that this proxy owns: one writer of `dlcore`, and the streams that write through it.

The writer joins waiting records of all streams into its next entry.
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
from dlcore.log.entries.stamp import TOKEN_BYTES, Claim, Mark
from dlcore.log.proxied.producers import Durable, Fresh, InFlight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from dlcore.base.clock import Clock
    from dlcore.base.errors import DLError
    from dlcore.base.ids import DLSN
    from dlcore.log.proxied.extension import ProxyExtension
    from dlcore.log.proxied.producers import Producers
    from dlcore.log.writing.writer import DirectWriter

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

READING_MAX = 8
"""Streams that receive messages at once while the log is slower than its clients."""
_VALUE = "value"
"""Names of the column of bytes; the second is an old name that other clients may still use."""
_TXID = "txid"
_VALUE_KINDS = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_string,
    pa.types.is_large_string,
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted batch: the future of its last position, and the number of its new last rows.

    The position is None if all rows were durable before and the position is not known any more.  If
    `is_placed` is False, it is the position of a later batch.  Futures complete in the order of the
    batches, and run their callbacks in this order.  Therefore a repeated batch that is still in
    flight gets the future of the batch that has its rows.
    """

    future: asyncio.Future[DLSN] | asyncio.Future[DLSN | None]
    fresh: int
    is_placed: bool = True


def _while_owned(
    method: Callable[Concatenate[OwnedLog, _Params], Awaitable[_Result]],
) -> Callable[Concatenate[OwnedLog, _Params], Coroutine[Any, Any, _Result]]:
    """Let a method refuse by local state only while this proxy still owns the log.

    After a takeover the local state may be stale: the next owner may have written the records that
    are missing here.  Ownership is verified after the decision, which proves it for the time of the
    decision, because a proxy that still has its first lock never lost it.
    """

    @wraps(method)
    async def verified(log: OwnedLog, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        try:
            return await method(log, *args, **kwargs)
        except (ConditionFailedError, ProducerFencedError, SequenceGapError):
            await log.writer.pump.verify()
            raise

    return verified


class LogRoom:
    """Whether the streams to a log may receive more: while it takes records, and none waits."""

    def __init__(self, writer: DirectWriter) -> None:
        self.reading_turns = asyncio.Semaphore(READING_MAX)
        self.accepted_bytes = 0
        """Bytes accepted since the log's acquisition; the number only grows."""
        self._writer = writer
        self._waiting = 0
        self._none_waits = asyncio.Event()
        self._none_waits.set()

    @property
    def is_free(self) -> bool:
        """Whether the writer has capacity, and no message waits."""
        return self._writer.machine.has_room and not self._waiting

    async def wait_free(self) -> None:
        """Wait until `is_free`."""
        # Each of the two may change again during the wait for the other.
        while not self.is_free:
            await self._none_waits.wait()
            await self._writer.wait_for_capacity()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a message that waits for the log during the block."""
        self._waiting += 1
        self._none_waits.clear()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._none_waits.set()


class OpenStreams:
    """The streams to a log that are open, and since when there is none.

    Each stream registers a callback that wakes it when the log is released.
    """

    def __init__(self) -> None:
        self.idle_since_s = _now_s()
        self.open: dict[Callable[[], None], None] = {}
        """An ordered set."""
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self.open)

    def idle_s(self) -> float:
        """Return the seconds for which no stream was open."""
        return 0.0 if self.open else _now_s() - self.idle_since_s

    def join(self, wake: Callable[[], None]) -> None:
        """Add a stream."""
        self.open[wake] = None
        self._empty.clear()

    def leave(self, wake: Callable[[], None]) -> None:
        """Remove a stream that has ended."""
        self.open.pop(wake, None)
        self.idle_since_s = _now_s()
        if not self.open:
            self._empty.set()

    def wake(self) -> None:
        """Wake all."""
        for wake in list(self.open):
            wake()

    async def wait_left(self) -> None:
        """Wait until no stream is left."""
        await self._empty.wait()


class OwnedLog:
    """One log from its acquisition to its release.

    `ending` is the reason why no more records are accepted, None while they are.  With `is_lost` no
    more records are acknowledged either.
    """

    def __init__(
        self,
        writer: DirectWriter,
        clock: Clock,
        extension: ProxyExtension,
    ) -> None:
        self.writer = writer
        self.extension = extension
        self._clock = clock
        self.room = LogRoom(writer)
        self.streams = OpenStreams()
        self._conditional = asyncio.Lock()
        self.acquired_at_s = _now_s()
        self.unreached: frozenset[str] = frozenset()
        """Proxies that the first client did not reach, which may be why the log is here."""
        self.ending: DLError | None = None
        self.is_lost = False

    def __repr__(self) -> str:
        return f"<OwnedLog {self.writer.log_name!r} streams={len(self.streams)}>"

    @property
    def name(self) -> str:
        """The log's name."""
        return self.writer.log_name

    @property
    def log_id(self) -> str:
        """The log's identity."""
        return self.writer.log_id

    def end(self, error: DLError, *, is_lost: bool = False) -> None:
        """Accept no more records, for the reason `error`.

        The first reason stays, unless the log is lost later: after a redirection a client believes
        that unacknowledged records were not written, which is then no longer certain.
        """
        if self.ending is None or (is_lost and not self.is_lost):
            self.ending = error
        self.is_lost |= is_lost
        self.streams.wake()

    def check(self, schema: pa.Schema) -> None:
        """Raise if batches of this schema cannot be written to a byte log.

        The writer of a typed log checks each batch instead, because the log's schema may change.

        Raises:
            ConfigurationError: columns are missing, unknown, or of a wrong type.
        """
        if self.writer.is_typed:
            return
        names = schema.names
        others = set(names) - {_VALUE, _TXID}
        name = self.writer.log_name
        if _VALUE not in names or others or len(names) != len(set(names)):
            raise ConfigurationError(
                f"log {name!r} is a byte log: expected one column value and, if rows "
                f"have their own transaction ids, a column txid; got {names}"
            )
        kind = schema.field(_VALUE).type
        if not any(is_kind(kind) for is_kind in _VALUE_KINDS):
            raise ConfigurationError(f"log {name!r}: column value has type {kind}, expected binary")
        if _TXID in names and not pa.types.is_integer(schema.field(_TXID).type):
            raise ConfigurationError(
                f"log {name!r}: column txid has type {schema.field(_TXID).type}, expected int64"
            )

    @property
    def _producers(self) -> Producers[asyncio.Future[DLSN]]:
        return self.extension.stamper

    def producer(self, name: str) -> tuple[Claim, int] | None:
        """Return a producer's claim and its last accepted sequence; None if it is not known.

        Before a caller is refused by this it must `writer.pump.verify`, as `begin` and `accept` do.
        """
        return self._producers.known_of(name)

    def adopt(self, claim: Claim) -> None:
        """Let an incarnation write, which begins behind all that its producer has written.

        Raises:
            OverCapacityError: there are too many producers.
        """
        self._producers.continue_with(claim, now_ms=self._clock.now_ms())

    @_while_owned
    async def begin(self, producer: str | Claim) -> tuple[Claim, int]:
        """Begin an incarnation of a producer by its name, or continue one by its claim.

        Returns: the claim, and the producer's last durable sequence, -1 if there is none.

        Raises:
            ProducerFencedError: a later incarnation writes, or this one is forgotten.
            ConfigurationError: the name is invalid; OverCapacityError: there are too many names.
            WriteError, AlreadyClosedError: the log is lost.
            MetadataError: the request would be refused, but the ownership cannot be verified now.
        """
        now_ms = self._clock.now_ms()
        if isinstance(producer, Claim):
            return producer, self._producers.continue_with(producer, now_ms=now_ms)
        identity = self._clock.new_token().encode()
        token = hashlib.blake2b(identity, digest_size=TOKEN_BYTES).digest()
        claim = self._producers.grant(producer, token, now_ms=now_ms)
        await self.writer.flush()  # so that all records of earlier incarnations are durable
        # A next owner could know later incarnations, and more records.
        await self.writer.pump.verify()
        return claim, claim.base - 1

    @_while_owned
    async def accept(self, batch: pa.RecordBatch, mark: Mark | None = None) -> Accepted:
        """Hand a batch with rows to the writer.

        Rows without transaction ids get the time, or the last id if that is higher.  With `mark`,
        the claim and first sequence of the batch, rows that were accepted before are not written
        again.

        Raises:
            ProducerFencedError, SequenceGapError: the producer's sequence is refused.
            MetadataError: it would be refused, but the ownership cannot be verified now.
            DLError: another error that refuses the batch, or ends the log here.
        """
        known = 0
        while True:
            if mark is not None:
                found = self._producers.look_at(mark.claim, mark.first, batch.num_rows)
                if not isinstance(found, Fresh):
                    return _known(found)
                known = found.known
            rows = await self.writer.fitted_latest(batch.slice(known) if known else batch)
            # The log may have been released, or lost, while the rows were fitted.
            if self.ending is not None:
                raise self.ending
            try:
                if mark is None:
                    return Accepted(self.writer.write_fitted(rows), batch.num_rows)
                # During the await another stream of the producer may have written some rows.
                if self._producers.look_at(mark.claim, mark.first, batch.num_rows) == found:
                    fresh = Mark(mark.claim, mark.first + known)
                    return self._write(rows, fresh, batch.num_rows - known)
            except LogNotReadyError:
                # The writer is paused for an atomic append.  Fit the rows again afterwards: their
                # transaction ids must not be below those of the append.
                await self.writer.wait_for_capacity()

    def _write(self, rows: Any, mark: Mark, count: int, *, whole: bool = False) -> Accepted:
        future = self.writer.write_fitted(rows, mark=mark, whole=whole)
        self._producers.accepted(mark, count, future, now_ms=self._clock.now_ms())
        future.add_done_callback(partial(self._settled, mark, count))
        return Accepted(future, count)

    def _settled(self, mark: Mark, count: int, future: asyncio.Future[DLSN]) -> None:
        if future.exception() is None:  # after an error the log is lost anyway
            self._producers.durable(mark, count, future.result())

    @_while_owned
    async def accept_if(
        self, batch: pa.RecordBatch, expected: DLSN | None, mark: Mark | None = None
    ) -> Accepted:
        """Hand a batch to the writer, in one entry, if the log's last record is at `expected`.

        With None the log must be empty.

        Raises:
            ConditionFailedError: the last record is elsewhere; else as `accept`.
        """
        async with self._conditional:
            while True:
                # Fitted before `find_last`: no await may come between that and the write, or
                # another record could.
                rows = await self.writer.fitted_latest(batch)
                last = await self.writer.find_last()
                if mark is not None:
                    found = self._producers.look_at(mark.claim, mark.first, batch.num_rows)
                    if not isinstance(found, Fresh):
                        return _known(found)
                    if found.known:
                        raise ConfigurationError(
                            f"producer {mark.claim.name!r} has written {found.known} of "
                            f"{batch.num_rows} records of a conditional write already: expected "
                            "all or none of them"
                        )
                if self.ending is not None:
                    raise self.ending
                if last != expected:
                    raise ConditionFailedError(
                        f"log {self.writer.log_name!r}: the condition expects its last record at "
                        f"{expected or 'no position'}, but it is at {last or 'no position'}",
                        last=None if last is None else str(last),
                    )
                if self.writer.machine.report.unwritten is not None:
                    continue  # another batch was handed over since `find_last`
                try:
                    if mark is not None:
                        return self._write(rows, mark, batch.num_rows, whole=True)
                    return Accepted(self.writer.write_fitted(rows, whole=True), batch.num_rows)
                except LogNotReadyError:
                    await self.writer.wait_for_capacity()


def _known(found: InFlight[asyncio.Future[DLSN]] | Durable) -> Accepted:
    """Return the result for a batch that was accepted before."""
    if isinstance(found, InFlight):
        return Accepted(found.ticket, 1, is_placed=found.is_last)
    answer: asyncio.Future[DLSN | None] = asyncio.get_running_loop().create_future()
    answer.set_result(found.dlsn)
    return Accepted(answer, 1)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
