"""Settings of a cluster: checked before they are stored, followed, and refused by itself alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from dlcore.base.config import LogSettings
from dlcore.base.errors import ConfigurationError, CorruptMetadataError
from dlcore.metadata.cluster_settings import ClusterSettingsStore, changed_tables
from dlcore.metadata.paths import NamespacePaths
from dlcore.ops.live_settings import require_allowed
from tests.fixtures.aio import run, until
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlcore.metadata.cluster_settings import Value

PATHS = NamespacePaths("/dlog")
RATE, PACE = ("proxy", "bytes_per_s"), ("autorecovery", "copy_bytes_per_s")


def test_changes_of_tables() -> None:
    """Set, set again, removed; a table without settings is none."""
    tables = changed_tables({}, {RATE: 5.0, PACE: 7})
    assert tables == {"proxy": {"bytes_per_s": 5.0}, "autorecovery": {"copy_bytes_per_s": 7}}
    assert changed_tables(tables, {RATE: 6.0, PACE: None}) == {"proxy": {"bytes_per_s": 6.0}}
    assert changed_tables({}, {RATE: None}) == {}


def test_a_stored_value_is_checked_and_followed() -> None:
    """A refused change stores nothing; a lost reply is no second change; damage is reported."""

    async def main() -> None:
        store = SimulatedTree().connect()
        await store.create(PATHS.root)
        settings = ClusterSettingsStore(store, PATHS)
        assert await settings.read() == {}
        seen: list[Mapping[str, Value]] = []
        follower = settings.follow("proxy", seen.append)
        await until(lambda: seen == [{}])
        with pytest.raises(ConfigurationError, match="bytes_per_s"):
            await settings.change({RATE: -1.0}, require_allowed)
        assert await store.get(PATHS.cluster_settings) is None
        await settings.change({RATE: 5.0}, require_allowed)
        await until(lambda: seen[-1] == {"bytes_per_s": 5.0})
        store.lose_next_reply(applied=True)
        assert await settings.change({RATE: 6.0}, require_allowed) == {
            "proxy": {"bytes_per_s": 6.0}
        }
        node = await store.get(PATHS.cluster_settings)
        assert node is not None
        assert node.version == 1
        await settings.change({RATE: None}, require_allowed)
        await until(lambda: seen[-1] == {})
        await store.put(PATHS.cluster_settings, b"{", version=-1)
        with pytest.raises(CorruptMetadataError, match="StoredClusterSettings"):
            await settings.read()
        await follower.aclose()

    run(main())


def test_a_new_log_gets_what_the_cluster_has(caplog: pytest.LogCaptureFixture) -> None:
    """All of it or, if it sets one of them itself, nothing; what cannot be used gives nothing."""

    async def main() -> None:
        store = SimulatedTree().connect()
        await store.create(PATHS.root)
        settings = ClusterSettingsStore(store, PATHS)
        given = LogSettings(compression="lz4")
        assert await settings.settings_of_new_log(given) == given
        retention, explicit = ("log", "retention_s"), ("log", "explicit_truncation")
        await settings.change({retention: 60, explicit: True}, require_allowed)
        assert await settings.settings_of_new_log(given) == LogSettings(
            compression="lz4", retention_s=60.0, explicit_truncation=True
        )
        for own in (LogSettings(retention_s=5.0), LogSettings(explicit_truncation=True)):
            assert await settings.settings_of_new_log(own) == own
        assert not caplog.text
        await settings.change({retention: -1}, lambda _: None)  # by a program that allows it
        assert await settings.settings_of_new_log(given) == given
        assert "retention_s=-1" in caplog.text
        await store.put(PATHS.cluster_settings, b"{", version=-1)
        assert await settings.settings_of_new_log(given) == given
        assert "StoredClusterSettings" in caplog.text

    run(main())


def test_a_process_that_refuses_a_value_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Its log says so, and it takes the next one."""
    used: list[Mapping[str, Value]] = []

    def use(values: Mapping[str, Value]) -> None:
        if values.get("bytes_per_s") == 1.0:
            raise ConfigurationError("bytes_per_s=1.0: too low here")
        used.append(values)

    async def main() -> None:
        store = SimulatedTree().connect()
        await store.create(PATHS.root)
        settings = ClusterSettingsStore(store, PATHS)
        follower = settings.follow("proxy", use)
        await until(lambda: used == [{}])
        await settings.change({RATE: 1.0}, require_allowed)
        await until(lambda: "too low here" in caplog.text)
        await settings.change({RATE: 2.0}, require_allowed)
        await until(lambda: used[-1] == {"bytes_per_s": 2.0})
        await follower.aclose()

    with caplog.at_level(logging.ERROR):
        run(main())
    assert caplog.text.count("the earlier ones count") == 1
