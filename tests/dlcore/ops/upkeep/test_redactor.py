"""Redaction of a log in memory: the rows are null, all else is as before, and old copies are gone.

The rows of one user have a needle in their bytes, which is searched for in all bookies, objects and
metadata.  `forget_ledgers` stands for the answer of bookies.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from dlcore.base.config import LogConfig, LogSettings, QuorumConfig
from dlcore.base.errors import (
    ConfigurationError,
    LogNotReadyError,
    OwnershipAcquireFailedError,
    UnsupportedError,
)
from dlcore.base.features import REDACTION
from dlcore.log.metadata.redactions import digest_of
from dlcore.log.proxied.extension import ProxyExtension
from dlcore.log.proxied.producers import Producers
from dlcore.log.upkeep.forks import fork_log
from dlcore.log.upkeep.staged import drop_merged, list_staged, settle
from dlcore.metadata import binding
from dlcore.ops.upkeep import redactor as redactor_module
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.redactor import LogRedactor
from dlcore.ops.upkeep.swap import MERGING_IDENTITY
from dlcore.ops.upkeep.tierer import LogTierer
from tests.dlcore.ops.upkeep.test_merger import check_ledgers, forget_ledgers
from tests.dlcore.ops.upkeep.test_tierer import WatchedObjects, check_objects
from tests.fixtures.aio import until_async
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.memory_namespace import MemoryCluster, memory_cluster

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.metadata.port import MetadataStore
    from tests.fixtures.simulated_store import SimulatedStore

NEEDLE = "needle-of-42"
WHERE = "user_id = 42"
TIER = "s3://bucket/logs"
SCHEMA = pa.schema([("user_id", pa.int64()), ("name", pa.string())])
WRITING = LogConfig(
    quorum=QuorumConfig(), lock_timeout_s=0, entry_bytes=600, segment_bytes_max=4_000
)
CONFIG = UpkeepConfig(
    merged_grace_s=10, tier_grace_s=40, tier_bytes_per_s=1e12, tier_object_bytes=1_500
)
TIME_LIMIT_S = 120
STRIDE = amount(3, sampled=17)
COLUMNS = ["_dlsn", "_txid", "_sequence_id", "_timestamp", *SCHEMA.names]


class Scene:
    """A typed log with cold and hot segments, all of which have rows of user 42."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster = cluster
        self.namespace: DirectNamespace
        self.objects = WatchedObjects()
        cluster.objects = self.objects
        self.rows = 0

    async def start(self) -> None:
        """Write, tier what is written, and write more."""
        self.namespace = await self.cluster.open("driver", config=WRITING)
        settings = LogSettings(tier=TIER, tier_after_s=0)
        await self.namespace.create_log("clicks", schema=SCHEMA, settings=settings)
        await self.write(120)
        await self.tier()
        await self.write(80)

    async def write(self, rows: int) -> None:
        """Append rows, each tenth of user 42; the last segment is completed."""
        log = await self.namespace.open_log("clicks", config=WRITING)
        async with await log.open_writer() as writer:
            for start in range(self.rows, self.rows + rows, 5):
                numbers = range(start, start + 5)
                users = [42 if number % 10 == 0 else 1000 + number for number in numbers]
                names = [NEEDLE if user == 42 else f"user number {user}" for user in users]
                self.cluster.clocks["driver"].current_ms += 1
                await writer.write_batch(pa.record_batch([users, names], schema=SCHEMA))
        self.rows += rows

    async def tier(self) -> None:
        """Tier all completed segments, and let the old ledgers go."""
        context = self.namespace.log_context
        self.cluster.clocks["driver"].current_ms += 10_000
        tierer = LogTierer(context, self.namespace.staging_owner, CONFIG)
        await tierer.tier(await context.logs.find("clicks"))
        self.cluster.clocks["driver"].current_ms += 100_000
        await drop_merged(context, grace_ms=10_000)
        forget_ledgers(self.cluster)

    async def read(self, name: str = "clicks") -> list[dict[str, Any]]:
        """Return all rows, as a new client sees them."""
        fresh = await self.cluster.open(f"reader-{len(self.cluster.namespaces)}", config=WRITING)
        log = await fresh.open_log(name)
        return cast(
            "list[dict[str, Any]]", (await (await log.read(columns=COLUMNS)).to_arrow()).to_pylist()
        )

    async def redactor(
        self, namespace: DirectNamespace | None = None, *, where: str = WHERE, **options: Any
    ) -> LogRedactor:
        """Return a redactor."""
        used = namespace or self.namespace
        return await LogRedactor.open(
            used.log_context,
            used.staging_owner,
            "clicks",
            where,
            config=CONFIG,
            patience_s=options.pop("patience_s", 0.0),
            **options,
        )

    def copies(self, *, with_metadata: bool = True) -> list[str]:
        """Return where the needle is."""
        needle = NEEDLE.encode()
        found = [
            f"bookie {bookie.bookie.name} ledger {ledger_id} entry {entry_id}"
            for bookie in self.cluster.bookies
            for ledger_id, ledger in bookie._ledgers.items()
            for entry_id, data in ledger.entries.items()
            if needle in bytes(data)
        ]
        found += [url for url, data in self.objects.stored.items() if needle in data]
        if with_metadata:
            found += [p for p, node in self.cluster.tree.dump().items() if needle in node.value]
        return found


