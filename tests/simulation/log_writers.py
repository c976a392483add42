"""Writers of logs in a run: they write, flush, truncate and leave in some way, or die at it.

Two roles compete for the same logs, with the lock and sometimes without it.  The answer for
each record goes to the checkers: its position, or that it was never sent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from dlcore.base.errors import AlreadyTruncatedError, DLError, EndOfStreamError, WriteCancelledError
from dlcore.base.records import LogRecord

if TYPE_CHECKING:
    import asyncio
    import random

    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.ids import DLSN
    from dlcore.log.writing.writer import DirectWriter
    from tests.simulation.log_checkers import LogCheckers, Writing
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs


WRITTEN = ("a", "b")
"""Few logs, so that writers meet."""


class Writer:
    """A role that opens one writer after the other, whichever process it lives in."""

    def __init__(self, logs: Logs, number: int, rng: random.Random) -> None:
        self._logs = logs
        self._rng = rng
        self._name = f"writer-{number}"
        self._count = 0

    async def work(self, process: LogProcess) -> None:
        """Open a log's writer, write for a while, and leave."""
        has_lock = self._rng.random() < self._logs.locked_share
        config = replace(process.config, lock_enabled=has_lock)
        name = self._rng.choice(WRITTEN)
        log = await process.namespace.open_log(name, config=config)
        writer = await log.open_writer()
        session = _Session(self, process, log, writer)
        process.note(f"writes to log {name}, with lock: {has_lock}")
        try:
            await session.write_some()
        finally:
            await session.leave()

    def payloads(self, log: str, count: int) -> list[bytes]:
        """Return payloads that no one else writes."""
        self._count += count
        numbers = range(self._count - count, self._count)
        return [f"{self._name}/{each}/{log}".encode() for each in numbers]


class _Session:
    """From opening a writer to its end."""

    def __init__(
        self, role: Writer, process: LogProcess, log: DirectLog, writer: DirectWriter
    ) -> None:
        self._role = role
        self._rng = role._rng
        self._logs = role._logs
        self._process = process
        self._log = log
        self._writer = writer
        self._checkers: LogCheckers = self._logs._checkers
        self._writing: Writing = self._checkers.new_writing(log.log_id, log.name)

    async def write_some(self) -> None:
        """Write records and batches, and wait for them now and then."""
        rng = self._rng
        pause_s = rng.choice((0.002, 0.05, 0.3))
        await self._logs.sleep(rng.choice((0.0, 0.0, 0.5)))
        for _ in range(rng.choice((1, 4, 25))):
            self._write()
            choice = rng.random()
            if choice < 0.1:
                self._writing.on_visible(await self._writer.commit())
            elif choice < 0.2:
                await self._writer.flush()
            elif choice < 0.24:
                await self._truncate()
            if rng.random() < 0.6:
                await self._logs.sleep(rng.expovariate(1 / pause_s))

    def _write(self) -> None:
        rng, writer = self._rng, self._writer
        txid = max(writer.last_txid, 0) + rng.choice((0, 0, 1, 5))
        payloads = self._role.payloads(self._log.name, rng.choice((1, 1, 1, 4)))
        self._writing.on_write(payloads)
        if len(payloads) == 1:
            future = writer.write(LogRecord(txid, payloads[0] + b" " * rng.choice((0, 0, 300))))
        else:
            columns = {"txid": [txid] * len(payloads), "value": payloads}
            future = writer.write_batch(pa.record_batch(columns))
        future.add_done_callback(partial(answered, self._process, self._writing, payloads))

    async def _truncate(self) -> None:
        places = self._checkers.places(self._log.log_id)
        if places:
            place = places[min(self._rng.randrange(len(places)), self._rng.randrange(len(places)))]
            self._process.note(f"truncates log {self._log.name} below {place}")
            self._checkers.on_truncate(self._log.log_id, self._log.name, place)
            await self._writer.truncate(place)

    async def leave(self) -> None:
        """Close, seal, abort, or fall silent until the process ends."""
        choice = self._rng.random()
        if choice < 0.03:
            await self._writer.mark_end_of_stream()
            self._writing.on_visible(self._writer.last_dlsn)
        if choice < 0.6:
            await self._writer.aclose()
            self._writing.on_visible(self._writer.last_dlsn)
        elif choice < 0.75:
            for _ in range(3):
                self._write()
            await self._logs.sleep(0.001)  # so that some of it is under way
            await self._writer.abort()
        elif choice < 0.85:
            self._process.note("dies with an open writer")
            self._process.client.crash()
        else:
            await self._writer.flush()
            await self._logs.sleep(self._rng.uniform(0.2, 3.0))
            await self._writer.aclose()
        if choice < 0.03:
            # Nothing more can be written: others go on with another log of that name.
            await self._logs.replace_log(self._process, self._log)


def answered(
    process: LogProcess, writing: Writing, payloads: list[bytes], future: asyncio.Future[DLSN]
) -> None:
    """Judge what a writer learns of the records that it wrote at once."""
    if future.cancelled() or not process.client.is_alive:
        return
    error = future.exception()
    try:
        if error is None:
            writing.on_acknowledged(payloads, future.result())
        elif isinstance(error, WriteCancelledError) and error.__cause__ is not None:
            writing.on_never_sent(payloads)
    except Exception as violation:  # noqa: BLE001  # whatever it is, it ends the run
        process.world.fail(violation)


async def follow(logs: Logs, process: LogProcess) -> None:
    """Read a log along as it grows, over segments, writers and truncations."""
    rng = logs._rng
    log = await process.namespace.open_log(logs.any_log(), config=process.config)
    reading = logs.new_reading(log._log, is_whole=rng.random() < 0.5)
    async with await log.open_reader(dlsn=reading.next_dlsn) as reader:
        for turn in range(rng.randint(5, 40)):
            floor = reading.floor
            patience_s = 0.5 if turn % 2 else None  # it may be cancelled when it has some
            read = reader.read_bulk(20, timeout_s=patience_s)
            try:
                records = await logs.within(rng.uniform(0.05, 1.0), read)
            except AlreadyTruncatedError:
                reading.on_truncated()
                return
            except EndOfStreamError:
                reading.on_caught_up(floor)
                return
            except DLError as error:
                process.note(f"reads on after {type(error).__name__}")
                return
            reading.on_records(records or [])
