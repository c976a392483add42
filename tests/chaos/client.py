"""A client process of the chaos run: writers, staged appends, tail readers or a recoverer.

It notes in its file of events (see `history`) what it is about to do, and what it learned.  An
error of dlog is an answer like another: the client tries again.  Any other exception ends it, and
fails the run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore import (
    DLSN,
    AppendRun,
    DLError,
    LedgerClientConfig,
    LogConfig,
    LogRecord,
    TlsFiles,
)
from dlcore.backends.direct.namespace import DirectNamespace, open_namespace
from dlcore.base.errors import MetadataConnectionError, MetadataSessionExpiredError
from tests.chaos.history import DAMAGED, NO_GROUP, UNKNOWN_DLSN
from tests.chaos.payloads import identity_of, payload_of
from tests.chaos.plan import ADD_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from dlcore import AsyncLogReader, AsyncLogWriter, DistributedLogManager

LOG_CONFIG = LogConfig(segment_bytes_max=400_000, segment_age_max_s=15.0, lock_timeout_s=20.0)
CLIENT_CONFIG = LedgerClientConfig(
    add_timeout_s=ADD_TIMEOUT_S, read_timeout_s=ADD_TIMEOUT_S, speculative_read_delay_s=0.5
)
_BURST_MAX = 20
_PAUSE_S_MAX = 0.5
_TAIL_RECORDS = 200
_SCRATCH_RECORDS = 20
_SCRATCH_REPEATS = 15_000


@dataclass(frozen=True)
class Work:
    """The task of a client process; its only argument, as JSON."""

    name: str
    life: int
    """How many processes of this name there were before."""
    uri: str
    seed: int
    folder: str
    """Where files of events are: ``<name>.<life>.events``."""
    tls: Mapping[str, str] | None = None
    """The files of `TlsFiles`, if bookies ask for them."""
    locked: Sequence[str] = ()
    """Logs to write under the writer lock."""
    contended: Sequence[str] = ()
    """Logs to write without it: a client that opens a log takes it over."""
    staged: Sequence[str] = ()
    """Logs that get atomic appends, all of them in each."""
    scratch: str = ""
    """Prefix of logs that are written, read back and deleted: garbage between what is kept."""
    tailed: Sequence[str] = ()
    recovered: Sequence[str] = ()
    """Logs whose writers are fenced now and then."""


class Events:
    """The file of events; a line is in the kernel's hands before the next thing happens."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def sent(self, log: str, identities: Sequence[str], group: str = NO_GROUP) -> None:
        """Note appends that are about to be made."""
        at_s = time.monotonic()
        self._write("".join(f"S\t{log}\t{each}\t{group}\t{at_s:.6f}\n" for each in identities))

    def acked(self, identities: Sequence[str], dlsn: DLSN | None) -> None:
        """Note an acknowledgement that is here."""
        at_s = time.monotonic()
        text = UNKNOWN_DLSN if dlsn is None else str(dlsn)
        self._write("".join(f"A\t{each}\t{text}\t{at_s:.6f}\n" for each in identities))

    def given(self, log: str, life: int, records: Sequence[tuple[DLSN, str]]) -> None:
        """Note records that a tail reader was given."""
        self._write("".join(f"T\t{log}\t{life}\t{dlsn}\t{who}\n" for dlsn, who in records))

    def note(self, text: str) -> None:
        """Note something for readers of the file."""
        self._write(f"N\t{time.monotonic():.3f} {' '.join(text.split())}\n")

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._descriptor, data) :]


