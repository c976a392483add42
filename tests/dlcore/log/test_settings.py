"""Settings stored with a log: a writer takes them over, at once or while it writes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.base.config import LogConfig, LogSettings
from dlcore.base.errors import ConfigurationError, CorruptMetadataError, LogNotFoundError
from dlcore.log.metadata.values import StoredSettings
from dlcore.metadata.stored import decode
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all, record

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.log.writing.writer import DirectWriter


def test_settings_come_before_the_configuration() -> None:
    """The writer's configuration decides what a log does not."""
    config = LogConfig(entry_bytes=1000, segment_bytes_max=5000)
    settings = LogSettings(segment_bytes_max=7000, compression="zstd")
    assert config.with_settings(settings) == replace(
        config, segment_bytes_max=7000, compression="zstd"
    )
    assert config.with_settings(LogSettings()) == config


def test_settings_are_changed_by_name() -> None:
    """None unsets one; what there is not, or cannot be, is refused and named."""
    settings = LogSettings(entry_bytes=5).changed({"compression": "lz4", "entry_bytes": None})
    assert settings == LogSettings(compression="lz4")
    kept = LogSettings(mode="proxied", explicit_truncation=True)
    assert kept.changed({"mode": None, "explicit_truncation": None}) == LogSettings()
    with pytest.raises(ConfigurationError, match=r"colour='red': LogSettings has entry_b"):
        settings.changed({"colour": "red"})
    with pytest.raises(ConfigurationError, match="entry_bytes=0: expected 1"):
        settings.changed({"entry_bytes": 0})
    with pytest.raises(ConfigurationError, match="expected a whole number or None"):
        settings.changed({"entry_bytes": "many"})
    with pytest.raises(ConfigurationError, match="'zip': expected auto, none, lz4 or zstd"):
        LogSettings(compression="zip")


async def entries_of(log: DirectLog) -> list[tuple[int, int]]:
    """Return the segment and entry of each record."""
    return [(each.dlsn.lssn, each.dlsn.entry_id) for each in await read_all(log)]


async def write_batch(writer: DirectWriter, txid: int, rows: int) -> None:
    """Write so many rows at once and wait for them."""
    await writer.write_batch(pa.record_batch({"txid": [txid] * rows, "value": [b"x" * 88] * rows}))


def test_a_writer_has_the_settings_of_its_log() -> None:
    """From its first entry on; every client sees the same."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log("small", settings=LogSettings(entry_bytes=200))
        small = await (await cluster.open("b")).open_log("small")
        assert await small.get_settings() == LogSettings(entry_bytes=200)
        assert await log.get_settings() == LogSettings()
        async with await small.open_writer() as writer:
            await write_batch(writer, 1, 4)
        assert await entries_of(small) == [(1, 0), (1, 0), (1, 1), (1, 1)]

    on_log(body)


def test_a_running_writer_takes_a_change_over() -> None:
    """Without a new writer and without a roll."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        other = await (await cluster.open("b")).open_log("clicks")
        async with await log.open_writer() as writer:
            await write_batch(writer, 1, 4)
            changed = await other.update_settings(entry_bytes=200, segment_bytes_max=300)
            assert changed == LogSettings(entry_bytes=200, segment_bytes_max=300)
            machine = writer.machine
            await until(lambda: machine.transmitter.entry_bytes == 200)
            await write_batch(writer, 2, 4)
        assert [segment for segment, _ in await entries_of(log)] == [1] * 4 + [2] * 2 + [3] * 2
        assert await log.update_settings(entry_bytes=None, segment_bytes_max=None) == LogSettings()

    on_log(body)


def test_staged_appends_have_the_settings_of_each_log() -> None:
    """Entries and segments of two logs in one append, and again after a change."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        await namespace.create_log(
            "small", settings=LogSettings(entry_bytes=200, segment_bytes_max=300)
        )
        small = await namespace.open_log("small")
        batch = pa.record_batch({"value": [b"x" * 88] * 4})
        for version in range(2):
            async with await namespace.begin_append("me", version) as append:
                for name in ("small", "clicks"):
                    await append.write_batch(name, batch)
                await append.commit()
        assert await entries_of(log) == [(1, 0)] * 4 + [(1, 1)] * 4
        expected = [(segment, entry) for segment in (1, 2) for entry in (0, 0, 1, 1)]
        assert await entries_of(small) == expected

    on_log(body)


def test_a_log_that_is_missing_is_created_when_it_is_opened_so() -> None:
    """Once, by the quicker client; a log that exists is opened as it is."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        with pytest.raises(LogNotFoundError):
            await namespace.open_log("late")
        opened = await asyncio.gather(
            *(namespace.open_log("late", create_if_missing=True) for _ in range(3))
        )
        assert len({each.log_id for each in opened}) == 1
        again = await namespace.open_log("clicks", create_if_missing=True)
        assert again.log_id == log.log_id

    on_log(body)


