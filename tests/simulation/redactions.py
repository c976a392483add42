"""A log with rows about persons in some runs, and redactions of them, whose processes die.

Rows are about one person at a time, some about the next one.  When that one has its turn, the rows
of the one before are redacted: by processes that die at any request, two at once, beside workers
that merge and tier the log and let its table follow, until one learns that no file has them any
more.  `RedactionCheckers` judges what readers get, and looks into all files, and into all versions
of tables.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import pyarrow as pa
from msgspec.structs import replace as with_values

from dlcore.base.config import LogSettings
from dlcore.base.errors import ConfigurationError
from dlcore.log.upkeep.requests import ask_for_upkeep
from dlcore.ops.upkeep.redactor import LogRedactor
from tests.simulation.checkers import LIVE
from tests.simulation.log_process import UPKEEP_OF_TIERS
from tests.simulation.redaction_checkers import PAYLOAD, PERSON
from tests.simulation.truth import InvariantViolatedError

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.ids import DLSN
    from dlcore.log.writing.typed import DirectTypedWriter
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs

PRIVATE = "p"
"""The name of the log."""
_SCHEMA = pa.schema({PERSON: pa.int64(), PAYLOAD: pa.binary()})
_PATIENCE_S = 5.0
_FINISHING_S_MAX = 120.0


class Redactions:
    """The roles."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._world = logs.world
        self._rng = logs.world.rng
        self._checkers = logs.world.log_checkers.redactions
        self._person = 0
        self._rows = 0
        self._redacted: int | None = None
        """The person whose rows are being redacted."""

    async def start(self, setup: LogProcess, settings: LogSettings | None) -> None:
        """Create the log, and start all processes."""
        settings = with_values(settings or LogSettings(), compression="none", segment_bytes_max=600)
        await setup.namespace.create_log(PRIVATE, schema=_SCHEMA, settings=settings)
        for number in range(2):
            self._logs.supervise(f"clerk-{number}", self._write)
            self._logs.supervise(f"redactor-{number}", self._redact)
        self._logs.supervise("visitor", self._read)

    async def _open(self, process: LogProcess) -> DirectLog:
        config = replace(process.config, lock_enabled=self._rng.random() < 0.7)
        return await process.namespace.open_log(PRIVATE, config=config)

    # Writers

    async def _write(self, process: LogProcess) -> None:
        """Write rows about the person whose turn it is."""
        rng = self._rng
        log = await self._open(process)
        if rng.random() < 0.3:
            await ask_for_upkeep(process.namespace.log_context, {log._log: 1})
        writer = cast("DirectTypedWriter", await log.open_writer())
        try:
            for _ in range(rng.choice((1, 5, 20))):
                person, payload = self._person + rng.choice((0, 0, 1)), b"<row %d>" % self._rows
                self._rows += 1
                self._checkers.on_write(payload, person)
                batch = pa.record_batch({PERSON: [person], PAYLOAD: [payload]}, schema=_SCHEMA)
                rows = await writer.fitted_latest(batch, last_txid=writer.last_txid)
                future = writer.write_fitted(rows)
                future.add_done_callback(partial(self._answered, process, payload))
                await self._logs.sleep(rng.expovariate(10.0))
        finally:
            await writer.aclose()

    def _answered(self, process: LogProcess, payload: bytes, future: asyncio.Future[DLSN]) -> None:
        if future.cancelled() or not process.client.is_alive or future.exception() is not None:
            return
        try:
            self._checkers.on_acknowledged(payload, future.result())
        except AssertionError as violation:
            self._world.fail(violation)

    # Readers

    async def _read(self, process: LogProcess) -> None:
        """Read the log from its start."""
        log = await self._open(process)
        await self._read_all(log, pause_s=self._rng.choice((0.0, 0.02, 0.2)))
        await self._logs.sleep(self._rng.uniform(0.0, 0.5))

    async def _read_all(self, log: DirectLog, *, pause_s: float) -> int:
        """R2: read all that there is; return how many rows."""
        reading = self._checkers.new_reading()
        async with await log.open_reader() as reader:
            while (batch := await reader.read_batch(until_caught_up=True)) is not None:
                reading.on_batch(batch)
                await asyncio.sleep(pause_s)
        return reading.count

    # Redactions

    async def _redact(self, process: LogProcess) -> None:
        """Redact what was written about the person before, or go on with what has begun."""
        if self._redacted is None:
            await self._logs.sleep(self._rng.uniform(0.5, 2.0))
            if self._redacted is None:
                self._redacted, self._person = self._person, self._person + 1
        await self._run(process, self._redacted)

    async def _run(self, process: LogProcess, person: int) -> None:
        """R1: redact once; when it learns that all is gone, look into all files."""
        log = await self._open(process)
        await self._read_all(log, pause_s=0.0)
        owed = self._checkers.on_begin(person)
        context, owner = process.namespace.log_context, process.namespace.staging_owner
        redactor = await LogRedactor.open(
            context,
            owner,
            PRIVATE,
            f"{PERSON} = {person}",
            config=UPKEEP_OF_TIERS,
            patience_s=_PATIENCE_S,
            report=process.note,
        )
        try:
            receipt = await redactor.redact()
        except ConfigurationError as error:  # the other process has ended it, and begun the next
            process.note(f"{error}")
            return
        process.note(f"redacted {receipt.done.rows} rows of {person}, left: {receipt.left}")
        if receipt.left:
            return
        self._world.faults["redaction"] += 1
        self._world.faults["redacted row"] += receipt.done.rows
        self._checkers.on_purged(owed, self._world.bookies)
        if self._redacted == person:
            self._redacted = None

    def _is_under_way(self) -> bool:
        return self._redacted is not None

    # The end

    async def finish(self, keeper: LogProcess) -> None:
        """Redact the rows of all but the last person, now that nothing goes wrong."""
        deadline = self._world.loop.time() + _FINISHING_S_MAX
        left = set(range(self._person))
        if self._redacted is not None:
            left.add(self._redacted)
        while left:
            # Others are refused while one is not finished that a dead process began.
            for person in sorted(left):
                self._redacted = person
                await self._run(keeper, person)
                if not self._is_under_way():
                    left.remove(person)
            if left and self._world.loop.time() > deadline:
                raise InvariantViolatedError(LIVE, f"the redactions of {left} do not end")

    async def check_whole(self, keeper: LogProcess) -> None:
        """Judge what is there in the end."""
        log = await self._open(keeper)
        self._checkers.check_whole(await self._read_all(log, pause_s=0.0), self._world.bookies)
