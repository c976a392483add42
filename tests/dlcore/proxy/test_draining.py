"""A proxy that drains while something is broken: it ends, and the defect is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlcore.proxy.writing.owned_log import OwnedLog
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    import pytest


def test_a_change_that_breaks_does_not_keep_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log that it was to let go of goes with the session."""

    def broken(self: OwnedLog, *_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    async def scenario(served: Proxies) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        client = await served.start()
        stream = await client.opened("a")
        await stream.told_all()
        monkeypatch.setattr(OwnedLog, "end", broken)
        assert await client.act("drain") == {}
        assert [str(context["exception"]) for context in told] == ["a defect"]

    with_proxies("a")(scenario)
