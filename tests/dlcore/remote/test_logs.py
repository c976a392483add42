"""Logs that come and go, end and begin later, through whichever proxy is asked."""

from __future__ import annotations

import pytest

from dlcore.config import LogSettings
from dlcore.errors import (
    ConfigurationError,
    EndOfStreamError,
    LogExistsError,
    LogNotFoundError,
    OwnershipAcquireFailedError,
)
from dlcore.ids import DLSN
from dlcore.remote import open_namespace
from tests.dlcore.remote.test_writing import numbered
from tests.fixtures.served_proxies import Proxies, with_proxies


def test_logs_come_and_go() -> None:
    """By the core's names, with its errors."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        direct = served.cluster.namespaces[0]
        async with await open_namespace(served.servers[0].location) as namespace:
            assert not await namespace.log_exists("clicks")
            with pytest.raises(LogNotFoundError):
                await namespace.open_log("clicks")
            log = await namespace.open_log("clicks", create_if_missing=True)
            assert (await namespace.open_log("clicks", create_if_missing=True)).name == log.name
            assert await namespace.log_exists("clicks")
            async with await log.open_writer() as writer:
                writer.write_bulk(numbered(0, 10))
            first = await direct.open_log("clicks")
            assert await log.truncate(txid=3)
            assert not await log.truncate(timestamp_ms=0)
            last = await log.get_last_dlsn()
            assert await log.truncate(last)
            assert await log.get_first_dlsn() == last == await first.get_first_dlsn()
            with pytest.raises(ConfigurationError, match="past the end"):
                await log.truncate(DLSN(9, 0, 0))
            with pytest.raises(ConfigurationError):
                await log.truncate()
            assert await log.get_settings() == LogSettings()
            told = await log.update_settings(retention_s=60, entry_bytes=1024)
            assert told == LogSettings(retention_s=60, entry_bytes=1024)
            assert await log.update_settings(entry_bytes=None) == LogSettings(retention_s=60)
            assert await first.get_settings() == LogSettings(retention_s=60)
            for wrong in ({"self": 1}, {"speed": 1}, {"retention_s": "long"}, {"mode": "no"}):
                with pytest.raises(ConfigurationError):
                    await log.update_settings(**wrong)
            await log.mark_end_of_stream()
            assert await log.is_end_of_stream_marked()
            with pytest.raises(EndOfStreamError):
                await log.mark_end_of_stream()
            await namespace.create_log("other")
            with pytest.raises(LogExistsError):
                await namespace.rename_log("clicks", "other")
            await namespace.rename_log("clicks", "older/clicks")
            assert await namespace.get_logs() == ["older/clicks", "other"]
            await namespace.delete_log("older/clicks")
            for name in ("older/clicks", "none"):
                with pytest.raises(LogNotFoundError):
                    await namespace.delete_log(name)
            assert await namespace.get_logs() == ["other"]

    with_proxies()(scenario)


def test_what_another_proxy_owns_is_ended_there() -> None:
    """Where we are sent to, though the endpoint names it not."""

    async def scenario(served: Proxies) -> None:
        owner = await served.start(lock_timeout_s=0.05)
        for log in ("a", "b", "c"):
            stream = await owner.opened(log)
            await stream.send(b"x")
            await stream.acked(1)
        await served.start(lock_timeout_s=0.05)
        async with await open_namespace(served.servers[1].location) as namespace:
            await namespace.rename_log("a", "renamed")
            await (await namespace.open_log("b")).mark_end_of_stream()
            await namespace.delete_log("c")
            assert await namespace.get_logs() == ["b", "renamed"]
            assert await (await namespace.open_log("b")).get_log_record_count() == 1

    with_proxies("a", "b", "c")(scenario)


def test_a_direct_writer_keeps_its_log() -> None:
    """That is told at once: waiting for him is not asked for."""

    async def scenario(served: Proxies) -> None:
        await served.start(lock_timeout_s=0.01)
        async with await open_namespace(served.servers[0].location) as namespace:
            direct = await served.cluster.namespaces[0].open_log("clicks")
            async with await direct.open_writer():
                with pytest.raises(OwnershipAcquireFailedError, match="is owned by direct"):
                    await namespace.delete_log("clicks")
                with pytest.raises(OwnershipAcquireFailedError, match="is owned by direct"):
                    await namespace.rename_log("clicks", "other")
            assert await namespace.get_logs() == ["clicks"]

    with_proxies("clicks")(scenario)
