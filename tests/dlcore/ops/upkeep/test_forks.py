"""Forks: the same records at the same positions, whatever happens to either log meanwhile.

Method: logs in memory whose segments are tiered; a change before each request of a fork in turn.
After each the counts of ledgers are those of the extents that refer to them, and each object is
named by a ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    InvalidLogNameError,
    LedgerReadError,
    LogExistsError,
    LogNotFoundError,
    MetadataError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.metadata import forking
from dlcore.log.metadata.values import LogMetadata
from dlcore.log.upkeep import forks
from dlcore.log.upkeep.removal import remove_deleted
from dlcore.metadata.stored import decode
from dlcore.ops.upkeep.worker import LogUpkeep
from tests.dlcore.ops.upkeep.test_merger import (
    TIME_LIMIT_S,
    CrashError,
    check_ledgers,
    forget_ledgers,
)
from tests.dlcore.ops.upkeep.test_tierer import (
    CONFIG_OF_TIERS,
    TIER,
    TierScene,
    check_objects,
    complete,
    is_cold,
    on_tier_scene,
    tidy,
)
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.lengths import amount
from tests.fixtures.memory_namespace import memory_cluster, read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.base.records import LogRecordWithDLSN

STRIDE = amount(1, sampled=11)


async def tier_segments(scene: TierScene, *, segments: int = 3, appends: int = 4) -> None:
    """Make segments after the one that there is, and tier all."""
    for _ in range(segments - 1):
        for _ in range(appends):
            await scene.append()
        await complete(scene)
    await scene.close_staging()
    scene.pass_time()
    assert await scene.tier()
    assert await is_cold(scene) == [True] * segments
    await tidy(scene)


async def records_of(scene: TierScene, name: str) -> list[LogRecordWithDLSN]:
    """Return the records of a log."""
    return await read_all(await scene.namespace.open_log(name))


async def write_one(scene: TierScene, name: str) -> None:
    """Write a record, which gets a segment of its own."""
    clock = scene.cluster.clocks["driver"]
    clock.current_ms += 1
    async with await (await scene.namespace.open_log(name)).open_writer() as writer:
        await writer.write(LogRecord(clock.current_ms, name.encode()))


def unfinished(scene: TierScene) -> list[str]:
    """Return the deleted logs that are left, and forks that are not whole."""
    parent = f"{scene.cluster.paths.deleted_logs}/"
    return [path for path in scene.cluster.tree.dump() if path.startswith(parent)]


def check(scene: TierScene) -> None:
    """Check what the metadata counts, and that no object is missing or left over."""
    assert not unfinished(scene)
    check_ledgers(scene.cluster, filled=0)
    check_objects(scene.cluster)


async def sweep(scene: TierScene) -> None:
    """Do all that a sweep does, once graces are over."""
    scene.pass_time(200_000)
    await LogUpkeep.of(scene.namespace, CONFIG_OF_TIERS).sweep()
    forget_ledgers(scene.cluster)


def test_a_fork_has_the_same_records_and_goes_on() -> None:
    """Then both are written; each outlives what is done to the other one."""

    async def body(scene: TierScene) -> None:
        await tier_segments(scene)
        before = await read_all(scene.log)
        assert await scene.namespace.fork_log("clicks", "test") == DLSN(4, 0, 0)
        assert await records_of(scene, "test") == before
        check(scene)
        await write_one(scene, "test")
        await write_one(scene, "clicks")
        forked, source = await records_of(scene, "test"), await read_all(scene.log)
        assert forked[:-1] == source[:-1] == before
        assert forked[-1].dlsn == source[-1].dlsn == DLSN(4, 0, 0)
        assert forked[-1].sequence_id == len(before)
        assert (forked[-1].payload, source[-1].payload) == (b"test", b"clicks")
        await scene.log.truncate(DLSN(3, 0, 0))
        await scene.namespace.log_context.tidier.settled()
        await sweep(scene)
        assert await records_of(scene, "test") == forked
        await scene.namespace.delete_log("clicks")
        await sweep(scene)
        assert await records_of(scene, "test") == forked
        assert scene.objects.stored
        await scene.namespace.delete_log("test")
        await sweep(scene)
        assert scene.objects.stored == {}
        check(scene)

    on_tier_scene(body, appends=6)


def test_a_fork_of_a_fork() -> None:
    """It shares with both; the middle one goes first."""

    async def body(scene: TierScene) -> None:
        await tier_segments(scene)
        before = await read_all(scene.log)
        at = DLSN(3, 2, 0)
        await scene.namespace.fork_log("clicks", "one", at=at)
        await write_one(scene, "one")
        await scene.namespace.fork_log("one", "two", at=DLSN(2, 3, 0))
        await scene.namespace.delete_log("one")
        await sweep(scene)
        assert await records_of(scene, "two") == [r for r in before if r.dlsn < DLSN(2, 3, 0)]
        await scene.namespace.delete_log("clicks")
        await sweep(scene)
        assert await records_of(scene, "two") == [r for r in before if r.dlsn < DLSN(2, 3, 0)]
        check(scene)

    on_tier_scene(body, appends=6)


def test_a_fork_ends_at_any_entry() -> None:
    """Its last segment is cut there, and the next record follows in positions and ids."""

    async def body(scene: TierScene) -> None:
        await tier_segments(scene)
        before = await read_all(scene.log)
        await scene.log.truncate(DLSN(1, 2, 1))
        kept = [record for record in before if record.dlsn >= DLSN(1, 2, 1)]
        ends = {DLSN(r.dlsn.lssn, r.dlsn.entry_id, 0) for r in kept} - {DLSN(1, 2, 0)}
        ends |= {DLSN(end.lssn, end.entry_id + 1, 0) for end in ends} | {DLSN(2, 0, 0)}
        assert len(ends) > 20
        for number, end in enumerate(sorted(ends)):
            name = f"test-{number}"
            assert await scene.namespace.fork_log("clicks", name, at=end) == end
            expected = [record for record in kept if record.dlsn < end]
            assert await records_of(scene, name) == expected
            log = await scene.namespace.open_log(name)
            assert await log.get_log_record_count() == len(expected)
            await write_one(scene, name)
            *found, last = await records_of(scene, name)
            assert found == expected
            assert last.sequence_id == expected[-1].sequence_id + 1
            lssn = end.lssn + (end.entry_id > 0)
            assert last.dlsn == DLSN(lssn, 0, 0)
        check(scene)
        for number in range(len(ends)):
            await scene.namespace.delete_log(f"test-{number}")
        await sweep(scene)
        assert await read_all(scene.log) == kept
        check(scene)

    on_tier_scene(body, appends=6)


def test_a_fork_is_tiered_truncated_and_expires_by_itself() -> None:
    """Records written to it become cold too, and its retention takes nothing from the source."""

    async def body(scene: TierScene) -> None:
        await tier_segments(scene)
        before = await read_all(scene.log)
        await scene.namespace.fork_log("clicks", "test", at=DLSN(2, 3, 0))
        await write_one(scene, "test")
        forked = await records_of(scene, "test")
        log = await scene.namespace.open_log("test")
        assert (await log.status()).forked_from == "clicks at 2:3:0"
        assert (await scene.log.status()).forked_from is None
        assert await log.get_settings() == await scene.log.get_settings()
        scene.pass_time()
        assert await scene.tierer.tier(log._log) == 1
        await tidy(scene)
        assert all(extent.is_cold for s in await log.get_log_segments() for extent in s.extents)
        assert await records_of(scene, "test") == forked
        await log.update_settings(retention_s=0.001)
        await sweep(scene)
        assert await records_of(scene, "test") == []
        assert await read_all(scene.log) == before
        await sweep(scene)  # the ledger of the fork's own segment stays for a grace
        check(scene)

    on_tier_scene(body, appends=6)


def test_a_typed_log_is_forked_with_its_schema() -> None:
    """The versions of the schema are those of the source; later ones are each log's own."""

    async def body(scene: TierScene) -> None:
        namespace = scene.namespace
        schema = pa.schema([("city", pa.string())])
        settings = LogSettings(tier=TIER, tier_after_s=0)
        await namespace.create_log("rides", schema=schema, settings=settings)
        log = await namespace.open_log("rides")
        async with await log.open_writer() as writer:
            await writer.write_batch(pa.RecordBatch.from_pydict({"city": ["Bern", None]}, schema))
        scene.pass_time()
        assert await scene.tierer.tier(log._log)
        await namespace.fork_log("rides", "test")
        await log.update_schema(schema.append(pa.field("fare", pa.float64())))
        forked = await namespace.open_log("test")
        assert await forked.get_schema() == schema
        assert (await (await forked.read()).to_arrow())["city"].to_pylist() == ["Bern", None]
        node = scene.cluster.tree.dump()[scene.cluster.paths.log("test")]
        origin = decode(LogMetadata, node.value, source="").origin
        assert origin is not None
        assert (origin.name, origin.log_id, origin.at) == ("rides", log.log_id, "2:0:0")

    on_tier_scene(body, appends=2)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (DLSN(2, 3, 1), r"within an entry: expected 2:3:0 or 2:4:0$"),
        (DLSN(1, 1, 0), r"no record is before 1:1:0, the first one is at 1:1:0: .* 1:2:0 … 4:0:0$"),
        (DLSN(2, 9, 0), r"segment 2 has 8 entries: expected 2:8:0 or 3:0:0$"),
        (
            DLSN(4, 1, 0),
            r"4:0:0 on are not in objects yet: .*dlog log settings clicks .*unless it has a tier",
        ),
        (DLSN(9, 0, 0), r"no fork can end at 9:0:0, the records from 4:0:0 on"),
    ],
)
def test_positions_that_are_refused(at: DLSN, expected: str) -> None:
    """The error names what works."""

    async def body(scene: TierScene) -> None:
        await tier_segments(scene)
        await scene.log.truncate(DLSN(1, 1, 0))
        await write_one(scene, "clicks")
        with pytest.raises(ConfigurationError, match=expected):
            await scene.namespace.fork_log("clicks", "test", at=at)
        assert not await scene.namespace.log_exists("test")

    on_tier_scene(body, appends=6)