def redacted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as they are after the redaction."""
    return [row | {"user_id": None, "name": None} if row["user_id"] == 42 else row for row in rows]


def on_scene(body: Callable[[Scene], Awaitable[None]]) -> None:
    """Run `body` on a fresh scene."""

    async def main() -> None:
        async with memory_cluster() as cluster:
            scene = Scene(cluster)
            await scene.start()
            await body(scene)

    run_in_own_time(asyncio.wait_for(main(), TIME_LIMIT_S))


def test_rows_are_null_and_all_else_is_as_before() -> None:
    """Goal: same positions, ids and times; hot and cold copies gone; the receipt counts."""

    async def body(scene: Scene) -> None:
        before = await scene.read()
        assert len(before) == 200
        found = await (await scene.redactor()).look()
        assert (found.rows, found.open_rows, found.obstacles) == (20, 0, ())
        assert 0 < found.cold_extents < found.extents
        assert await scene.read() == before
        receipt = await (await scene.redactor()).redact()
        assert receipt.left == ()
        done = receipt.done
        assert (receipt.log.name, done.rows, done.shape) == ("clicks", 20, "user_id = ?")
        assert done.digest == digest_of(WHERE, done.salt)
        assert len(done.segments) == found.segments
        assert len(done.ledgers) >= found.extents
        assert done.objects > 2
        assert forget_ledgers(scene.cluster) > 0
        assert scene.copies() == []
        assert await scene.read() == redacted(before)
        check_ledgers(scene.cluster)
        check_objects(scene.cluster)
        paths = scene.cluster.paths
        left = [p for p in scene.cluster.tree.dump() if p.startswith(f"{paths.redactions}/")]
        assert left == []
        again = await (await scene.redactor()).redact()
        assert (again.done.rows, again.left, again.done.ledgers) == (0, (), ())
        await scene.write(20)
        assert (await scene.read())[:200] == redacted(before)

    on_scene(body)


class CrashError(BaseException):
    """The end of a process."""


class DyingStore:
    """Ends the process at its `at`th change of the metadata, before or after it is made."""

    def __init__(self, store: SimulatedStore, at: int) -> None:
        self._store = store
        self._left = at
        self.has_died = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name not in ("create", "put", "delete", "multi"):
            return real

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._count()
            result = await real(*args, **kwargs)
            self._count()
            return result

        return call

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.has_died = True
            raise CrashError


def test_the_command_goes_on_after_a_crash_at_any_change() -> None:
    """Goal: whatever was done, the same command makes the same log, and leaves no copy."""

    async def crash(at: int) -> bool:
        async with memory_cluster() as cluster:
            scene = Scene(cluster)
            await scene.start()
            before = await scene.read()

            def wrap(store: SimulatedStore) -> MetadataStore:
                return cast("MetadataStore", DyingStore(store, at))

            dying = await cluster.open("dying", config=WRITING, wrap=wrap)
            dying_store = cast("DyingStore", dying.log_context.store)
            has_died = False
            try:
                await (await scene.redactor(dying)).redact()
            except CrashError:
                has_died = True
            assert has_died is dying_store.has_died
            cluster.stores["dying"].expire()
            assert await scene.read() in (before, redacted(before)) or has_died
            context = scene.namespace.log_context
            receipt = await (await scene.redactor()).redact()
            assert receipt.left == ()
            assert not has_died or receipt.done.rows in (0, 20)
            assert await scene.read() == redacted(before)
            forget_ledgers(cluster)
            assert scene.copies() == []
            await settle(context, await list_staged(context, MERGING_IDENTITY))
            check_ledgers(cluster)
            return has_died

    at = 1
    while run_in_own_time(asyncio.wait_for(crash(at), TIME_LIMIT_S)):
        at += STRIDE
    assert at > 60


async def refused(scene: Scene, error: type[Exception], **options: Any) -> str:
    """Return why a redaction is refused; nothing of the log has changed."""
    before = await scene.read()
    redactor = await scene.redactor(**options)
    with pytest.raises(error) as raised:
        await redactor.redact()
    assert await scene.read() == before
    return str(raised.value)


def test_a_condition_that_is_no_redaction_is_refused_at_once() -> None:
    """Goal: logs of bytes, wrong columns, and a cluster whose members cannot all erase."""

    async def body(scene: Scene) -> None:
        await scene.namespace.create_log("bytes")
        context, owner = scene.namespace.log_context, scene.namespace.staging_owner
        with pytest.raises(UnsupportedError, match="'bytes' is a log of bytes"):
            await LogRedactor.open(context, owner, "bytes", WHERE)
        with pytest.raises(ConfigurationError, match="has no column 'user'"):
            await scene.redactor(where="user = 42")

    on_scene(body)


def test_the_feature_must_be_finalized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an older bookie would never answer."""

    async def body(scene: Scene) -> None:
        async def has(_: object, name: str) -> bool:
            return name != REDACTION

        monkeypatch.setattr(binding.ClusterFeatures, "has", has)
        assert "feature 'redaction' is not finalized" in await refused(scene, UnsupportedError)

    on_scene(body)


