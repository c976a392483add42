"""Watching the logs of a namespace: every change is reported, whatever becomes of the session.

Goal: the changes of a watch, applied in order, give the logs there are.  Method: a
metadata store in memory that loses connections and sessions, and a real one that ends a session.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from dlcore.backends.direct.namespace import open_namespace
from dlcore.base.errors import AlreadyClosedError, MetadataError
from dlcore.log.metadata.names import LogChange, LogChangeKind
from dlcore.log.reading.watching import _BUCKETS_AT_ONCE
from dlcore.metadata.paths import bucket_of
from tests.fixtures import aio
from tests.fixtures.lateness import run_in_own_time
from tests.fixtures.memory_namespace import MemoryCluster, memory_cluster
from tests.fixtures.zookeeper import expire_session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.watching import LogWatch
    from dlcore.metadata.port import Versioned
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

CREATED, DELETED, RENAMED = LogChangeKind


def on_namespaces(
    body: Callable[[MemoryCluster, DirectNamespace, DirectNamespace], Awaitable[None]],
) -> None:
    """Run `body` with a cluster, the namespace that watches, and another that changes it."""

    async def run() -> None:
        async with memory_cluster() as cluster:
            await body(cluster, await cluster.open("a"), await cluster.open("b"))

    run_in_own_time(asyncio.wait_for(run(), 60))


class Changes:
    """A user of watches, which applies changes to the names it knows."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def apply(self, changes: Iterable[LogChange]) -> None:
        """Apply changes: each must fit."""
        for change in changes:
            if change.kind is not CREATED:
                assert self.names.pop(change.old_name or change.name) == change.log_id
            if change.kind is not DELETED:
                assert change.name not in self.names
                self.names[change.name] = change.log_id


async def until_known(watch: LogWatch, changes: Changes, names: Iterable[str]) -> None:
    """Take changes until these are the names."""
    while sorted(changes.names) != sorted(names):
        changes.apply(await watch.take())


def fail_once(cluster: MemoryCluster) -> None:
    """Let the next values that the client "a" asks for be an error that is not tried again."""
    store = cluster.stores["a"]
    get_many = store.get_many

    async def fail(paths: object) -> None:
        store.get_many = get_many  # type: ignore[method-assign]
        raise MetadataError("planted")

    store.get_many = fail  # type: ignore[method-assign, assignment]


def test_logs_are_reported_as_they_come_and_go() -> None:
    """Those that there are come first; a prefix is looked through."""

    async def body(
        cluster: MemoryCluster, namespace: DirectNamespace, other: DirectNamespace
    ) -> None:
        for name in ("x/a", "y/a"):
            await other.create_log(name)
        async with namespace.watch_logs("/x/") as watch:
            first = await anext(watch)
            assert (first.kind, first.name) == (CREATED, "x/a")
            await other.create_log("y/b")
            await other.rename_log("y/a", "x/b")
            change = await anext(watch)
            assert (change.kind, change.name) == (CREATED, "x/b")
            await other.rename_log("x/b", "x/c")
            change = await anext(watch)
            assert (change.kind, change.old_name, change.name) == (RENAMED, "x/b", "x/c")
            assert watch.names == ["x/a", "x/c"]
            await other.delete_log("x/a")
            change = await anext(watch)
            assert (change.kind, change.name, change.log_id) == (DELETED, "x/a", first.log_id)
            assert await watch.take(timeout_s=0.01) == []

    on_namespaces(body)


def test_changes_without_a_connection_are_reported_afterwards() -> None:
    """Also when the session ended meanwhile: creations, deletions, renames, and both at once."""

    async def body(
        cluster: MemoryCluster, namespace: DirectNamespace, other: DirectNamespace
    ) -> None:
        rng, changes = random.Random(1), Changes()
        store = cluster.stores["a"]
        names = [f"log-{i}" for i in range(6)]
        async with namespace.watch_logs() as watch:
            for round_ in range(12):
                store.disconnect()
                if round_ % 3:
                    store.expire()
                for name in rng.sample(names, 4):
                    to = rng.choice(names)
                    if not await other.log_exists(name):
                        await other.create_log(name)
                    elif not await other.log_exists(to):
                        await other.rename_log(name, to)
                    else:
                        await other.delete_log(name)
                store.reconnect()
                await until_known(watch, changes, await other.get_logs())
            ids = [(await other.open_log(name)).log_id for name in sorted(changes.names)]
            assert [changes.names[name] for name in sorted(changes.names)] == ids

    on_namespaces(body)


def test_an_answer_that_fails_loses_nothing() -> None:
    """The error is raised, and the next call returns the changes."""

    async def body(
        cluster: MemoryCluster, namespace: DirectNamespace, other: DirectNamespace
    ) -> None:
        await other.create_log("clicks")
        fail_once(cluster)
        async with namespace.watch_logs() as watch:
            with pytest.raises(MetadataError, match="planted"):
                await watch.take()
            assert [change.name for change in await watch.take()] == ["clicks"]

    on_namespaces(body)