def test_logs_that_cannot_be_forked() -> None:
    """A log without objects, one that is not there, and names that are taken or wrong."""

    async def body(scene: TierScene) -> None:
        fork = scene.namespace.fork_log
        for wrong, error in (("none", LogNotFoundError), ("clicks", ConfigurationError)):
            with pytest.raises(error):
                await fork(wrong, "test")
        await tier_segments(scene)
        with pytest.raises(LogExistsError):
            await fork("clicks", "clicks")
        with pytest.raises(InvalidLogNameError):
            await fork("clicks", "a b")
        context = scene.namespace.log_context
        end = await forks.fork_log(context, "clicks", "test", at=DLSN(2, 1, 0), log_id="mine")
        again = await forks.fork_log(context, "clicks", "test", log_id="mine")
        assert end == again == DLSN(2, 1, 0)
        with pytest.raises(LogExistsError):
            await forks.fork_log(context, "clicks", "test", log_id="another")
        await scene.objects.delete(next(iter(scene.objects.stored)))
        with pytest.raises(LedgerReadError, match="is cold, and its entries"):
            await fork("clicks", "more", at=DLSN(1, 1, 0))
        check_ledgers(scene.cluster, filled=0)

    on_tier_scene(body, appends=6)


# Changes before each request of a fork


