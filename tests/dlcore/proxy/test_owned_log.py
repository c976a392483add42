"""A log that a proxy owns, over a writer that does at its calls what other streams bring about."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from dlcore.base.config import LogConfig
from dlcore.base.errors import (
    ConfigurationError,
    LogNotReadyError,
    ProducerFencedError,
    WriteError,
)
from dlcore.base.ids import DLSN
from dlcore.log.entries.batches import timed_rows
from dlcore.log.entries.stamp import Mark
from dlcore.log.proxied.extension import ProxyExtension
from dlcore.log.proxied.producers import Producers
from dlcore.proxy.writing.owned_log import OwnedLog
from tests.fixtures.aio import run, until
from tests.fixtures.memory_namespace import ManualClock, MemoryCluster, on_log, read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.records import LogRecord
    from dlcore.log.writing.writer import DirectWriter

LAST = DLSN(1, 7, 0)


def rows(*payloads: bytes) -> pa.RecordBatch:
    """Return a batch."""
    return pa.record_batch({"value": pa.array(payloads, pa.binary())})


class Writer:
    """Takes what it is given, unless it is paused or has `unwritten` records of others."""

    log_name = "clicks"
    is_typed = False

    def __init__(self) -> None:
        self.last_txid = 5
        self.is_paused = False
        self.left: deque[int] = deque()  # what it has unwritten, at each look
        self.written: list[tuple[pa.RecordBatch, asyncio.Future[DLSN]]] = []
        self.flushes = 0
        self.pump = self.machine = self.report = self

    async def fitted_latest(self, batch: pa.RecordBatch) -> pa.RecordBatch | LogRecord:
        """Return a batch with transaction ids."""
        return timed_rows(batch, now_ms=0, last_txid=self.last_txid)

    def write_fitted(self, batch: pa.RecordBatch, **_: object) -> asyncio.Future[DLSN]:
        """Accept rows; return the future of their last position."""
        if self.is_paused:
            raise LogNotReadyError("paused")
        future: asyncio.Future[DLSN] = asyncio.get_running_loop().create_future()
        self.written.append((batch, future))
        return future

    async def wait_for_capacity(self) -> None:
        """Come back, behind what an append has written meanwhile."""
        self.is_paused, self.last_txid = False, 2**60

    async def flush(self) -> None:
        """Wait for what an earlier incarnation has on its way."""
        self.flushes += 1
        for _, future in self.written:
            await future

    async def verify(self) -> None:
        """The log is still its own."""

    async def find_last(self) -> DLSN:
        """Return the position of the log's last record."""
        return LAST

    @property
    def unwritten(self) -> int | None:
        """The accepted records that are not durable."""
        return self.left.popleft() if self.left else None


def with_log(scenario: Callable[[OwnedLog, Writer], Awaitable[None]]) -> None:
    """Run a scenario."""

    async def body() -> None:
        writer = Writer()
        owned = OwnedLog(
            cast("DirectWriter", writer), ManualClock("proxy"), ProxyExtension(Producers())
        )
        await scenario(owned, writer)

    run(body())


@pytest.mark.parametrize("is_conditional", [False, True])
def test_a_batch_waits_while_its_writer_is_paused(is_conditional: bool) -> None:
    """Its transaction ids follow those of the append that it waited for."""

    async def scenario(owned: OwnedLog, writer: Writer) -> None:
        writer.is_paused = True
        accept = partial(owned.accept_if, expected=LAST) if is_conditional else owned.accept
        accepted = await accept(rows(b"a", b"b"))
        ((batch, _),) = writer.written
        assert batch.to_pydict() == {"txid": [2**60] * 2, "value": [b"a", b"b"]}
        assert accepted.fresh == 2

    with_log(scenario)


def test_a_condition_looks_again_when_others_have_written_meanwhile() -> None:
    """Between the look at the last record and the write nothing may be on its way."""

    async def scenario(owned: OwnedLog, writer: Writer) -> None:
        writer.left.extend([1, 1])
        await owned.accept_if(rows(b"a"), LAST)
        assert not writer.left
        assert len(writer.written) == 1

    with_log(scenario)


