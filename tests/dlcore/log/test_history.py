"""Writers, committers and readers at once, with lost replies, lost sessions and crashes.

Goal: whatever happens, every acknowledged record is in the log exactly once, at the position that
was promised; atomic appends are there wholly or not at all; positions ascend and sequence ids are
dense; a reader that was there all the time saw just that.  Method: one seed is one run in memory;
the history below keeps its own truth from what callers were told.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.config import LogConfig
from dlcore.errors import DLError
from dlcore.records import LogRecord, LogRecordWithDLSN
from tests.fixtures.lengths import sample
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, memory_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.ids import DLSN
    from dlcore.namespace import Namespace

LOGS = ("clicks", "orders")
RUN_LIMIT_S = 60
OUTAGE_ATTEMPTS_MAX = 200


@dataclass
class History:
    """What callers were told."""

    acked: dict[bytes, tuple[str, DLSN]] = field(default_factory=dict)
    offered: set[bytes] = field(default_factory=set)
    appends: list[tuple[dict[str, list[bytes]], str]] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    def note(self, error: DLError) -> None:
        """Count an error, so that a failing run shows what happened."""
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1


async def write_some(
    namespace: Namespace, name: str, log: str, rng: random.Random, history: History
) -> None:
    """Open a writer, write in some way, and end in some way; errors are part of life."""
    manager = await namespace.open_log(log)
    try:
        writer = await manager.open_writer()
    except DLError as error:
        history.note(error)
        return
    futures: dict[bytes, asyncio.Future[DLSN]] = {}
    try:
        for index in range(rng.randrange(1, 12)):
            payload = f"{name}-{log}-{rng.getrandbits(60):x}-{index}".encode()
            history.offered.add(payload)
            futures[payload] = writer.write(LogRecord(max(writer.last_txid, 0), payload))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.002)
            if rng.random() < 0.2:
                await (writer.commit() if rng.random() < 0.5 else writer.flush())
        if rng.random() < 0.8:
            await writer.flush()
    except DLError as error:
        history.note(error)
    try:
        await (writer.aclose() if rng.random() < 0.7 else writer.abort())
    except DLError as error:
        history.note(error)
    for payload, future in futures.items():
        assert future.done()
        if future.exception() is None:
            history.acked[payload] = (log, future.result())


async def append_some(
    namespace: Namespace, identity: str, version: int, rng: random.Random, history: History
) -> bool:
    """Stage records for some logs and commit them; return whether the version is decided."""
    records: dict[str, list[bytes]] = {}
    try:
        append = await namespace.begin_append(identity, version)
        for log in rng.sample(LOGS, rng.randrange(1, len(LOGS) + 1)):
            count = rng.randrange(1, 6)
            records[log] = [
                f"{identity}-{log}-{rng.getrandbits(60):x}".encode() for _ in range(count)
            ]
            await append.write_batch(log, pa.record_batch({"payload": records[log]}))
    except DLError as error:
        history.note(error)
        return False
    history.offered.update(payload for part in records.values() for payload in part)
    try:
        result = await append.commit()
    except DLError as error:
        history.note(error)
        outcome = "unknown"
    else:
        outcome = "committed" if result.committed else "skipped"
    history.appends.append((records, outcome))
    try:
        await append.aclose()
    except DLError as error:
        history.note(error)
    return outcome != "unknown"


async def tail(namespace: Namespace, log: str, seen: list[LogRecordWithDLSN]) -> None:
    """Read along from the start, for ever."""
    async with await (await namespace.open_log(log)).open_reader() as reader:
        while True:
            record = await reader.read_next()
            assert record is not None
            seen.append(record)


def disturb(cluster: MemoryCluster, rng: random.Random) -> None:
    """Do something bad to a client that is not a reader."""
    store = cluster.stores[rng.choice(["a", "b", "c"])]
    if rng.random() < 0.7:
        store.lose_next_reply(applied=rng.random() < 0.5)
    else:
        store.expire()


async def run(seed: int, *, lock_enabled: bool) -> None:
    """One whole run."""
    rng = random.Random(seed)
    history = History()
    config = LogConfig(
        quorum=CONFIG.quorum,
        lock_timeout_s=0.05,
        lock_enabled=lock_enabled,
        entry_bytes=200,
        segment_bytes_max=rng.choice([1, 1500, 10**9]),
    )
    async with memory_cluster(seed=seed) as cluster:
        clients = {name: await cluster.open(name, config=config) for name in ("a", "b", "c")}
        reader = await cluster.open("reader")
        for log in LOGS:
            await clients["a"].create_log(log)
        seen: dict[str, list[LogRecordWithDLSN]] = {log: [] for log in LOGS}
        tails = [asyncio.create_task(tail(reader, log, seen[log])) for log in LOGS]

        async def actor(name: str) -> None:
            own = random.Random(f"{seed}-{name}")
            version = 1
            for _ in range(5):
                if own.random() < 0.25:
                    disturb(cluster, own)
                if name == "c" or own.random() < 0.2:
                    version += await append_some(clients[name], name, version, own, history)
                else:
                    await write_some(clients[name], name, own.choice(LOGS), own, history)

        try:
            async with asyncio.TaskGroup() as group:
                for name in clients:
                    group.create_task(actor(name))
            await check(cluster, history, seen)
        finally:
            for task in tails:
                task.cancel()
            ended = await asyncio.gather(*tails, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended


def has_as_many(seen: list[LogRecordWithDLSN], wanted: list[LogRecordWithDLSN]) -> bool:
    """Return whether a reader has caught up."""
    return len(seen) >= len(wanted)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks bring about."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited for too long")


async def check(
    cluster: MemoryCluster, history: History, seen: dict[str, list[LogRecordWithDLSN]]
) -> None:
    """Compare the logs with what callers were told."""
    checker = await cluster.open("checker")
    found: dict[bytes, tuple[str, DLSN]] = {}
    for log in LOGS:
        manager = await checker.open_log(log)
        for _ in range(OUTAGE_ATTEMPTS_MAX):  # a crashed client's lock goes with its session
            try:
                await manager.recover()
                break
            except DLError:
                await asyncio.sleep(0.01)
        records: list[LogRecordWithDLSN] = []
        async with await manager.open_reader() as reader:
            while more := await reader.read_bulk(100, until_caught_up=True):
                records += more
        assert [r.sequence_id for r in records] == list(range(len(records)))
        assert [r.dlsn for r in records] == sorted({r.dlsn for r in records})
        assert len(records) == await manager.get_log_record_count()
        payloads = [r.payload for r in records]
        assert len(set(payloads)) == len(payloads), "a record is there twice"
        found |= {r.payload: (log, r.dlsn) for r in records}
        await until(partial(has_as_many, seen[log], records))
        assert seen[log] == records
    assert found.keys() <= history.offered
    for payload, place in history.acked.items():
        assert found.get(payload) == place, f"{payload!r} was acknowledged at {place}"
    for records_of, outcome in history.appends:
        held = {payload in found for part in records_of.values() for payload in part}
        assert len(held) == 1, f"an append is there in part: {records_of}"
        if outcome != "unknown":
            assert held == {outcome == "committed"}


@pytest.mark.parametrize("seed", sample(range(120), 24))
def test_history_with_the_lock(seed: int) -> None:
    """Two writers and two committers compete; the lock and fencing keep them apart."""
    asyncio.run(asyncio.wait_for(run(seed, lock_enabled=True), RUN_LIMIT_S))


@pytest.mark.parametrize("seed", sample(range(80), 16))
def test_history_without_the_lock(seed: int) -> None:
    """Without the lock fencing alone must do."""
    asyncio.run(asyncio.wait_for(run(seed, lock_enabled=False), RUN_LIMIT_S))
