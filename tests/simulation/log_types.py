"""A typed log in some runs: its columns get more and wider, while it is written, merged and read.

A writer of a row may know any version of the schema that there ever was, or one that its writer has
not heard of.  The log is appended to by the appenders and merged with the others, has writers and
readers of its own, and is not renamed, truncated, sealed or deleted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from dlcore.base.errors import InvalidEntryError, SchemaMismatchError
from dlcore.base.ids import DLSN
from tests.simulation.life_checkers import require
from tests.simulation.log_writers import answered
from tests.simulation.type_checkers import AS_WRITTEN, GROWS, PAYLOAD, WIDTHS, Columns

if TYPE_CHECKING:
    import random

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.reader import DirectReader
    from dlcore.log.writing.typed import DirectTypedWriter
    from tests.simulation.log_checkers import LogCheckers, Reading
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs

TYPED = "t"
"""The name of the log."""
_FIRST: Columns = {PAYLOAD: "binary", "x": WIDTHS[0]}
_TYPES = {"binary": pa.binary(), **{str(kind): kind for kind in map(pa.type_for_alias, WIDTHS)}}
_BITS = {kind: 8 << step for step, kind in enumerate(WIDTHS)}


class Types:
    """The roles."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._rng: random.Random = logs.world.rng
        self._checkers: LogCheckers = logs.world.log_checkers
        self._types = self._checkers.types
        self._columns = 0
        self._rows = 0

    async def start(self, namespace: DirectNamespace) -> None:
        """Create the log, and start all processes."""
        await namespace.create_log(TYPED, schema=_schema_of(_FIRST))
        for number in range(2):
            self._logs.supervise(f"evolver-{number}", self._evolve)
            self._logs.supervise(f"typist-{number}", self._write)
            self._logs.supervise(f"typed-reader-{number}", self._read)

    async def _open(self, process: LogProcess) -> DirectLog:
        config = replace(process.config, lock_enabled=self._rng.random() < 0.7)
        return await process.namespace.open_log(TYPED, config=config)

    # Changes of the schema

    async def _evolve(self, process: LogProcess) -> None:
        """L13: add a column or ask for a type of one, with or without what others added."""
        rng = self._rng
        await self._logs.sleep(rng.uniform(0.0, 1.5))
        log = await self._open(process)
        known = dict(self._types.versions[-1])
        numbers = [name for name, kind in known.items() if kind in WIDTHS]
        merges = rng.random() < 0.7
        if rng.random() < 0.5:
            name = rng.choice(numbers)
            wider = WIDTHS if merges else WIDTHS[WIDTHS.index(known[name]) :]
        else:
            self._columns += 1
            name, wider = f"c{self._columns}", WIDTHS
        asked = {name: rng.choice(wider)}
        if rng.random() < 0.3:
            process.client.store.inner.lose_next_reply(applied=rng.random() < 0.6)
        wanted = asked if merges else {**known, **asked}
        try:
            merged = await log.update_schema(_schema_of(wanted), merge=merges)
        except SchemaMismatchError as error:
            require(GROWS, holds=not merges, message=f"{asked} cannot be added: {error}")
            return  # another one added a column meanwhile
        process.note(f"log {TYPED} has {len(merged)} columns, with {asked}")
        self._types.check_answer({field.name: str(field.type) for field in merged}, wanted)

    # Writers

    def batch(self, payloads: list[bytes], txid: int | None = None) -> pa.RecordBatch:
        """Return rows by a version of the schema, which need not be the latest."""
        rng = self._rng
        columns = rng.choice(self._types.versions[-3:])
        rows = []
        for payload in payloads:
            values = {}
            for name, kind in columns.items():
                if kind in WIDTHS and rng.random() < 0.8:
                    limit = 1 << (_BITS[kind] - 1)
                    values[name] = rng.randrange(-limit, limit)
            self._types.on_write(payload, values)
            rows.append({PAYLOAD: payload, **values})
        batch = pa.RecordBatch.from_pylist(rows, schema=_schema_of(columns))
        if txid is None:
            return batch
        return batch.append_column("_txid", pa.array([txid] * len(rows), pa.int64()))

    async def _write(self, process: LogProcess) -> None:
        """Open the log's writer, and write for a while."""
        rng = self._rng
        log = await self._open(process)
        writer = cast("DirectTypedWriter", await log.open_writer())
        writing = self._checkers.new_writing(log.log_id, log.name)
        try:
            for _ in range(rng.choice((1, 5, 20))):
                count = rng.choice((1, 1, 3))
                payloads = [b"typed/%d" % (self._rows + each) for each in range(count)]
                self._rows += count
                writing.on_write(payloads)
                batch = self.batch(payloads)
                # Its columns may be newer than the writer.
                rows = await writer.fitted_latest(batch, last_txid=writer.last_txid)
                future = writer.write_fitted(rows)
                future.add_done_callback(partial(answered, process, writing, payloads))
                await self._logs.sleep(rng.expovariate(10.0))
                if rng.random() < 0.2:
                    writing.on_visible(await writer.commit())
        finally:
            await writer.aclose()

    # Readers

    async def _read(self, process: LogProcess) -> None:
        """Read for a while, from the start or from somewhere in the log."""
        rng = self._rng
        log = await self._open(process)
        reading = self._logs.new_reading(log._log, is_whole=rng.random() < 0.5)
        async with await log.open_reader(dlsn=reading.next_dlsn) as reader:
            for _ in range(rng.randint(1, 30)):
                if not await self._read_batch(reader, reading):
                    await self._logs.sleep(rng.expovariate(5.0))

    async def read_whole(self, process: LogProcess) -> Reading:
        """Read all that there is."""
        log = await self._open(process)
        reading = self._logs.new_reading(log._log, is_whole=True)
        async with await log.open_reader() as reader:
            while await self._read_batch(reader, reading):
                pass
        return reading

    async def _read_batch(self, reader: DirectReader, reading: Reading) -> bool:
        """L14: read the next batch; return False if there is none."""
        floor = reading.floor
        try:
            batch = await reader.read_batch(until_caught_up=True)
        except InvalidEntryError as error:
            require(AS_WRITTEN, holds=False, message=f"an entry cannot be read: {error}")
            raise
        if batch is None:
            reading.on_caught_up(floor)
            return False
        self._types.check_batch(batch)
        for row in batch.to_pylist():
            place = DLSN(*row["_dlsn"].values())
            written_ms = round(row["_timestamp"].timestamp() * 1000)
            reading.on_record(row[PAYLOAD], place, row["_sequence_id"], row["_txid"], written_ms)
        return True


def _schema_of(columns: Columns) -> pa.Schema:
    return pa.schema({name: _TYPES[kind] for name, kind in columns.items()})