def test_a_batch_sent_again_waits_for_those_in_flight() -> None:
    """Also on a condition, which held when it was sent first; a part of it is not all of it."""

    async def scenario(owned: OwnedLog, writer: Writer) -> None:
        claim, last = await owned.begin("meter")
        assert last == -1
        first = await owned.accept(rows(b"a", b"b"), Mark(claim, 0))
        again = [
            await owned.accept(rows(b"a"), Mark(claim, 0)),
            await owned.accept(rows(b"a", b"b"), Mark(claim, 0)),
            await owned.accept_if(rows(b"b"), None, Mark(claim, 1)),
        ]
        with pytest.raises(ConfigurationError, match="has written 1 of "):
            await owned.accept_if(rows(b"b", b"c"), LAST, Mark(claim, 1))
        ((_, future),) = writer.written
        future.set_result(DLSN(1, 8, 1))
        assert await first.future == DLSN(1, 8, 1)
        assert [await each.future for each in again] == [DLSN(1, 8, 1)] * 3
        assert [each.is_placed for each in again] == [False, True, True]
        durable = await owned.accept_if(rows(b"b"), None, Mark(claim, 1))
        assert await durable.future == DLSN(1, 8, 1)

    with_log(scenario)


def test_a_batch_sent_again_is_answered_before_the_next_one() -> None:
    """A stream's positions follow from the order of its batches, also of those of one entry."""

    async def scenario(owned: OwnedLog, writer: Writer) -> None:
        claim, _ = await owned.begin("meter")
        await owned.accept(rows(b"a"), Mark(claim, 0))
        again = await owned.accept(rows(b"a"), Mark(claim, 0))
        following = await owned.accept(rows(b"b"), Mark(claim, 1))
        reported: list[DLSN | None] = []
        for each in (again, following):
            each.future.add_done_callback(lambda done: reported.append(done.result()))
        for slot, (_, future) in enumerate(writer.written):  # in one turn of the loop
            future.set_result(DLSN(1, 8, slot))
        await until(lambda: len(reported) == 2)
        assert reported == [DLSN(1, 8, 0), DLSN(1, 8, 1)]

    with_log(scenario)


def test_a_batch_sent_again_is_answered_when_it_is_durable() -> None:
    """Behind it more may be in flight: a durable one would be reported before it."""

    async def scenario(owned: OwnedLog, writer: Writer) -> None:
        claim, _ = await owned.begin("meter")
        for sequence in range(3):
            await owned.accept(rows(b"a"), Mark(claim, sequence))
        first = await owned.accept(rows(b"a"), Mark(claim, 0))
        for entry_id in range(2):
            writer.written[entry_id][1].set_result(DLSN(1, entry_id, 0))
        assert await first.future == DLSN(1, 0, 0)
        second = await owned.accept(rows(b"a"), Mark(claim, 1))
        assert await second.future == DLSN(1, 1, 0)

    with_log(scenario)


def test_a_batch_sent_again_fails_with_those_in_flight() -> None:
    """It is not durable, and no client learns that it is."""

    async def scenario(owned: OwnedLog, writer: Writer) -> None:
        claim, _ = await owned.begin("meter")
        accepted = [await owned.accept(rows(b"a"), Mark(claim, 0)) for _ in range(2)]
        ((_, future),) = writer.written
        future.set_exception(WriteError("lost"))
        for each in accepted:
            with pytest.raises(WriteError, match="lost"):
                await each.future
        assert (await owned.begin(claim))[1] == -1

    with_log(scenario)


def test_a_producer_learns_where_it_goes_on_once_that_is_durable() -> None:
    """No client would write a record before it that is lost later."""

    async def scenario(owned: OwnedLog, writer: Writer) -> None:
        claim, _ = await owned.begin("meter")
        await owned.accept(rows(b"a"), Mark(claim, 0))
        flushes = writer.flushes
        beginning = asyncio.create_task(owned.begin("meter"))
        await until(lambda: writer.flushes > flushes or beginning.done())
        assert not beginning.done()
        ((_, future),) = writer.written
        future.set_result(DLSN(1, 8, 0))
        later, last = await beginning
        assert (later.base, last) == (1, 0)

    with_log(scenario)


def test_two_incarnations_are_distinguished_wherever_they_begin() -> None:
    """Two proxies may give out the same epoch; the one that writes first fences the other."""

    async def body() -> None:
        clocks = ManualClock("here"), ManualClock("there")
        logs = [
            OwnedLog(cast("DirectWriter", Writer()), each, ProxyExtension(Producers()))
            for each in clocks
        ]
        (one, _), (other, _) = [await each.begin("meter") for each in logs]
        assert one.epoch == other.epoch
        with pytest.raises(ProducerFencedError):
            await logs[0].begin(other)

    run(body())


