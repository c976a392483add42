"""The ZooKeeper store bears answers that come late, twice, or to a process that is ending.

Goal: no callback is called twice, an answer that no caller awaits harms nothing, no session
outlives its process.  Method: a real server; what its client does at odd moments is done by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from kazoo.exceptions import RolledBackError, ThrottledOpError
from kazoo.protocol.states import Callback

from dlcore.base.errors import ConfigurationError, MetadataError
from dlcore.metadata import zookeeper_session as adapter
from dlcore.metadata.port import ANY_VERSION, Create, SessionState
from dlcore.metadata.requests import RemoveWatches, call
from dlcore.metadata.zookeeper import ZooKeeperStore
from tests.fixtures.aio import run, until, until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

pytestmark = pytest.mark.integration


@contextlib.asynccontextmanager
async def connected(zookeeper: EmbeddedZooKeeper) -> AsyncIterator[ZooKeeperStore]:
    """Open a store and close it at the end."""
    store = await ZooKeeperStore.connect(zookeeper.servers, session_timeout_s=20)
    try:
        yield store
    finally:
        await store.aclose()


def test_a_session_that_is_being_ended_is_left_alone_at_exit(
    zookeeper: EmbeddedZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kazoo would raise at a second stop before it has stopped."""

    async def scenario() -> None:
        began, goes_on = threading.Event(), threading.Event()
        async with connected(zookeeper) as store:
            stop = store._client.stop

            def stop_late() -> None:
                assert not began.is_set()
                began.set()
                goes_on.wait()
                stop()

            monkeypatch.setattr(store._client, "stop", stop_late)
            closing = asyncio.create_task(store.aclose())
            await until(began.is_set)
            assert store._session.kazoo in adapter._left_open
            await asyncio.to_thread(adapter._end_sessions)
            goes_on.set()
            await closing

    run(scenario())


