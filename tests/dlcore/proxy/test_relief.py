"""Memory is given back while it is short, and all that can be once it has not been for a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dlcore.proxy.reading import serving
from dlcore.proxy.reading.serving import Relief
from tests.fixtures.aio import run, until

if TYPE_CHECKING:
    import pytest


def test_memory_is_given_back_while_it_is_short_and_then_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not more often than now and then, however often it is said; and nothing after the end."""
    monkeypatch.setattr(serving, "LOOK_S", 0.05)
    monkeypatch.setattr(serving, "CALM_S", 0.5)
    given: list[str] = []
    monkeypatch.setattr(serving, "give_back_what_is_free", lambda: given.append("free"))

    async def scenario() -> None:
        memory = Relief(lambda: given.append("kept"))
        for count in (1, 2):
            for _ in range(100):
                memory.needed()
            await until(lambda: given.count("free") == count)  # noqa: B023
        await until(lambda: given == ["free", "free", "kept", "free"])
        memory.used()
        await until(lambda: given == ["free", "free", "kept", "free", "kept", "free"])
        memory.needed()
        memory.close()
        await asyncio.sleep(0.1)
        assert len(given) == 6

    run(scenario())