async def truncate_all(scene: TierScene) -> None:
    """Truncate the source, and sweep."""
    await scene.log.truncate((await scene.log.get_snapshot()).end)
    await scene.namespace.log_context.tidier.settled()
    await sweep(scene)


async def truncate_some(scene: TierScene) -> None:
    """Truncate the first segment of the source, and sweep."""
    await scene.log.truncate(DLSN(2, 0, 0))
    await scene.namespace.log_context.tidier.settled()
    await sweep(scene)


async def delete(scene: TierScene) -> None:
    """Delete the source, and sweep."""
    await scene.log.delete()
    await sweep(scene)


async def take_name(scene: TierScene) -> None:
    """Give the name to another log."""
    with contextlib.suppress(LogExistsError):
        await scene.namespace.create_log("test")


async def fork_too(scene: TierScene) -> None:
    """Fork the same log once more."""
    await scene.namespace.fork_log("clicks", "second")


async def write(scene: TierScene) -> None:
    """Write to the source."""
    await write_one(scene, "clicks")


async def lose_reply(scene: TierScene) -> None:
    """Apply the next request, and lose its answer."""
    scene.cluster.stores[scene.merging_name].lose_next_reply(applied=True)


async def lose_request(scene: TierScene) -> None:
    """Lose the next request."""
    scene.cluster.stores[scene.merging_name].lose_next_reply(applied=False)


