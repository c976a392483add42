"""Waiting for work outside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dlcore.metadata.answers import in_thread


def test_zookeeper_is_left_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the exit of Python 3.12: the event loop does it; an error is raised all the same."""
    done: list[str] = []

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def fail() -> None:
        raise OSError("no answer")

    async def leave() -> None:
        await in_thread(lambda: done.append(threading.current_thread().name))
        with pytest.raises(OSError, match="no answer"):
            await in_thread(fail)

    asyncio.run(leave())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(leave())
    assert done == ["zookeeper-stop", threading.current_thread().name]
