"""Programs that write over proxies by the real client: its writer with the outbox, its appends.

Each writes under a name of its own, which it keeps when it starts again, or under one that is made
for each writer.  It numbers its records as the client does: one that starts again goes on after
its acknowledged records.  Proxies die and pause, streams break, writers are silent until logs
forget them, stop, and leave records behind.  In between the program reads back its commits, takes
snapshots and reads what they name.  It knows logs by handles that outlive a change of names.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from dlcore.backends.flight.log import FlightLog
from dlcore.backends.flight.planning import FlightSnapshots, get_info, scan
from dlcore.backends.flight.staging import FlightStagedAppend
from dlcore.base.errors import (
    AlreadyTruncatedError,
    DLError,
    EndOfStreamError,
    LogNotFoundError,
    ProducerFencedError,
    TransactionIdOutOfOrderError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.scan_driver import by_entry
from tests.simulation.proxy_clients import PATIENCE_S
from tests.simulation.remote_calls import Calls
from tests.simulation.remote_checkers import FORGOTTEN_S, Remote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.backends.flight.writing import FlightWriter
    from dlcore.log.reading.scan import LogSnapshot
    from tests.simulation.log_checkers import Rows
    from tests.simulation.proxies import Proxies

_RECORDS_MAX = 120
"""The logs of one program."""
_NAMED_SHARE = 0.5


class Program:
    """Writes, appends, reads back, and looks at what there is; and starts again."""

    def __init__(self, proxies: Proxies, name: str, logs: Sequence[str]) -> None:
        self.name = name
        self._proxies = proxies
        self._rng = proxies.rng
        self._names = logs
        self._known: list[LogKey] = []  # under the names that they had
        self._checkers = proxies.log_checkers
        self._is_named = proxies.rng.random() < _NAMED_SHARE
        self._remotes: dict[str, Remote] = {}  # of a name that is kept, by log id
        self._lives = self._count = self._appends = 0
        self._rows: Rows = {}

    async def run(self) -> None:
        """Work until the end is near; then a last time, until what was begun is done."""
        is_done = False
        while not is_done:
            is_last = self._proxies.is_ending and not self._rows
            is_done = await self._try(is_last=is_last) and is_last
            await asyncio.sleep(self._rng.expovariate(3.0))

    async def _try(self, *, is_last: bool) -> bool:
        """Do something; return whether nothing hindered it."""
        try:
            async with Calls(self._proxies, self.name) as calls:
                if is_last:
                    await self._write(calls, await self._find(calls, self._names[0]), is_last=True)
                elif self._rows or self._rng.random() < 0.2:
                    await self._append(calls)
                elif self._rng.random() < 0.3:
                    await self._look(calls)
                else:
                    await self._write(calls, await self._some_log(calls), is_last=False)
        except LogNotFoundError as error:
            self._note(f"{type(error).__name__}: {error}")
            return not is_last
        except DLError as error:
            self._note(f"{type(error).__name__}: {error}")
            return False
        return True

    def _note(self, what: str) -> None:
        self._proxies.note(self.name, what)

    async def _some_log(self, calls: Calls) -> LogKey:
        if self._known and self._rng.random() < 0.6:
            return self._rng.choice(self._known)
        return await self._find(calls, self._rng.choice(self._names))

    async def _find(self, calls: Calls, name: str) -> LogKey:
        key = LogKey(name=name, log_id=(await get_info(calls, name)).log_id)
        self._known.append(key)
        return key

    # Writing

    async def _write(self, calls: Calls, key: LogKey, *, is_last: bool) -> None:
        """Write to a log for a while, and leave in some way."""
        log = FlightLog(calls, key)
        writer = await log.open_writer(producer=self.name if self._is_named else None)
        try:
            remote = self._begin(key, writer)
            for _ in range(1 if is_last else self._rng.choice((1, 3, 10))):
                if self._count < _RECORDS_MAX or is_last:
                    await self._write_some(writer, remote, is_last=is_last)
                if not is_last:
                    await self._pause()
            if is_last or self._rng.random() < 0.6:
                await self._commit(log, writer, remote)
                await writer.aclose()
            elif self._rng.random() < 0.5:
                self._note("stops, and leaves what is not acknowledged")
        except ProducerFencedError as error:
            if not self._is_named:  # else a request of its own may have come late
                remote.on_fenced(error)
            raise
        except TransactionIdOutOfOrderError:
            self._proxies.count("remote record that came too late")
            raise
        finally:
            await writer.abort()

    def _begin(self, key: LogKey, writer: FlightWriter) -> Remote:
        """Go on with the numbers of a name that is kept; else begin to number."""
        remote = self._remotes.get(key.log_id) if self._is_named else None
        if remote is None:
            self._lives += 1
            name = f"{self.name}-{self._lives}"
            remote = Remote(self._proxies.checkers, key, name, self._proxies.fail)
            if self._is_named:
                self._remotes[key.log_id] = remote
        if self._is_named:
            remote.on_begin(writer.next_sequence)
        return remote

    async def _write_some(self, writer: FlightWriter, remote: Remote, *, is_last: bool) -> None:
        """Write one by one, or a batch; wait for it or not."""
        rng = self._rng
        await writer.wait_for_capacity()
        count = rng.choice((1, 1, 3, 8))
        # Records that others write meanwhile have the time, too, which may be later.
        is_single = not is_last and rng.random() < 0.5
        self._count += count
        numbers, payloads = remote.on_write(count)
        if is_single:
            now_ms = self._proxies.now_ms()
            for number, payload in zip(numbers, payloads, strict=True):
                future = writer.write(LogRecord(now_ms, payload))
                future.add_done_callback(partial(remote.on_answer, [number]))
        else:
            future = writer.write_batch(pa.record_batch({"value": payloads}))
            future.add_done_callback(partial(remote.on_answer, numbers))
        if rng.random() < 0.2:
            await writer.flush()

    async def _pause(self) -> None:
        rng = self._rng
        if rng.random() < 0.1:
            await asyncio.sleep(rng.uniform(0.0, 2 * FORGOTTEN_S))
            self._proxies.count("silent writer")
        elif rng.random() < 0.7:
            await asyncio.sleep(rng.expovariate(5.0))

    async def _commit(self, log: FlightLog, writer: FlightWriter, remote: Remote) -> None:
        """Commit, and read back at whichever proxy answers all that was committed."""
        await writer.commit()
        written = remote.durable()
        reading = self._checkers.new_reading(log.log_id, log.name)
        floor = reading.floor
        reader = await log.open_reader()
        try:
            while records := await reader.read_bulk(50, until_caught_up=True):
                reading.on_records(records)
        except AlreadyTruncatedError:
            reading.on_truncated()
            return
        except EndOfStreamError:
            pass
        finally:
            await reader.aclose()
        remote.on_read_back(written, reading)
        reading.on_caught_up(floor)
        self._proxies.count("read back what was committed")

    # Appends to several logs

    async def _append(self, calls: Calls) -> None:
        """Append to some logs at once, the same until a proxy reported the result."""
        rng, append = self._rng, (self.name, self._appends)
        if not self._rows:
            names = rng.sample(self._names[:2], rng.randint(1, 2))
            self._rows = {
                log: [
                    f"{self.name}/append-{self._appends}/{log}/{row}".encode()
                    for row in range(rng.randint(1, 4))
                ]
                for log in sorted(names)
            }
        self._checkers.on_append(append, self._rows)
        staged = FlightStagedAppend.begin(
            calls,
            *append,
            shared=None,
            run=None,
            lock_timeout_s=None,
            strict=False,
            patience_s=2 * PATIENCE_S,
        )
        try:
            for log, payloads in self._rows.items():
                await staged.write_batch(log, pa.record_batch({"value": payloads}))
            extents = await staged.stage()
            self._checkers.on_commit(append, sorted({(e.log, e.log_id) for e in extents}))
            await staged.commit(extents)
        finally:
            await staged.aclose()
        self._checkers.on_committed(append, {})
        self._rows, self._appends = {}, self._appends + 1
        self._proxies.count("remote append")

    # Snapshots

    async def _look(self, calls: Calls) -> None:
        """Take snapshots one after the other, and read what some of them name."""
        snapshots = FlightSnapshots(calls)
        for _ in range(self._rng.choice((1, 3))):
            looking = self._proxies.checkers.snapshots.begin(self._names)
            found = await snapshots.take(self._names)
            looking.on_answered(found)
            self._proxies.count("remote snapshot")
            given = [each for each in found.values() if each is not None]
            if given and self._rng.random() < 0.7:
                await self._scan(calls, self._rng.choice(given))
            await asyncio.sleep(self._rng.expovariate(3.0))

    async def _scan(self, calls: Calls, snapshot: LogSnapshot) -> None:
        """Read all that a snapshot names."""
        reading = self._checkers.new_reading(snapshot.log_id, snapshot.log, snapshot.first)
        try:
            for part in snapshot.scans(snapshot.first, snapshot.end):
                async for each in by_entry(scan(calls, part, patience_s=2 * PATIENCE_S)):
                    rows = each.batch.to_pylist()
                    for row, values in enumerate(rows):
                        reading.on_record(
                            values["value"],
                            DLSN(each.lssn, each.entry_id, each.first_slot + row),
                            each.sequence_id + row,
                            values["txid"],
                            each.timestamp_ms,
                        )
        except AlreadyTruncatedError:
            reading.on_truncated()
            return
        self._proxies.checkers.snapshots.on_scanned(snapshot, reading)
