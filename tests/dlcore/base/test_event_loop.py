"""Goal: without uvloop everything that runs on an event loop of ours runs on asyncio's."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import uvloop

from dlcore.base import event_loop
from dlcore.sync.portal import Portal

if TYPE_CHECKING:
    import pytest


async def kind_of_loop() -> type[asyncio.AbstractEventLoop]:
    """Return the class of the loop that this runs on."""
    await asyncio.sleep(0)
    return type(asyncio.get_running_loop())


def kinds_of_loops() -> list[type[asyncio.AbstractEventLoop]]:
    """Return those of a server and of the blocking face."""
    portal = Portal()
    kinds = [event_loop.run(kind_of_loop()), portal.call(kind_of_loop())]
    portal.stop()
    return kinds


def test_uvloop_is_used_where_it_is_and_else_asyncio(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a message tells that CPU is lost."""
    caplog.set_level("INFO", "dlcore.base.event_loop")
    assert kinds_of_loops() == [uvloop.Loop] * 2
    assert caplog.messages == []
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert not [kind for kind in kinds_of_loops() if issubclass(kind, uvloop.Loop)]
    assert "asyncio's event loop takes the place of uvloop's" in caplog.text


class _Broken:
    """Finds a build of uvloop that does not load."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "uvloop":
            raise ImportError("undefined symbol: uv_loop_init")


def test_a_build_of_uvloop_that_does_not_load_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was installed, therefore its user expects it."""
    monkeypatch.delitem(sys.modules, "uvloop")
    monkeypatch.setattr(sys, "meta_path", [_Broken(), *sys.meta_path])
    event_loop.new_event_loop().close()
    (logged,) = caplog.records
    assert (logged.levelname, "undefined symbol" in logged.message) == ("WARNING", True)
