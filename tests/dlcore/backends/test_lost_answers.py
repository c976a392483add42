"""Changes of logs whose answers are lost: asked for again, they are known to be done."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from dlcore.backends.direct.log import DirectLog
from dlcore.backends.flight.endpoint import Endpoint
from dlcore.backends.flight.namespace import open_namespace
from dlcore.backends.flight.planning import act
from dlcore.base.errors import (
    AlreadyClosedError,
    EndOfStreamError,
    LogExistsError,
    LogNotFoundError,
    LogRenamedError,
    MetadataConnectionError,
    OverCapacityError,
    OwnershipAcquireFailedError,
)
from dlcore.base.records import LogRecord
from dlcore.flight.actions import DELETE, RENAME, SEAL
from dlcore.flight.requests import ChangeRequest, RenameRequest
from dlcore.proxy.actions import Actions
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from dlcore.flight.actions import Action
    from dlcore.flight.needs import Pass
    from dlcore.log.writing.writer import DirectWriter


@contextmanager
def losing_the_answer(
    action: str, then: Callable[[], Awaitable[object]] | None = None
) -> Iterator[None]:
    """Lose the first answer to an action, which is performed; something else happens then."""
    perform = Actions.perform
    lost: list[str] = []

    async def perform_silently(self: Actions, name: str, body: bytes, entry: Pass) -> bytes:
        answer = await perform(self, name, body, entry)
        if name == action and not lost:
            lost.append(name)
            if then is not None:
                await then()
            raise MetadataConnectionError("the answer is lost")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actions, "perform", perform_silently)
        yield
    assert lost == [action]


def test_a_completed_call_is_not_done_again() -> None:
    """By the log's id, whether it is there, gone, called otherwise or sealed."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as namespace:
            with losing_the_answer("create"):
                await namespace.create_log("clicks")
            with pytest.raises(LogExistsError):
                await namespace.create_log("clicks")
            log = await namespace.open_log("clicks")
            with losing_the_answer("seal"):
                await log.mark_end_of_stream()
            with pytest.raises(EndOfStreamError):
                await log.mark_end_of_stream()
            with losing_the_answer("rename"):
                await namespace.rename_log("clicks", "older")
            assert await namespace.get_logs() == ["older"]
            with pytest.raises(LogNotFoundError):
                await namespace.rename_log("clicks", "older")
            with losing_the_answer("delete"):
                await namespace.delete_log("older")
            assert await namespace.get_logs() == []
            with pytest.raises(LogNotFoundError):
                await namespace.delete_log("older")

    with_proxies()(scenario)


@pytest.mark.parametrize("action", [SEAL, RENAME, DELETE], ids=lambda each: each.name)
def test_an_attempt_that_has_not_ended_is_no_stranger(action: Action[Any, Any]) -> None:
    """A repeated call waits for its lock meanwhile, or finds its half-done work."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        await client.act("create", log="clicks", log_id="1")
        request = ChangeRequest(log="clicks", log_id="1")
        if action is RENAME:
            request = RenameRequest(log="clicks", log_id="1", new_name="older")
        async with Endpoint(served.servers[0].location, patience_s=60.0) as calls:
            await asyncio.gather(*(act(calls, action, request) for _ in range(3)))
        direct = served.cluster.namespaces[0]
        names = {SEAL: ["clicks"], RENAME: ["older"], DELETE: []}[action]
        assert await direct.get_logs() == names
        if action is SEAL:
            assert await (await direct.open_log("clicks")).is_end_of_stream_marked()

    with_proxies()(scenario)


def test_a_client_refused_for_a_writer_here_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client that began to write between the release of the log and its lock."""
    rename = DirectLog.rename
    writers: list[DirectWriter] = []

    async def begin_to_write(log: DirectLog, name: str) -> None:
        if not writers:
            writers.append(await log.open_writer())
            with pytest.raises(OwnershipAcquireFailedError):
                await rename(log, name)
            asyncio.get_running_loop().call_later(0.05, asyncio.ensure_future, writers[0].aclose())
        await rename(log, name)

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as namespace:
            await namespace.create_log("clicks")
            monkeypatch.setattr(DirectLog, "rename", begin_to_write)
            await namespace.rename_log("clicks", "older")
            assert await namespace.get_logs() == ["older"]

    with_proxies()(scenario)


