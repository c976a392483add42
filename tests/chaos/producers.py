"""Producers of the chaos run: writers that know proxies alone, and number their records.

A writer sends again by itself what was not acknowledged, to whichever proxy owns the log by then.
A producer whose records still fail opens another stream, as a new producer.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlcore import DLError
from dlcore.backends.flight.namespace import open_namespace
from tests.chaos.client import Events, files_of, perform, termination
from tests.chaos.payloads import payload_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlcore import DLSN
    from dlcore.backends.flight.namespace import FlightNamespace

_BURST_MAX = 5
_PAUSE_S_MAX = 0.5


@dataclass(frozen=True)
class Production:
    """The task of a process of producers; its only argument, as JSON."""

    name: str
    life: int
    endpoint: str
    log: str
    producers: int
    seed: int
    folder: str
    tls: Mapping[str, str] | None = None


async def produce(
    work: Production, namespace: FlightNamespace, events: Events, number: int
) -> None:
    """Write as one producer after the other, until cancelled."""
    rng = random.Random(f"{work.seed} {work.name} {work.life} {number}")
    turns = 0
    while True:
        turns += 1
        name = f"{work.name}.{work.life}.{number}.{turns}"
        try:
            log = await namespace.open_log(work.log)
            async with await log.open_writer(producer=name) as writer:
                for burst in range(rng.randint(20, 400)):
                    count = rng.randint(1, _BURST_MAX)
                    identities = [f"{name}#{burst * _BURST_MAX + each}" for each in range(count)]
                    events.sent(work.log, identities)
                    payloads = [payload_of(each) for each in identities]
                    future = writer.write_batch(pa.record_batch({"value": payloads}))
                    future.add_done_callback(partial(_answered, events, identities))
                    await writer.wait_for_capacity()
                    await asyncio.sleep(rng.uniform(0, _PAUSE_S_MAX))
        except DLError as error:
            events.note(f"producer {name}: {type(error).__name__}: {error}")
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
        await asyncio.sleep(rng.uniform(0.1, 0.5))


def _answered(
    events: Events, identities: Sequence[str], future: asyncio.Future[DLSN | None]
) -> None:
    if not future.cancelled() and future.exception() is None:
        events.acked(identities[:-1], None)
        events.acked(identities[-1:], future.result())


async def run(work: Production) -> None:
    """Work until SIGTERM, then close everything in order."""
    events = Events(Path(work.folder) / f"{work.name}.{work.life}.events")
    stop = termination()
    async with await open_namespace(work.endpoint, tls=files_of(work.tls)) as namespace:
        numbers = range(work.producers)
        await perform((produce(work, namespace, events, each) for each in numbers), stop)
    events.note("closed")


if __name__ == "__main__":
    options: dict[str, Any] = json.loads(sys.argv[1])
    asyncio.run(run(Production(**options)))