def test_a_fork_is_an_obstacle_that_is_named() -> None:
    """Goal: the bytes that it shares would stay; without it the same command works."""

    async def body(scene: Scene) -> None:
        await fork_log(scene.namespace.log_context, "clicks", "spring")
        found = await (await scene.redactor()).look()
        assert "are also those of 'spring', as a fork" in found.obstacles[0]
        assert "'spring'" in await refused(scene, UnsupportedError)
        await scene.namespace.delete_log("spring")
        await scene.namespace.log_context.tidier.settled()
        assert (await (await scene.redactor()).redact()).left == ()
        forget_ledgers(scene.cluster)
        assert scene.copies() == []

    on_scene(body)


def test_a_fork_is_redacted_once_its_source_is_gone() -> None:
    """Goal: its objects are in the folder of the source; the copies are in its own."""

    async def body(scene: Scene) -> None:
        context, owner = scene.namespace.log_context, scene.namespace.staging_owner
        await fork_log(context, "clicks", "spring")
        before = await scene.read("spring")
        await scene.namespace.delete_log("clicks")
        await scene.namespace.log_context.tidier.settled()
        redactor = await LogRedactor.open(
            context, owner, "spring", WHERE, config=CONFIG, patience_s=0
        )
        receipt = await redactor.redact()
        assert await scene.read("spring") == redacted(before)
        assert receipt.done.rows == 12
        log_id = (await context.logs.find("spring")).log_id
        assert any(f"/{log_id}/" in url for url in scene.objects.stored)

    on_scene(body)


def test_a_writer_with_such_rows_is_an_obstacle_and_the_open_segment_else_none() -> None:
    """Goal: rows of a writer's segment cannot be rewritten; those of a closed writer can."""

    async def body(scene: Scene) -> None:
        other = await scene.cluster.open("writer", config=WRITING)
        log = await other.open_log("clicks", config=WRITING)
        writer = await log.open_writer()
        await writer.write_batch(pa.record_batch([[7], ["seven"]], schema=SCHEMA))
        found = await (await scene.redactor()).look()
        assert (found.rows, found.open_rows) == (20, 0)
        await writer.write_batch(pa.record_batch([[42], [NEEDLE]], schema=SCHEMA))
        await writer.flush()
        await writer.write_batch(pa.record_batch([[8], ["eight"]], schema=SCHEMA))
        await writer.flush()
        found = await (await scene.redactor()).look()
        assert (found.rows, found.open_rows) == (21, 1)
        reason = await refused(scene, OwnershipAcquireFailedError)
        assert "is in progress and has such rows, and writer" in reason
        await writer.aclose()
        before = await scene.read()
        receipt = await (await scene.redactor()).redact()
        assert (receipt.done.rows, receipt.left) == (21, ())
        assert await scene.read() == redacted(before)
        forget_ledgers(scene.cluster)
        assert scene.copies() == []

    on_scene(body)


