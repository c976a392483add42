"""Logs that come and go, end and begin later, through whichever proxy is asked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    ConfigurationError,
    EndOfStreamError,
    InvalidLogNameError,
    LogEmptyError,
    LogExistsError,
    LogNotFoundError,
    LogRenamedError,
    OwnershipAcquireFailedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import NotLessThan, RecordField
from dlcore.proxy.actions import Actions
from dlcore.sync import open_namespace as open_blocking
from tests.dlcore.backends.test_writing import numbered
from tests.dlcore.proxy.test_actions import refused
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.flight.needs import Pass


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
            reply = await log.update_settings(retention_s=60, entry_bytes=1024)
            assert reply == LogSettings(retention_s=60, entry_bytes=1024)
            assert await log.update_settings(entry_bytes=None) == LogSettings(retention_s=60)
            assert await first.get_settings() == LogSettings(retention_s=60)
            for wrong in ({"self": 1}, {"speed": 1}, {"retention_s": "long"}, {"mode": "no"}):
                with pytest.raises(ConfigurationError):
                    await log.update_settings(**wrong)
            assert await namespace.get_schemas(["clicks"], for_write=True) == {"clicks": None}
            await log.mark_end_of_stream()
            assert await log.is_end_of_stream_marked()
            with pytest.raises(EndOfStreamError):
                await log.mark_end_of_stream()
            with pytest.raises(EndOfStreamError, match="'clicks' is sealed"):
                await namespace.get_schemas(["clicks"], for_write=True)
            assert await namespace.get_schemas(["clicks"]) == {"clicks": None}
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


class _EarlierRequest(msgspec.Struct, forbid_unknown_fields=True):
    """As 0.2.0 knows the request of `schemas`."""

    logs: list[str]


def test_writers_may_ask_a_proxy_of_0_2_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the field by which a writer asks for seals: the writer asks as a reader does."""
    bodies: list[bytes] = []
    perform = Actions.perform

    async def perform_as_before(self: Actions, name: str, body: bytes, entry: Pass) -> bytes:
        assert name == "schemas"
        bodies.append(body)
        try:
            msgspec.json.decode(body, type=_EarlierRequest)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"action 'schemas': {error}") from error
        return await perform(self, name, body, entry)

    monkeypatch.setattr(Actions, "perform", perform_as_before)

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as namespace:
            assert await namespace.get_schemas(["a"]) == {"a": None}
            assert await namespace.get_schemas(["a"], for_write=True) == {"a": None}
            with pytest.raises(InvalidLogNameError):
                await namespace.get_schemas(["/"], for_write=True)

    with_proxies("a")(scenario)
    as_reader, as_writer = b'{"logs":["a"]}', b'{"logs":["a"],"for_write":true}'
    assert bodies[:3] == [as_reader, as_writer, as_reader]


def test_a_handle_renames_and_deletes_its_log() -> None:
    """Goes on under the new name, and asks for nothing of a log that is gone."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        direct = served.cluster.namespaces[0]
        async with await open_namespace(served.servers[0].location) as namespace:
            settings = LogSettings(retention_s=60, mode="proxied")
            await namespace.create_log("clicks", settings=settings)
            assert await (await direct.open_log("clicks")).get_settings() == settings
            code, reply = await refused(client, "create", log="other", settings={"speed": 1})
            assert (code, "speed" in reply) == ("INVALID_ARGUMENT", True)
            log = await namespace.open_log("clicks")
            with pytest.raises(ConfigurationError):
                await log.rename("")
            await log.rename("older")
            assert log.name == "older"
            async with await log.open_writer() as writer:
                await writer.write_bulk(numbered(0, 3))[-1]
            assert await log.get_log_record_count() == 3
            other = await namespace.open_log("older")
            await namespace.rename_log("older", "oldest")
            with pytest.raises(LogRenamedError, match="is called 'oldest' by now"):
                await other.delete()
            log = await namespace.open_log("oldest")
            for _ in range(2):
                await log.delete()
            assert await namespace.get_logs() == []
            with pytest.raises(LogNotFoundError):
                await log.rename("new")
            await namespace.create_log("oldest")
            await log.delete()
            assert await namespace.get_logs() == ["oldest"]

        def rename_and_delete() -> None:
            with open_blocking(served.servers[0].location) as blocking:
                blocking.create_log("clicks", settings=LogSettings(retention_s=60))
                log = blocking.open_log("clicks")
                log.rename("older")
                assert (log.name, log.get_settings().retention_s) == ("older", 60)
                log.delete()
                assert blocking.get_logs() == ["oldest"]

        await asyncio.to_thread(rename_and_delete)

    with_proxies()(scenario)


def test_a_log_that_another_proxy_owns_is_ended_there() -> None:
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
    """The refusal comes at once: the caller did not ask to wait for the owner."""

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


def ask_blocking(endpoint: str) -> None:
    """Ask the same of the blocking face, of a log that holds 12 records."""
    with open_blocking(endpoint) as namespace:
        log = namespace.open_log("clicks")
        assert (log.get_first_txid(), log.get_last_txid()) == (0, 11)
        assert log.get_first_record().payload == b"0"
        assert log.get_last_record().dlsn == log.get_last_dlsn()
        position = log.get_dlsn_not_less_than_txid(4)
        assert log.get_log_record_count(end=position) == 4
        assert log.get_dlsn_not_less_than_timestamp(0) == log.get_snapshot().first
        assert not log.purge_logs_older_than(4)


def test_answers_about_a_log_are_those_of_the_core() -> None:
    """By positions, transaction ids and times; of records and of ranges."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        direct = await served.cluster.namespaces[0].open_log("clicks")
        async with await open_namespace(served.servers[0].location) as namespace:
            log = await namespace.open_log("clicks")
            for asked in (log.get_last_txid, log.get_first_record, log.get_last_record):
                with pytest.raises(LogEmptyError):
                    await asked()
            async with await direct.open_writer() as writer:
                for first in range(0, 12, 3):
                    writer.write_bulk(numbered(first, 3))
                    await writer.flush()
            assert await log.get_first_txid() == await direct.get_first_txid() == 0
            assert await log.get_last_txid() == await direct.get_last_txid() == 11
            assert (await log.get_last_record()).payload == b"11"
            for txid in (0, 4, 11, 12):
                place = NotLessThan(RecordField.TXID, txid)
                assert await log.find_place(place) == await direct.find_place(place)
                position = await log.get_dlsn_not_less_than_txid(txid)
                assert position == await direct.get_dlsn_not_less_than_txid(txid)
                assert await log.get_log_record_count(position) == 12 - txid
                assert await log.get_log_record_count(end=position) == txid
            for time_ms in (0, 2**50):
                found = await log.get_dlsn_not_less_than_timestamp(time_ms)
                assert found == await direct.get_dlsn_not_less_than_timestamp(time_ms)
            assert await log.get_log_record_count() == 12
            assert await log.get_log_record_count(DLSN(9, 0, 0)) == 0
            assert (await log.get_snapshot()).end == (await direct.get_snapshot()).end
            await asyncio.to_thread(ask_blocking, served.servers[0].location)
            assert not await log.purge_logs_older_than(11)
            async with await direct.open_writer() as writer:
                writer.write_bulk(numbered(12, 1))
            assert await log.purge_logs_older_than(12)
            assert await log.get_first_txid() == 12
            await namespace.delete_log("clicks")
            with pytest.raises(LogNotFoundError):
                await log.get_snapshot()

    with_proxies("clicks")(scenario)