class Client:
    """The tasks of one process, over one namespace."""

    def __init__(self, work: Work, namespace: DirectNamespace, events: Events) -> None:
        self._work = work
        self._namespace = namespace
        self._events = events
        self._writers = 0
        self._attempts = 0

    def tasks(self) -> list[Coroutine[None, None, None]]:
        """Return what is to be done until cancelled."""
        work = self._work
        unlocked = replace(LOG_CONFIG, lock_enabled=False)
        tasks = [self._write(log, LOG_CONFIG) for log in work.locked]
        tasks += [self._write(log, unlocked) for log in work.contended]
        tasks += [self._tail(log) for log in work.tailed]
        if work.scratch:
            tasks.append(self._make_garbage())
        if work.staged:
            tasks.append(self._append())
        if work.recovered:
            tasks.append(self._recover())
        return tasks

    def _rng(self, *what: object) -> random.Random:
        return random.Random(" ".join(map(str, (self._work.seed, self._work.name, *what))))

    async def _attempt(self, what: str, step: Callable[[], Awaitable[object]]) -> bool:
        """Return whether `step` succeeded; note why not."""
        try:
            await step()
        except DLError as error:
            self._events.note(f"{what}: {type(error).__name__}: {error}")
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error  # closing the writer failed on the way out
            return False
        return True

    # Ordinary writers

    async def _write(self, log: str, config: LogConfig) -> None:
        rng = self._rng("write", log, self._work.life)
        while True:
            await self._attempt(f"write {log}", lambda: self._write_once(log, config, rng))
            # Without a lock two writers that come back at once would only fence each other.
            await asyncio.sleep(rng.uniform(0.1, 0.5) if config.lock_enabled else rng.uniform(1, 4))

    async def _write_once(self, log: str, config: LogConfig, rng: random.Random) -> None:
        manager = await self._namespace.open_log(log, config=config)
        async with await manager.open_writer() as writer:
            self._writers += 1
            name = f"{self._work.name}.{self._work.life}.{self._writers}"
            self._events.note(f"writer {name} opened {log}")
            count = 0
            for _ in range(rng.randint(20, 400)):
                size = rng.randint(1, _BURST_MAX)
                await self._burst(log, writer, [f"{name}#{count + i}" for i in range(size)])
                count += size
                if rng.random() < 0.1:
                    await writer.commit()
                await asyncio.sleep(rng.uniform(0, _PAUSE_S_MAX))

    async def _burst(self, log: str, writer: AsyncLogWriter, identities: Sequence[str]) -> None:
        self._events.sent(log, identities)
        for identity in identities:
            record = LogRecord(writer.last_txid + 1, payload_of(identity))
            future = writer.write(record)
            future.add_done_callback(partial(self._answered, identity))
        if len(identities) % 2:  # else the next burst follows while this one is on its way
            await writer.flush()

    def _answered(self, identity: str, future: asyncio.Future[DLSN]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._events.acked([identity], future.result())

    # Atomic appends

    async def _append(self) -> None:
        """Append atomically, each version until it is known to be committed or aborted.

        As a restarted Spark job does, begin with the version that the process before was busy with,
        with the same records: it must not be appended twice.
        """
        rng = self._rng("append", self._work.life)
        version, records = self._interrupted_append()
        while True:
            if not records:
                version += 1
                writer = f"{self._work.name}.staged"
                first = version * 100
                for log in self._work.staged:
                    records[log] = [
                        f"{writer}.{log}#{first + i}" for i in range(rng.randint(1, 20))
                    ]
                    self._events.sent(log, records[log], f"{writer}@{version}")
            append = partial(self._append_once, version, records)
            is_done = await self._attempt(f"append {version}", append)
            if is_done and rng.random() < 0.8:  # else the same again: it is committed already
                records = {}
            await asyncio.sleep(rng.uniform(0, 2 * _PAUSE_S_MAX) if is_done else 0.3)

    def _interrupted_append(self) -> tuple[int, dict[str, list[str]]]:
        """Return the last version that an earlier process began, and its records by log."""
        prefix = f"{self._work.name}.staged@"
        version, records = 0, dict[str, list[str]]()
        for life in range(self._work.life):
            path = Path(self._work.folder) / f"{self._work.name}.{life}.events"
            text = path.read_text() if path.exists() else ""  # killed before it began
            for line in text.rpartition("\n")[0].split("\n"):
                fields = line.split("\t")
                if fields[0] == "S" and fields[3].startswith(prefix):
                    if (number := int(fields[3].removeprefix(prefix))) > version:
                        version, records = number, {}
                    records.setdefault(fields[1], []).append(fields[2])
        is_whole = set(records) == set(self._work.staged)  # else the kill came before the append
        return version, records if is_whole else {}

    async def _append_once(self, version: int, records: dict[str, list[str]]) -> None:
        identity = f"{self._work.name}.staged"
        self._attempts += 1
        run = AppendRun(  # of one attempt: the others are other runs
            token=f"{self._work.life}.{self._attempts}", begun_ns=time.monotonic_ns()
        )
        append = await self._namespace.begin_append(identity, version, run=run)
        async with append:
            for log, identities in records.items():
                payloads = pa.array([payload_of(each) for each in identities], pa.binary())
                await append.write_batch(log, pa.record_batch({"value": payloads}))
            while True:
                try:
                    await append.commit()
                    break
                except (MetadataConnectionError, MetadataSessionExpiredError) as error:
                    self._events.note(f"append {version} is unknown: {error}")
                    await asyncio.sleep(0.3)
            for identities in records.values():
                self._events.acked(identities, None)

    # Logs that come and go

    async def _make_garbage(self) -> None:
        rng = self._rng("scratch", self._work.life)
        for number in itertools.count():
            name = f"{self._work.scratch}/{self._work.name}.{self._work.life}.{number}"
            await self._attempt(f"scratch {name}", partial(self._write_and_delete, name))
            await asyncio.sleep(rng.uniform(0.2, 1))

    async def _write_and_delete(self, name: str) -> None:
        await self._namespace.create_log(name)
        manager = await self._namespace.open_log(name)
        payloads = [b"%d" % number * _SCRATCH_REPEATS for number in range(_SCRATCH_RECORDS)]
        async with await manager.open_writer() as writer:
            await writer.write_batch(
                pa.record_batch({"txid": range(_SCRATCH_RECORDS), "value": payloads})
            )
        async with await manager.open_reader() as reader:
            read = await reader.read_bulk(_SCRATCH_RECORDS + 1, until_caught_up=True)
        if [each.payload for each in read] != payloads:
            raise AssertionError(f"{name} was closed with {len(payloads)} records, read {read}")
        await self._namespace.delete_log(name)

    # Readers

    async def _tail(self, log: str) -> None:
        position: DLSN | None = None

        async def read() -> None:
            nonlocal position
            manager = await self._namespace.open_log(log)
            async with await manager.open_reader(dlsn=position) as reader:
                while True:
                    position = await self._take(log, reader)

        while True:
            await self._attempt(f"tail {log} at {position}", read)
            await asyncio.sleep(0.3)

    async def _take(self, log: str, reader: AsyncLogReader) -> DLSN:
        records = await reader.read_bulk(_TAIL_RECORDS)
        given = [(each.dlsn, identity_of(each.payload) or DAMAGED) for each in records]
        self._events.given(log, self._work.life, given)
        return records[-1].dlsn.next_slot()

    # Recoverers

    async def _recover(self) -> None:
        rng = self._rng("recover", self._work.life)
        config = replace(LOG_CONFIG, lock_timeout_s=1.0)
        while True:
            await asyncio.sleep(rng.uniform(1, 6))
            log = rng.choice(self._work.recovered)
            fences = rng.random() < 0.7

            async def recover(log: str = log, fences: bool = fences) -> None:
                manager = await self._namespace.open_log(log, config=config)
                await (self._fence(manager) if fences else manager.recover())

            await self._attempt(f"recover {log}", recover)

    async def _fence(self, manager: DistributedLogManager) -> None:
        """Recover the ledger under a live writer, which does not know it."""
        segments = await manager.get_log_segments()
        if segments and (extents := segments[-1].extents):
            await self._namespace.ports.ledgers.recover_ledger(extents[-1].ledger_id)


async def _open_persistently(work: Work, events: Events) -> DirectNamespace:
    while True:
        try:
            return await open_namespace(
                work.uri,
                config=LOG_CONFIG,
                client_config=CLIENT_CONFIG,
                client_id=work.name,
                tls=files_of(work.tls),
            )
        except DLError as error:
            events.note(f"open: {type(error).__name__}: {error}")
            await asyncio.sleep(0.5)


def files_of(tls: Mapping[str, str] | None) -> TlsFiles | None:
    """Return the files that a process was given."""
    return None if tls is None else TlsFiles(**tls)


def termination() -> asyncio.Event:
    """Return what SIGTERM sets from now on."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def perform(works: Iterable[Coroutine[Any, Any, None]], stop: asyncio.Event) -> None:
    """Do all this until it is stopped, or one of it ends; raise what is no answer of dlog."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(each) for each in works]
    tasks.append(asyncio.create_task(stop.wait()))
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception) and not isinstance(result, DLError):
            raise result


async def run(work: Work) -> None:
    """Work until SIGTERM, then close everything in order."""
    events = Events(Path(work.folder) / f"{work.name}.{work.life}.events")
    stop = termination()
    async with await _open_persistently(work, events) as namespace:
        await perform(Client(work, namespace, events).tasks(), stop)
    events.note("closed")


if __name__ == "__main__":
    options: dict[str, Any] = json.loads(sys.argv[1])
    asyncio.run(run(Work(**options)))
