"""The bookie process from start to stop: crashes, frozen sessions, wrong folders, failing disks."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from bookie.config import GarbageConfig, SpaceConfig, StorageConfig
from bookie.server import BookieServer
from bookie.server_config import BookieConfig
from dlcore.base.clock import SystemClock
from dlcore.base.errors import (
    BadRequestError,
    BookieError,
    BookieReadOnlyError,
    BookieStorageError,
    BookieUnavailableError,
    ConfigurationError,
    CorruptMetadataError,
)
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.ledger.metadata.values import BookieRegistration
from dlcore.metadata.binding import ensure_namespace, read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.stored import decode, encode
from dlcore.metadata.zookeeper import ZooKeeperStore
from dlcore.wire.client import WireBookieClient
from tests.fixtures.aio import until, until_async
from tests.fixtures.bookie_process import REPOSITORY, BookieProcess, bookie_process, end_of, spawn
from tests.fixtures.lengths import sample
from tests.fixtures.served_bookie import ANY_SPACE, CLIENT, frame_of, run
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from dlcore.base.ids import BookieId
    from dlcore.metadata.port import MetadataStore
    from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

PATHS = NamespacePaths("/dlog")
URI = "distributedlog://memory:2181/dlog"
LEDGER = 5


@asynccontextmanager
async def client_of(
    store: MetadataStore, paths: NamespacePaths, address: str, *, add_timeout_s: float = 30.0
) -> AsyncIterator[WireBookieClient]:
    """Open a client to the bookie at `address`, in a namespace that has ledgers."""
    idgen = await store.get(paths.ledger_idgen)
    if idgen is not None and idgen.value == b"0":
        await store.put(paths.ledger_idgen, b"%d" % (LEDGER + 2), version=-1)

    async def resolve(_bookie: BookieId) -> str:
        return address

    cluster_id = (await read_binding(store, paths)).cluster_id
    config = replace(CLIENT, add_timeout_s=add_timeout_s)
    client = WireBookieClient(resolve, cluster_id=cluster_id, config=config)
    try:
        yield client
    finally:
        await client.aclose()


class Cluster:
    """A namespace of its own on the shared ZooKeeper."""

    def __init__(self, store: ZooKeeperStore, servers: str, root: str) -> None:
        self.store = store
        self.uri = f"distributedlog://{servers}{root}"
        self.paths = NamespacePaths(root)

    async def registered_at(self, name: str) -> str:
        """Return the address registered for a writable bookie; empty if none."""
        node = await self.store.get(self.paths.bookie_available(name))
        return (
            "" if node is None else decode(BookieRegistration, node.value, source="/here").address
        )

    def client(
        self, process: BookieProcess, *, add_timeout_s: float = 30.0
    ) -> AbstractAsyncContextManager[WireBookieClient]:
        """Open a client to one bookie."""
        return client_of(self.store, self.paths, process.address, add_timeout_s=add_timeout_s)


@asynccontextmanager
async def connect(zookeeper: EmbeddedZooKeeper, root: str) -> AsyncIterator[Cluster]:
    """Open a session for the test's own questions."""
    store = await ZooKeeperStore.connect(zookeeper.servers)
    try:
        yield Cluster(store, zookeeper.servers, root)
    finally:
        await store.aclose()


async def add_until_refused(
    client: WireBookieClient, bookie: BookieId, acknowledged: list[int]
) -> None:
    """Keep adds in flight until one is refused; note the entries that were acknowledged."""
    pending = {i: client.add_entry(bookie, frame_of(LEDGER, i, b"x" * 4000)) for i in range(200)}
    while pending:
        await asyncio.wait(pending.values(), return_when=asyncio.FIRST_COMPLETED)
        for entry_id in [i for i, add in pending.items() if add.done()]:
            add = pending.pop(entry_id)
            if add.exception() is None:
                acknowledged.append(entry_id)
                again = entry_id + 200
                pending[again] = client.add_entry(bookie, frame_of(LEDGER, again, b"x" * 4000))
            else:
                assert isinstance(add.exception(), BookieUnavailableError)


async def check_held(client: WireBookieClient, bookie: BookieId, entry_ids: list[int]) -> None:
    """See that the bookie holds every one of the entries, unchanged."""
    assert entry_ids
    for entry_id in entry_ids:
        read = await client.read_entry(bookie, ledger_id=LEDGER, entry_id=entry_id, fence=False)
        assert bytes(read) == frame_of(LEDGER, entry_id, b"x" * 4000)


