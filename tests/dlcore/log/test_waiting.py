"""Reports of a wait: which client holds the lock, since when, and how long the wait may last."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base import backoff
from dlcore.base.errors import MetadataConnectionError, OwnershipAcquireFailedError
from dlcore.log.metadata.store import WriterLocks
from dlcore.log.metadata.values import LockHolder
from dlcore.log.staging import commit
from tests.fixtures.aio import until
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, on_log
from tests.fixtures.staged_records import stage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.metadata.values import LogKey

SINCE = "a since 2023-11-14T22:13:20Z"


async def write(namespace: DirectNamespace) -> Any:
    """Open a writer."""
    return await (await namespace.open_log("clicks")).open_writer()


async def read(namespace: DirectNamespace) -> Any:
    """Open a reader for a subscriber."""
    return await (await namespace.open_log("clicks")).open_reader(subscriber="s")


async def append(namespace: DirectNamespace) -> Any:
    """Commit an append."""
    extent = await stage(namespace, "appended")
    staged = await namespace.begin_append("job", 1)
    await staged.commit([extent])
    return staged


@pytest.mark.parametrize(
    ("hold", "wait", "reason"),
    [
        (write, write, f"log 'clicks' is owned by {SINCE}"),
        (read, read, f"log 'clicks': another reader has subscriber 's': {SINCE}"),
        (write, append, f"log 'clicks' is owned by the writer {SINCE}"),
    ],
    ids=["writer", "subscriber", "append"],
)
def test_a_waiting_writer_logs_which_one_it_waits_for(
    hold: Callable[[DirectNamespace], Coroutine[Any, Any, Any]],
    wait: Callable[[DirectNamespace], Coroutine[Any, Any, Any]],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a warning, and by the error at the end."""
    caplog.set_level(logging.WARNING)  # whatever other tests have set
    monkeypatch.setattr(commit, "LOOKS_EVERY_S", 0.05)

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        patient = await cluster.open("b", config=replace(CONFIG, lock_timeout_s=60))
        impatient = await cluster.open("c", config=replace(CONFIG, lock_timeout_s=0.25))
        async with AsyncExitStack() as opened:
            held = await opened.enter_async_context(await hold(cluster.namespaces[0]))
            with pytest.raises(OwnershipAcquireFailedError) as caught:
                await wait(impatient)
            assert str(caught.value).removesuffix(" (waited 0.25 s)") == reason
            assert caught.value.owner == "a"
            assert caplog.messages == []  # it was soon over
            monkeypatch.setattr(backoff, "REPORTED_AFTER_S", 0.05)
            waiting = asyncio.create_task(wait(patient))
            await until(lambda: bool(caplog.messages))
            (message,) = caplog.messages
            assert message.startswith(f"{reason}; waiting for 60 s more; to do: ")
            assert not waiting.done()
            await held.aclose()
            await opened.enter_async_context(await waiting)

    on_log(body)


def test_a_second_writer_of_one_client_learns_that_it_is_this_one() -> None:
    """As in a notebook whose first one was never closed."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        async with await log.open_writer():
            with pytest.raises(OwnershipAcquireFailedError, match=f"{SINCE}, this client itself$"):
                await log.open_writer()

    on_log(body)


def test_a_holder_of_an_earlier_release_says_no_time() -> None:
    """It stored none."""
    assert LockHolder(owner="host:1", token="t").described("me") == "host:1"


def test_an_append_that_fails_waits_for_no_other_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two logs are held; the look at one lock fails, and the other is watched no longer."""
    monkeypatch.setattr(commit, "LOOKS_EVERY_S", 60.0)
    holder_of = WriterLocks.holder_of

    async def read(self: WriterLocks, log: LogKey) -> LockHolder | None:
        if log.name == "views":
            raise MetadataConnectionError("planted")
        return await holder_of(self, log)

    def watching() -> int:
        return sum("_await_lock" in str(each.get_coro()) for each in asyncio.all_tasks())

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        owner = cluster.namespaces[0]
        other = await cluster.open("b", config=replace(CONFIG, lock_timeout_s=60))
        await owner.create_log("views")
        extents = [await stage(other, "appended", log=name) for name in ("clicks", "views")]
        async with AsyncExitStack() as opened:
            for name in ("clicks", "views"):
                held = await owner.open_log(name)
                await opened.enter_async_context(await held.open_writer())
            monkeypatch.setattr(WriterLocks, "holder_of", read)
            staged = await other.begin_append("job", 1)
            with pytest.raises(MetadataConnectionError, match="planted"):
                await staged.commit(extents)
            assert watching() == 0

    on_log(body)