def test_another_log_of_the_name_is_left_alone() -> None:
    """Another client made it after the first attempt, and before the second."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        direct = served.cluster.namespaces[0]

        async def make_again() -> None:
            await direct.create_log("clicks")

        async with await open_namespace(served.servers[0].location) as namespace:
            await make_again()
            with losing_the_answer("delete", make_again):
                await namespace.delete_log("clicks")
            assert await namespace.get_logs() == ["clicks"]
            with losing_the_answer("rename", make_again):
                await namespace.rename_log("clicks", "older")
            assert await namespace.get_logs() == ["clicks", "older"]

            async def rename_further() -> None:
                await direct.rename_log("newer", "newest")

            with (
                losing_the_answer("rename", rename_further),
                pytest.raises(LogRenamedError, match="'older' is called 'newest' by now"),
            ):
                await namespace.rename_log("older", "newer")

            older = await namespace.open_log("newest")
            await direct.rename_log("newest", "later")
            with pytest.raises(LogRenamedError, match="is called 'later' by now: open it by that"):
                await older.delete()
            await direct.rename_log("later", "newest")

            async def delete() -> None:
                await direct.delete_log("newer")

            with (
                losing_the_answer("rename", delete),
                pytest.raises(LogNotFoundError, match="'newest' was deleted"),
            ):
                await namespace.rename_log("newest", "newer")

    with_proxies()(scenario)


def test_a_client_that_means_another_log_of_the_name_takes_it_from_no_owner() -> None:
    """It stays with the proxy that writes it."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        stream = await client.opened("clicks")
        for action, body in (("seal", {}), ("delete", {}), ("rename", {"new_name": "older"})):
            with suppress(grpc.aio.AioRpcError):
                await client.act(action, log="clicks", log_id="gone", **body)
            assert (await client.act("logs"))["logs"] == ["clicks"]
        await stream.send(b"x")
        await stream.acked(1)
        await stream.last_reply()

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_writer_that_could_not_seal_tries_again(*, is_sealed: bool) -> None:
    """Its records are there; no answer said whether the log is sealed."""
    perform = Actions.perform

    async def fail(self: Actions, name: str, body: bytes, entry: Pass) -> bytes:
        if name != "seal" or is_sealed:
            await perform(self, name, body, entry)
        raise MetadataConnectionError("no answer")

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as namespace:
            log = await namespace.open_log("clicks")
            async with await log.open_writer() as writer:
                writer.write(LogRecord(0, b"0"))
                namespace._calls.patience_s = 0.01
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Actions, "perform", fail)
                    for _ in range(2):
                        with pytest.raises(MetadataConnectionError):
                            await writer.mark_end_of_stream()
                with pytest.raises(AlreadyClosedError):
                    writer.write(LogRecord(1, b"1"))
                info = await log._info()
                assert (info.records, info.sealed) == (1, is_sealed)
                namespace._calls.patience_s = 60.0
                await writer.mark_end_of_stream()
                assert (await log._info()).sealed
                with pytest.raises(AlreadyClosedError):
                    await writer.mark_end_of_stream()

    with_proxies("clicks")(scenario)


def test_a_client_that_gets_a_time_to_retry_comes_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before."""
    perform, asked_s = Actions.perform, []

    async def refuse_once(self: Actions, name: str, body: bytes, entry: Pass) -> bytes:
        asked_s.append(asyncio.get_running_loop().time())
        if len(asked_s) == 1:
            raise OverCapacityError("not now", retry_after_s=0.3)
        return await perform(self, name, body, entry)

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as namespace:
            monkeypatch.setattr(Actions, "perform", refuse_once)
            await namespace.create_log("clicks")
        first_s, second_s = asked_s
        assert second_s - first_s >= 0.3

    with_proxies()(scenario)


def test_without_an_id_nothing_is_known() -> None:
    """Clients of other languages may give one."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        log_id = "11-aa"
        await client.act("create", log="a", log_id=log_id)
        assert (await client.act("owner", log="a"))["log_id"] == log_id
        await client.act("seal", log="a")
        await client.act("seal", log="a", log_id=log_id)
        await client.act("delete", log="a", log_id=log_id)
        await client.act("delete", log="a", log_id=log_id)
        for action, body in (
            ("seal", {}),
            ("delete", {}),
            ("rename", {"new_name": "b"}),
            ("rename", {"new_name": "b", "log_id": log_id}),
            ("delete", {"log_id": "../../locks"}),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.act(action, log="a", **body)
            assert refused.value.code().name == (
                "INVALID_ARGUMENT" if ".." in str(body) else "NOT_FOUND"
            )

    with_proxies()(scenario)