def test_unclosed_sessions_end_with_their_process(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that lives as long as the session, such as a lock, is free at once."""

    async def scenario() -> None:
        async with connected(zookeeper) as other:
            left = await ZooKeeperStore.connect(zookeeper.servers, session_timeout_s=60)
            await other.create(zookeeper_root)
            await left.create(f"{zookeeper_root}/lock", ephemeral=True)
            kept, adapter._left_open = (
                adapter._left_open,
                type(adapter._left_open)({left._session.kazoo}),
            )
            try:
                await asyncio.to_thread(adapter._end_sessions)
            finally:
                adapter._left_open = kept

            async def is_free() -> bool:
                return await other.get(f"{zookeeper_root}/lock") is None

            await until_async(is_free)
            # A connection begun now would keep the end waiting.
            assert "starting another" not in caplog.text
            await left.aclose()

    run(scenario())


def test_a_child_leaves_the_sessions_of_its_parent_alone(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """It neither ends nor uses them, and says which process opened what it has."""

    async def scenario() -> None:
        async with connected(zookeeper) as store:
            await store.create(f"{zookeeper_root}", ephemeral=True)
            kept, adapter._left_open = (
                adapter._left_open,
                type(adapter._left_open)({store._session.kazoo}),
            )
            try:
                adapter._forget_sessions()
                assert not adapter._left_open
                adapter._end_sessions()
            finally:
                adapter._left_open = kept
            store._session.kazoo._pid -= 1
            with pytest.raises(
                ConfigurationError, match=f"opened in process {store._session.kazoo._pid} and used"
            ):
                await store.get(zookeeper_root)
            store._session.kazoo._pid = os.getpid()
            assert await store.get(zookeeper_root) is not None

    run(scenario())


def test_an_answer_counts_once(zookeeper: EmbeddedZooKeeper, zookeeper_root: str) -> None:
    """kazoo gives some twice, and some to callers that have gone."""

    async def scenario() -> None:
        async with connected(zookeeper) as store:
            reply = store._requests.enqueue("get", lambda: store._client.exists_async("/"))
            (request,) = store._requests._outstanding
            await reply
            store._requests._on_answer(request, None, RuntimeError("again"))
            gone = store._requests.enqueue("get", lambda: store._client.exists_async("/"))
            gone.cancel()
            await until(lambda: not store._requests._outstanding)
            await store.create(zookeeper_root)

    run(scenario())


def test_a_watcher_gets_one_notice_of_many_changes_and_none_after_it_left(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of the session's state; a watch that cannot be armed is an error that is logged."""

    async def scenario() -> None:
        async with connected(zookeeper) as store:
            reported: list[object] = []
            unwatch = store.watch(zookeeper_root, lambda: reported.append("changed"))
            for _ in range(3):
                store._session.watches._on_change(zookeeper_root)
            await until(lambda: not store._requests._outstanding)
            assert reported == ["changed"]
            forget = store.on_session(reported.append)
            store._session.watches._on_change(zookeeper_root)
            store._session._set_state(SessionState.SUSPENDED)
            store._session.watches._arm(zookeeper_root)  # the next connection does it
            assert not store._requests._backlog
            store._session.states.now = SessionState.CONNECTED
            unwatch()
            forget()
            store._session.watches._on_change(zookeeper_root)
            await until(lambda: not store._requests._outstanding)
            assert reported == ["changed"]
            failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            failed.set_exception(MetadataError("no such watch"))
            store._session.watches._on_armed(zookeeper_root, failed)
            assert "a watch is not armed: no such watch" in caplog.text

    with caplog.at_level(logging.ERROR):
        run(scenario())


def test_a_watch_that_a_server_refuses_is_armed_later(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other code would, and other watchers of the node rely on it."""
    monkeypatch.setattr("dlcore.metadata.watches._ARMED_AGAIN_S", 0.05)

    async def scenario() -> None:
        async with connected(zookeeper) as store, connected(zookeeper) as other:
            await other.create(zookeeper_root, b"0")
            values: list[int] = []

            async def look() -> None:
                node = await store.get(zookeeper_root)
                assert node is not None
                values.append(int(node.value))

            tasks: set[asyncio.Task[None]] = set()
            unwatch = store.watch(
                zookeeper_root, lambda: tasks.add(asyncio.create_task(look())), children=False
            )
            await until(lambda: values == [0])
            exists = store._client.exists_async
            refusals = [ThrottledOpError()]

            def refusing(path: str, watch: Any = None) -> Any:
                if watch is None or not refusals:
                    return exists(path, watch)
                answer = store._session.kazoo._handler.async_result()
                answer.set_exception(refusals.pop())
                return answer

            monkeypatch.setattr(store._client, "exists_async", refusing)
            for value in (1, 2):
                await other.put(zookeeper_root, b"%d" % value, version=ANY_VERSION)
                await until(lambda value=value: value in values)  # type: ignore[misc]
                await until(lambda: not refusals and store._session.watches._arming_again is None)
                await until(lambda: not store._requests._outstanding)
            unwatch()
            await asyncio.gather(*tasks)

    run(scenario())


def test_a_second_watch_of_a_node_sends_nothing(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """It is called as the others are; the list of children is watched after its first
    subscriber."""

    async def scenario() -> None:
        async with connected(zookeeper) as store, connected(zookeeper) as other:
            await other.create(zookeeper_root)
            reported: list[str] = []

            def watch(name: str, children: bool) -> int:
                """Return how many requests are made for it."""
                before = len(store._requests._outstanding)
                store.watch(zookeeper_root, lambda: reported.append(name), children=children)
                return len(store._requests._outstanding) - before

            made = [watch(*each) for each in (("a", False), ("b", False), ("c", True), ("d", True))]
            assert made == [1, 0, 2, 0]
            await store.sync(zookeeper_root)
            assert sorted(reported) == ["a", "b", "c", "d"]
            for change in (
                partial(other.put, zookeeper_root, b"new", version=0),
                partial(other.create, f"{zookeeper_root}/child"),
                partial(other.put, zookeeper_root, b"newer", version=1),
            ):
                reported.clear()
                await change()
                await until(lambda: set(reported) == {"a", "b", "c", "d"})
                await until(lambda: not store._requests._outstanding)

    run(scenario())


def test_a_change_is_reported_before_later_answers(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """Also if kazoo's thread is late to tell of it: after a sync the caller has heard it."""

    async def scenario() -> None:
        async with connected(zookeeper) as store, connected(zookeeper) as other:
            await other.create(zookeeper_root)
            reported: list[str] = []
            store.watch(zookeeper_root, lambda: reported.append("changed"))
            await store.sync(zookeeper_root)
            assert reported == ["changed"]  # as is reported at first
            held = threading.Event()
            store._client.handler.dispatch_callback(Callback("watch", held.wait, (20,)))
            await other.put(zookeeper_root, b"new", version=0)
            asyncio.get_running_loop().call_later(0.2, held.set)
            await store.sync(zookeeper_root)
            assert reported == ["changed"] * 2

    run(scenario())


def test_reads_that_begin_together_share_a_sync(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """It is not sent before the last of them has begun, and one that comes later has its own."""

    async def scenario() -> None:
        async with connected(zookeeper) as store:
            await store.create(zookeeper_root, b"value")
            sync, synced = store._client.sync_async, list[str]()

            def note(path: str) -> Any:
                synced.append(path)
                gone.cancel()  # without it the others go on
                return sync(path)

            async def read() -> bytes:
                assert not synced
                node = await store.get(zookeeper_root, fresh=True)
                assert node is not None
                return node.value

            store._client.sync_async = note
            async with asyncio.TaskGroup() as tasks:
                values = [tasks.create_task(read()) for _ in range(3)]
                children = tasks.create_task(store.get_children(zookeeper_root, fresh=True))
                gone = tasks.create_task(store.get(zookeeper_root, fresh=True))
            assert [task.result() for task in values] == [b"value"] * 3
            assert children.result() == []
            assert synced == [zookeeper_root]
            await store.get(zookeeper_root, fresh=True)
            assert len(synced) == 2

    run(scenario())


def test_a_sync_without_a_waiting_caller_is_not_sent(zookeeper: EmbeddedZooKeeper) -> None:
    """Else those of a caller that asks again and again would gather without a connection."""

    async def scenario() -> None:
        async with connected(zookeeper) as store:
            store._session._set_state(SessionState.SUSPENDED)
            reading = [asyncio.create_task(store.get("/", fresh=True)) for _ in range(2)]
            await until(lambda: len(store._requests._backlog) == 3)
            for task in reading:
                task.cancel()
            await asyncio.wait(reading)
            assert all(request.reply.cancelled() for request in store._requests._backlog)
            store._session._set_state(SessionState.CONNECTED)
            store._requests.pump()
            assert not store._requests._outstanding

    run(scenario())


def test_a_watch_without_a_waiting_caller_is_removed(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At the server and in kazoo, also where there is no node; else they grow with each log."""

    async def scenario() -> None:
        async with connected(zookeeper) as store:
            kept: list[str] = []
            await store.create(zookeeper_root)
            for path in (zookeeper_root, f"{zookeeper_root}/missing"):
                unwatch, unwatch_too = (store.watch(path, lambda: None) for _ in range(2))
                await store.sync(path)
                unwatch()
                await store.sync(path)
                assert path in store._client._data_watchers
                unwatch_too()
                unwatch_too()
                await store.sync(path)
                with pytest.raises(MetadataError, match="NoWatcher"):
                    await remove_watches(store, path)
            assert not store._client._data_watchers
            assert not store._client._child_watchers
            # One that comes again at once is there.
            store.watch(zookeeper_root, lambda: None)()
            store.watch(zookeeper_root, lambda: kept.append("changed"))
            await until(lambda: kept == ["changed"])
            await store.sync(zookeeper_root)
            await store.put(zookeeper_root, b"new", version=0)
            await until(lambda: kept == ["changed"] * 2)
            # One that fired is gone, which is what was wanted.
            store._session.watches._forget(zookeeper_root)
            await remove_watches(store, zookeeper_root)
            store._session.watches._disarm(zookeeper_root)
            await until(lambda: not store._requests._outstanding)

    async def remove_watches(store: ZooKeeperStore, path: str) -> None:
        removal = RemoveWatches(path, lambda _: None)
        await store._requests.read("unwatch", partial(call, store._client, removal))

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert not caplog.records


def test_a_transaction_that_failed_without_a_reason_is_an_error(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never taken for applied."""

    async def scenario() -> None:
        async with connected(zookeeper) as store:

            async def answer(*_asked: object) -> list[object]:
                return [RolledBackError()]

            monkeypatch.setattr(store._requests, "write", answer)
            with pytest.raises(MetadataError, match="a transaction of 1 operations failed"):
                await store.multi([Create(zookeeper_root)])

    run(scenario())


def test_events_of_kazoo_after_the_end_of_the_loop_are_dropped(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    """Its threads may outlive the loop; any other error of the loop is a defect."""

    async def scenario() -> None:
        async with connected(zookeeper) as store:
            loop = store._session.kazoo._loop

            def refuse(*_asked: object) -> None:
                raise RuntimeError("planted")

            for is_closed in (True, False):
                ending = SimpleNamespace(
                    call_soon_threadsafe=refuse, is_closed=lambda is_closed=is_closed: is_closed
                )
                store._session.kazoo._loop = ending  # type: ignore[assignment]
                if is_closed:
                    store._session.kazoo.post(print)
                else:
                    with pytest.raises(RuntimeError, match="planted"):
                        store._session.kazoo.post(print)
            store._session.kazoo._loop = loop

    run(scenario())