def test_a_change_during_a_look_is_in_the_next() -> None:
    """One that comes after the names were listed, in the bucket that is looked at."""

    async def body(
        cluster: MemoryCluster, namespace: DirectNamespace, other: DirectNamespace
    ) -> None:
        late = next(n for n in map(str, range(10**6)) if bucket_of(n) == bucket_of("clicks"))
        await other.create_log("clicks")
        store = cluster.stores["a"]
        get_many = store.get_many

        async def create_first(paths: Sequence[str]) -> list[Versioned | None]:
            store.get_many = get_many  # type: ignore[method-assign]
            await other.create_log(late)
            await asyncio.sleep(0)  # its own watch gets it before the answer
            return await get_many(paths)

        store.get_many = create_first  # type: ignore[method-assign, assignment]
        async with namespace.watch_logs() as watch:
            assert [change.name for change in await watch.take()] == ["clicks"]
            assert [change.name for change in await watch.take(timeout_s=30)] == [late]

    on_namespaces(body)


def test_a_look_that_is_longer_than_the_time_goes_on() -> None:
    """However often the time is up: each look is made once, and what it finds is taken later."""

    async def body(
        cluster: MemoryCluster, namespace: DirectNamespace, other: DirectNamespace
    ) -> None:
        await other.create_log("clicks")
        store, answered = cluster.stores["a"], asyncio.Event()
        get_many, asked = store.get_many, 0

        async def slow(paths: Sequence[str]) -> list[Versioned | None]:
            nonlocal asked
            asked += 1
            await answered.wait()
            return await get_many(paths)

        store.get_many = slow  # type: ignore[method-assign, assignment]
        async with namespace.watch_logs() as watch:
            for _ in range(20):
                assert await watch.take(timeout_s=0.001) == []
            assert asked <= _BUCKETS_AT_ONCE
            answered.set()
            assert [change.name for change in await watch.take(timeout_s=30)] == ["clicks"]

    on_namespaces(body)


def test_a_watch_is_closed_in_the_middle_of_a_look() -> None:
    """A caller that waits for it gets an error."""

    async def body(
        cluster: MemoryCluster, namespace: DirectNamespace, other: DirectNamespace
    ) -> None:
        async def never(paths: Sequence[str]) -> list[Versioned | None]:
            await asyncio.Event().wait()
            raise AssertionError

        await other.create_log("clicks")
        cluster.stores["a"].get_many = never  # type: ignore[method-assign, assignment]
        watch = namespace.watch_logs()
        taking = asyncio.create_task(watch.take())
        await aio.until(lambda: watch._looking is not None)
        await watch.aclose()
        with pytest.raises(AlreadyClosedError):
            await taking

    on_namespaces(body)


def test_a_listener_is_called_until_the_watch_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Its errors and those of the metadata store are logged, and it goes on."""

    async def body(
        cluster: MemoryCluster, namespace: DirectNamespace, other: DirectNamespace
    ) -> None:
        heard: list[str] = []
        fail_once(cluster)

        def hear(changes: list[LogChange]) -> None:
            heard.extend(change.name for change in changes)
            raise ValueError("planted")

        async with namespace.watch_logs() as watch:
            watch.listen(hear)
            await other.create_log("a")
            await aio.until(lambda: heard == ["a"])
            await other.create_log("b")
            await aio.until(lambda: heard == ["a", "b"])
        await other.create_log("c")
        assert heard == ["a", "b"]
        with pytest.raises(AlreadyClosedError):
            watch.listen(hear)

    on_namespaces(body)
    assert "MetadataError: planted" in caplog.text
    assert "its listener failed" in caplog.text


def test_a_watch_that_is_closed_ends() -> None:
    """A loop over it ends; with its namespace it fails, for the watch was not closed."""

    async def body(
        cluster: MemoryCluster, namespace: DirectNamespace, other: DirectNamespace
    ) -> None:
        one, two = namespace.watch_logs(), namespace.watch_logs()

        async def collect(watch: LogWatch) -> list[LogChange]:
            return [change async for change in watch]

        loops = [asyncio.create_task(collect(watch)) for watch in (one, two)]
        await asyncio.sleep(0)
        await one.aclose()
        assert await loops[0] == []
        await namespace.aclose()
        with pytest.raises(AlreadyClosedError, match="its namespace was closed"):
            await loops[1]
        with pytest.raises(AlreadyClosedError):
            namespace.watch_logs()

    on_namespaces(body)


def test_a_watch_outlives_its_session_at_zookeeper(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str
) -> None:
    """Changes of another client meanwhile are reported."""

    async def scenario() -> None:
        uri = f"distributedlog://{zookeeper.servers}{zookeeper_root}"
        async with (
            await open_namespace(uri, create=True) as other,
            await open_namespace(uri) as namespace,
            namespace.watch_logs() as watch,
        ):
            changes = Changes()
            for name in ("a", "b", "x" * 300):
                await other.create_log(name)
            await until_known(watch, changes, ["a", "b", "x" * 300])
            store = namespace.ports.store
            changing = asyncio.create_task(expire_session(store, zookeeper.servers))  # type: ignore[arg-type]
            await other.rename_log("a", "y" * 300)
            await other.delete_log("b")
            await other.create_log("b")
            await changing
            await until_known(watch, changes, ["b", "x" * 300, "y" * 300])
            while changes.names["b"] != (await other.open_log("b")).log_id:
                changes.apply(await watch.take())

    aio.run(scenario())