def test_a_writer_that_gives_turns_lets_its_segment_be_completed() -> None:
    """Goal: a proxy that owns the log hinders nothing, and goes on in the next segment."""

    async def body(scene: Scene) -> None:
        other = await scene.cluster.open("writer", config=WRITING)
        log = await other.open_log("clicks", config=WRITING)
        writer = await log.open_writer(extension=ProxyExtension(Producers()))
        for user, name in ((42, NEEDLE), (8, "eight"), (9, "nine")):
            await writer.write_batch(pa.record_batch([[user], [name]], schema=SCHEMA))
            await writer.flush()
        before = await scene.read()
        receipt = await (await scene.redactor()).redact()
        assert (receipt.done.rows, receipt.left) == (21, ())
        assert await scene.read() == redacted(before)

        async def is_taken() -> bool:
            try:
                await writer.write_batch(pa.record_batch([[42], ["again"]], schema=SCHEMA))
            except LogNotReadyError:
                return False  # it has not seen yet that its turn is over
            return True

        await until_async(is_taken)
        await writer.aclose()
        after = await scene.read()
        assert after[:-1] == redacted(before)
        assert after[-1]["name"] == "again"
        forget_ledgers(scene.cluster)
        assert scene.copies() == []

    on_scene(body)


def test_a_dead_writers_segment_is_completed() -> None:
    """Goal: no operator has to recover the log first."""

    async def body(scene: Scene) -> None:
        other = await scene.cluster.open("writer", config=WRITING)
        log = await other.open_log("clicks", config=WRITING)
        writer = await log.open_writer()
        await writer.write_batch(pa.record_batch([[42], [NEEDLE]], schema=SCHEMA))
        await writer.flush()
        await writer.write_batch(pa.record_batch([[8], ["eight"]], schema=SCHEMA))
        await writer.flush()
        scene.cluster.stores["writer"].disconnect()  # and it never comes back
        scene.cluster.stores["writer"].expire()
        receipt = await (await scene.redactor()).redact()
        assert (receipt.done.rows, receipt.left) == (21, ())
        forget_ledgers(scene.cluster)
        assert scene.copies() == []

    on_scene(body)


def test_logs_of_one_append_share_a_ledger() -> None:
    """Goal: the bytes that one log gives up stay for the other one's, so it is refused."""

    async def body(scene: Scene) -> None:
        driver = scene.namespace
        await driver.create_log("other", schema=SCHEMA)
        task = await scene.cluster.open("task", config=WRITING)
        writer = await task.open_staging_writer(identity="job")
        for name in ("clicks", "other"):
            await writer.write_batch(name, pa.record_batch([[42], [NEEDLE]], schema=SCHEMA))
        extents = await writer.stage()
        append = await driver.begin_append("job", 1)
        assert (await append.commit(extents)).committed
        await writer.aclose()
        found = await (await scene.redactor()).look()
        assert found.open_rows == 1
        assert "also those of 'other'" in found.obstacles[0]
        await driver.delete_log("other")
        await driver.log_context.tidier.settled()
        await settle(driver.log_context, await list_staged(driver.log_context, "job"))
        receipt = await (await scene.redactor()).redact()
        assert (receipt.done.rows, receipt.left) == (21, ())
        forget_ledgers(scene.cluster)
        assert scene.copies() == []

    on_scene(body)


def test_one_worker_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a worker that merges or tiers the log is waited for, and then named in an error."""

    async def body(scene: Scene) -> None:
        context = scene.namespace.log_context
        lock = scene.cluster.paths.upkeep_lock((await context.logs.find("clicks")).log_id)
        await context.store.create(lock, b"a worker", ephemeral=True, make_parents=True)
        monkeypatch.setattr(redactor_module, "_LOCK_PATIENCE_S", 0.0)
        reason = await refused(scene, OwnershipAcquireFailedError)
        assert "a worker of auto-recovery does the upkeep" in reason
        monkeypatch.setattr(redactor_module, "_LOCK_PATIENCE_S", 60.0)
        reported: list[str] = []

        def report(text: str) -> None:
            if not reported:
                reported.append(text)
                ended.append(asyncio.ensure_future(context.store.delete(lock)))

        ended: list[object] = []
        assert (await (await scene.redactor(report=report)).redact()).left == ()
        assert reported == ["waiting for the worker that does the log's upkeep"]

    on_scene(body)


def test_imported_metadata_and_a_left_table_are_obstacles() -> None:
    """Goal: settings that would keep old copies are reported before any change."""

    async def body(scene: Scene) -> None:
        context, paths = scene.namespace.log_context, scene.cluster.paths
        await context.store.create(paths.restored, b"", make_parents=True)
        log_id = (await context.logs.find("clicks")).log_id
        folder = f"{TIER}/{scene.cluster.cluster_id}/{log_id}"
        await scene.objects.put_new(f"{folder}/_delta_log/{0:020}.json", b"{}")
        reason = await refused(scene, UnsupportedError)
        assert "nothing is deleted before dlog metadata accept" in reason
        assert f"in {folder} is a table of the kind delta that does not follow" in reason

    on_scene(body)