@pytest.mark.integration
@pytest.mark.parametrize("how", sample([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 1))
def test_no_acknowledged_entry_is_lost(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path, how: signal.Signals
) -> None:
    """End the bookie under load, start it on its folder: all it acknowledged is there."""

    async def scenario() -> None:
        async with connect(zookeeper, zookeeper_root) as cluster:
            async with bookie_process(cluster.uri, "b", tmp_path / "b") as one:
                async with cluster.client(one) as client:
                    acknowledged: list[int] = []
                    loading = asyncio.create_task(
                        add_until_refused(client, one.bookie, acknowledged)
                    )
                    await client.add_entry(one.bookie, frame_of(LEDGER + 1, 0))
                    await until(lambda: len(acknowledged) > 1000 or loading.done())
                    one.send(how)
                    await loading
                status, errors = await one.end()
            if how is signal.SIGKILL:
                assert status == -signal.SIGKILL
            else:
                assert (status, await cluster.registered_at("b")) == (0, "")
                assert "Traceback" not in errors
            async with bookie_process(cluster.uri, "b", tmp_path / "b") as again:
                assert again.bookie == one.bookie
                assert await cluster.registered_at("b") == again.address
                async with cluster.client(again) as client:
                    await check_held(client, again.bookie, acknowledged)
                    await client.add_entry(again.bookie, frame_of(LEDGER + 1, 1))

    run(scenario)


@pytest.mark.integration
def test_a_frozen_bookie_registers_again(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """SIGSTOP beyond the session's time-out: adds fail in time; after SIGCONT it is back."""

    async def scenario() -> None:
        async with (
            connect(zookeeper, zookeeper_root) as cluster,
            bookie_process(cluster.uri, "b", tmp_path / "b", "--session-timeout-s", "1.5") as one,
            cluster.client(one) as client,
            cluster.client(one, add_timeout_s=5.0) as impatient,
        ):
            await client.add_entry(one.bookie, frame_of(LEDGER, 0))
            one.send(signal.SIGSTOP)
            with pytest.raises(BookieUnavailableError):
                await impatient.add_entry(one.bookie, frame_of(LEDGER, 1))
            await until_async(lambda: _is(cluster.registered_at("b"), ""))
            one.send(signal.SIGCONT)
            await until_async(lambda: _is(cluster.registered_at("b"), one.address))
            await client.add_entry(one.bookie, frame_of(LEDGER, 2))
            one.send(signal.SIGTERM)
            assert (await one.end())[0] == 0

    run(scenario)


async def _is(address: Awaitable[str], expected: str) -> bool:
    return await address == expected


@pytest.mark.integration
def test_wrong_folders_are_refused(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """In use, swapped, wiped: exit status 2 and a message that says what to do."""

    async def refusal(uri: str, name: str, folder: Path, *options: str) -> str:
        process = await spawn(uri, name, folder, *options)
        status, output, errors = await end_of(process)
        assert (status, output) == (2, "")
        assert "Traceback" not in errors
        return errors

    async def scenario() -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        async with connect(zookeeper, zookeeper_root) as cluster:
            uri = cluster.uri
            async with (
                bookie_process(uri, "one", one) as first,
                bookie_process(uri, "two", two) as second,
            ):
                assert "in use" in await refusal(uri, "one", one)
                port = second.address.rpartition(":")[2]
                assert f"port={port}" in await refusal(uri, "3", tmp_path / "3", "--port", port)
                for each in (first, second):
                    each.send(signal.SIGTERM)
                    assert (await each.end())[0] == 0
            assert "belongs to bookie 'two', not to 'one'" in await refusal(uri, "one", two)
            shutil.rmtree(one)
            assert "mount the disk with its data" in await refusal(uri, "one", one)
            assert await cluster.registered_at("one") == ""

    run(scenario)


@pytest.mark.integration
def test_a_failing_disk_ends_the_bookie(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """Let writes fail after 3 MB: no add is acknowledged from then on, and the process says why."""

    async def scenario() -> None:
        async with (
            connect(zookeeper, zookeeper_root) as cluster,
            bookie_process(cluster.uri, "b", tmp_path / "b", file_bytes_max=3_000_000) as one,
            cluster.client(one) as client,
        ):
            frames = [frame_of(LEDGER, i, b"x" * 500_000) for i in range(10)]
            held: list[int] = []
            failed: list[int] = []

            async def add(entry_id: int) -> None:
                try:
                    await client.add_entry(one.bookie, frames[entry_id])
                except BookieError:
                    failed.append(entry_id)
                else:
                    assert not failed
                    held.append(entry_id)

            await asyncio.gather(*map(add, range(10)))
            status, errors = await one.end()
            assert status == 1
            assert "failed: " in errors
            assert len(held) < 6
            assert await cluster.registered_at("b") == ""
            async with (
                bookie_process(cluster.uri, "b", tmp_path / "b") as again,
                cluster.client(again) as reader,
            ):
                for i in held:  # the first of a new ledger may come after others
                    read = await reader.read_entry(
                        again.bookie, ledger_id=LEDGER, entry_id=i, fence=False
                    )
                    assert bytes(read) == frames[i]

    run(scenario)


@pytest.mark.integration
def test_a_bookie_ends_with_its_parent(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """Close its standard input."""

    async def scenario() -> None:
        async with connect(zookeeper, zookeeper_root) as cluster:
            async with bookie_process(cluster.uri, "b", tmp_path / "b") as one:
                assert one.process.stdin is not None
                one.process.stdin.close()
                assert (await one.end())[0] == 0
            assert await cluster.registered_at("b") == ""

    run(scenario)


@pytest.mark.integration
def test_optimised_python_is_refused_before_anything_happens(tmp_path: Path) -> None:
    """It has no assertions; `test_main` tries other command lines in its own process."""
    command = [sys.executable, "-O", "-m", "bookie", "--name", "b", "--metadata-uri", URI]
    command += ["--data-dir", str(tmp_path / "b")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
    assert (done.returncode, b"python -O" in done.stderr) == (2, True)
    assert not (tmp_path / "b").exists()


@asynccontextmanager
async def in_process(
    directory: Path, tree: SimulatedTree, **limits: object
) -> AsyncIterator[BookieServer]:
    """Run a bookie in the test's own process, on a metadata store in memory."""
    storage = StorageConfig(
        settle_interval_s=0.05,
        **{"space": ANY_SPACE, **limits},  # type: ignore[arg-type]
    )
    config = BookieConfig(
        name="b",
        metadata_uri=URI,
        data_dir=directory,
        garbage_interval_s=0.05,
        session_timeout_s=1.0,
        storage=storage,
    )
    store = tree.connect()
    try:
        async with await BookieServer.start(config, store=store, clock=SystemClock()) as server:
            yield server
    finally:
        await store.aclose()


def test_a_full_disk_is_registered_as_read_only(tmp_path: Path) -> None:
    """No free space by its own rules: it registers as read-only, and says so to adds."""

    async def scenario() -> None:
        tree = SimulatedTree()
        space = SpaceConfig(read_only_below_bytes=2**50, writable_above_bytes=2**50)
        async with in_process(tmp_path, tree, space=space) as server:
            store = tree.connect()
            assert await store.get(PATHS.bookie_available("b")) is None
            node = await store.get(PATHS.bookie_readonly("b"))
            assert node is not None
            assert decode(BookieRegistration, node.value, source="/here").read_only
            async with client_of(store, PATHS, server.address) as client:
                with pytest.raises(BookieReadOnlyError):
                    await client.add_entry(server.bookie, frame_of(LEDGER, 0))
                assert await client.read_lac(server.bookie, ledger_id=LEDGER, fence=True) == -1
            await store.aclose()

    run(scenario)


def test_a_bookie_is_registered_where_clients_reach_it(tmp_path: Path) -> None:
    """Something forwards from another address: that one is registered, and not its own."""

    async def scenario() -> None:
        tree = SimulatedTree()
        config = BookieConfig(
            name="b",
            metadata_uri=URI,
            data_dir=tmp_path,
            advertised_host="bookie.example",
            advertised_port=4321,
        )
        store = tree.connect()
        async with await BookieServer.start(config, store=store, clock=SystemClock()) as server:
            assert server.address == "bookie.example:4321"
            node = await store.get(PATHS.bookie_available("b"))
            assert node is not None
            assert (
                decode(BookieRegistration, node.value, source="/here").address
                == "bookie.example:4321"
            )
        await store.aclose()

    run(scenario)


@pytest.mark.parametrize("address", ["a..b:3181", "127.0.0.1:99999"])
def test_an_address_that_reaches_no_process_does_not_stop_the_next_start(
    tmp_path: Path, address: str
) -> None:
    """A killed process had registered what is no address, by mistake: another one may start."""

    async def scenario() -> None:
        tree = SimulatedTree()
        async with in_process(tmp_path, tree) as server:
            bookie = server.bookie
        left, path = tree.connect(), PATHS.bookie_available("b")
        value = BookieRegistration(name="b", incarnation=bookie.incarnation, address=address)
        await left.create(path, encode(value), ephemeral=True)
        async with in_process(tmp_path, tree) as server:
            assert (node := await left.get(path)) is not None
            assert decode(BookieRegistration, node.value, source=path).address == server.address
        await left.aclose()

    run(scenario)


def test_a_storage_that_fails_during_the_start_ends_the_start(tmp_path: Path) -> None:
    """The failure comes before anybody listens for it: the bookie must not register and stay."""

    class FailsEarly(BookieServer):
        async def _open_storage(self) -> None:
            await super()._open_storage()
            self.storage._on_failed(BookieStorageError("made to fail"))

    async def scenario() -> None:
        store = SimulatedTree().connect()
        config = BookieConfig(name="b", metadata_uri=URI, data_dir=tmp_path)
        with pytest.raises(BookieStorageError, match="the storage failed"):
            await FailsEarly.start(config, store=store, clock=SystemClock())
        assert await store.get(PATHS.bookie_available("b")) is None
        await store.aclose()

    run(scenario)


def test_a_storage_that_fails_later_ends_the_bookie(tmp_path: Path) -> None:
    """Its first error is the bookie's; clients get an error before that when its disk is full."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store = tree.connect()
        async with in_process(tmp_path, tree) as server:
            for is_full in (True, False):
                server.storage.status.note_stalled(is_full)
                path = PATHS.bookie_readonly("b") if is_full else PATHS.bookie_available("b")
                await until_async(partial(_exists, store, path))
            server.storage._on_failed(BookieStorageError("made to fail"))
            server._fail(BookieStorageError("and again"))
            assert "the storage failed" in str(await server.wait_failed())
        await store.aclose()

    run(scenario)


async def _exists(store: MetadataStore, path: str) -> bool:
    return await store.get(path) is not None


def test_garbage_is_what_the_metadata_store_says_is_deleted(tmp_path: Path) -> None:
    """Two ledgers, one deleted: only that one goes; none goes in another cluster's namespace."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store = tree.connect()
        async with in_process(tmp_path, tree, garbage=GarbageConfig(age_ms=0)) as server:
            await store.put(PATHS.ledger_idgen, b"3", version=-1)
            for ledger_id in (1, 2):
                await store.create(PATHS.ledger(ledger_id), make_parents=True)
            async with client_of(store, PATHS, server.address) as client:
                for ledger_id in (1, 2):
                    await client.add_entry(server.bookie, frame_of(ledger_id, 0))
                await store.delete(PATHS.ledger(1))
                await until(lambda: server.storage.core.live_ledgers() == [2])
            root = await store.get(PATHS.root)
            assert root is not None
            other = SimulatedTree().connect()
            await store.put(PATHS.root, await _binding_of_another(other), version=root.version)
            await store.delete(PATHS.ledger(2))
            with pytest.raises(Exception, match="no ledger counts as deleted"):
                await server._house.collect_once()
            assert server.storage.core.live_ledgers() == [2]
            await other.aclose()
            await store.aclose()

    run(scenario)


@pytest.mark.parametrize("next_id", [b"2", b"", None])
def test_metadata_that_is_older_than_the_data_deletes_nothing(
    tmp_path: Path, next_id: bytes | None
) -> None:
    """Two ledgers in a namespace that gave out one: it is a restored backup, and proves nothing."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store = tree.connect()
        # Old enough only in the second half: the bookie collects by itself, too.
        async with in_process(tmp_path, tree, garbage=GarbageConfig(age_ms=600_000)) as server:
            await store.put(PATHS.ledger_idgen, b"3", version=-1)
            for ledger_id in (1, 2):
                await server.storage.writes.add_entry(frame_of(ledger_id, 0))
            if next_id is None:
                await store.delete(PATHS.ledger_idgen)
            else:
                await store.put(PATHS.ledger_idgen, next_id, version=-1)
            for _ in range(3):
                with pytest.raises(CorruptMetadataError, match="no ledger counts as deleted"):
                    await server._house.collect_once()
            assert server.storage.core.live_ledgers() == [1, 2]
        async with in_process(tmp_path, tree, garbage=GarbageConfig(age_ms=0)) as server:
            for _ in range(3):
                with pytest.raises(CorruptMetadataError, match="no ledger counts as deleted"):
                    await server._house.collect_once()
            assert server.storage.core.live_ledgers() == [1, 2]
            if next_id is not None:
                await store.put(PATHS.ledger_idgen, b"3", version=-1)
                await until(lambda: server.storage.core.live_ledgers() == [])
        await store.aclose()

    run(scenario)


def test_a_ledger_that_was_never_made_stops_no_garbage_collection(tmp_path: Path) -> None:
    """Goal: requests with ids out of the blue leave nothing, and garbage goes as before."""

    async def scenario() -> None:
        tree = SimulatedTree()
        store = tree.connect()
        async with in_process(tmp_path, tree, garbage=GarbageConfig(age_ms=0)) as server:
            await store.put(PATHS.ledger_idgen, b"3", version=-1)
            async with client_of(store, PATHS, server.address) as client:
                await client.add_entry(server.bookie, frame_of(2, 0))
                for made_up in (3, 2**63 - 1):
                    await refuses(client, server.bookie, made_up)
                await until(lambda: server.storage.core.live_ledgers() == [])
            await store.aclose()

    run(scenario)


async def refuses(client: WireBookieClient, bookie: BookieId, ledger_id: int) -> None:
    """See that a bookie takes nothing of a ledger that was never made."""
    reason = f"ledger {ledger_id} was never created"
    with pytest.raises(BadRequestError, match=reason):
        await client.read_lac(bookie, ledger_id=ledger_id, fence=True)
    with pytest.raises(BadRequestError, match=reason):
        await client.write_lac(bookie, ledger_id=ledger_id, last_add_confirmed=0)
    with pytest.raises(BadRequestError, match=reason):
        await client.add_entry(bookie, frame_of(ledger_id, 0), is_recovery=True)


@pytest.mark.integration
def test_ledger_ids_are_checked_against_the_highest_one_given(
    zookeeper: EmbeddedZooKeeper, zookeeper_root: str, tmp_path: Path
) -> None:
    """A real bookie beside a real ZooKeeper: made-up ids are refused, new ones taken at once."""

    async def scenario() -> None:
        async with (
            connect(zookeeper, zookeeper_root) as cluster,
            bookie_process(cluster.uri, "b", tmp_path / "b") as one,
            cluster.client(one) as client,
        ):
            ledgers = LedgerStore(cluster.store, cluster.paths)
            await refuses(client, one.bookie, 2**63 - 1)
            for _ in range(20):  # more than are given at once
                await client.add_entry(one.bookie, frame_of(await ledgers.new_ledger_id(), 0))
            await refuses(client, one.bookie, await ledgers.next_ledger_id())

    run(scenario)


def test_a_bug_in_the_upkeep_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: what runs in the background is tried again, whatever it raised, and that is logged."""

    async def scenario() -> None:
        async with in_process(tmp_path, SimulatedTree()) as server:
            calls = 0

            async def broken(*_asked: object, **_options: object) -> None:
                nonlocal calls
                calls += 1
                raise KeyError(calls)

            monkeypatch.setattr(server.storage.upkeep, "collect_garbage", broken)
            await until(lambda: calls > 2)

    run(scenario)
    assert "KeyError: 2" in caplog.text


async def _binding_of_another(store: MetadataStore) -> bytes:
    await ensure_namespace(store, PATHS, SystemClock())
    node = await store.get(PATHS.root)
    assert node is not None
    return node.value


def test_a_refused_start_leaves_nothing_behind(tmp_path: Path) -> None:
    """Take the folder twice in one process; the first bookie goes on, and stops twice."""

    async def scenario() -> None:
        tree = SimulatedTree()
        async with in_process(tmp_path, tree) as server:
            with pytest.raises(ConfigurationError):
                async with in_process(tmp_path, tree):
                    pass
            store = tree.connect()
            async with client_of(store, PATHS, server.address) as client:
                await client.add_entry(server.bookie, frame_of(LEDGER, 0))
            await server.aclose()
            assert await store.get(PATHS.bookie_available("b")) is None
            await store.aclose()

    run(scenario)