def test_two_streams_of_a_producer_write_a_record_once() -> None:
    """The one that is made to fit for longer finds that the other has brought it."""

    async def scenario(owned: OwnedLog, writer: Writer) -> None:
        claim, _ = await owned.begin("meter")
        fitted: list[Any] = []

        async def slowly(batch: pa.RecordBatch) -> pa.RecordBatch:
            fitted.append(batch)
            if len(fitted) == 1:  # as where the schema of a typed log is read again
                await owned.accept(rows(b"a", b"b"), Mark(claim, 0))
            return batch

        writer.fitted_latest = slowly  # type: ignore[method-assign]
        accepted = await owned.accept(rows(b"a", b"b", b"c"), Mark(claim, 0))
        assert [batch["value"].to_pylist() for batch, _ in writer.written] == [
            [b"a", b"b"],
            [b"c"],
        ]
        assert accepted.fresh == 1

    with_log(scenario)


def test_a_log_that_is_lost_while_it_is_let_go_of_says_that_it_is_lost() -> None:
    """Sent elsewhere, a client would take what was not acknowledged for not written."""

    async def scenario(log: OwnedLog, _: Writer) -> None:
        let_go, lost = LogNotReadyError("let go of"), WriteError("lost")
        log.end(let_go)
        log.end(LogNotReadyError("again"))
        assert (log.ending, log.is_lost) == (let_go, False)
        log.end(lost, is_lost=True)
        assert (log.ending, log.is_lost) == (lost, True)
        log.end(WriteError("again"), is_lost=True)
        assert log.ending is lost

    with_log(scenario)


async def owned(cluster: MemoryCluster, name: str, **config: Any) -> OwnedLog:
    """Own the log without its lock, as one does that has lost it and does not know yet."""
    namespace = await cluster.open(name, config=LogConfig(lock_enabled=False, **config))
    extension = ProxyExtension(Producers())
    writer = await (await namespace.open_log("clicks")).open_writer(extension=extension)
    return OwnedLog(writer, cluster.clocks[name], extension)


@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("judged", ["gap", "incarnation", "condition"])
def test_a_proxy_that_has_lost_the_log_judges_nothing(
    judged: str, is_idle: bool, has_left: bool
) -> None:
    """A batch that the next owner took is no gap, and a producer that began there is not fenced."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        stale = await owned(cluster, "stale", segment_age_max_s=1)
        claim, _ = await stale.begin("meter")
        await (await stale.accept(rows(b"0"), Mark(claim, 0))).future
        if is_idle:
            cluster.clocks["stale"].current_ms += 1000
            await until(lambda: stale.writer.machine.log.at.head.segment is None)
        taken = await owned(cluster, "other")
        await taken.begin(claim)
        await (await taken.accept(rows(b"1"), Mark(claim, 1))).future
        later, last = await taken.begin("meter")
        assert last == 1
        if has_left:
            await (await taken.accept(rows(b"2"), Mark(later, 2))).future
            await taken.writer.aclose()
        judging: dict[str, Callable[[], Awaitable[object]]] = {
            "gap": partial(stale.accept, rows(b"2"), Mark(claim, 2)),
            "incarnation": partial(stale.begin, later),
            "condition": partial(stale.accept_if, rows(b"2"), LAST),
        }
        with pytest.raises(WriteError, match="another writer"):
            await judging[judged]()
        await stale.writer.abort()
        await taken.writer.abort()
        assert len(await read_all(log)) == 2 + has_left

    on_log(body)


def test_a_proxy_that_has_lost_the_log_begins_no_incarnation() -> None:
    """A producer would learn that its records of the next owner are not in the log."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        stale = await owned(cluster, "stale")
        claim, _ = await stale.begin("meter")
        await (await stale.accept(rows(b"0"), Mark(claim, 0))).future
        taken = await owned(cluster, "other")
        later, last = await taken.begin("meter")
        assert last == 0
        await (await taken.accept(rows(b"1"), Mark(later, 1))).future
        with pytest.raises(WriteError, match="another writer"):
            await stale.begin("meter")
        assert (await taken.begin("meter"))[1] == 1
        await stale.writer.abort()
        await taken.writer.abort()
        assert len(await read_all(log)) == 2

    on_log(body)
