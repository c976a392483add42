"""Goal: damage in real stores is found, and mended or named.  Method: objects changed in place."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from dlcore import LogConfig, LogSettings, QuorumConfig
from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.records import LogRecord
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.upkeep.staged import drop_merged
from dlcore.ops.autorecovery.metrics import RecoveryFigures
from dlcore.ops.sandbox.cluster import Sandbox
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.fixtures.aio import until_async
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.s3 import s3_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.cold.objects import Objects

pytestmark = pytest.mark.integration

CONFIG = UpkeepConfig(
    merged_grace_s=0, tier_object_bytes=20_000, scrub_period_s=0.001, scrub_bytes_per_s=1e12
)
RECORDS = 60
TIME_LIMIT_S = 280


class Store:
    """The objects of a tier, and the damage done to them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects: Objects = StoredObjects()

    async def listed(self) -> dict[str, int]:
        """Return all objects, with their sizes."""
        found: dict[str, int] = {}
        async with aclosing(self.objects.list_below(self.url)) as pages:
            async for page in pages:
                found |= {each.url: each.size_bytes for each in page}
        return found

    async def cut(self, url: str) -> None:
        """Take the second half of an object away."""
        whole = await self.objects.read(url, 0, (await self.listed())[url])
        await self.objects.delete(url)
        await self.objects.put_new(url, whole[: len(whole) // 2])

    async def change(self, url: str) -> None:
        """Change bytes in the middle of an object."""
        data = bytearray(await self.objects.read(url, 0, (await self.listed())[url]))
        middle = len(data) // 2
        data[middle - 200 : middle + 200] = bytes(400)
        await self.objects.delete(url)
        await self.objects.put_new(url, bytes(data))

    async def lose(self, url: str) -> None:
        """Delete an object."""
        await self.objects.delete(url)


@pytest.fixture
def own_uri(tmp_path: Path) -> Iterator[str]:
    """A cluster of its own: a pass goes over the objects of all logs, those of other tests too."""
    with Sandbox(bookies=3, data_dir=tmp_path / "cluster", autorecovery=False) as sandbox:
        yield sandbox.uri


def test_a_folder(own_uri: str, tmp_path: Path) -> None:
    """Objects that are files of this host."""
    run_in_own_time(asyncio.wait_for(_damage(own_uri, f"file://{tmp_path}/t"), TIME_LIMIT_S))


def test_a_bucket(own_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of a real S3 server."""
    with s3_server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        run_in_own_time(asyncio.wait_for(_damage(own_uri, f"{server.url}/t"), TIME_LIMIT_S))


async def _damage(uri: str, tier: str) -> None:
    async with await open_namespace(uri) as namespace:
        figures = RecoveryFigures()
        upkeep, store = LogUpkeep.of(namespace, CONFIG, figures), Store(tier)
        log = await _filled(namespace, tier)
        assert await upkeep.tier() >= 1
        assert await _passed(upkeep) == 0
        for number, harm in enumerate((store.cut, store.change, store.lose), 1):
            # It is read whole after each, of what bookies still have.
            await _harm_and_mend(namespace, upkeep, store, harm)
            assert figures.cold.mended_objects == number
            assert await _read(log) == RECORDS
        await drop_merged(namespace.log_context, grace_ms=-(10**9))
        await _name_a_hole(namespace, upkeep, store)
        assert len(figures.cold.holes) == 1


async def _filled(namespace: DirectNamespace, tier: str) -> DirectLog:
    name, config = "scrubbed", LogConfig(quorum=QuorumConfig(), segment_bytes_max=100_000)
    settings = LogSettings(tier=tier, tier_after_s=0)
    await namespace.create_log(name, config=config, settings=settings)
    log = await namespace.open_log(name, config=config)
    async with await log.open_writer() as writer:
        for number in range(RECORDS):
            await writer.write(LogRecord(number, bytes([number]) * 4_000))
            await writer.flush()
    return log


async def _read(log: DirectLog) -> int:
    table = await (await log.read(columns=["sequence_id"])).to_arrow()
    assert table.column(0).to_pylist() == list(range(table.num_rows))
    return int(table.num_rows)


async def _passed(upkeep: LogUpkeep) -> int:
    """Run passes until some damage was found, or one is through; return how many objects."""
    found = 0
    for _ in range(5):
        found += await upkeep.scrub()
        await asyncio.sleep(0.01)
    return found


async def _some_object(namespace: DirectNamespace, store: Store) -> str:
    """Return an object that a ledger names, with more of its segment behind it."""
    context = namespace.log_context
    named = []
    async for ledger_id in context.ledger_store.list_ledgers():
        ledger = (await context.ledger_store.read(ledger_id)).metadata
        if ledger.folder.startswith(store.url) and len(ledger.objects) > 1:
            named += [f"{ledger.folder}/{ledger.objects[1].name}"]
    return named[0]


async def _harm_and_mend(
    namespace: DirectNamespace,
    upkeep: LogUpkeep,
    store: Store,
    harm: Callable[[str], Awaitable[None]],
) -> None:
    url = await _some_object(namespace, store)
    await harm(url)

    async def is_found() -> bool:
        return bool(await upkeep.scrub())

    await until_async(is_found)
    ledger_id = int(url.rpartition("/")[2].partition("-")[0])
    assert await upkeep.mend(ledger_id) == ""
    assert await _some_object(namespace, store) != url


async def _name_a_hole(namespace: DirectNamespace, upkeep: LogUpkeep, store: Store) -> None:
    url = await _some_object(namespace, store)
    for each in await store.listed():  # the damaged ones, and what was written beside them
        if each.rpartition("/")[0] == url.rpartition("/")[0]:
            await store.lose(each)
    reason = await upkeep.mend(int(url.rpartition("/")[2].partition("-")[0]))
    assert reason is not None
    assert "of log 'scrubbed' are lost with object" in reason
    assert "there is no other object in its folder" in reason
