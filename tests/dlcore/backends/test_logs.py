"""Logs that come and go, end and begin later, through whichever proxy is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dlcore.backends.flight.namespace import open_namespace
from dlcore.base.errors import (
    ConfigurationError,
    InvalidLogNameError,
)
from dlcore.proxy.actions import Actions
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from dlcore.flight.needs import Pass


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