def test_settings_go_with_their_log() -> None:
    """Nothing of a deleted log stays, and its settings cannot be changed."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        await log.update_settings(entry_bytes=100)
        paths = cluster.paths.log_of(log.log_id)
        await log.delete()
        assert await cluster.stores["a"].get(paths.settings) is None
        assert await cluster.stores["a"].get(paths.head) is None
        with pytest.raises(LogNotFoundError):
            await log.update_settings(entry_bytes=200)

    on_log(body)


@pytest.mark.parametrize("applied", [True, False])
def test_an_update_whose_answer_is_lost_is_made_once(*, applied: bool) -> None:
    """The stored value then shows whether it must be made again."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        cluster.stores["a"].lose_next_reply(applied=applied)
        assert await log.update_settings(entry_bytes=100) == LogSettings(entry_bytes=100)
        path = cluster.paths.log_of(log.log_id).settings
        node = await cluster.stores["a"].get(path)
        assert node is not None
        assert node.version == 0
        assert decode(StoredSettings, node.value, source=path).settings.entry_bytes == 100

    on_log(body)


def test_settings_that_cannot_be_read_leave_a_writer_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The command says so, and a client that opens the log gets an error."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer() as writer:
            await cluster.stores["a"].create(cluster.paths.log_of(log.log_id).settings, b"{}")
            await until(lambda: "settings of log=clicks: a change is not known yet" in caplog.text)
            await writer.write(record(1))
        with pytest.raises(CorruptMetadataError, match="settings"):
            await log.open_writer()

    on_log(body)


def test_entries_are_compressed_as_the_log_says() -> None:
    """A staged entry too."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        batch = pa.record_batch({"value": [b"x" * 1000] * 20})
        sizes = []
        for version, compression in enumerate(("none", "zstd")):
            await log.update_settings(compression=compression)
            async with await namespace.begin_append("me", version) as append:
                await append.write_batch("clicks", batch)
                await append.commit()
        (segment,) = await log.get_log_segments()
        sizes = [extent.size_bytes for extent in segment.extents]
        assert sizes[0] > 20_000 > 2_000 > sizes[1]

    on_log(body)


def test_ledgers_carry_what_their_writer_says() -> None:
    """Beside the keys of dlog itself, which no user may set."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        with pytest.raises(ConfigurationError, match=r"\['log'\] are keys that dlog sets itself"):
            await log.open_writer(ledger_metadata={"log": "x", "team": "a"})
        with pytest.raises(ConfigurationError, match=r"4097 bytes .* at most 4096"):
            await log.open_writer(ledger_metadata={"team": "a" * 4093})
        async with await log.open_writer(ledger_metadata={"team": "a"}) as writer:
            await writer.write(record(1))
        (segment,) = await log.get_log_segments()
        ledger = await cluster.namespaces[0].get_ledger(segment.extents[0].ledger_id)
        assert ledger.custom == {"team": "a", "log": "clicks", "log_id": log.log_id}

    on_log(body)


@pytest.mark.parametrize(
    "tier", ["s3://bucket/folder", "s3://b-1.x/a/b_c/d=1", "file:///var/lib/dlog", "file:///x.y"]
)
def test_a_tier(tier: str) -> None:
    """A bucket or a folder, and a path below it."""
    settings = LogSettings(tier=tier)
    assert settings.needs_visits
    assert settings.tier_url == tier
    for without in (None, "none"):
        changed = settings.changed({"tier": without})
        assert not changed.needs_visits
        assert changed.tier_url is None


@pytest.mark.parametrize(
    "tier",
    [
        "",
        "s3://bucket",
        "s3://bucket/",
        "s3://bucket/a/",
        "s3://bucket/a//b",
        "s3://bucket/../a",
        "file://host/a",
        "/folder",
        "https://a/b",
        "s3://bucket/a b",
        "s3://bucket/a?b",
        "file:///.",
    ],
)
def test_no_tier(tier: str) -> None:
    """Every other URL is refused, for its objects' names are made of it."""
    with pytest.raises(ConfigurationError, match=r"tier=.*: expected s3://.*digits and \. _ = "):
        LogSettings(tier=tier)


@pytest.mark.parametrize(
    "wrong",
    [{"tier": "s3://bucket/a", "encrypted": True}, {"tier_after_s": -1}, {"tier_after_s": 1e12}],
)
def test_tiers_that_cannot_be(wrong: dict[str, object]) -> None:
    """An encrypted log has none, and an age is a time that a calendar has."""
    with pytest.raises(ConfigurationError, match="tier"):
        LogSettings.of(wrong)


def test_a_log_with_a_tier_is_listed() -> None:
    """Workers find it without a look at other logs, until it has neither tier nor retention."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        listed = cluster.paths.retained_log(log.log_id)
        steps: tuple[tuple[dict[str, object], bool], ...] = (
            ({"tier": "s3://bucket/a"}, True),
            ({"retention_s": 5}, True),
            ({"tier": None}, True),
            ({"retention_s": None}, False),
        )
        for changes, is_listed in steps:
            await log.update_settings(**changes)
            assert (listed in cluster.tree.dump()) is is_listed

    on_log(body)