async def crash(_: TierScene) -> None:
    """Let the process die."""
    raise CrashError


CHANGES = (
    *(sweep, truncate_all, truncate_some, delete, take_name, fork_too, write),
    *(lose_reply, lose_request, crash),
)


@pytest.mark.parametrize("ops_max", [300, 1])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_anything_may_happen_at_any_step(
    change: Callable[[TierScene], Awaitable[None]], ops_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork is whole or not there; counts and objects are right once all was swept."""
    monkeypatch.setattr(forking, "OPS_MAX", ops_max)
    if ops_max < 300:
        monkeypatch.setattr(forking, "CHUNK_EXTENTS_MAX", 1)

    async def body(at: int) -> bool:
        async with memory_cluster() as cluster:
            scene = TierScene(cluster)
            await scene.start(appends=22)
            await tier_segments(scene)
            return await interrupt(scene, change, at)

    at = 1 + CHANGES.index(change) % STRIDE
    while run_in_own_time(asyncio.wait_for(body(at), TIME_LIMIT_S)):
        at += STRIDE
    assert at > (7 if ops_max == 300 else 11)


async def interrupt(
    scene: TierScene, change: Callable[[TierScene], Awaitable[None]], at: int
) -> bool:
    """Fork, with `change` before the request number `at`; return whether there was such one."""
    before = await read_all(scene.log)
    cut = DLSN(3, 5, 0)

    async def met() -> None:
        try:
            await change(scene)
        except DLError as error:
            raise AssertionError("the change itself failed") from error

    scene.store.arm(at, met)
    outcome: DLError | CrashError | None = None
    try:
        assert await scene.merging.fork_log("clicks", "test", at=cut) == cut
    except (DLError, CrashError) as error:
        outcome = error
    was_reached = scene.store.made >= at
    scene.store.disarm()
    refusals: dict[object, type[Exception]] = {
        truncate_all: ConfigurationError,
        delete: LogNotFoundError,
        take_name: LogExistsError,
        crash: CrashError,
    }
    assert outcome is None or isinstance(outcome, refusals[change])
    if not isinstance(outcome, CrashError):
        assert not unfinished(scene)
    expected = [record for record in before if record.dlsn < cut]
    for _ in range(2):
        if outcome is None:
            found = await records_of(scene, "test")
            kept = [record for record in expected if record.dlsn >= DLSN(2, 0, 0)]
            assert found == expected or (change is truncate_some and found == kept)
        elif change is not take_name and not isinstance(outcome, CrashError):
            assert not await scene.namespace.log_exists("test")
        await sweep(scene)
        check(scene)
    if isinstance(outcome, CrashError) and not await scene.namespace.log_exists("test"):
        await scene.namespace.fork_log("clicks", "test", at=cut)
        assert await records_of(scene, "test") == expected
    return was_reached


def test_a_source_that_gives_up_its_segments_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork is given up with an error, and nothing of it is left."""

    async def body(scene: TierScene) -> None:
        await tier_segments(scene)

        async def overtaken(*_: object) -> bool:
            return False

        monkeypatch.setattr(forks, "_run", overtaken)
        with pytest.raises(MetadataError, match="gave up its segments during each of 10 attempts"):
            await scene.namespace.fork_log("clicks", "test")
        check(scene)

    on_tier_scene(body, appends=6)


def test_a_fork_that_became_whole_is_not_removed() -> None:
    """A sweep that took it for a deleted log finds that it is none."""

    async def body(scene: TierScene) -> None:
        await tier_segments(scene)
        await scene.namespace.fork_log("clicks", "test")
        before = await records_of(scene, "test")
        log = await scene.namespace.log_context.logs.find("test")
        await remove_deleted(scene.namespace.log_context, log)
        assert await records_of(scene, "test") == before

    on_tier_scene(body, appends=6)
